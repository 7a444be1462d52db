"""Common parts of starting other people's engine servers: finding one, its process, the wait for it, its log.

Each kind of server has its own command line beside its dialect: `agentrl.engine.vllm.launch`,
`agentrl.engine.sglang.server_launch`. Never knows a flag.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import trio

from agentrl.engine.embedded_process import end_group
from agentrl.errors import ConfigError, EngineError, EngineTimeout, RunFailed
from agentrl.host import json_log

_POLL_S = 0.1
_SAY_S = 10.0  # between two lines about a server that is not up yet
_GRACE_S = 8.0  # between asking a server to end and killing it
_ASK = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """An interpreter that has a server: its version, and whether it is built for a CPU."""

    python: Path
    version: str
    cpu: bool = False


@functools.cache
def installed(python: Path, distributions: Sequence[str]) -> dict[str, str]:
    """The versions of those of the distributions that an interpreter has; empty if it has none or is none."""
    try:
        finished_query = subprocess.run(
            [python, "-c", _ASK, *distributions], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return cast("dict[str, str]", json.loads(finished_query.stdout))


def visible(gpus: Sequence[int]) -> list[str]:
    """CUDA's names of GPUs that torch counts: if this process sees only a few, torch counts those from 0. Raises
    ConfigError for a GPU that it does not see."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is None:
        return [str(gpu) for gpu in gpus]
    # Entries may be UUIDs or MIG names: they are passed on as they are, and only counted.
    device_names = [device_name.strip() for device_name in visible_devices.split(",") if device_name.strip()]
    if unseen_gpus := [gpu for gpu in gpus if gpu >= len(device_names)]:
        hint = f"CUDA_VISIBLE_DEVICES={visible_devices!r} shows {len(device_names)}: count them from 0"
        raise ConfigError("engine.replicas", unseen_gpus, hint)
    return [device_names[gpu] for gpu in gpus]


@asynccontextmanager
async def server_process(
    python: Path, argv: Sequence[str], env: Mapping[str, str], log: Path
) -> AsyncGenerator[trio.Process]:
    """The process of a server for as long as the block runs. Its standard input is its lifeline."""
    command = [str(python), *argv]
    with log.open("ab") as log_file:
        process = await trio.lowlevel.open_process(
            json_log.wrapped(command, "engine") if json_log.is_on() else command,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=log_file,
            # A group of its own, so that workers that vLLM left behind can be ended with it, and so that Ctrl-C in
            # the terminal reaches this process first and not the server in the midst of a turn.
            process_group=0,
        )
    try:
        yield process
    finally:
        with trio.CancelScope(shield=True):
            await _end(process)


def has_ended(process: trio.Process) -> bool:
    """Whether a process is over."""
    return process.poll() is not None


async def _end(process: trio.Process) -> None:
    """Close the lifeline and wait; after a grace kill it, then what is left of its group."""
    if process.stdin is not None:
        await process.stdin.aclose()
    with trio.move_on_after(_GRACE_S):
        await process.wait()
    # Safe where it has ended already: Python sends no signal to a process that it has reaped.
    process.kill()
    await process.wait()
    await end_group(process.pid)


@asynccontextmanager
async def starting(name: str, *, deadline_s: float, why: Callable[[], str]) -> AsyncGenerator[None]:
    """Bound the wait for a server and for its first answers, which the block does. Raises RunFailed, with `why`, if it
    does not serve within the deadline."""
    try:
        with trio.fail_after(deadline_s):
            yield
    except (trio.TooSlowError, EngineTimeout) as error:
        raise RunFailed(f"{name} was not ready within {deadline_s:g} s (engine.start_deadline_s): {why()}") from error
    except EngineError as error:
        raise RunFailed(f"{name} started but does not serve: {error}; {why()}") from error


async def wait_for(
    serves: Callable[[], Awaitable[bool]],
    *,
    name: str,
    model: Path,
    ended: Callable[[], bool],
    why: Callable[[], str],
    log: Path | None,
    say: Callable[[str], None],
) -> None:
    """Wait, within the caller's deadline, until a server `serves`; `say` gets a line from time to time about what is
    waited for. Raises RunFailed, with `why`, once `ended` says that its process is gone."""
    began_at = reported_at = trio.current_time()
    while not await serves():
        if ended():
            raise RunFailed(f"{name} ended before it was ready: {why()}")
        if (current_time := trio.current_time()) - reported_at >= _SAY_S:
            reported_at = current_time
            say(f"{name} imports and loads {model}: {current_time - began_at:.0f} s; {_last_line(log)}")
        await trio.sleep(_POLL_S)


def _last_line(log: Path | None) -> str:
    """Describe the last line of a server's log."""
    if log is None or not log.exists():
        return "no log is kept"
    with log.open("rb") as log_file:
        log_file.seek(max(0, log.stat().st_size - 4096))
        log_lines = [line.strip() for line in _lines(log_file.read().decode(errors="replace")) if line.strip()]
    return f"its log says: {log_lines[-1][:160]}" if log_lines else "it has written nothing yet"


def why_it_ended(log: Path | None, hints: Sequence[tuple[str, str]]) -> str:
    """The line of a log that says why a server ended, and how to fix that, if one of `hints` (a pattern and the fix)
    knows it."""
    if log is None or not log.exists():
        return "no log was kept"
    log_lines = [re.sub(r"^\([^)]*\)\s*", "", line).strip() for line in _lines(log.read_text(errors="replace"))]
    for pattern, correction in hints:
        if matching_line := next((line for line in reversed(log_lines) if re.search(pattern, line)), None):
            return f"{matching_line[:300]} ({correction}); see {log}"
    # The first error is the cause; those after it tell of its consequences.
    error_pattern = r"(ERROR .*\] )?([\w.]+(Error|Exception)|Value error)\b"
    error_lines = [line for line in log_lines if re.match(error_pattern, line)]
    return f"{(error_lines or log_lines or ['it printed nothing'])[0 if error_lines else -1][:300]}; see {log}"


def _lines(text: str) -> list[str]:
    return [json_log.message(line) for line in text.splitlines()]
