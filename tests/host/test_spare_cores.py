"""An engine takes the cores that nobody uses, and gives them back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from each_case import each_case

from agentrl.host.spare_cores import SpareCores, idle_time_s


class Machine:
    """Of two cores: seconds in which this process computed, and in which nobody did."""

    def __init__(self) -> None:
        self.now_s = self.used_s = self.idle_s = 0.0

    def spare(self, most: int = 2) -> SpareCores:
        return SpareCores(most=most, clock=lambda: self.now_s, used_s=lambda: self.used_s, idle_s=lambda: self.idle_s)

    def go(self, used: float, idle: float) -> None:
        """A second, with this share of it used here and idle, in cores."""
        self.now_s += 1.0
        self.used_s += used
        self.idle_s += idle


@each_case(
    ("used", "idle", "threads"),
    [
        pytest.param(1.0, 1.0, 2, id="nobody else computes"),
        pytest.param(2.0, 0.0, 2, id="it has both cores, and keeps them"),
        pytest.param(0.0, 2.0, 2, id="it had nothing to do"),
        pytest.param(1.0, 0.0, 1, id="the learner computes"),
        pytest.param(1.33, 0.0, 1, id="it takes the learner's time: three threads on two cores"),
        pytest.param(1.0, 0.7, 1, id="a core idles too seldom"),
        pytest.param(1.0, 0.8, 2, id="a core is nearly free"),
        pytest.param(0.0, 0.0, 1, id="others have all of it"),
    ],
)
def test_threads_are_what_it_used_and_what_nobody_did(used: float, idle: float, threads: int) -> None:
    machine = Machine()
    spare = machine.spare()
    machine.go(used, idle)
    assert spare.threads() == threads


def test_no_more_than_its_own_cores_and_one_at_first() -> None:
    machine = Machine()
    spare = machine.spare(most=3)
    assert spare.threads() == 1
    machine.go(1.0, 15.0)
    assert spare.threads() == 3


def test_it_looks_again_after_a_while_only() -> None:
    machine = Machine()
    spare = machine.spare()
    machine.go(1.0, 1.0)
    assert spare.threads() == 2
    machine.now_s += 0.1  # in which the learner began
    assert spare.threads() == 2
    machine.go(1.0, 0.0)
    assert spare.threads() == 1


def test_a_machine_that_does_not_tell_gives_one(tmp_path: Path) -> None:
    assert idle_time_s(tmp_path / "none") is None
    spare = SpareCores(most=8, clock=iter(float(at) for at in range(9)).__next__, idle_s=lambda: None)
    assert [spare.threads() for _ in range(3)] == [1, 1, 1]


def test_cores_that_it_is_not_bound_to_do_not_count(tmp_path: Path) -> None:
    mine, others = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0)) + 1
    hz = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    stat.write_text(f"cpu 1 2 3 999 9\ncpu{mine} 1 2 3 {4 * hz} {hz} 0\ncpu{others} 1 2 3 {70 * hz} 0 0\nintr 5\n")
    assert idle_time_s(stat) == 5.0
