"""`agentrl serve`: it says where it answers, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import httpx
import pytest

from agentrl.cli import main
from agentrl.engine.vllm import launch
from agentrl.engine.vllm.launch import Build, VLLMServer
from agentrl.errors import RunFailed
from agentrl.testing.faults import processes

DEADLINE_S = 280


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The command, with `folder` for its temporary files, the URL that it printed, and the lines before."""
    command = [sys.executable, "-c", "from agentrl.cli import main; main()", "serve", "agentrl/tiny-coder", *arguments]
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
        import select

        assert select.select([descriptor], [], [], 60)[0], f"process {pid} lives on"
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("kind", ["embedded", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lora-rank", "8"], "--lora-rank is for --kind vllm"),
        (["--gpus", "0"], "--gpus 0 is for --kind vllm"),
        (["--kind", "vllm", "--gpus", "0;1"], "write their numbers as 0,1"),
    ],
)
def test_what_no_engine_takes_is_refused(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-c", "from agentrl.cli import main; main()", "serve", "agentrl/tiny-coder"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and said in done.stderr


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
