"""The lag bound and episodes that run: what a learner waits for, which groups close there, and how long it waits."""

from __future__ import annotations

import math

import pytest

from agentrl.records import GroupState, StopReason
from agentrl.store import Claim, Ending, Patience, RunStore, Source
from agentrl.store.audit import audit

from .play import START, Clock, admit, play, serve, turn


def begun(store: RunStore, *, size: int = 4, groups: int = 1, max_lag: int = 1) -> list[Claim]:
    admit(store, limit=groups, group_size=size, max_lag=max_lag, groups_per_step=groups)
    return store.leases.claim("a", size * groups, lease_s=1e6)


def hang(store: RunStore, claim: Claim, *, version: int = 1) -> None:
    """A turn is sampled, and the environment has yet to answer."""
    store.journal.begin(claim.episode_id, claim.fence, START)
    store.journal.journal_turn(claim.episode_id, claim.fence, turn(0, version))


def found(store: RunStore, step: int, *, quorum: int | None, max_lag: int = 1) -> tuple[int, int]:
    return tuple(store.buffer.at_bound(step, max_lag=max_lag, quorum=quorum))  # pyright: ignore[reportReturnType]


def test_a_full_group_is_waited_for_from_the_last_step_that_trains_its_first_member(store: RunStore) -> None:
    """Weights of step 0 and max_lag 1: steps 1 and 2 train them, step 3 does not."""
    first, second, *_ = begun(store)
    assert found(store, 2, quorum=None) == (0, 0), "nobody has ended: nothing would be lost"
    play(store, first)
    assert found(store, 1, quorum=None) == (0, 0)
    assert found(store, 2, quorum=None) == (3, 0)
    play(store, second, stop=StopReason.ENV_FAILED, outcome=None)
    assert found(store, 2, quorum=None) == (2, 0)


def test_a_group_whose_members_ended_with_new_tokens_is_not_waited_for(store: RunStore) -> None:
    first, *_ = begun(store)
    new = serve(store, 1)
    play(store, first, version=new)
    assert found(store, 2, quorum=None) == (0, 0)
    assert found(store, 3, quorum=None) == (3, 0)


def test_a_quorum_is_waited_for_and_no_more(store: RunStore) -> None:
    first, second, third, _ = begun(store)
    play(store, first)
    play(store, second)
    assert found(store, 2, quorum=3) == (2, 0)
    play(store, third)
    assert found(store, 2, quorum=3) == (0, 1), "it has not closed yet: the quorum waits for others"


def test_law_3_a_member_whose_action_hangs_is_waited_for_since_its_end_is_the_policys_own(
    store: RunStore, clock: Clock
) -> None:
    """Late or not. One that samples its next turn gets new tokens, and is not waited for."""
    first, second, hangs, samples = begun(store)
    for claim in (first, second):
        play(store, claim)
    hang(store, hangs)
    play_on(store, samples)
    assert found(store, 1, quorum=2) == (0, 0)
    assert found(store, 2, quorum=2) == (1, 1)
    assert store.buffer.take(1, 1, max_lag=1, close_at_bound=2) is None, "it is not the last step yet"
    (group,) = store.buffer.take(2, 1, max_lag=1, close_at_bound=2) or []
    assert [one.member for one in group.trajectories] == [0, 1]
    assert found(store, 2, quorum=2) == (1, 0)
    store.journal.finish(
        hangs.episode_id, hangs.fence, Ending(stop_reason=StopReason.TIME_LIMIT, outcome=0.0, success=False)
    )
    assert found(store, 2, quorum=2) == (0, 0)
    assert audit(store).violations == []


def play_on(store: RunStore, claim: Claim) -> None:
    """Its first turn was answered: it samples the next."""
    from .play import answer

    hang(store, claim)
    store.journal.journal_step(claim.episode_id, claim.fence, 0, answer(0))


def test_a_member_that_waits_for_a_reward_source_is_waited_for(store: RunStore) -> None:
    store.scores.declare_sources([Source(name="judge", deadline_s=60.0)])
    first, *_ = begun(store, size=2)
    play(store, first, turns=1)
    assert found(store, 1, quorum=2) == (0, 0)
    assert found(store, 2, quorum=2) == (1, 0)


def test_law_5_a_group_closes_at_the_bound_before_its_quick_members_grow_stale(store: RunStore) -> None:
    first, second, _, _ = begun(store)
    play(store, first, outcome=0.0)
    play(store, second, outcome=1.0)
    assert store.buffer.take(2, 1, max_lag=1, close_at_bound=3) is None, "too few for its quorum"
    assert store.groups.counts() == {GroupState.RUNNING: 1}
    (group,) = store.buffer.take(2, 1, max_lag=1, close_at_bound=0) or []
    assert [one.member for one in group.trajectories] == [0, 1]
    assert store.buffer.late_open() == 2
    assert store.metrics.drops() == {}


def test_without_the_bound_the_same_members_are_lost(store: RunStore) -> None:
    """What closing at the bound is for."""
    claims = begun(store)
    for claim in claims[:2]:
        play(store, claim)
    assert store.buffer.take(2, 1, max_lag=1) is None
    new = serve(store, 2)
    for claim in claims[2:]:
        play(store, claim, version=new)
    (group,) = store.buffer.take(3, 1, max_lag=1) or []
    assert [one.member for one in group.trajectories] == [2, 3]


def test_groups_at_the_bound_stay_open_while_the_step_lacks_others(store: RunStore) -> None:
    """The learner waits for these anyway."""
    claims = begun(store, groups=2)
    for claim in claims[:2]:
        play(store, claim)
    assert store.buffer.take(2, 2, max_lag=1, close_at_bound=0) is None
    assert store.groups.counts() == {GroupState.RUNNING: 2}
    for claim in claims[4:]:
        play(store, claim)
    assert len(store.buffer.take(2, 2, max_lag=1, close_at_bound=0) or []) == 2


def test_one_scored_member_closes_no_group(store: RunStore) -> None:
    """Nobody would judge it."""
    first, *_ = begun(store)
    play(store, first)
    assert store.buffer.take(2, 1, max_lag=1, close_at_bound=0) is None
    assert found(store, 2, quorum=2) == (3, 0)


@pytest.mark.parametrize("wait", [0.0, 0.5, 2.0])
def test_patience_is_earned_by_work(wait: float) -> None:
    """10 s of work, then a wait of 100 s: it holds for 10 * wait, and again only after more work."""
    patience = Patience(wait)
    assert not patience.holds(True, 10.0), "nothing is earned yet"
    patience.worked(10.0)
    assert patience.holds(True, 20.0) == (wait > 0)
    assert patience.ends_s == (20.0 + 10.0 * wait if wait else math.inf)
    assert not patience.holds(True, 120.0)
    assert patience.held_s == 10.0 * wait
    assert not patience.holds(True, 130.0)
    patience.worked(4.0)
    assert patience.left_s == 4.0 * wait


def test_what_was_not_waited_is_left() -> None:
    patience = Patience(1.0)
    patience.worked(10.0)
    assert patience.holds(True, 0.0)
    assert patience.holds(True, 2.0)
    assert not patience.holds(False, 3.0), "what it waited for has ended"
    assert (patience.left_s, patience.held_s) == (7.0, 3.0)


def test_patience_without_bound_holds_while_there_is_something_to_wait_for() -> None:
    patience = Patience(math.inf)
    assert patience.holds(True, 0.0)
    assert patience.holds(True, 1e6)
    assert not patience.holds(False, 2e6)
    assert (patience.left_s, patience.held_s) == (math.inf, 2e6)
