"""What a run prints waits for no reader (`agentrl.host.nonblocking_output`)."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

from agentrl.host.nonblocking_output import Unread, waiting_for_no_reader
from agentrl.run.reporting.live_view import LiveView

_DEADLINE_S = 120.0


class Pipe:
    """A pipe of the kernel's, whose reader reads when the test says so."""

    def __init__(self, blocking: bool = True) -> None:
        self.reader, writer = os.pipe()
        os.set_blocking(writer, blocking)
        self.stream: TextIO = os.fdopen(writer, "w")

    def read(self, enough: Callable[[str], bool]) -> str:
        """What is read until it is enough."""
        text = ""
        while not enough(text):
            text += os.read(self.reader, 1 << 20).decode()
        return text


@pytest.fixture(params=[True, False], ids=["blocking", "not blocking"])
def pipe(request: pytest.FixtureRequest) -> Generator[Pipe]:
    made = Pipe(request.param)
    yield made
    os.close(made.reader)


def within_deadline(action: Callable[[], object]) -> None:
    """Does it in another thread. Fails when it is blocked."""
    done: Future[object] = Future()
    threading.Thread(target=lambda: done.set_result(action()), daemon=True).start()
    done.result(_DEADLINE_S)


def test_who_reads_late_gets_what_was_held_and_is_told_what_was_not(pipe: Pipe) -> None:
    line = "x" * 999 + "\n"
    printing = Unread(pipe.stream)
    within_deadline(lambda: [printing.write(line) for _ in range(5_000)])
    text = pipe.read(lambda text: "left out" in text)
    kept, _, said = text.partition("\nagentrl: ")
    assert set(kept.splitlines()) == {line.strip()}, "whole lines, none of them cut"
    assert len(kept) >= 1_000_000
    assert said == f"{5_000_000 - len(kept)} characters were not read in time and are left out\n"
    printing.write("after\n")
    assert pipe.read(lambda text: "\n" in text) == "after\n"
    within_deadline(printing.close)


def test_a_reader_that_is_gone_is_not_missed() -> None:
    pipe = Pipe()
    os.close(pipe.reader)
    printing = Unread(pipe.stream)
    within_deadline(lambda: [printing.write("x" * 1_000) for _ in range(5_000)])
    within_deadline(printing.close)


@pytest.mark.medium
def test_the_end_waits_for_a_slow_reader_and_not_for_one_that_never_reads(pipe: Pipe) -> None:
    printing = Unread(pipe.stream)
    printing.write("last words\n")
    printing.close()
    assert os.read(pipe.reader, 100) == b"last words\n"
    never = Unread(pipe.stream)
    never.write("x" * 500_000)
    within_deadline(never.close)


@pytest.mark.medium
@pytest.mark.parametrize("pipe", [True], indirect=True)
def test_a_run_goes_on_when_nobody_reads_its_lines(pipe: Pipe) -> None:
    row = {"outcome_mean": 0.5, "success_mean": 0.5, "lag_mean": 0.0, "lag_max": 0, "tokens_scored": 8}
    row |= {"busy_s": 1.0, "idle_s": 0.0, "updated": True, "grad_norm": 1.0, "alarms": ["a long line " * 20]}
    rows = [SimpleNamespace(step=number, values=row) for number in range(1, 2_001)]
    store = SimpleNamespace(
        metrics=SimpleNamespace(
            values=lambda kind, after: [one for one in rows if one.step > after],
            failures=lambda: SimpleNamespace(failed=0),
        ),
        lineage=SimpleNamespace(latest_checkpoint=lambda: None),
    )
    run = SimpleNamespace(path=Path("run"))
    supervisor: Any = SimpleNamespace(
        phase="train", store=store, started_s=time.time(), run=run, config=SimpleNamespace(rewards=[])
    )

    def watch() -> None:
        with redirect_stdout(pipe.stream), redirect_stderr(pipe.stream), LiveView() as view:
            view.tick(supervisor)
            print("warning: to standard error too", file=sys.stderr)

    within_deadline(watch)
    assert os.read(pipe.reader, 200).decode().splitlines()[2].startswith("step    1  reward 0.500")


def test_streams_that_are_no_files_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    out = sys.stdout
    with waiting_for_no_reader():
        assert sys.stdout is out
