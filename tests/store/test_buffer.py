"""The buffer: once, oldest first, not too old, and everything that leaves is counted (laws 2 and 5)."""

from __future__ import annotations

import pytest

from agentrl.records import Group, GroupState, StopReason
from agentrl.store import Ending, EpisodeLengths, LeaseLost, RunStore, Source, StoreError
from agentrl.store.audit import audit
from agentrl.tokens.staleness import lag_in_step as lag

from .play import START, Clock, admit, answer, play, play_all, serve, task, turn


def ids(groups: list[Group] | None) -> list[int] | None:
    return None if groups is None else [group.id for group in groups]


def test_groups_are_taken_oldest_first_and_whole(store: RunStore) -> None:
    admit(store)
    claims = store.leases.claim("a", 100, lease_s=30.0)
    for claim in reversed(claims):  # the youngest group ends first
        play(store, claim)
    taken = store.buffer.take(1, 2, max_lag=1)
    assert ids(taken) == [1, 2]
    assert taken is not None
    assert taken[0] == store.reads.group(1)
    assert taken[0].state == GroupState.TAKEN
    assert (taken[0].taken_step, taken[0].started_step, taken[0].size) == (1, 0, 2)
    first = taken[0].trajectories[0]
    assert first.start == START
    assert first.turns == (turn(0, 1, step=answer(0)), turn(1, 1, step=answer(1, last=True)))
    assert (first.task, first.stop_reason, first.outcome, first.success) == (task(0), StopReason.DONE, 1.0, True)


def test_law_2_no_group_is_taken_twice(store: RunStore, clock: Clock) -> None:
    admit(store)
    play_all(store)
    with RunStore.open(store.path, clock=clock) as second_learner:
        assert ids(store.buffer.take(1, 2, max_lag=1)) == [1, 2]
        with pytest.raises(StoreError, match="step 1: members were taken for step 1 already: roll back first"):
            second_learner.buffer.take(1, 2, max_lag=1)
        assert ids(second_learner.buffer.take(2, 2, max_lag=1)) == [3, 4]
        with pytest.raises(StoreError, match="step 1: members were taken for step 2 already"):
            store.buffer.take(1, 2, max_lag=1)


@pytest.mark.parametrize(("step", "made_at", "expected"), [(1, 0, 0), (2, 0, 1), (5, 1, 3), (3, 9, 0), (3, None, 0)])
def test_lag_counts_from_the_weights_before_the_update(step: int, made_at: int | None, expected: int) -> None:
    assert lag(step, made_at) == expected


def test_law_5_no_token_beyond_the_bound_is_taken_and_the_drop_is_counted(store: RunStore) -> None:
    """Groups 1 and 2 hold tokens of step 0, group 3 of step 1, a member of group 4 of both."""
    admit(store, limit=4)
    one = serve(store, 1)
    claims = store.leases.claim("a", 8, lease_s=30.0)
    for claim in claims[:4]:
        play(store, claim, version=1)
    for claim in claims[4:7]:
        play(store, claim, version=one)
    store.journal.begin(claims[7].episode_id, claims[7].fence, START)
    store.journal.journal_turn(claims[7].episode_id, claims[7].fence, turn(0, one, step=answer(0)))
    store.journal.journal_turn(claims[7].episode_id, claims[7].fence, turn(1, 1, step=answer(1, last=True)))
    store.journal.finish(
        claims[7].episode_id, claims[7].fence, Ending(stop_reason=StopReason.DONE, outcome=0.0, success=False)
    )
    assert (
        ids(store.buffer.take(2, 3, max_lag=0)) is None
    )  # groups 3 and 4 are fresh; the stale ones leave all the same
    assert store.metrics.drops() == {"stale": 2}
    assert store.groups.counts() == {GroupState.SCORED: 2, GroupState.EXPIRED: 2}
    assert ids(store.buffer.take(2, 2, max_lag=0)) == [3, 4]
    assert store.lineage.episodes_of(2) == [5, 6, 7, 8], (
        "of an episode only its old tokens are left out, and by the learner"
    )


def test_a_group_without_sampled_tokens_is_never_stale(store: RunStore) -> None:
    admit(store, limit=1)
    play_all(store, turns=0)
    assert ids(store.buffer.take(50, 1, max_lag=0)) == [1]


# --- deadlines ----------------------------------------------------------------------------------------------------


def test_law_4_a_group_past_its_deadline_expires_and_its_worker_hears_of_it(store: RunStore, clock: Clock) -> None:
    admit(store, limit=2)
    claims = store.leases.claim("a", 3, lease_s=1e6)
    play(store, claims[0])
    store.journal.begin(claims[1].episode_id, claims[1].fence, START)
    store.journal.journal_turn(claims[1].episode_id, claims[1].fence, turn(0, 1))
    clock.now += 5.0
    store.leases.claim("a", 1, lease_s=1e6)
    assert not any(store.buffer.expire(clock() + 1195.0, 600.0)), "one member tells nothing: it waits as long again"
    assert store.buffer.expire(clock() + 1195.1, 600.0).groups == (1, 2)
    assert store.metrics.drops() == {"deadline": 2}
    assert store.metrics.endings() == {StopReason.DONE: 1, StopReason.EXPIRED: 3}
    assert store.leases.renew("a", lease_s=1e6) == frozenset()
    with pytest.raises(LeaseLost, match="episode 2 is expired"):
        store.journal.journal_step(claims[1].episode_id, claims[1].fence, 0, answer(0))
    assert store.reads.trajectory(2).turns == (turn(0, 1),)  # what was journaled stays


def test_law_4_an_evaluation_past_its_deadline_keeps_what_ended(store: RunStore, clock: Clock) -> None:
    store.groups.add_groups([task(0)], size=2, purpose="eval")
    done, hung = store.leases.claim("a", 2, lease_s=1e6)
    play(store, done)
    assert store.buffer.expire(clock() + 601.0, 600.0).groups == (1,)
    assert store.groups.counts("eval") == {GroupState.SCORED: 1}
    assert [one.scored for one in store.reads.trajectories("eval")] == [True, False]
    assert store.reads.trajectory(hung.episode_id).stop_reason is StopReason.EXPIRED


def test_law_4_deadlines_go_along_with_a_clock_that_jumps(store: RunStore, clock: Clock) -> None:
    admit(store, limit=2)
    store.scores.declare_sources([Source(name="prm", deadline_s=10.0)])
    claims = store.leases.claim("a", 3, lease_s=1e6)
    play(store, claims[0])
    clock.now += 3600.0
    store.deaths.shift_deadlines(3600.0)
    assert not any(store.buffer.expire(clock.now, 600.0)) and store.scores.expire_sources(clock.now) == {}
    assert set(store.scores.expire_sources(clock.now + 11.0)) == {"prm"}
    assert store.buffer.expire(clock.now + 1201.0, 600.0).groups == (1, 2), "they have no more time than others"


def test_law_5_a_running_member_is_not_expired_for_its_first_tokens(store: RunStore, clock: Clock) -> None:
    """Its younger ones may still train; a sibling that ended with old ones alone leaves by itself, and still judges."""
    admit(store, limit=1)
    early, slow = store.leases.claim("a", 2, lease_s=1e6)
    play(store, early, version=1, outcome=0.0)
    store.journal.begin(slow.episode_id, slow.fence, START)
    store.journal.journal_turn(slow.episode_id, slow.fence, turn(0, 1, step=answer(0)))
    four = serve(store, 4)
    assert not any(store.buffer.expire(clock() + 1.0, 600.0))
    store.journal.journal_turn(slow.episode_id, slow.fence, turn(1, four, step=answer(1)))
    store.journal.finish(slow.episode_id, slow.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True))
    (group,) = store.buffer.take(5, 1, max_lag=1) or []
    assert [one.episode_id for one in group.trajectories] == [slow.episode_id]
    assert [one.episode_id for one in group.left_out] == [early.episode_id]
    assert group.record is not None
    assert {member: one.outcome for member, one in group.record.items()} == {0: 0.0, 1: 1.0}
    assert store.metrics.members_dropped() == {"stale": 1}
    assert store.metrics.drops() == {}
    assert audit(store).violations == []


# --- what dropping does to lengths --------------------------------------------------------------------------------


def test_law_5_the_bias_of_dropping_is_measured(store: RunStore, clock: Clock) -> None:
    """Trained: two episodes of 1 turn, two of 2 turns, 3 tokens each. Dropped: two members of 5 turns in a stale group;
    members of 4 turns and of none in a group past its deadline. A turn takes a second here."""
    admit(store, limit=4)
    claims = store.leases.claim("a", 8, lease_s=1e6)
    began = clock.now
    for claim, turns in zip(claims[:4], (1, 1, 5, 5), strict=True):
        clock.now = began + turns
        play(store, claim, turns=turns)
    store.journal.begin(claims[4].episode_id, claims[4].fence, START)
    for index in range(4):
        store.journal.journal_turn(claims[4].episode_id, claims[4].fence, turn(index, 1, step=answer(index)))
    assert ids(store.buffer.take(1, 1, max_lag=0)) == [1]
    for claim in claims[6:]:
        clock.now = began + 2
        play(store, claim, turns=2, version=serve(store, 1))
    assert ids(store.buffer.take(2, 1, max_lag=0)) == [4]
    store.buffer.expire(began + 2000.0, 600.0)
    bias = store.metrics.length_bias()
    assert bias.trained == EpisodeLengths(episodes=4, turns=1.5, tokens=4.5, seconds=1.5)
    assert bias.dropped == EpisodeLengths(episodes=4, turns=3.5, tokens=10.5, seconds=1002.5)
    assert bias.by_reason == {
        "deadline": EpisodeLengths(episodes=2, turns=2.0, tokens=6.0, seconds=2000.0),
        "stale": EpisodeLengths(episodes=2, turns=5.0, tokens=15.0, seconds=5.0),
    }
    assert store.metrics.episodes_trained() == 4


def test_an_unscored_member_of_a_trained_group_counts_as_dropped(store: RunStore) -> None:
    admit(store, limit=1, group_size=3)
    first, *others = store.leases.claim("a", 3, lease_s=1e6)
    play(store, first, turns=7, stop=StopReason.ENGINE_FAILED, outcome=None)
    for claim in others:
        play(store, claim, turns=1)
    store.buffer.take(1, 1, max_lag=0)
    expected = {"engine_failed": EpisodeLengths(episodes=1, turns=7.0, tokens=21.0, seconds=0.0)}
    assert store.metrics.length_bias().by_reason == expected
    assert store.metrics.episodes_trained() == 2
