"""If groups are scored and no step comes, the terminal says who is waited for. With the real store, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.run.reporting.live_view import WaitLines
from agentrl.run.supervisor import TRAINING
from agentrl.store import RunStore, Source
from agentrl.store.run_values import LEARNER_WAITS
from tests.store.play import Clock, admit, play_all, serve


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        serve(store, 0)
        yield store


def view_of(store: RunStore) -> tuple[Clock, Any, WaitLines]:
    clock = Clock(0.0)
    config, run = SimpleNamespace(buffer=SimpleNamespace(groups_per_step=1)), SimpleNamespace(path="runs/mine")
    return clock, SimpleNamespace(phase=TRAINING, store=store, config=config, run=run), WaitLines(now=clock)


def at(clock: Clock, now: float, lines: WaitLines, supervisor: Any) -> list[str]:
    clock.now = now
    return list(lines.lines(supervisor))


def test_scored_groups_that_nobody_takes_are_said_at_30_s_and_at_each_doubling(store: RunStore) -> None:
    admit(store, limit=1)
    play_all(store)
    assert store.buffer.ready_count() == 1
    clock, supervisor, lines = view_of(store)
    assert at(clock, 0, lines, supervisor) == at(clock, 29, lines, supervisor) == []
    (line,) = at(clock, 32, lines, supervisor)
    assert line == (
        "warning: 1 groups are scored, and the learner takes none for 32 s, nor does it say that it waits: "
        "agentrl logs runs/mine learner"
    )
    assert at(clock, 40, lines, supervisor) == []
    assert len(at(clock, 62, lines, supervisor)) == 1
    assert store.buffer.take(1, 1, max_lag=1)
    assert at(clock, 200, lines, supervisor) == [], "it computes"


def test_what_the_learner_says_of_its_wait_is_said_with_the_sources_that_are_waited_for(store: RunStore) -> None:
    store.scores.declare_sources([Source(name="taste", late="partial", deadline_s=10.0)])
    admit(store, limit=1)
    play_all(store)
    assert store.buffer.ready_count() == 0
    clock, supervisor, lines = view_of(store)
    at(clock, 0, lines, supervisor)
    (line,) = at(clock, 31, lines, supervisor)
    waits = "reward source 'taste' has to score turns of 2 ended episodes"
    assert line == f"warning: no step for 31 s: {waits}: agentrl logs runs/mine worker-0"
    LEARNER_WAITS.set(store, "step 1 waits for groups: 0 of 1 are scored")
    (line,) = at(clock, 61, lines, supervisor)
    assert line == f"warning: no step for 61 s: step 1 waits for groups: 0 of 1 are scored; {waits}"


def test_law_4_a_source_that_hangs_wakes_the_learner_as_its_deadline_passes(store: RunStore) -> None:
    """With `late = "partial"` the supervisor ends the episodes: the learner's signal changes with that, and the groups
    can be taken."""
    store.scores.declare_sources([Source(name="taste", late="partial", deadline_s=10.0)])
    for _ in range(20):
        admit(store, limit=1)
    play_all(store)
    signal = store.signal("learner")
    signal.changed()
    assert not signal.changed()
    assert store.scores.episodes_unscored() and store.buffer.ready_count() == 0
    store.scores.expire_sources(store.now() + 11.0)
    assert signal.changed()
    assert store.scores.episodes_unscored() == {}
    ready = store.buffer.ready_count()
    assert ready and len(store.buffer.take(1, ready, max_lag=1) or ()) == ready
