"""The member is trained, not the group: late members, records, early closing, and what leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.records import Group, MemberRecord, Step, StopReason
from agentrl.store import Claim, Ending, LeaseLost, Quorum, RunStore
from agentrl.store.audit import audit
from tests.parts.outside_audit import OutsideAuditor

from .play import START, Clock, admit, answer, play, serve, task, turn

DEADLINE_S = 600.0


def begun(store: RunStore, *, size: int = 3, groups: int = 1) -> list[Claim]:
    admit(store, limit=groups, group_size=size)
    return store.leases.claim("a", size * groups, lease_s=1e6)


def trained(groups: list[Group] | None) -> dict[int, list[int]]:
    """Group -> members that a take trains."""
    return {group.id: [one.member for one in group.trajectories] for group in groups or []}


def test_late_members_ride_with_a_step_and_count_for_no_group(store: RunStore, clock: Clock) -> None:
    claims = begun(store, groups=3)
    for claim in (*claims[:2], *claims[3:]):
        play(store, claim)
    store.buffer.expire(clock(), DEADLINE_S, close_policy=Quorum(2, 0.0))
    assert trained(store.buffer.take(1, 1, max_lag=1)) == {1: [0, 1]}
    play(store, claims[2])
    assert trained(store.buffer.take(2, 1, max_lag=1)) == {2: [0, 1, 2], 1: [2]}
    assert trained(store.buffer.take(3, 1, max_lag=2)) == {3: [0, 1, 2]}


def test_what_a_member_is_judged_against_is_kept_exactly(store: RunStore) -> None:
    """ann and bob by turns: bob's move costs ann, which is a consequence of her turn before."""
    (one, two) = begun(store, size=2)
    store.journal.begin(one.episode_id, one.fence, START)
    for index, (role, step) in enumerate(
        [
            ("ann", Step(observation=(), reward=0.1)),
            ("bob", Step(observation=(), reward=0.7, rewards={"ann": -0.3})),
            ("ann", Step(observation=(), reward=1 / 3)),
        ]
    ):
        played = turn(index, 1, step=step)
        object.__setattr__(played, "role", role)
        store.journal.journal_turn(one.episode_id, one.fence, played)
    store.journal.finish(
        one.episode_id,
        one.fence,
        Ending(stop_reason=StopReason.DONE, outcome=0.5, success=True, outcomes={"bob": -2.0}),
    )
    play(store, two, turns=2)
    (group,) = store.buffer.take(1, 1, max_lag=0) or []
    assert group.record is not None
    assert {member: replace(one, states={}) for member, one in group.record.items()} == {
        0: MemberRecord(outcome=0.5, outcomes={"bob": -2.0}, rewards={"ann": (0.1 - 0.3, 1 / 3), "bob": (0.7,)}),
        1: MemberRecord(outcome=1.0, outcomes={}, rewards={"policy": (0.0, 0.25)}),
    }
    assert {one.member: one.record for one in group.trajectories} == group.record
    states = [state for one in group.record.values() for own in one.states.values() for state in own]
    assert len(states) == 5 and len(set(states)) == 3, "turns of equal prompts are in one state: 0 and 1 of both, and 2"


def test_law_4_a_stalling_member_does_not_take_its_siblings_with_it_and_is_itself_scored(
    store: RunStore, clock: Clock
) -> None:
    first, second, stalls = begun(store)
    for claim in (first, second):
        play(store, claim)
    assert store.buffer.expire(clock() + DEADLINE_S + 1.0, DEADLINE_S).closed == (1,)
    assert trained(store.buffer.take(1, 1, max_lag=1)) == {1: [0, 1]}
    play(store, stalls, stop=StopReason.TIME_LIMIT, outcome=0.0)  # its own time was up
    assert trained(store.buffer.take(2, 0, max_lag=1)) == {1: [2]}
    assert store.metrics.drops() == store.metrics.members_dropped() == {}


def test_law_4_a_late_member_expires_after_as_long_again(store: RunStore, clock: Clock) -> None:
    first, second, hangs = begun(store)
    for claim in (first, second):
        play(store, claim)
    store.journal.begin(hangs.episode_id, hangs.fence, START)
    store.buffer.expire(clock() + DEADLINE_S + 1.0, DEADLINE_S)
    assert not any(store.buffer.expire(clock() + 2 * DEADLINE_S, DEADLINE_S))
    assert store.buffer.expire(clock() + 2 * DEADLINE_S + 0.1, DEADLINE_S).members == (hangs.episode_id,)
    with pytest.raises(LeaseLost, match="episode 3 is expired"):
        store.journal.journal_turn(hangs.episode_id, hangs.fence, turn(0, 1))
    assert trained(store.buffer.take(1, 1, max_lag=1)) == {1: [0, 1]}
    assert store.metrics.members_dropped() == {"deadline": 1}
    assert audit(store).violations == []


def test_law_5_late_members_that_no_step_took_leave_as_counted_when_the_run_is_over(
    store: RunStore, clock: Clock
) -> None:
    first, second, late, slow = begun(store, size=4)
    play(store, first)
    play(store, second)
    store.buffer.expire(clock(), DEADLINE_S, close_policy=Quorum(2, 0.0))
    assert trained(store.buffer.take(1, 1, max_lag=1)) == {1: [0, 1]}
    play(store, late)
    assert store.buffer.end_late() == 2
    assert store.metrics.members_dropped() == {"run_over": 2} and store.buffer.late_open() == 0
    with pytest.raises(LeaseLost):
        play(store, slow)
    assert store.buffer.take(2, 0, max_lag=1) is None, "it has left"
    assert store.buffer.end_late() == 0
    assert audit(store).violations == [] and OutsideAuditor(store.path).look(ended=True) == []


def test_retention_keeps_the_tokens_of_a_group_with_a_late_member_to_train(store: RunStore, clock: Clock) -> None:
    first, second, slow = begun(store)
    for claim in (first, second):
        play(store, claim)
    store.buffer.expire(clock(), DEADLINE_S, close_policy=Quorum(2, 0.0))
    store.buffer.take(1, 1, max_lag=9)
    store.lineage.checkpoint(1, serve(store, 1), "/checkpoints/1")
    assert store.lineage.retain(9, keep_steps=0, keep_sample=0.0) == 0
    play(store, slow)
    assert store.lineage.retain(9, keep_steps=0, keep_sample=0.0) == 0
    (late,) = store.buffer.take(10, 0, max_lag=99) or []
    assert all(one.token_ids for one in late.trajectories[0].turns)
    store.lineage.checkpoint(10, serve(store, 10), "/checkpoints/10")
    assert store.lineage.retain(9, keep_steps=0, keep_sample=0.0) == 0
    assert store.lineage.retain(10, keep_steps=0, keep_sample=0.0) == 1
    assert audit(store).violations == []


def test_what_is_said_of_a_groups_success_never_changes(store: RunStore, clock: Clock) -> None:
    first, second, slow = begun(store)
    play(store, first, outcome=1.0)
    play(store, second, outcome=0.0)
    store.buffer.expire(clock(), DEADLINE_S, close_policy=Quorum(2, 0.0))
    before = store.reads.results()
    play(store, slow, outcome=1.0)
    assert store.reads.results() == before
    assert (before[0].plays, before[0].success) == (2, 0.5)


def test_a_quorum_never_closes_an_evaluation(store: RunStore, clock: Clock) -> None:
    store.groups.add_groups([task(0)], size=3, purpose="eval")
    for claim in store.leases.claim("a", 2, lease_s=1e6):
        play(store, claim)
    assert not any(store.buffer.expire(clock(), DEADLINE_S, close_policy=Quorum(2, 0.0)))


def test_a_late_member_holds_its_place_and_no_groups(store: RunStore, clock: Clock) -> None:
    """Admission counts it as an episode that runs; its group makes room as any that is taken."""
    settings = {"group_size": 3, "groups_per_step": 1, "max_lag": 0, "max_running": 1}
    assert admit(store, **settings) == 1
    first, second, slow = store.leases.claim("a", 3, lease_s=1e6)
    for claim in (first, second):
        play(store, claim)
    store.buffer.expire(clock(), DEADLINE_S, close_policy=Quorum(2, 0.0))
    store.buffer.take(1, 1, max_lag=0)
    serve(store, 1)
    assert admit(store, **settings) == 0, "the only place is taken"
    store.journal.begin(slow.episode_id, slow.fence, START)
    store.journal.journal_turn(slow.episode_id, slow.fence, turn(0, 1, step=answer(0)))
    store.journal.finish(slow.episode_id, slow.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True))
    assert admit(store, **settings) == 1


def test_a_group_that_waits_for_its_quorums_time_is_read_again_only_after_another_end(
    store: RunStore, clock: Clock
) -> None:
    """However many groups wait, a look at them costs one statement for all."""
    policy, statements = Quorum(2, 5.0), list[str]()
    admit(store, group_size=4, limit=3)
    claims = store.leases.claim("w", 12, lease_s=30.0)
    for claim in claims[:2] + claims[4:6]:
        play(store, claim)
    connection = store._db.driver.connection  # pyright: ignore[reportPrivateUsage]

    def look() -> tuple[int, ...]:
        statements.clear()
        connection.set_trace_callback(statements.append)
        closed = store.buffer.expire(clock(), DEADLINE_S, close_policy=policy).closed
        connection.set_trace_callback(None)
        return closed

    def read() -> int:
        return sum("FROM episodes WHERE group_id" in statement for statement in statements)

    assert look() == () and read() == 2
    assert look() == () and read() == 0
    clock.now += 1
    play(store, claims[2])
    assert look() == () and read() == 1
    clock.now += 4
    assert look() == (1, 2), "five seconds after the second end, whenever the third was"
