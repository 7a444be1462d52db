"""Who plays what: the order of claims, the fate of a dead worker's episodes (laws 2 and 4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.records import GroupState, WeightVersion
from agentrl.store import RunStore, StoreError

from .play import START, Clock, admit, play, play_all, serve, task, turn


def claimed(store: RunStore, worker: str, limit: int = 100, lease_s: float = 30.0) -> list[int]:
    return [claim.episode_id for claim in store.claim(worker, limit, lease_s=lease_s)]


def test_claims_are_evaluation_first_then_the_dead_ones_then_oldest_group_first(store: RunStore, clock: Clock) -> None:
    admit(store, limit=2)  # episodes 1 to 4
    assert claimed(store, "a", 2) == [1, 2]
    store.add_groups([task(0)], size=2, purpose="eval:held_out@0")  # 5 and 6
    assert claimed(store, "a", 1) == [5]
    clock.now += 31.0  # a's lease ran out
    assert claimed(store, "b", 3) == [5, 6, 1]
    assert claimed(store, "b") == [2, 3, 4]
    assert claimed(store, "b") == []


def test_a_claim_tells_all_about_its_episode(store: RunStore) -> None:
    admit(store, limit=2)
    claim = store.claim("a", 100, lease_s=30.0)[3]
    assert (claim.episode_id, claim.group_id, claim.member, claim.size) == (4, 2, 1, 2)
    assert (claim.task, claim.purpose, claim.fence, claim.trial) == (task(1), "train", 1, 0)
    assert (claim.start, claim.turns) == (None, ())


def test_an_episode_is_claimed_once(store: RunStore, clock: Clock) -> None:
    admit(store)
    with RunStore.open(store.path, clock=clock) as other:
        assert claimed(store, "a", 3) == [1, 2, 3]
        assert claimed(other, "b", 3) == [4, 5, 6]
        assert claimed(store, "a") + claimed(other, "b") == [7, 8]


def test_law_4_a_lease_that_is_not_renewed_ends(store: RunStore, clock: Clock) -> None:
    admit(store, limit=1)
    assert claimed(store, "dead", lease_s=10.0) == [1, 2]
    clock.now += 10.0
    assert claimed(store, "alive") == []  # the deadline itself still counts
    clock.now += 0.001
    assert claimed(store, "alive") == [1, 2]


def test_a_renewed_lease_holds_and_tells_what_is_still_held(store: RunStore, clock: Clock) -> None:
    admit(store)
    claims = store.claim("a", 3, lease_s=10.0)
    clock.now += 8.0
    assert store.renew("a", lease_s=10.0) == {1, 2, 3}
    clock.now += 8.0
    assert claimed(store, "b", 1) == [4]
    play(store, claims[0])
    assert store.renew("a", lease_s=10.0) == {2, 3}


def test_a_late_renewal_keeps_what_nobody_took(store: RunStore, clock: Clock) -> None:
    admit(store, limit=1)
    claims = store.claim("a", 2, lease_s=10.0)
    clock.now += 60.0
    assert claimed(store, "b", 1) == [1]
    assert store.renew("a", lease_s=10.0) == {2}
    assert claimed(store, "b") == []
    play(store, claims[1])


def test_a_worker_does_not_take_its_own_episodes_again(store: RunStore, clock: Clock) -> None:
    admit(store, limit=1)
    assert claimed(store, "a", lease_s=10.0) == [1, 2]
    clock.now += 60.0
    assert claimed(store, "a") == []


def test_law_4_a_worker_under_an_old_name_does_not_keep_its_dead_forerunners_episodes(
    store: RunStore, clock: Clock
) -> None:
    admit(store, limit=1)
    assert claimed(store, "a", lease_s=10.0) == [1, 2]
    with RunStore.open(store.path, clock=clock) as next_life:
        clock.now += 6.0
        assert next_life.renew("a", lease_s=10.0) == frozenset()
        clock.now += 6.0
        assert claimed(next_life, "a") == [1, 2]


def test_a_released_workers_episodes_are_free_at_once(store: RunStore, clock: Clock) -> None:
    admit(store)
    claimed(store, "a", 2)
    claimed(store, "b", 2)
    with RunStore.open(store.path, clock=clock) as supervisor:
        assert supervisor.release_worker("a").episodes == 2
        assert claimed(supervisor, "c", 9) == [5, 6, 7, 8, 1, 2]
    assert store.renew("b", lease_s=30.0) == {3, 4}


def test_a_restarted_run_gives_its_groups_their_whole_deadline_again(store: RunStore, clock: Clock) -> None:
    admit(store, limit=1)
    claimed(store, "a")
    clock.now += 3600.0  # the machine was off
    assert store.release_all() == 2
    assert not any(store.expire(clock(), 600.0))
    assert claimed(store, "a") == [1, 2]
    clock.now += 1199.0
    assert not any(store.expire(clock(), 600.0))
    clock.now += 2.0
    assert store.expire(clock(), 600.0).groups == (1,)


def test_waiting_episodes_have_no_deadline(store: RunStore, clock: Clock) -> None:
    admit(store, limit=1)
    clock.now += 1e6
    assert not any(store.expire(clock(), 600.0))
    assert store.counts() == {GroupState.WAITING: 1}


def test_versions_are_minted_once_also_after_a_restart(store: RunStore) -> None:
    first = store.mint_version(1, "/weights/1")
    store.close()
    with RunStore.open(store.path) as again:
        second = again.mint_version(1)
        assert second.version > first.version
        assert again.step_of(first.version) == again.step_of(second.version) == 1
        assert str(again.weights_path(first.version)) == "/weights/1"
        assert again.weights_path(second.version) is None


def test_the_current_version_is_the_latest_confirmed(store: RunStore, tmp_path: Path) -> None:
    minted = store.mint_version(1)
    assert store.current_version() == WeightVersion(version=1, step=0)
    store.confirm_version(minted)
    assert store.current_version() == minted
    store.confirm_version(1)  # an engine that came back late serves old weights
    assert store.current_version() == minted
    with pytest.raises(StoreError, match="weight version 99 was never minted"):
        store.confirm_version(99)
    with pytest.raises(StoreError, match="weight version 99 was never minted"):
        store.step_of(99)
    with (
        RunStore.create(tmp_path / "other.sqlite", "{}") as other,
        pytest.raises(StoreError, match="no weight version is confirmed yet"),
    ):
        other.current_version()


def test_progress_moves_with_every_turn(store: RunStore) -> None:
    admit(store, limit=1)
    claim = store.claim("a", 1, lease_s=30.0)[0]
    store.begin(claim.episode_id, claim.fence, START)
    before = store.progress()
    store.renew("a", lease_s=30.0)
    assert store.progress() == before
    store.journal_turn(claim.episode_id, claim.fence, turn(0, 1))
    assert store.progress() != before


def test_reading_waits_for_no_writer_and_sees_no_half_write(store: RunStore, clock: Clock) -> None:
    serve(store, 1)
    admit(store, limit=1)
    with RunStore.open(store.path, clock=clock) as reader:
        with store._db.write():  # pyright: ignore[reportPrivateUsage]
            store._db.execute("UPDATE groups SET state = 'failed', reason = 'half'")  # pyright: ignore[reportPrivateUsage]
            assert reader.counts() == {GroupState.WAITING: 1}
        assert reader.counts() == {GroupState.FAILED: 1}
    play_all(store)
