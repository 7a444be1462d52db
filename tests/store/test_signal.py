"""Waiting for work: woken by what one may act on, whichever process wrote it; nearly free while nothing happens."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from agentrl.host import file_writes
from agentrl.records import StopReason
from agentrl.store import Ending, RunStore
from agentrl.store.async_calls import Waiting
from agentrl.store.databases import change_signal
from agentrl.store.databases.change_signal import Role, Signal
from agentrl.store.run_values import PAUSED

from .play import START, admit, answer, play_all, serve, task, turn

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows writes of a file")


@pytest.fixture
def signals(store: RunStore) -> dict[Role, Signal]:
    """Of every role, all of them silent."""
    found = {role: store.signal(role) for role in ("rollout", "learner", "control", "reward")}
    assert all(signal.changed() for signal in found.values()), "the first look is one"
    assert not any(signal.changed() for signal in found.values())
    return found


def told(signals: dict[Role, Signal]) -> set[str]:
    return {role for role, signal in signals.items() if signal.changed()}


EVERYBODY = {"rollout", "learner", "control", "reward"}


def test_a_journaled_turn_wakes_reward_sources_alone(store: RunStore, signals: dict[Role, Signal]) -> None:
    admit(store)
    claim = store.leases.claim("w", 1, lease_s=30.0)[0]
    store.journal.begin(claim.episode_id, claim.fence, START)
    told(signals)
    store.journal.journal_turn(claim.episode_id, claim.fence, turn(0, 1))
    store.journal.journal_step(claim.episode_id, claim.fence, 0, answer(0))
    pauses = {role: signal.pause_s for role, signal in signals.items()}
    assert told(signals) == {"reward"}
    assert all(signals[role].pause_s > pauses[role] for role in EVERYBODY - {"reward"}), "they look seldom meanwhile"


def test_whatever_may_be_claimed_wakes_workers(store: RunStore, signals: dict[Role, Signal]) -> None:
    admit(store, limit=2)
    assert "rollout" in told(signals), "new groups"
    claims = store.leases.claim("w", 4, lease_s=30.0)
    told(signals)
    store.leases.hand_back("w")
    assert "rollout" in told(signals), "episodes of a worker that left"
    claims = store.leases.claim("w", 4, lease_s=30.0)
    told(signals)
    store.deaths.release_worker("w")
    assert "rollout" in told(signals), "of one that died"
    claims = store.leases.claim("w", 4, lease_s=30.0)
    for claim in claims:
        store.journal.finish(
            claim.episode_id, claim.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
        )
    told(signals)
    assert store.buffer.take(1, 1, max_lag=1) is not None
    assert "rollout" in told(signals), "the window in which workers play moves on"
    serve(store, 1)
    assert "rollout" in told(signals), "and with new weights"


def test_an_episode_that_ends_wakes_everybody(store: RunStore, signals: dict[Role, Signal]) -> None:
    admit(store)
    play_all(store, turns=1)
    assert told(signals) == EVERYBODY
    assert told(signals) == set()


def test_new_weights_and_a_phase_wake_admission(store: RunStore, signals: dict[Role, Signal]) -> None:
    serve(store, 1)
    assert "control" in told(signals)
    store.set_meta("phase", "drain")
    assert told(signals) == EVERYBODY


def test_a_group_that_expires_without_an_ending_wakes_admission(store: RunStore, signals: dict[Role, Signal]) -> None:
    admit(store, max_lag=0)
    play_all(store, turns=1)
    told(signals)
    assert store.buffer.take(5, 2, max_lag=0) is None, "all of it is too old for step 5"
    assert {"control", "learner"} <= told(signals)


def test_a_group_that_closes_by_its_deadline_wakes_the_learner(store: RunStore, signals: dict[Role, Signal]) -> None:
    admit(store, limit=1, group_size=3)
    claims = store.leases.claim("w", 3, lease_s=30.0, now=1000.0)
    for claim in claims[:2]:
        store.journal.finish(
            claim.episode_id, claim.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
        )
    told(signals)
    assert store.buffer.expire(2000.0, 100.0).closed == (1,)
    assert "learner" in told(signals)


def test_a_pause_and_its_end_wake_who_begins_turns_steps_and_groups(
    store: RunStore, signals: dict[Role, Signal]
) -> None:
    """They look seldom while nothing goes on, and begin again at once."""
    for pause in ({"since_s": 1.0, "now": False}, {}):
        PAUSED.set(store, pause)
        assert told(signals) == EVERYBODY


def test_a_write_of_another_process_ends_the_wait(store: RunStore, path: Path) -> None:
    store.wait_for_work("learner", 60.0)  # the first one is a look
    code = "import sys; from agentrl.store import RunStore; RunStore.open(sys.argv[1]).set_meta('phase', 'stop')"
    started = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", code, str(path)]) as other:
        store.wait_for_work("learner", 60.0)
        assert store.meta("phase") == "stop"
        assert time.monotonic() - started < 60.0
        assert other.wait(60) == 0


def test_a_write_of_this_process_ends_the_wait(store: RunStore) -> None:
    store.wait_for_work("learner", 60.0)
    writer = threading.Thread(target=lambda: store.set_meta("phase", "stop"))
    started = time.monotonic()
    writer.start()
    store.wait_for_work("learner", 60.0)
    assert time.monotonic() - started < 30.0
    writer.join()


async def test_the_wait_ends_at_its_timeout_and_looks_seldom(
    store: RunStore, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Waiting(store)("rollout", 60.0)
    looks = 0
    really = Signal.changed

    def changed(signal: Signal) -> bool:
        nonlocal looks
        looks += 1
        return really(signal)

    monkeypatch.setattr(Signal, "changed", changed)
    started = trio.current_time()
    await Waiting(store)("rollout", 60.0)
    assert trio.current_time() - started == pytest.approx(60.0)
    assert looks < 60.0 + 30, "once a second while nobody writes, each one statement"


def still(signal: Signal) -> int:
    """Look until the signal waits for a write of the log; returns how often."""
    looks = 0
    while signal.wakes is None:
        assert not signal.changed() and looks < 100
        looks += 1
    return looks


@linux
@pytest.mark.parametrize("durable", [False, True])
def test_the_first_write_after_a_still_time_wakes_who_sleeps_until_one(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    monkeypatch.setattr(change_signal, "_WAKES_S", 60.0)  # no look by the clock helps
    store.wait_for_work("learner", 60.0)
    assert still(store.signal("learner"))

    def write() -> None:
        if durable:
            store.versions.confirm_version(store.versions.mint_version(1))  # the log is written before its sync
        store.set_meta("phase", "stop")

    writer = threading.Thread(target=write)
    started = time.monotonic()
    writer.start()
    store.wait_for_work("learner", 60.0)
    assert time.monotonic() - started < 30.0
    writer.join()


@linux
def test_writes_that_one_does_not_wait_for_wake_no_more_often_than_the_clock(
    store: RunStore, signals: dict[Role, Signal]
) -> None:
    """A busy store is written many times a second, and a reader that each write woke would do nothing else."""
    learner = signals["learner"]
    still(learner)
    for number in range(30):
        store.metrics.record("fleet", 1, {"n": number})
        assert not learner.changed()
        assert learner.wakes is None, "the next look comes by the clock"
    pauses = [learner.pause_s]
    assert still(learner) == 20
    assert pauses == [0.02]


@linux
def test_a_look_that_came_before_the_commit_is_made_again_at_once(store: RunStore, path: Path) -> None:
    """The log is written before its index: a reader may be woken by a commit that it cannot read yet."""
    learner = store.signal("learner")
    assert learner.changed()
    still(learner)
    with path.with_name(path.name + "-wal").open("r+b") as log:
        first = log.read(1)
        log.seek(0)
        log.write(first)  # a write without a commit
    assert not learner.changed()
    assert learner.wakes is None and learner.pause_s == 0.001


async def test_where_no_descriptor_shows_writes_a_store_is_looked_at_by_the_clock(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """macOS has none, and a user of Linux a limited number."""
    monkeypatch.setattr(file_writes, "_watched", lambda path: None)
    await Waiting(store)("learner", 60.0)
    started = trio.current_time()

    async def write() -> None:
        await trio.sleep(10.0)
        store.set_meta("phase", "stop")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await Waiting(store)("learner", 60.0)
    assert trio.current_time() - started == pytest.approx(10.0, abs=0.03)


async def test_what_is_written_between_two_waits_is_not_missed(store: RunStore, autojump_clock: MockClock) -> None:
    await Waiting(store)("rollout", 60.0)
    store.groups.add_groups([task(0)], size=1, purpose="eval")
    started = trio.current_time()
    await Waiting(store)("rollout", 60.0)
    assert trio.current_time() == started
