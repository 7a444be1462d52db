"""Starts an embedded engine as a child process and ends it with its owner; ends what other engines leave. No torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from agentrl.config import EngineSettings
from agentrl.engine.weight_sync.weight_sources import everyday
from agentrl.errors import EngineUnavailable, UsageError
from agentrl.host import json_log
from agentrl.host.janitor import owned_folder
from agentrl.host.platform_checks import has_proc, kill_group, process_stat
from agentrl.records import EngineKey

_POLL_S = 0.05
# More than the second that uvicorn gives open requests.
_END_S = 5.0  # between asking a process to end and killing it
_LINGER_S = 3.0  # for what an ended process left in its group
_UNSAID = "its output does not say why"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedEngine:
    """A running engine process, where it listens, and its key if it asks for one."""

    url: str
    process: trio.Process
    key: EngineKey | None = None


def embedded_argv(
    model_dir: Path,
    settings: EngineSettings,
    *,
    ready_file: Path,
    socket: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    version: int = 0,
    weights: Path | None = None,
    max_context: int | None = None,
    weights_from: Sequence[str] = (),
) -> list[str]:
    """The command that serves `model_dir` until its standard input ends; it writes `ready_file` once it answers. It
    listens on `socket`, or else on `host` and `port`. Its key is in its environment. New weights may come from the
    places `weights_from`; without any from where learners of this machine keep them."""
    arguments = [
        sys.executable,
        "-m",
        "agentrl.engine.embedded",
        "--model",
        str(model_dir),
        *(["--host", host, "--port", str(port)] if socket is None else ["--socket", str(socket)]),
    ]
    arguments += ["--threads", str(settings.threads), "--dtype", settings.dtype, "--max-batch", str(settings.max_batch)]
    arguments += ["--kv-cache-mb", str(settings.kv_cache_mb), "--stream-tokens", str(settings.stream_tokens)]
    arguments += ["--served-version", str(version), "--ready-file", str(ready_file), "--lifeline"]
    if max_context is not None:
        arguments += ["--max-model-len", str(max_context)]
    if weights is not None:
        arguments += ["--weights", str(weights)]
    for weight_place in weights_from:
        arguments += ["--weights-from", weight_place]
    return arguments


@asynccontextmanager
async def launch_embedded(
    model_dir: Path,
    settings: EngineSettings | None = None,
    *,
    host: str | None = None,
    port: int = 0,
    key: EngineKey | None = None,
    version: int = 0,
    weights: Path | None = None,
    name: str | None = None,
    tool_parser: str | None = None,
    max_context: int | None = None,
    log: int | None = None,
) -> AsyncGenerator[EmbeddedEngine]:
    """Serve a model for as long as the block runs: on a Unix socket that only this user can reach, or on TCP where a
    `host` is named, and with `key` to nobody who does not show it. `name` is the model's at the server, `tool_parser`
    (module:class) how chats read its calls of tools. `log` is a file descriptor for the engine's output; without it the
    output is kept only for the message of a failed start.

    Raises UsageError if it cannot start with these arguments, EngineUnavailable if it dies or is not up in time."""
    settings = settings or EngineSettings()
    async with owned_folder() as engine_folder:
        ready_file, errors_path = engine_folder.path / "ready.json", engine_folder.path / "errors.txt"
        arguments = embedded_argv(
            model_dir,
            settings,
            ready_file=ready_file,
            socket=engine_folder.path / "engine.sock" if host is None else None,
            host=host or "",
            port=port,
            version=version,
            weights=weights,
            max_context=max_context,
            weights_from=[*everyday(), *settings.weights_from],
        )
        # The mark is in the environment, which children inherit: a janitor recognises a process by it even where its
        # parent is gone.
        # What the engine leaves in its temporary folder goes with that folder.
        environment = {**os.environ, "TMPDIR": str(engine_folder.path), **engine_folder.mark}
        with errors_path.open("wb") as errors_file:
            output_fd = log or json_log.objects() or errors_file.fileno()
            arguments += [] if key is not None or host is None else ["--no-key"]
            arguments += [] if name is None else ["--served-model-name", name]
            arguments += [] if tool_parser is None else ["--tool-parser", tool_parser]
            arguments = json_log.wrapped(arguments, "engine") if json_log.objects() else arguments
            # Emptied where the engine has none: the keys of an engine that this process itself is given would be
            # inherited, and the new one would refuse its owner.
            key_values = key.variables(signs=True) if key is not None else {EngineKey.VALUE: "", EngineKey.SIGNING: ""}
            # Standard input is a pipe that only this process holds. When it dies, by SIGKILL too, the kernel closes
            # the pipe, and the engine ends (`--lifeline`): law 4 without any cleanup that could be skipped.
            process = await trio.lowlevel.open_process(
                arguments,
                stdin=subprocess.PIPE,
                stdout=output_fd,
                stderr=output_fd,
                env={**environment, **key_values},
            )
        try:
            engine_url = await _wait_ready(process, ready_file, errors_path, settings.start_deadline_s)
            yield EmbeddedEngine(url=engine_url, process=process, key=key)
        finally:
            with trio.CancelScope(shield=True):
                await _end(process)


async def _wait_ready(process: trio.Process, ready_file: Path, errors: Path, deadline_s: float) -> str:
    with trio.move_on_after(deadline_s):
        while not await trio.Path(ready_file).exists():
            # A child that refuses its arguments is over in a tenth of a second, and the caller should not wait out
            # `start_deadline_s` to learn it.
            exit_status = process.poll()
            if exit_status is not None:
                error_lines = (await trio.Path(errors).read_text()).strip().splitlines() or [_UNSAID]
                error_type = UsageError if exit_status == 2 else EngineUnavailable
                raise error_type(f"the engine did not start: {error_lines[-1].removeprefix('error: ')}")
            await trio.sleep(_POLL_S)
        return json.loads(await trio.Path(ready_file).read_text())["url"]
    raise EngineUnavailable(f"the engine was not up within {deadline_s:g} s")


async def end_group(leader: int) -> None:
    """End the process group of a leader that has ended. What it left may end by itself for a moment: a resource tracker
    of Python's has the shared memory of the dead to remove, and would leave it if it were killed."""
    with trio.CancelScope(shield=True), trio.move_on_after(_LINGER_S):
        while _lives(leader):  # noqa: ASYNC110 - processes that are not our children send no signal
            await trio.sleep(_POLL_S)
    # After the grace above. The kernel gives the group's number to nobody else as long as a member of it lives.
    kill_group(leader)


def _lives(group: int) -> bool:
    """Whether some process of a group is there, other than zombies that nobody has reaped yet."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # nobody, or in macOS zombies alone
        return False
    for process in Path("/proc").glob("[0-9]*"):
        process_state, _, process_group, *_ = process_stat(process.name) or ("Z", "", "-1")
        if int(process_group) == group and process_state != "Z":
            return True
    return not has_proc()  # then nobody can tell


async def _end(process: trio.Process) -> None:
    if process.poll() is None:
        process.terminate()
        with trio.move_on_after(_END_S):
            await process.wait()
        if process.poll() is None:
            process.kill()
            await process.wait()
    if process.stdin is not None:
        await process.stdin.aclose()
