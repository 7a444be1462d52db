"""A parent keeps a supervisor alive: after a crash or a hang it is started again, after an end on purpose it is not."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from each_case import each_case

from agentrl.config import RunConfig
from agentrl.errors import RunFailed
from agentrl.run.processes import heartbeat, restart_budget
from agentrl.run.processes.keep_alive import keep_alive
from agentrl.run.supervisor import Interrupted, _interrupt  # pyright: ignore[reportPrivateUsage]

DEADLINE_S = 300
BEGIN = """
import os, signal, sys, time
from pathlib import Path
from agentrl.run.processes.heartbeat import Heartbeat
beat = Heartbeat.of_process()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_LOOK_S", 0.01)
    monkeypatch.setattr(heartbeat, "_DUMP_S", 0.01)
    monkeypatch.setattr(restart_budget, "_PAUSE_S", 0.001)


class Kept:
    """Runs `lives`, one after the other; the last one again and again.

    A life marks last, if at all: until its first mark it has the minutes of a start, however busy the machine is."""

    def __init__(self, folder: Path, *lives: str, hang_s: float = 30.0, start_s: float = 600.0) -> None:
        self.folder, self.lives, self.started = folder, lives, 0
        self.settings = RunConfig.model_validate(
            {
                "model": "unused",
                "env": {"id": "test/none"},
                "train": {"liveness_deadline_s": hang_s},
                "engine": {"start_deadline_s": start_s},
            }
        )

    def command(self) -> list[str]:
        self.started += 1
        return [sys.executable, "-c", BEGIN + self.lives[min(self.started, len(self.lives)) - 1]]

    def status(self) -> int:
        return keep_alive(self.command, path=self.folder / "run", settings=self.settings)


DIES = "os.kill(os.getpid(), signal.SIGKILL)"
CRASHES = "raise KeyError('a bug')"
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"
STANDS = "beat.mark()\ntime.sleep(600)"


@pytest.mark.parametrize("life", [DIES, CRASHES, STOPS, STANDS])
def test_a_supervisor_that_dies_or_hangs_is_started_again(
    life: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = Kept(tmp_path, life, "beat.retire()\nsys.exit(0)", hang_s=1.0)
    assert (kept.status(), kept.started) == (0, 2)
    assert "agentrl: the supervisor " in capfd.readouterr().err


@pytest.mark.medium
def test_one_that_is_reaped_just_before_the_signal_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread waits for it and may reap it between the look whether it runs and the signal."""
    deliver = os.killpg

    def late(group: int, number: int) -> None:
        deliver(group, number)
        while Path(f"/proc/{group}").exists():  # until the waiting thread has reaped it
            os.sched_yield()
        deliver(group, number)

    monkeypatch.setattr(os, "killpg", late)
    answers_no_signal = "signal.signal(signal.SIGUSR2, signal.SIG_IGN)\n"  # so that only the last signal ends it
    kept = Kept(tmp_path, answers_no_signal + STANDS, "beat.retire()\nsys.exit(0)", hang_s=1.0)
    assert (kept.status(), kept.started) == (0, 2)


@pytest.mark.medium
@each_case("status", [0, 1, 2, 130])
def test_one_that_ends_on_purpose_is_not(status: int, tmp_path: Path) -> None:
    line = "Path(os.environ['AGENTRL_ERROR_FILE']).write_text('the run cannot go on')\n"
    kept = Kept(tmp_path, line + f"sys.exit({status})")
    assert (kept.status(), kept.started) == (status, 1)


def test_one_that_lost_its_cluster_is_and_knows_that_it_was_there_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """So it waits for the next cluster; at its first start it would say that there is none."""
    line = "Path(os.environ['AGENTRL_ERROR_FILE']).write_text('it is gone')\n"
    kept = Kept(tmp_path, line + "sys.exit(9 if 'AGENTRL_AGAIN' in os.environ else 7)")
    assert (kept.status(), kept.started) == (9, 2)
    assert "agentrl: the supervisor lost its cluster; it is started again" in capfd.readouterr().err


@pytest.mark.parametrize("life", [STANDS, DIES, STOPS])
def test_one_that_was_stopped_and_does_not_end_is_ended_and_not_started_again(
    life: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`agentrl stop` reached it, and then it hung: in a call to a cluster that is gone, say."""
    line = "Path(os.environ['AGENTRL_ERROR_FILE']).write_text('stopped by SIGTERM; go on with …')\n"
    kept = Kept(tmp_path, line + life, hang_s=1.0)
    assert (kept.status(), kept.started) == (130, 1)
    assert "agentrl: stopped by SIGTERM; go on with …" in capfd.readouterr().err


def test_one_that_is_asked_for_its_stacks_writes_them_and_lives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = "os.kill(os.getpid(), signal.SIGUSR2)\nsys.exit(0)"
    kept = Kept(tmp_path, "from agentrl.run.processes.keep_alive import live_with_parent\nlive_with_parent()\n" + asked)
    assert (kept.status(), kept.started) == (0, 1)
    assert "most recent call first" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_supervisor_says_that_it_was_stopped_before_it_ends_its_children(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "error"
    monkeypatch.setenv("AGENTRL_ERROR_FILE", str(note))

    async def stopped() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_interrupt, tmp_path / "run")
            await trio.testing.wait_all_tasks_blocked()
            os.kill(os.getpid(), number)
            try:
                await trio.sleep(DEADLINE_S)
            finally:
                assert f"go on with agentrl train --resume {tmp_path / 'run'}" in note.read_text()

    with pytest.RaisesGroup(Interrupted):
        trio.run(stopped)


@pytest.mark.medium
def test_it_gives_up_with_a_line_that_says_how_to_go_on(tmp_path: Path) -> None:
    kept = Kept(tmp_path, DIES)
    with pytest.raises(RunFailed) as failed:
        kept.status()
    assert str(failed.value) == (
        "the supervisor ended with signal SIGKILL (started again 5 times, never well for 60 s); "
        f"go on with agentrl train --resume {tmp_path / 'run'}"
    )
    assert kept.started == 6


@pytest.mark.medium
@pytest.mark.parametrize(("life", "start_s"), [("time.sleep(600)", 0.5), (STANDS, 600.0)])
def test_law_4_one_that_hangs_at_every_start_uses_up_the_restarts(
    life: str, start_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hang is noticed after 0.5 s, which is longer than the time for which a supervisor has to be well here."""
    monkeypatch.setattr(
        "agentrl.run.processes.keep_alive.RestartBudget", partial(restart_budget.RestartBudget, allowed=2, window_s=0.2)
    )
    kept = Kept(tmp_path, life, life, life, "beat.retire()\nsys.exit(0)", hang_s=0.5, start_s=start_s)
    with pytest.raises(RunFailed):
        kept.status()
    assert kept.started == 3


@pytest.mark.medium
def test_what_has_nothing_left_but_its_summary_is_not_taken_for_hung(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "beat.retire()\ntime.sleep(1.5)", hang_s=0.5)
    assert (kept.status(), kept.started) == (0, 1)


def test_ctrl_c_is_passed_on_once(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    waits = f"signal.signal(signal.SIGINT, lambda *_: sys.exit(130))\nPath({str(ready)!r}).touch()\nsignal.pause()"
    kept = Kept(tmp_path, waits)

    def interrupt() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert (kept.status(), kept.started) == (130, 1)
