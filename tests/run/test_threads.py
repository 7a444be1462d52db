"""A run from a thread, or beside somebody else's event loop: it works, or one line says what to do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from agentrl import Trainer
from agentrl.config import parse
from agentrl.errors import UsageError
from agentrl.run.reporting import status
from agentrl.run.run_folder import RunDir
from agentrl.run.supervisor import Interrupted, Supervisor, run_to_end
from agentrl.run.trainer import evaluate

DOCUMENT = {"model": "agentrl/tiny-coder", "env": {"id": "agentrl/TinyCoder-v0"}}
DEADLINE_S = 300


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", parse(DOCUMENT))


def in_a_thread(work: Callable[[], object]) -> BaseException | None:
    """What it raised there."""
    raised: list[BaseException] = []

    def do() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=do)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    return raised[0] if raised else None


async def nothing(supervisor: Supervisor) -> None:
    await trio.lowlevel.checkpoint()


def test_a_thread_can_supervise_a_run(run: RunDir) -> None:
    assert in_a_thread(lambda: run_to_end(run, nothing)) is None


def test_so_can_one_whose_loop_is_asyncios(run: RunDir) -> None:
    async def beside() -> None:
        run_to_end(run, nothing)
        await asyncio.to_thread(run_to_end, run, nothing)

    asyncio.run(beside())
    trio.run(trio.to_thread.run_sync, run_to_end, run, nothing)


def test_a_run_in_a_thread_is_stopped_by_its_store_and_the_process_lives(run: RunDir) -> None:
    """A signal would end the whole process, which is the user's own."""
    began = threading.Event()

    async def waits(_: Supervisor) -> None:
        began.set()
        await trio.sleep_forever()

    told: list[str] = []

    def stops() -> None:
        assert began.wait(DEADLINE_S)
        told.append(status.stop(run, DEADLINE_S))

    stopper = threading.Thread(target=stops)
    stopper.start()
    error = in_a_thread(lambda: run_to_end(run, waits))
    stopper.join(DEADLINE_S)
    assert isinstance(error, Interrupted)
    assert told == [f"{run.path} is stopped; go on with agentrl train --resume {run.path}"]


@pytest.mark.parametrize("there", [False, True])
def test_inside_trio_one_line_says_what_to_do_before_anything_is_made(tmp_path: Path, there: bool) -> None:
    out = tmp_path / "run"
    if there:
        RunDir.create(out, parse(DOCUMENT))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    calls = {
        "Trainer.train": lambda: Trainer(config=DOCUMENT, out=out, overwrite=True).train(),
        "Trainer.resume": lambda: Trainer.resume(out, settings=["train.steps=999"]),
        "evaluate": lambda: evaluate(parse(DOCUMENT), out=out),
    }
    for name, call in calls.items():

        async def inside(call: Callable[[], object] = call) -> None:
            call()

        with pytest.raises(UsageError) as raised:
            trio.run(inside)
        assert f"{name} starts an event loop of trio's" in str(raised.value)
        assert "await trio.to_thread.run_sync(" in str(raised.value)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
