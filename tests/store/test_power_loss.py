"""A loss of power, or a copy put back: the store knows less than the newest checkpoint has trained (law 2).

The checkpoint's folder is durable before the store's rows need be. What the lost rows said is taken from a copy of the
file made earlier; the folder lists the groups that it trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl.config import parse
from agentrl.errors import FormatError, RunFailed
from agentrl.learner.checkpoints.digests import write as write_digests
from agentrl.records import GroupState
from agentrl.run.run_folder import RunDir
from agentrl.run.start_point import start_point
from agentrl.store import Quorum, RunStore
from agentrl.store.audit import audit
from agentrl.store.run_values import WENT_BACK

from .play import admit, play, play_all, serve

BATCH = 2


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "run", parse({"model": "m", "env": {"id": "e"}, "buffer": {"groups_per_step": 2}}))
    with RunStore.open(run.store_path) as store:
        serve(store, 0)
    return run


@contextmanager
def opened(run: RunDir) -> Iterator[RunStore]:
    with RunStore.open(run.store_path) as store:
        yield store


def train(store: RunStore, step: int) -> list[int]:
    """A step on a whole batch; its episodes. Those of group g are 2 g - 1 and 2 g."""
    assert store.buffer.take(step, BATCH, max_lag=9) is not None
    serve(store, step)
    return store.lineage.episodes_of(step)


def played(store: RunStore, n: int) -> None:
    admit(store, limit=n, max_lag=99)
    play_all(store)


def folder(run: RunDir, step: int, previous: int, *episodes: list[int]) -> Path:
    """What the learner leaves of a checkpoint, as far as the store's side is concerned."""
    path = run.checkpoints / f"step-{step:08d}"
    path.mkdir()
    (path / "state.json").write_text(
        json.dumps({"format": 1, "step": step, "previous_step": previous, "episodes": episodes})
    )
    write_digests(path)
    return path


def copy(run: RunDir) -> Path:
    """The store's file as it is now, the write-ahead log folded in."""
    target = run.path / f"copy-{len(list(run.path.glob('copy-*')))}.sqlite"
    with opened(run) as store:
        store._db.driver.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # pyright: ignore[reportPrivateUsage]
        shutil.copy(run.store_path, target)
    return target


def put_back(run: RunDir, older: Path) -> None:
    for leftover in run.path.glob("store.sqlite*"):
        leftover.unlink()
    shutil.copy(older, run.store_path)


def test_law_2_groups_whose_lineage_a_loss_of_power_took_are_not_trained_again(run: RunDir) -> None:
    with opened(run) as store:
        played(store, 6)
        first = train(store, 1)
    before = copy(run)
    with opened(run) as store:
        second = train(store, 2)
    folder(run, 2, 0, first, second)
    put_back(run, before)
    with opened(run) as store:
        assert "checkpoint_disagrees" in audit(store, run.checkpoints).breaches
        start = start_point(run, store)
        assert start.version.step == 2
        assert (store.lineage.episodes_of(1), store.lineage.episodes_of(2)) == (first, second)
        assert store.groups.counts() == {GroupState.TRAINED: 4, GroupState.SCORED: 2}
        assert not set(train(store, 3)) & {*first, *second}
        assert audit(store, run.checkpoints).violations == []


def test_law_2_groups_of_which_not_even_the_end_was_kept_are_not_trained_again(run: RunDir) -> None:
    """Group 1 was finished, 2 was running, 3 waiting when the copy was made; 4 was not there."""
    with opened(run) as store:
        admit(store, limit=3, max_lag=99)
        for claim in store.leases.claim("a", 3, lease_s=1e6)[:2]:
            play(store, claim)
    before = copy(run)
    with opened(run) as store:
        store.deaths.release_all()
        played(store, 1)
        first, second = train(store, 1), train(store, 2)
    assert [*first, *second] == [1, 2, 3, 4, 5, 6, 7, 8]
    folder(run, 2, 0, first, second)
    put_back(run, before)
    with opened(run) as store:
        start_point(run, store)
        assert store.groups.counts() == {GroupState.TRAINED: 1, GroupState.EXPIRED: 2}
        assert store.metrics.drops() == {"journal_lost": 2}
        assert audit(store, run.checkpoints).violations == []
        played(store, 4)
        trained = train(store, 3) + train(store, 4)
        assert not set(trained) & {*first, *second}, "a new episode has no number that was ever used"
        assert audit(store, run.checkpoints).violations == []


def test_law_2_a_store_put_back_from_before_the_checkpoints_that_are_kept_trains_nothing_twice(run: RunDir) -> None:
    """Of steps 2 to 3 no folder is left: any group of the copy may have been trained then."""
    with opened(run) as store:
        played(store, 10)
        path = folder(run, 1, 0, train(store, 1))
        store.lineage.checkpoint(1, 2, path)
    before = copy(run)
    with opened(run) as store:
        trained = [train(store, step) for step in (2, 3, 4)]
    shutil.rmtree(path)
    folder(run, 4, 3, trained[2])
    put_back(run, before)
    with opened(run) as store:
        start_point(run, store)
        assert store.lineage.episodes_of(4) == trained[2]
        assert store.metrics.drops() == {"lineage_lost": 6}
        assert audit(store, run.checkpoints).violations == []
        played(store, 2)
        assert not set(train(store, 5)) & {episode for step in trained for episode in step}
        assert audit(store, run.checkpoints).violations == []


def test_law_2_a_late_member_that_a_checkpoint_lists_is_not_trained_again(run: RunDir) -> None:
    """It ran on when the copy was made, its group was closed; another late member was trained by nobody."""
    with opened(run) as store:
        admit(store, limit=2, group_size=4, max_lag=99)
        claims = store.leases.claim("a", 8, lease_s=1e6)
        for claim in claims[:2] + claims[4:]:
            play(store, claim)
        store.buffer.expire(1e12, 1.0, close_policy=Quorum(2, 0.0))
        assert store.buffer.late_open() == 2
    before = copy(run)
    with opened(run) as store:
        first = train(store, 1)
        play(store, claims[2])
        played(store, 2)
        second = train(store, 2)
        assert claims[2].episode_id in second
    folder(run, 2, 0, first, second)
    put_back(run, before)
    with opened(run) as store:
        start_point(run, store)
        assert store.lineage.episodes_of(1) == first
        assert store.metrics.members_dropped()["journal_lost"] == 1
        assert store.buffer.late_open() == 1
        play(store, claims[3])
        played(store, 2)
        assert claims[3].episode_id in train(store, 3)
        assert audit(store, run.checkpoints).violations == []


def test_a_version_that_a_lost_row_had_minted_is_not_minted_again(run: RunDir) -> None:
    with opened(run) as store:
        played(store, 4)
    before = copy(run)
    with opened(run) as store:
        folder(run, 2, 0, train(store, 1), train(store, 2))
        lost = store.versions.current_version().version
    put_back(run, before)
    with opened(run) as store:
        assert start_point(run, store).version.version > lost


def test_what_a_checkpoint_and_the_store_agree_on_is_left_alone(run: RunDir) -> None:
    """The usual start, after a kill between the folder and its row and after one behind it: twice the same."""
    with opened(run) as store:
        played(store, 5)
        path = folder(run, 1, 0, train(store, 1))
        store.lineage.checkpoint(1, 2, path)
        folder(run, 2, 1, train(store, 2))
        start_point(run, store)
        assert store.groups.counts() == {GroupState.TRAINED: 4, GroupState.SCORED: 1}
        assert store.versions.current_version().version == 3
        assert store.versions.mint_version(3).version == 4
        start_point(run, store)
        assert store.groups.counts() == {GroupState.TRAINED: 4, GroupState.SCORED: 1}
        assert audit(store, run.checkpoints).violations == []


def test_the_rows_that_say_who_trained_what_wait_for_the_disk(run: RunDir) -> None:
    """Once a step, before anything is trained; a turn does not."""
    with opened(run) as store:
        played(store, 2)
        said: list[str] = []
        store._db.driver.connection.set_trace_callback(said.append)  # pyright: ignore[reportPrivateUsage]
        store.buffer.take(1, 2, max_lag=9)
        commit = next(at for at, one in enumerate(said) if one == "COMMIT")
        assert "PRAGMA synchronous = FULL" in said[:commit]
        assert any(one.startswith("INSERT INTO lineage") for one in said[:commit])
        said.clear()
        store.set_meta("phase", "train")
        assert "PRAGMA synchronous = FULL" not in said


def test_the_audit_sees_an_episode_that_the_checkpoint_does_not_have(run: RunDir) -> None:
    with opened(run) as store:
        played(store, 2)
        *some, _ = train(store, 1)
        store.lineage.checkpoint(1, 2, folder(run, 1, 0, some))
        assert audit(store).breaches == {"checkpoint_disagrees": 1}, "the store knows where its checkpoint lies"


def test_a_damaged_checkpoint_is_found_by_the_audit_and_the_run_goes_on_from_the_one_before(run: RunDir) -> None:
    with opened(run) as store:
        played(store, 6)
        first = train(store, 1)
        paths = [folder(run, 1, 0, first)]
        store.lineage.checkpoint(1, 2, paths[0])
        second = train(store, 2)
        paths.append(folder(run, 2, 1, second))
        store.lineage.checkpoint(2, 3, paths[1])
        store.metrics.record("step", 2, {"busy_s": 3, "idle_s": 1, "tokens_scored": 40})
        for path in paths:
            (path / "model.safetensors").write_bytes(bytes(range(256)) * 64)
            write_digests(path)
        assert audit(store, run.checkpoints).violations == []
        (paths[1] / "model.safetensors").write_bytes(bytes(range(256)) * 63 + b"?" * 256)
        found = audit(store, run.checkpoints)
        assert found.breaches == {"checkpoint_damaged": 1} and "model.safetensors" in found.violations[0].detail
        start = start_point(run, store)
        assert (start.version.step, start.checkpoint) == (1, paths[0])
        line = WENT_BACK.of(store.meta)
        assert line is not None and "step-00000002 is damaged (model.safetensors does not hold" in line
        assert "went back to step 1: 1 step (4 s, 40 tokens) are trained again" in line
        assert store.groups.counts() == {GroupState.TRAINED: 2, GroupState.SCORED: 4}
        again = train(store, 2)
        assert sorted(again) == sorted(second)  # once in the lineage that counts
        assert folder(run, 2, 1, again).is_dir()  # its place is free
        assert audit(store, run.checkpoints).violations == []


def test_a_checkpoint_whose_state_cannot_be_read_is_named(run: RunDir) -> None:
    path = folder(run, 3, 0, [])
    (path / "state.json").write_text("{")
    with opened(run) as store, pytest.raises(RunFailed, match=r"step-00000003/state\.json cannot be read: move"):
        start_point(run, store)


def test_a_checkpoint_of_another_format_is_refused_in_one_line(run: RunDir) -> None:
    path = folder(run, 3, 0, [])
    (path / "state.json").write_text('{"step": 3, "previous_step": 0, "groups": [1]}')
    write_digests(path)
    with opened(run) as store, pytest.raises(FormatError) as refused:
        start_point(run, store)
    assert (refused.value.format, refused.value.expected) == (0, 1)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_checkpoint_that_cannot_be_read_may_be_moved_aside(run: RunDir) -> None:
    with opened(run) as store:
        played(store, 4)
        kept = folder(run, 1, 0, train(store, 1))
        broken = folder(run, 2, 1, train(store, 2))
        broken.rename(broken.with_name(f"{broken.name}.bak"))
        assert start_point(run, store).checkpoint == kept
        assert audit(store, run.checkpoints).breaches == {}
