"""`agentrl serve`: it says where it answers, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import httpx
import pytest
import trio
from commands import agentrl
from descriptors import readable
from each_case import each_case
from trio.testing import MockClock

from agentrl.cli.main import main
from agentrl.config import EngineSettings
from agentrl.engine.running_engine import Door, running_engine, tool_format
from agentrl.engine.vllm import launch
from agentrl.engine.vllm.launch import PARSERS, Build, VLLMServer
from agentrl.engine.vllm.vllm_dialect import VLLMDialect
from agentrl.errors import RunFailed, UsageError
from agentrl.models.resolve import model_dir
from agentrl.records import EngineKey
from agentrl.run.serving.serve import key_of
from agentrl.run.training_server import training_server
from tests.parts.faults import processes
from tests.parts.served_vllm import listening
from tests.parts.vllm_server import FakeVLLM

DEADLINE_S = 280


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The command, with `folder` for its temporary files, the URL that it printed, and the lines before."""
    command = [
        sys.executable,
        "-c",
        "from agentrl.cli.main import main; main()",
        "serve",
        "agentrl/tiny-coder",
        *arguments,
    ]
    env = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True, env=env)
    watch = threading.Timer(DEADLINE_S, process.kill)
    watch.start()
    assert process.stdout is not None
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith("http://"):
                break
        assert lines and lines[-1].startswith("http://"), f"it ended with {process.wait()}: {lines}"
        yield process, lines.pop(), lines
    finally:
        watch.cancel()
        process.kill()
        process.communicate()


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="serving-") as folder:
        yield Path(folder)


def engines_of(pid: int) -> list[int]:
    return [child for child, parent, words in processes() if parent == pid and "agentrl.engine" in words]


def folders_of(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"agentrl-boxes-*/{pid}.*"))


def wait_until_gone(pid: int) -> None:
    """A process that is no child of ours ends on its own time."""
    descriptor = os.pidfd_open(pid)
    try:
        assert readable(descriptor, 60), f"process {pid} lives on"
    finally:
        os.close(descriptor)


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["embedded", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.long])])
@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_the_engine_ends_with_its_owner(kind: str, how: signal.Signals, short_tmp: Path) -> None:
    with serving(short_tmp, "--kind", kind, "--kv-cache-mb", "64", "--max-context", "256") as (process, url, said):
        assert "model: agentrl/tiny-coder" in said
        (key,) = (line.partition("=")[2] for line in said if line.startswith("key: export AGENTRL_SERVE_KEY="))
        for path in ("/v1/models", "/health", "/metrics", "/is_paused", "/version"):
            assert httpx.get(f"{url}{path}", timeout=60).status_code == 401
        shown = {"authorization": f"Bearer {key}"}
        model = httpx.get(f"{url}/v1/models", headers=shown, timeout=60).json()["data"][0]
        assert (model["id"], model["max_model_len"]) == ("agentrl/tiny-coder", 256)
        (engine,) = engines_of(process.pid)
        assert folders_of(process.pid)
        process.send_signal(how)
        wait_until_gone(engine)
        assert process.wait() == (0 if how == signal.SIGTERM else -signal.SIGKILL)
    deadline = time.monotonic() + 60
    while how == signal.SIGKILL and folders_of(process.pid):  # a janitor takes its time
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not folders_of(process.pid)
    kept = {path.name for path in short_tmp.iterdir() if path.suffix != ".log"}
    assert kept <= {f"torchinductor_{os.getuid()}"}  # a cache


@each_case(
    ("arguments", "said"),
    [
        (["--lora-rank", "8"], "--lora-rank is for --kind vllm"),
        (["--gpus", "0"], "--gpus 0 is for --kind vllm"),
        (["--kind", "vllm", "--gpus", "0;1"], "write their numbers as 0,1"),
    ],
)
def test_what_no_engine_takes_is_refused(arguments: list[str], said: str) -> None:
    done = agentrl("serve", "agentrl/tiny-coder", *arguments)
    assert done.code == 2 and said in done.err


def test_a_server_is_started_on_the_gpus_it_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the start of its process."""
    given: list[VLLMServer] = []

    def running(server: VLLMServer, **_: object) -> AbstractAsyncContextManager[object]:
        given.append(server)
        raise RunFailed("it ended")

    monkeypatch.setattr(launch, "find_build", lambda **_: Build(python=Path("/bin/false"), version="0.32.0", cpu=False))
    monkeypatch.setattr(launch, "running", running)
    monkeypatch.setattr(sys, "argv", ["agentrl", "serve", "agentrl/tiny-coder", "--kind", "vllm", "--gpus", "2,3"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == RunFailed.exit_code and "it ended" in capsys.readouterr().err
    assert [server.gpus for server in given] == [(2, 3)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lora-rank", "8"], "--lora-rank is for --kind vllm"),
        (["--kind", "vllm", "--sync", "nccl"], "--sync is for engines of runs, not for --training: leave it out"),
        (["--kind", "vllm", "--lora-targets", "q_proj"], "--lora-targets is for engines of runs"),
    ],
)
def test_what_a_training_server_has_no_use_for_is_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agentrl", "serve", "agentrl/tiny-coder", "--training", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == UsageError.exit_code and said in capsys.readouterr().err


@pytest.mark.tinker
@pytest.mark.parametrize(("given", "rank"), [([], 32), (["--lora-rank", "64"], 64)])
def test_a_training_servers_vllm_has_room_for_adapters_and_is_reached_by_its_user_alone(
    given: list[str], rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Up to the start of its process. Who reaches the socket needs no key."""
    servers: list[VLLMServer] = []

    def running(server: VLLMServer, **_: object) -> AbstractAsyncContextManager[object]:
        servers.append(server)
        raise RunFailed("it ended")

    monkeypatch.setattr(launch, "find_build", lambda **_: Build(python=Path("/bin/false"), version="0.32.0", cpu=True))
    monkeypatch.setattr(launch, "running", running)
    monkeypatch.setattr(training_server, "_learner", lambda *_: SimpleNamespace(vocab=544))
    command = ["serve", "agentrl/tiny-coder", "--training", "--kind", "vllm", "--dtype", "bfloat16", "--port", "0"]
    monkeypatch.setattr(sys, "argv", ["agentrl", *command, "--state", str(tmp_path), *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == RunFailed.exit_code and "it ended" in capsys.readouterr().err
    (server,) = servers
    assert server.socket is not None and server.open
    assert (server.lora_rank, server.max_loras, server.dtype) == (rank, 8, "bfloat16")
    assert server.weights_from[-1] == str(tmp_path)


async def test_the_log_of_a_server_has_a_name_that_nobody_can_guess(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Somebody planted files, and a link to a file of ours, under the name that follows from the port."""
    logs: list[Path] = []

    def running(server: VLLMServer, *, log: Path, **_: object) -> AbstractAsyncContextManager[object]:
        status = log.stat()
        assert (stat.S_IMODE(status.st_mode), status.st_size, status.st_uid) == (0o600, 0, os.getuid())
        logs.append(log)
        raise RunFailed("it ended")

    monkeypatch.setattr(launch, "find_build", lambda **_: Build(python=Path("/bin/false"), version="0.32.0", cpu=False))
    monkeypatch.setattr(launch, "running", running)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours, planted = tmp_path / "ours", [tmp_path / f"agentrl-vllm-{port}.log", tmp_path / "agentrl-vllm-.log"]
    ours.write_text("kept")
    planted[0].symlink_to(ours)
    planted[1].write_text("planted")
    door = Door(host="127.0.0.1", port=port, key=EngineKey.fresh())
    for _ in range(2):
        with pytest.raises(RunFailed, match="it ended"):
            async with running_engine(
                model_dir("agentrl/tiny-coder"), EngineSettings(kind="vllm"), door=door, max_context=64
            ):
                raise AssertionError("no engine runs")
    assert len({*logs, *planted}) == 4 and str(port) not in logs[0].name
    assert (ours.read_text(), planted[1].read_text()) == ("kept", "planted")
    assert all(log.parent == tmp_path and not log.is_symlink() for log in logs)


def vllm_of(tmp_path: Path, port: int, **options: object) -> VLLMServer:
    build = Build(python=Path("/bin/false"), version="0.32.0", cpu=True)
    return VLLMServer(model=tmp_path, port=port, plugin_folder=tmp_path / "p", build=build, **options)  # pyright: ignore[reportArgumentType]


def changed(fake: FakeVLLM) -> list[str]:
    return [call for call in fake.calls if call.startswith("POST")]


@pytest.mark.parametrize("kind", ["embedded", "vllm"])
async def test_a_port_that_is_taken_is_refused_and_its_server_left_alone(
    kind: Literal["embedded", "vllm"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_build", lambda **_: Build(python=Path("/bin/false"), version="0.32.0", cpu=True))
    fake = FakeVLLM(version="7")
    async with listening(fake) as url:
        door = Door(host="127.0.0.1", port=int(url.rpartition(":")[2]), key=EngineKey.fresh())
        with pytest.raises(
            UsageError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use; choose another"
        ):
            async with running_engine(
                model_dir("agentrl/tiny-coder"), EngineSettings(kind=kind), door=door, max_context=64
            ):  # pyright: ignore[reportArgumentType]
                raise AssertionError("it serves on a port of somebody else")
    assert fake.version == "7" and not changed(fake)


async def test_another_server_on_the_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    """It took the port while ours was imported. It answers 200, and has no proof."""
    fake, ours = FakeVLLM(version="7"), iter([False, False, True])
    async with listening(fake) as url:
        server = vllm_of(tmp_path, int(url.rpartition(":")[2]))
        with pytest.raises(RunFailed, match="vLLM ended before it was ready"):
            await launch.ready(server, version=0, deadline_s=60, ended=lambda: next(ours))
    assert fake.version == "7" and not changed(fake) and "GET /health" in fake.calls


async def test_a_server_that_imports_is_said_to_do_so_again_and_again(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def proves(*_: object, **__: object) -> bool:
        return trio.current_time() - began >= 35

    async def nothing(*_: object, **__: object) -> None:
        await trio.lowlevel.checkpoint()

    began, said, log = trio.current_time(), list[str](), tmp_path / "log"
    log.write_text("INFO first\nINFO loading weights\n\n")
    monkeypatch.setattr(launch.EngineClient, "proves", proves)
    monkeypatch.setattr(VLLMDialect, "announce", nothing)
    monkeypatch.setattr(launch, "_warm_up", nothing)
    server = vllm_of(tmp_path, 1)
    await launch.ready(server, version=0, deadline_s=60, ended=lambda: False, log=log, say=said.append)
    assert said == [
        f"vLLM imports and loads {tmp_path}: {s} s; its log says: INFO loading weights" for s in (10, 20, 30)
    ]


def test_a_hint_for_the_room_of_keys_and_values_says_which_way(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: Free memory on device is less than desired CPU memory utilization\n")
    assert "(lower engine.kv_cache_mb (agentrl serve: --kv-cache-mb))" in launch.explain(log)
    log.write_text("ValueError: 0.5 GiB KV cache is needed, which is larger than the available KV cache memory\n")
    assert "(raise engine.kv_cache_mb (agentrl serve: --kv-cache-mb))" in launch.explain(log)


HERMES = '<tool_call>\n{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}\n</tool_call>'
CODER = (
    "<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("call", "form", "parser"),
    [(HERMES, "hermes", "hermes"), (CODER, "qwen3_coder", "qwen3_coder"), ("", "json", None)],
)
def test_a_server_reads_calls_as_the_template_writes_them(
    call: str, form: str, parser: str | None, tmp_path: Path
) -> None:
    source = model_dir("agentrl/tiny-coder")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path)
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + (
        "{% for call in m.tool_calls or [] %}" + call + "{% endfor %}" if call else ""
    )
    (tmp_path / "chat_template.jinja").write_text(
        turns + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert tool_format(tmp_path) == form and PARSERS.get(form) == parser
    argv = vllm_of(tmp_path, 1, tool_parser=parser).argv()
    assert ("--enable-auto-tool-choice" in argv) == (parser is not None)
    assert parser is None or argv[argv.index("--tool-call-parser") + 1] == parser


def test_a_folder_without_template_takes_no_tools(tmp_path: Path) -> None:
    assert tool_format(tmp_path) is None


def test_the_key_of_a_server_is_ones_own_a_new_one_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "mine")
    assert key_of("MY_KEY", none=False) == EngineKey.of("mine")
    first, second = key_of(None, none=False), key_of(None, none=False)
    assert first is not None and second is not None and first.value != second.value and len(first.value) >= 24
    assert key_of(None, none=True) is None
    with pytest.raises(UsageError, match=r"--api-key-env NOBODYS: this environment variable is not set"):
        key_of("NOBODYS", none=False)
    with pytest.raises(UsageError, match="give one of them"):
        key_of("MY_KEY", none=True)
