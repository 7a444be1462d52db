"""Training servers for tests: in a thread of this process, or the command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import trio

from agentrl.config import EngineSettings
from agentrl.run.training_server.training_server import (
    RunningTrainingServer,
    TrainingServerSettings,
    training_server,
)

MODEL = "agentrl/tiny-coder"
START_S = 300.0


@contextmanager
def in_thread(state: Path, **settings: object) -> Generator[RunningTrainingServer]:
    """A server with this folder for as long as the block runs."""
    engine = EngineSettings(kv_cache_mb=64)
    given: dict[str, Any] = {"model": MODEL, "engine": engine, "max_context": 256, **settings}
    made = TrainingServerSettings(state=state, port=0, **given)
    news: SimpleQueue[object] = SimpleQueue()

    async def main() -> None:
        try:
            async with training_server(made) as server:
                scope = trio.CancelScope()
                news.put((server, trio.lowlevel.current_trio_token(), scope))
                with scope:
                    await trio.sleep_forever()
        except BaseException as error:
            news.put(error)
            raise

    thread = threading.Thread(target=trio.run, args=(main,), daemon=True)
    thread.start()
    found = news.get(timeout=START_S)
    if isinstance(found, BaseException):
        raise found
    server, token, scope = found  # pyright: ignore
    try:
        yield server
    finally:
        token.run_sync_soon(scope.cancel)
        thread.join(60)


@contextmanager
def in_process(state: Path, port: int) -> Generator[subprocess.Popen[str]]:
    """`agentrl serve --training` at this port, once it answers; killed at the end."""
    command = [sys.executable, "-c", "from agentrl.cli.main import main; main()", "serve", MODEL, "--training"]
    command += ["--state", str(state), "--port", str(port), "--kv-cache-mb", "64", "--max-context", "256"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    watch = threading.Timer(START_S, process.kill)
    watch.start()
    assert process.stdout is not None
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith("http://"):
                break
        assert lines and lines[-1].startswith("http://"), f"it ended with {process.wait()}: {lines}"
        yield process
    finally:
        watch.cancel()
        process.kill()
        process.communicate()
