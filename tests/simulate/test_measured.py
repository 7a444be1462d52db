"""The times of a finished run, read back from its store."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from random import Random

import pytest

from agentrl.config import BufferSettings, parse
from agentrl.errors import UsageError
from agentrl.planning.simulate.measured import MeasuredRun, measure
from agentrl.planning.simulate.service import MeasuredSteps
from agentrl.planning.simulate.sweep import limits
from agentrl.records import StopReason, Task, Turn, VersionSpan
from agentrl.store import Ending, Returns, RunStore
from agentrl.store.buffer.admission import AdmissionBounds

BOUNDS = AdmissionBounds(group_size=2, groups_per_step=2, max_lag=9, max_running=100, steps_total=100)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def of(store: RunStore, *, start_up: int, returns: Returns | None = None) -> MeasuredRun:
    """What a run measures that is not near its end."""
    return measure(store, BufferSettings(max_lag=2), start_up=start_up, end=100, returns=returns or Returns())


def finished(
    path: Path, *, groups: int, steps: int, clock: Clock | None = None, outcomes: Sequence[float] = (1.0,)
) -> RunStore:
    """Each group has an episode of 3 s and one of 5 s, whose turn begins after 1 s and ends 1 s before its end. Group k
    starts at 100 k s. A step of 10 s for 20 tokens comes every 14 s; the learner waits 3 s for it. Episodes
    have the `outcomes` in turn."""
    clock, outcome = clock or Clock(), cycle(outcomes)
    store = RunStore.create(path / "store.sqlite", "{}", clock=clock)
    version = store.versions.mint_version(0)
    clock.now += 0.5
    store.versions.confirm_version(version)
    for k in range(groups):
        start = 1100.0 + 100 * k
        store.groups.admit([Task(index=k, env="t", seed=k)], first=k, bounds=BOUNDS, limit=1)
        for claim, seconds in zip(store.leases.claim("w", 2, lease_s=1e9, now=start), (3.0, 5.0), strict=True):
            clock.now = start + seconds
            turn = Turn(
                index=0,
                parent=None,
                prompt_ids=(1,),
                token_ids=(2,) * 4,
                logprobs=(-1.0,) * 4,
                spans=(VersionSpan(version.version, 0, 4),),
                finish="stop",
                text="",
                started_s=start + 1,
                ended_s=start + seconds - 1,
            )
            store.journal.begin(claim.episode_id, claim.fence, ({"role": "user", "content": ""},))
            store.journal.journal_turn(claim.episode_id, claim.fence, turn)
            store.journal.finish(
                claim.episode_id, claim.fence, Ending(stop_reason=StopReason.DONE, outcome=next(outcome), success=None)
            )
    for step in range(1, steps + 1):
        clock.now = 5000.0 + 14 * step
        store.metrics.record("step", step, {"idle_s": 3.0, "busy_s": 10.0, "tokens_scored": 20})
    return store


def test_a_run_gives_its_episodes_turn_by_turn_and_its_steps(tmp_path: Path) -> None:
    with finished(tmp_path, groups=8, steps=10) as store:
        run = of(store, start_up=2)
    assert run.idle == pytest.approx(3 / 13)
    assert (run.push_s, run.between_s) == (pytest.approx(0.5), pytest.approx(1.0))
    assert run.steps.seconds(20, Random(0)) == pytest.approx(10.0)
    plays = run.episodes.group(2, Random(0))
    assert sorted(play.duration_s for play in plays) == [3.0, 5.0]
    assert {play.turns for play in plays} == {((1.0, 2.0, 4),), ((1.0, 4.0, 4),)}
    assert all(play.scored and play.tokens == 4 for play in plays)


def test_a_run_that_skipped_groups_gives_their_share(tmp_path: Path) -> None:
    with finished(tmp_path, groups=8, steps=10) as store:
        assert of(store, start_up=2).skipped == 0
        for step, skipped in ((11, 0), (12, 4)):
            row = {"idle_s": 3.0, "busy_s": 10.0, "tokens_scored": 20, "group_count": 4, "groups_skipped": skipped}
            store.metrics.record("step", step, row)
        run = of(store, start_up=2)
    assert run.skipped == pytest.approx(4 / 12)


def test_a_run_tells_which_of_its_groups_give_no_signal(tmp_path: Path) -> None:
    with finished(tmp_path, groups=8, steps=10, outcomes=(1.0, 1.0, 1.0, 0.0)) as store:
        groups = of(store, start_up=2).episodes.groups
        assert [[play.silent for play in group] for group in groups] == [[True, True], [False, False]] * 4
        learns = of(store, start_up=2, returns=Returns(skips=False)).episodes.groups
    assert not any(play.silent for group in learns for play in group)


def test_times_that_are_drawn_have_no_group_without_signal_and_a_run_has(tmp_path: Path) -> None:
    skips = parse({"model": "m", "env": {"id": "e"}, "buffer": {"skip_without_signal": True}})
    [line] = limits(skips, None)
    assert line.startswith("not simulated: buffer.skip_without_signal")
    with finished(tmp_path, groups=8, steps=10) as store:
        assert list(limits(skips, of(store, start_up=2))) == []


def test_the_last_steps_of_a_run_are_left_out_because_no_group_is_admitted_behind_theirs(tmp_path: Path) -> None:
    with finished(tmp_path, groups=8, steps=8) as store:
        for step in (9, 10):
            store.metrics.record("step", step, {"idle_s": 500.0, "busy_s": 10.0, "tokens_scored": 20})
        assert measure(store, BufferSettings(max_lag=2), start_up=2, end=10).idle == pytest.approx(3 / 13)
        assert measure(store, BufferSettings(max_lag=0), start_up=2, end=10).idle == pytest.approx(
            (6 * 3 + 500) / (7 * 10 + 6 * 3 + 500)
        )
        assert of(store, start_up=2).idle == pytest.approx((6 * 3 + 1000) / (8 * 10 + 6 * 3 + 1000)), "it goes on"


def test_groups_of_the_last_moments_are_left_out_because_only_their_short_episodes_have_ended(tmp_path: Path) -> None:
    clock = Clock()
    with finished(tmp_path, groups=8, steps=10, clock=clock) as store:
        clock.now = 1806.0  # the episodes before took 5 s at most, and ended at 1805 s
        store.groups.admit([Task(index=8, env="t", seed=8)], first=8, bounds=BOUNDS, limit=1)
        for claim in store.leases.claim("w", 2, lease_s=1e9, now=1806.0):
            clock.now = 1807.0
            store.journal.finish(
                claim.episode_id, claim.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=None)
            )
        found = of(store, start_up=0).episodes.groups
    assert len(found) == 8


def test_a_run_too_short_to_say_anything_is_one_clear_line(tmp_path: Path) -> None:
    says = (
        "8 finished groups and 1 steps between the first 2 and the last 1; .* 4 of each: go on with .*train.steps=12$"
    )
    with finished(tmp_path, groups=8, steps=4) as store, pytest.raises(UsageError, match=says):
        measure(store, BufferSettings(max_lag=0), start_up=2, end=4)


def test_steps_are_a_line_through_what_was_measured() -> None:
    steps = MeasuredSteps.fit([(100, 3.0), (200, 5.0), (300, 7.0)])
    assert steps.seconds(400, Random(0)) == pytest.approx(9.0)
    assert steps.sped_up(2).seconds(400, Random(0)) == pytest.approx(4.5)


def test_steps_that_got_shorter_with_more_tokens_have_no_slope() -> None:
    steps = MeasuredSteps.fit([(100, 4.0), (200, 2.0)])
    assert {round(steps.seconds(10**6, Random(seed)), 6) for seed in range(9)} == {4.0, 2.0}
