"""Groups without signal leave the buffer, others take their place, and a run with nothing to learn still ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.algos.judging import Returns, advantages, strength
from agentrl.config.sections import BufferSettings
from agentrl.records import Group, GroupState, MemberRecord, Task
from agentrl.store import Quorum, RunStore
from agentrl.store.audit import audit
from tests.parts.outside_audit import OutsideAuditor

from .play import Clock, admit, play, serve


def member(outcome: float, *rewards: float, **outcomes: float) -> MemberRecord:
    return MemberRecord(outcome=outcome, outcomes=outcomes, rewards={"policy": rewards})


def record(*members: MemberRecord) -> dict[int, MemberRecord]:
    return dict(enumerate(members))


def play_groups(store: RunStore, outcomes: list[tuple[float, float]], **how: Any) -> None:
    """Groups of two, admitted and played to their end, with these outcomes."""
    assert admit(store, limit=len(outcomes), max_lag=1000) == len(outcomes)
    for claim, outcome in zip(
        store.leases.claim("w", 1000, lease_s=1e6), [one for two in outcomes for one in two], strict=True
    ):
        play(store, claim, outcome=outcome, **how)


def take(store: RunStore, step: int, n: int = 1, at_most: int = 10, **changes: Any) -> list[Group] | None:
    return store.buffer.take(step, n, max_lag=9, **({"skip_at_most": at_most, "returns": Returns()} | changes))


def ids(groups: list[Group] | None) -> tuple[list[int], list[int]] | None:
    """The groups that are trained, and those that were skipped."""
    if groups is None:
        return None
    return [one.id for one in groups if not one.skipped], [one.id for one in groups if one.skipped]


def clean(store: RunStore) -> bool:
    return not audit(store).violations and not OutsideAuditor(store.path).look()


# --- which groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "weight", "expected"),
    [
        ([member(1.0, 0.0), member(1.0, 0.0)], 1.0, 0.0),
        ([member(1.0, 0.0), member(0.0, 0.0)], 1.0, 1.0),  # each against the other: +1, -1
        ([member(1.0, 0.5), member(1.0, 0.5)], 1.0, 0.0),
        ([member(1.0, 0.5, 0.0), member(1.0, 0.0, 0.5)], 1.0, 0.25),  # returns are equal, but not from turn 1 on
        ([member(1.0, 0.5, 0.0), member(1.0, 0.0, 0.5)], 0.0, 0.0),  # process rewards do not count
        ([member(1.0, 0.0, 0.0), member(1.0)], 1.0, 0.0),  # one took no turn: the same return at every turn
        ([member(1.0), member(0.0)], 1.0, 0.0),  # nothing was sampled
        ([member(1.0, 0.0)], 1.0, 0.0),  # nobody to compare with
        ([member(1.0, 0.1 + 0.2), member(1.0, 0.3)], 1.0, 0.0),  # equal but for rounding
    ],
)
def test_a_group_has_signal_if_some_turn_has_an_advantage(
    members: list[MemberRecord], weight: float, expected: float
) -> None:
    assert strength(record(*members), Returns(process_weight=weight)) == pytest.approx(expected)


def test_roles_are_judged_apart_and_frozen_ones_do_not_count() -> None:
    """White always wins, black always loses: neither learns. If white is frozen, its difference is no signal."""

    def game(white: float, black: float) -> MemberRecord:
        both = {"white": (0.0,), "black": (0.0,)}
        return MemberRecord(outcome=0.0, outcomes={"white": white, "black": black}, rewards=both)

    assert strength(record(game(1, -1), game(1, -1)), Returns()) == 0
    assert strength(record(game(1, -1), game(0, -1)), Returns()) == 0.5
    assert strength(record(game(1, -1), game(0, -1)), Returns(frozen=frozenset({"white"}))) == 0


def test_a_role_of_an_algorithm_of_its_own_has_its_own_returns() -> None:
    """White earns its second reward a turn later in one of two games; black earns the same."""
    members = [
        MemberRecord(outcome=0.0, outcomes={}, rewards={"white": rewards, "black": (1.0, 0.0)})
        for rewards in ((1.0, 0.0), (0.0, 1.0))
    ]
    assert strength(record(*members), Returns(by_role=(("black", 0.0, 1.0),))) == pytest.approx(2 / 8)
    assert strength(record(*members), Returns(by_role=(("white", 0.0, 1.0),))) == 0
    assert strength(record(*members), Returns(by_role=(("white", 1.0, 0.5),))) == pytest.approx((2 * 0.5 + 2 * 1) / 8)


def test_a_late_member_is_judged_by_all_and_changes_nothing_for_them() -> None:
    found = advantages(record(member(1.0, 0.0), member(0.0, 0.0)), Returns(), late={4: member(1.0, 0.0, 0.0)})
    assert found == {0: [1.0], 1: [-1.0], 4: [0.5, 0.5]}


# --- what becomes of them -------------------------------------------------------------------------------------------


def test_groups_are_skipped_while_the_learner_waits_and_reported_with_its_step(store: RunStore) -> None:
    play_groups(store, [(1, 1)])
    assert take(store, 1) is None
    assert store.metrics.drops() == {"no_signal": 1}, "at once: admission starts another"
    play_groups(store, [(1, 0)])
    step = take(store, 1)
    assert step is not None
    assert ids(step) == ([2], [1])
    skipped = step[-1]
    assert skipped.trajectories == ()
    assert [one.outcome for one in skipped.left_out] == [1.0, 1.0]
    play_groups(store, [(1, 0)])
    assert ids(take(store, 2)) == ([3], []), "reported once"


def test_admission_makes_up_for_skipped_groups_within_the_lag_bound(store: RunStore) -> None:
    """(max_lag + step + 1) * 2 = 4 groups; each one skipped makes room for another, one trained does not."""
    assert admit(store) == 4
    for claim in store.leases.claim("w", 100, lease_s=1e6):
        play(store, claim, outcome=float(claim.group_id in (1, 2) or claim.member))
    assert admit(store) == 0
    assert ids(take(store, 1, n=2)) == ([3, 4], [1, 2])
    assert admit(store) == 2


def test_when_nothing_has_signal_a_step_skips_so_many_groups_and_trains_the_next(store: RunStore) -> None:
    """All is solved: each step skips three and takes one, so the run comes to its last step."""
    play_groups(store, [(1, 1)] * 8)
    assert ids(take(store, 1, at_most=3)) == ([4], [1, 2, 3])
    assert ids(take(store, 2, at_most=3)) == ([8], [5, 6, 7])
    assert clean(store)


@pytest.mark.parametrize(("max_lag", "max_tokens"), [(0, 1), (4, None)])
def test_a_run_whose_rewards_are_all_equal_ends_after_twice_the_groups(
    store: RunStore, max_lag: int, max_tokens: int | None
) -> None:
    """With the defaults: nobody waits for ever, whatever is admitted, and each step's weights are served before the
    next."""
    buffer, steps = BufferSettings(groups_per_step=3, max_lag=max_lag), 4
    bounds = {
        "groups_per_step": 3,
        "max_lag": max_lag,
        "max_running": 4,
        "steps_total": steps,
        "max_tokens": max_tokens,
    }
    for step in range(1, steps + 1):
        taken = None
        while taken is None:
            started = admit(store, **bounds)
            for claim in store.leases.claim("w", 1000, lease_s=1e6):
                play(store, claim, outcome=1.0)
            taken = store.buffer.take(step, 3, max_lag=max_lag, skip_at_most=buffer.skips)
            assert started or taken, "admission and learner wait for each other"
        trained, skipped = ids(taken) or ([], [])
        assert (len(trained), len(skipped)) == (3, 3)
        serve(store, step)
    assert store.groups.counts() == {GroupState.TAKEN: 3 * steps, GroupState.EXPIRED: 3 * steps}
    assert clean(store)


def test_a_skipped_group_without_its_tokens_stays_skipped_in_a_rollback(store: RunStore) -> None:
    play_groups(store, [(1, 1), (1, 0)])
    take(store, 1)
    assert store.lineage.retain(1, keep_steps=0, keep_sample=0.0) == 1
    store.lineage.rollback(0)
    assert store.metrics.drops() == {"no_signal": 1}
    assert ids(take(store, 1)) == ([2], [])
    assert clean(store)


def test_a_late_member_of_a_skipped_group_is_still_trained(store: RunStore, clock: Clock) -> None:
    """Two of three succeed and close the group without signal; the third one fails, and that is signal."""
    admit(store, limit=2, group_size=3)
    *early, late = store.leases.claim("w", 3, lease_s=1e6)
    for claim in early:
        play(store, claim, outcome=1.0)
    store.buffer.expire(clock() + 1.0, 600.0, close_policy=Quorum(2, 0.0))
    assert take(store, 1) is None
    assert store.metrics.drops() == {"no_signal": 1}
    play(store, late, outcome=0.0)
    for claim, outcome in zip(store.leases.claim("w", 3, lease_s=1e6), (1.0, 0.0, 1.0), strict=True):
        play(store, claim, outcome=outcome)
    first, of_late, skipped = take(store, 1) or []
    assert (first.id, of_late.id, skipped.id) == (2, 1, 1)
    assert [one.episode_id for one in of_late.trajectories] == [late.episode_id]
    assert clean(store)


def test_outcomes_of_skipped_groups_count_for_the_curriculum(store: RunStore) -> None:
    play_groups(store, [(1, 1), (1, 0)])
    take(store, 1)
    assert [(one.id, one.plays, one.success) for one in store.reads.results()] == [(1, 2, 1.0), (2, 2, 0.5)]


# --- several algorithms ----------------------------------------------------------------------------------------------


def by_turns(index: int) -> Task:
    return Task(index=index, env=f"test/{'two' if index % 2 else 'one'}", seed=index)


def test_each_group_is_judged_by_the_returns_of_its_own_environment(store: RunStore) -> None:
    """Members differ in process rewards alone: test/two does not look at these, and test/one does."""
    returns = Returns(by_env=(("test/two", Returns(process_weight=0.0)),))
    admit(store, by_turns, limit=4, max_lag=1000)
    for claim in store.leases.claim("w", 8, lease_s=1e6):
        play(store, claim, turns=1 + claim.member, outcome=1.0)  # a turn that is not the last earns 0.25
    assert ids(take(store, 1, n=2, returns=returns)) == ([1, 3], [2, 4])


def test_the_bias_is_told_in_the_returns_of_each_environment(store: RunStore) -> None:
    admit(store, by_turns, limit=2, max_lag=1000)
    for claim in store.leases.claim("w", 4, lease_s=1e6):
        play(store, claim, turns=1 + claim.member, outcome=1.0)
    take(store, 1, n=2, at_most=0)
    bias = store.metrics.training_bias(Returns(by_env=(("test/two", Returns(process_weight=0.0)),)))
    assert bias.trained.advantage_by_quartile[2] == pytest.approx((0.25 + 0.0) / 2)


def test_a_group_whose_algorithm_learns_from_equal_returns_is_never_skipped(store: RunStore) -> None:
    returns = Returns(by_env=(("test/two", Returns(skips=False)),))
    admit(store, by_turns, limit=4, max_lag=1000)
    for claim in store.leases.claim("w", 8, lease_s=1e6):
        play(store, claim, outcome=1.0)
    assert ids(take(store, 1, n=2, returns=returns)) == ([2, 4], [1, 3])


@pytest.mark.parametrize(
    ("algo", "says"),
    [
        ({"process_weight": 0.0}, ""),
        ({"process_weight": 1.0}, "turn 0 of 'policy' returned"),
        ({"process_weight": 0.0, "distil_weight": 1.0}, "its algorithm learns from equal returns"),
        ({"process_weight": 0.0, "observation_weight": 0.5}, "its algorithm learns from equal returns"),
    ],
)
def test_the_audit_judges_a_skipped_group_by_the_algorithm_of_its_task(
    tmp_path: Path, algo: dict[str, float], says: str
) -> None:
    tables = [{"id": None, "algo": None}, {"id": "test/two", "algo": {"kind": "grpo", **algo}}]
    document = {"env": {"id": "test/one"}, "algo": {"process_weight": 1.0}, "tasks": tables}
    with RunStore.create(tmp_path / "store.sqlite", json.dumps(document)) as store:
        serve(store, 0)
        admit(store, by_turns, limit=2, max_lag=1000)
        for claim in store.leases.claim("w", 4, lease_s=1e6):
            play(store, claim, turns=1 + claim.member, outcome=1.0)
        take(store, 1, returns=Returns(by_env=(("test/two", Returns(process_weight=0.0)),)))
        assert store.metrics.drops() == {"no_signal": 1}
        found = [one.detail for one in audit(store).violations if one.kind == "skipped_with_signal"]
    assert [one for one in found if says and says in one] == found
    assert bool(found) == bool(says)


# --- the auditors ---------------------------------------------------------------------------------------------------


def test_the_auditors_find_a_skipped_group_that_had_signal_or_did_not_leave(store: RunStore) -> None:
    play_groups(store, [(1, 1), (1, 0), (1, 0)])
    take(store, 1)
    with store._db.write():  # pyright: ignore[reportPrivateUsage]
        store._db.execute("UPDATE groups SET state = 'expired', reason = 'no_signal', skipped_step = 1 WHERE id = 3")
    (found,) = audit(store).violations
    assert (found.kind, "turn 0 of 'policy' returned [1.25, 0.25]" in found.detail) == ("skipped_with_signal", True)
    with store._db.write():  # pyright: ignore[reportPrivateUsage]
        store._db.execute("UPDATE groups SET state = 'scored', reason = NULL WHERE id = 3")
    assert "skipped_with_signal" in [one.kind for one in audit(store).violations]
    (line,) = OutsideAuditor(store.path).look()
    assert line == "law 2: skipped, and has not left: group: 3"
