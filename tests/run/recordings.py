"""A recorder in a thread or in a process of its own, before a fake engine that writes scripted answers."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import trio

from agentrl.engine.rendering.renderer import Renderer
from agentrl.models.resolve import model_dir
from agentrl.records import Trajectory
from agentrl.run.recording.record import RecordSettings, opened_folder, serving
from agentrl.run.run_folder import RunDir
from agentrl.store import TRAIN, RunStore
from tests.parts.vllm_server import FakeVLLM

MODEL = "agentrl/tiny-coder"
ROOM = 4096
RENDERER = Renderer(model_dir(MODEL))
_PROMPT = RENDERER.start([{"role": "user", "content": "x"}])
_START = _PROMPT[0]
_HEADER = list(reversed(_PROMPT)).index(_START)  # tokens of the generation prompt behind the one that starts it


def engine(answer: Callable[[str], str], **fields: Any) -> FakeVLLM:
    """A fake engine that writes `answer` of all text before the turn, and then ends it."""

    def script(context: Sequence[int]) -> int:
        prompt = len(context) - list(reversed(context)).index(_START) + _HEADER
        tokens = RENDERER.tokens(answer(RENDERER.decode(context[:prompt])))
        done = len(context) - prompt
        return tokens[done] if done < len(tokens) else RENDERER.stop_token_ids[0]

    return FakeVLLM(script=script, max_model_len=ROOM, **fields)


@dataclass(frozen=True, slots=True)
class Running:
    """A recorder at work, and its folder."""

    url: str
    folder: Path

    def episodes(self) -> list[Trajectory]:
        return episodes(self.folder)


def episodes(folder: Path, purpose: str = TRAIN) -> list[Trajectory]:
    """All conversations of a folder, in the order in which they began."""
    with RunStore.read(RunDir(folder).store_path) as store:
        return [store.reads.trajectory(row.id) for row in store.reads.episodes(purpose, after=0, limit=1000)]


@contextmanager
def recorder(folder: Path, url: str, *, key: str | None = None, **settings: Any) -> Generator[Running]:
    """A recorder in a thread; its end is that of Ctrl-C."""
    chosen = RecordSettings(engine=url, model=MODEL, out=folder, **settings)
    run, config = opened_folder(chosen)
    started = SimpleQueue[Any]()

    async def main() -> None:
        ended = trio.Event()
        async with serving(chosen, run, config, key) as (_, port):
            started.put((port, ended.set, trio.lowlevel.current_trio_token()))
            await ended.wait()

    def work() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            started.put(error)
            raise

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begun = started.get(timeout=120)
    if isinstance(begun, BaseException):
        raise begun
    port, end, token = begun
    try:
        yield Running(f"http://127.0.0.1:{port}", folder)
    finally:
        token.run_sync_soon(end)
        thread.join(60)
        assert not thread.is_alive()


def command(folder: Path, url: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """The command `agentrl record` in a process of its own."""
    argv = [sys.executable, "-c", "from agentrl.cli.main import main; main()", "record"]
    argv += ["--engine", url, "--model", MODEL, "--out", str(folder), *arguments]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})


def url_of(process: subprocess.Popen[str]) -> str:
    """The URL that the command prints once it answers."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("http://"):
            return line.strip()
    raise AssertionError(f"it ended with {process.wait()}")


def partial_tokens(folder: Path) -> int:
    """Tokens of turns under way that the store has."""
    if not (folder / "store.sqlite").exists():
        return 0
    with sqlite3.connect(folder / "store.sqlite") as connection:
        tables = connection.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'partials'").fetchone()[0]
        return connection.execute("SELECT COALESCE(SUM(n), 0) FROM partials").fetchone()[0] if tables else 0
