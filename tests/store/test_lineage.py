"""Checkpoints, going back to one, and what is kept of what was trained (law 2)."""

from __future__ import annotations

import pytest

from agentrl.records import GroupState
from agentrl.store import RunStore, StoreError
from agentrl.store.audit import audit
from agentrl.store.lineage import _share  # pyright: ignore[reportPrivateUsage]

from .play import Clock, admit, play_all, serve, task, turn


def members(*groups: int) -> list[int]:
    """The episodes of groups of two."""
    return [2 * group - 1 + member for group in groups for member in (0, 1)]


def train(store: RunStore, step: int, n: int = 2, max_lag: int = 9) -> list[int]:
    """One optimizer step on whatever is there; the ids of its groups."""
    taken = store.buffer.take(step, n, max_lag=max_lag)
    assert taken is not None
    return [group.id for group in taken]


def trained_store(store: RunStore, steps: int) -> None:
    """Two groups a step, a checkpoint after each."""
    for step in range(1, steps + 1):
        admit(store, limit=2)
        play_all(store)
        train(store, step)
        store.lineage.checkpoint(step, serve(store, step), f"/checkpoints/{step}")


def test_a_checkpoint_of_an_unknown_version_is_refused(store: RunStore) -> None:
    with pytest.raises(StoreError, match="checkpoint of step 1: weight version 7 was never minted"):
        store.lineage.checkpoint(1, 7, "/checkpoints/1")


def test_law_2_a_checkpoint_can_be_given_up_for_an_older_one(store: RunStore) -> None:
    trained_store(store, 3)
    store.lineage.rollback(1)
    latest = store.lineage.latest_checkpoint()
    assert latest is not None
    assert latest.step == 1
    assert store.groups.counts() == {GroupState.TRAINED: 2, GroupState.SCORED: 4}
    assert audit(store).violations == []
    store.lineage.rollback(0)
    assert store.lineage.latest_checkpoint() is None
    assert store.groups.counts() == {GroupState.SCORED: 6}
    assert audit(store).violations == []


def test_versions_of_an_abandoned_future_are_told_from_those_that_stand(store: RunStore) -> None:
    kept, gone = store.versions.mint_version(1), store.versions.mint_version(2)
    trained_store(store, 1)
    assert not store.versions.is_undone(gone.version)
    store.lineage.rollback(1)
    again = store.versions.mint_version(2)  # of the same step, other weights
    assert [store.versions.is_undone(version.version) for version in (kept, gone, again)] == [False, True, False]


def test_there_is_no_going_back_to_a_step_without_a_checkpoint(store: RunStore) -> None:
    trained_store(store, 3)
    store.lineage.rollback(2)
    for step in (3, 7):
        with pytest.raises(StoreError, match=f"cannot roll back to step {step}: it has no checkpoint"):
            store.lineage.rollback(step)
    assert store.lineage.attempt == 2


def test_tokens_of_an_abandoned_future_are_off_policy_but_not_old(store: RunStore) -> None:
    """A group sampled by weights of step 5 that a crash lost: taken for step 1, its lag is 0."""
    future = serve(store, 5)
    admit(store, limit=1)
    play_all(store, version=future)
    store.lineage.rollback(0)
    assert train(store, 1, n=1, max_lag=0) == [1]
    assert store.versions.step_of(future) == 5
    assert store.versions.mint_version(1).version > future
    assert audit(store).violations == []


def test_evaluations_of_an_abandoned_future_are_made_anew(store: RunStore, clock: Clock) -> None:
    trained_store(store, 1)
    store.groups.add_groups([task(0)], size=1, purpose="eval@1")
    play_all(store)
    serve(store, 2)
    store.groups.add_groups([task(0)], size=1, purpose="eval@2")
    play_all(store)
    store.groups.add_groups([task(0)], size=2, purpose="eval@2, unfinished")
    (running,) = store.leases.claim("a", 1, lease_s=1e6)
    store.lineage.rollback(1)
    assert store.leases.renew("a", lease_s=1e6) == frozenset()
    assert store.groups.counts("eval@1") == {GroupState.SCORED: 1}
    assert store.groups.counts("eval@2") == {}
    assert store.groups.counts("undone-2:eval@2") == {GroupState.SCORED: 1}
    assert store.groups.counts("undone-2:eval@2, unfinished") == {GroupState.EXPIRED: 1}
    assert store.reads.group(running.group_id).state == GroupState.EXPIRED
    assert audit(store).violations == []
    store.lineage.rollback(0)
    assert store.groups.counts("undone-2:eval@2") == {GroupState.SCORED: 1}  # renamed once
    assert audit(store).violations == []


def test_metrics_of_an_abandoned_future_are_kept_and_flagged(store: RunStore) -> None:
    for step in (1, 2, 3):
        store.metrics.record("step", step, {"loss": float(step)})
    store.lineage.checkpoint(1, serve(store, 1), "/checkpoints/1")
    store.lineage.rollback(1)
    store.metrics.record("step", 2, {"loss": 20.0})
    assert [(row.step, row.values["loss"]) for row in store.metrics.values("step")] == [(1, 1.0), (2, 20.0)]
    everything = store.metrics.values("step", undone=True)
    assert [(row.step, row.attempt, row.undone) for row in everything] == [
        (1, 1, False),
        (2, 1, True),
        (2, 2, False),
        (3, 1, True),
    ]
    assert [row.step for row in store.metrics.values("step", after=1)] == [2]


# --- retention ----------------------------------------------------------------------------------------------------


def has_tokens(store: RunStore, group_id: int) -> bool:
    return any(one.token_ids for member in store.reads.group(group_id).trajectories for one in member.turns)


def test_old_token_arrays_are_dropped_and_transcripts_stay(store: RunStore) -> None:
    trained_store(store, 5)
    before = store.reads.group(1).trajectories[0]
    assert store.lineage.retain(5, keep_steps=2, keep_sample=0.0) == 6  # steps 1, 2, 3
    assert [has_tokens(store, group_id) for group_id in range(1, 11)] == [False] * 6 + [True] * 4
    after = store.reads.group(1).trajectories[0]
    assert after.start == before.start
    assert [(one.text, one.step, one.finish, one.parent) for one in after.turns] == [
        (one.text, one.step, one.finish, one.parent) for one in before.turns
    ]
    assert [(one.token_ids, one.logprobs, one.spans, one.experts) for one in after.turns] == [((), (), (), None)] * 2
    assert store.reads.episodes("train")[0].tokens == 6
    assert store.lineage.episodes_of(1) == members(1, 2)
    assert audit(store).violations == []
    assert store.lineage.retain(5, keep_steps=2, keep_sample=0.0) == 0


def test_a_share_of_the_old_ones_is_kept_always_the_same(store: RunStore) -> None:
    trained_store(store, 10)
    kept = {group_id for group_id in range(1, 21) if _share(group_id) < 0.3}
    store.lineage.retain(10, keep_steps=0, keep_sample=0.3)
    assert {group_id for group_id in range(1, 21) if has_tokens(store, group_id)} == kept
    assert store.lineage.retain(10, keep_steps=0, keep_sample=0.3) == 0


def test_the_kept_share_is_the_asked_one() -> None:
    shares = [_share(group_id) for group_id in range(20_000)]
    for share in (0.02, 0.5, 0.9):
        assert sum(one < share for one in shares) / len(shares) == pytest.approx(share, abs=0.01)


def test_retention_leaves_what_may_still_be_trained(store: RunStore) -> None:
    """Running, scored and taken groups keep their tokens however old; dropped and evaluation groups lose theirs."""
    admit(store, limit=3)
    play_all(store)
    train(store, 1, n=1)
    admit(store, limit=1)
    (claim, _) = store.leases.claim("a", 2, lease_s=1e6)
    store.journal.begin(claim.episode_id, claim.fence, ())
    store.journal.journal_turn(claim.episode_id, claim.fence, turn(0, 1))
    store.groups.add_groups([task(0)], size=1, purpose="eval@0")
    play_all(store)
    assert store.lineage.retain(100, keep_steps=0, keep_sample=0.0) == 1
    assert [has_tokens(store, group_id) for group_id in range(1, 6)] == [True] * 4 + [False]
    store.buffer.take(50, 9, max_lag=1)  # groups 2 and 3 are stale by now
    assert store.lineage.retain(100, keep_steps=0, keep_sample=0.0) == 2
    assert [has_tokens(store, group_id) for group_id in range(1, 6)] == [True, False, False, True, False]
    assert audit(store).violations == []


def test_a_group_that_lost_its_tokens_is_not_trained_from_nothing(store: RunStore) -> None:
    trained_store(store, 2)
    store.lineage.retain(2, keep_steps=0, keep_sample=0.0)
    store.lineage.rollback(0)
    assert store.groups.counts() == {GroupState.EXPIRED: 4}
    assert store.metrics.drops() == {"tokens_dropped": 4}
    assert audit(store).violations == []
