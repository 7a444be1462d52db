"""Continuations of an episode from one of its turns: their shared beginning is context, and never trained twice."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from agentrl.algos.grpo import GRPO
from agentrl.errors import StoreError, UsageError
from agentrl.learner.data.batch import group_rows
from agentrl.records import GroupState, StopReason, turn_id
from agentrl.store import Claim, EnvSnapshot, RunStore
from agentrl.store.audit import audit
from tests.parts.outside_audit import OutsideAuditor

from .play import START, admit, answer, play, serve, task, turn


def played(store: RunStore, *, turns: int = 4, **how: Any) -> Claim:
    """An episode of a fresh group of two, played to its end; so is its sibling."""
    store.groups.add_groups([task(0)], size=2, purpose="train")
    first, second = store.leases.claim("w", 2, lease_s=10)
    play(store, first, turns=turns, **how)
    play(store, second, turns=2, outcome=0.0)
    return first


def clean(store: RunStore) -> None:
    assert audit(store).violations == [] and OutsideAuditor(store.path).look() == []


def test_a_fork_begins_with_the_turns_before_it_and_they_do_not_learn(store: RunStore) -> None:
    origin = played(store)
    group = store.groups.fork(origin.episode_id, turn=2, k=3)
    claims = store.leases.claim("v", 9, lease_s=10)
    assert [(one.group_id, one.member, one.size, one.fork_turn) for one in claims] == [
        (group, m, 3, 2) for m in range(3)
    ]
    before = store.reads.trajectory(origin.episode_id)
    for claim in claims:
        assert claim.start == START and claim.task == before.task and claim.trial == 0
        assert [one.id for one in claim.turns] == [turn_id(claim.episode_id, 0, index) for index in (0, 1)]
        for ours, theirs in zip(claim.turns, before.turns, strict=False):
            assert theirs.learns and not ours.learns
            for field in ("token_ids", "logprobs", "prompt_ids", "spans", "parent", "text", "step", "experts", "role"):
                assert getattr(ours, field) == getattr(theirs, field)
    clean(store)


def test_law_2_only_what_a_fork_sampled_itself_enters_the_loss(store: RunStore) -> None:
    origin = played(store)
    first = store.buffer.take(1, 1, max_lag=1)
    assert first is not None and sum(len(one.turns) for one in first[0].trajectories) == 6
    group_id = store.groups.fork(origin.episode_id, turn=2, k=3)
    for n, claim in enumerate(store.leases.claim("v", 9, lease_s=10)):
        play(store, claim, turns=3 + n, outcome=float(n))
    (group,) = store.buffer.take(2, 1, max_lag=1) or []
    assert group.id == group_id and group.record is not None and len(group.record) == 3
    rows = group_rows(group, GRPO(), step_of=store.versions.step_of, step_now=1, max_lag=1).rows
    assert [len(row.place_S) for row in rows] == [3, 6, 9], "three tokens for each turn from turn 2 on"
    assert all(int(row.place_S[0]) == 3 + 3 + 3 + 3 + 3 for row in rows), "after two turns and the third one's prompt"
    assert [one.outcome for one in group.record.values()] == [0.0, 1.0, 2.0]
    advantages = [float(row.columns["advantage"][-1]) for row in rows]
    assert advantages[0] < 0 < advantages[2], "a baseline of their own"
    clean(store)


def test_a_fork_of_a_running_episode_takes_its_snapshot_along_if_it_is_of_the_beginning(store: RunStore) -> None:
    store.groups.add_groups([task(0)], size=2, purpose="train")
    claim = store.leases.claim("w", 1, lease_s=10)[0]
    store.journal.begin(claim.episode_id, claim.fence, START)
    for index in range(3):
        store.journal.journal_turn(claim.episode_id, claim.fence, turn(index, 1))
        store.journal.journal_step(claim.episode_id, claim.fence, index, answer(index))
    kept = EnvSnapshot(turn=1, data=b"state", seconds=3.0)
    store.journal.keep_snapshot(claim.episode_id, claim.fence, kept)
    for at, snapshot in ((1, None), (2, kept), (3, kept)):
        group = store.groups.fork(claim.episode_id, turn=at, k=2)
        assert [store.journal.snapshot(row.id) for row in store.reads.episodes(group_id=group)] == [snapshot] * 2
    clean(store)


def test_a_fork_of_a_fork_keeps_the_beginning_of_both(store: RunStore) -> None:
    origin = played(store)
    store.groups.fork(origin.episode_id, turn=1, k=2)
    claims = store.leases.claim("v", 9, lease_s=10)
    for claim in claims:
        play(store, claim, turns=4)
    store.groups.fork(claims[0].episode_id, turn=3, k=2)
    again = store.leases.claim("v", 9, lease_s=10)
    assert [one.learns for one in again[0].turns] == [False] * 3 and again[0].fork_turn == 3
    clean(store)


@pytest.mark.parametrize(
    ("turn", "k", "words"),
    [
        (0, 2, "turn 0 begins the episode: a fork starts at turn 1 or later"),
        (5, 2, "has 4 turns, and its last one ended it: a fork starts at turn 1 to 3"),
        (4, 2, "has 4 turns, and its last one ended it: a fork starts at turn 1 to 3"),
        (-1, 2, "turn -1 begins the episode"),
        (2, 1, "1 continuation has no sibling to be compared with: ask for 2 or more"),
        (2, 2000, "2000 continuations"),
    ],
)
def test_an_impossible_fork_is_refused_in_one_line(store: RunStore, turn: int, k: int, words: str) -> None:
    origin = played(store)
    with pytest.raises(UsageError, match=words):
        store.groups.fork(origin.episode_id, turn=turn, k=k)
    clean(store)


def test_a_fork_needs_answered_turns_whose_tokens_are_kept(store: RunStore, path: Any) -> None:
    store.groups.add_groups([task(0)], size=2, purpose="train")
    claim = store.leases.claim("w", 1, lease_s=10)[0]
    with pytest.raises(UsageError, match="has no turn yet"):
        store.groups.fork(claim.episode_id, turn=1, k=2)
    store.journal.begin(claim.episode_id, claim.fence, START)
    store.journal.journal_turn(claim.episode_id, claim.fence, turn(0, 1))
    with pytest.raises(UsageError, match="has no turn yet that its environment has answered"):
        store.groups.fork(claim.episode_id, turn=1, k=2)
    store.journal.journal_step(claim.episode_id, claim.fence, 0, answer(0))
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM tokens")
    with pytest.raises(UsageError, match="retention has dropped"):
        store.groups.fork(claim.episode_id, turn=1, k=2)
    with pytest.raises(StoreError, match="no episode 99"):
        store.groups.fork(99, turn=1, k=2)


def test_an_evaluation_is_not_forked_into_training(store: RunStore) -> None:
    store.groups.add_groups([task(0)], size=2, purpose="eval:held_out@0")
    claim = store.leases.claim("w", 1, lease_s=10)[0]
    play(store, claim)
    with pytest.raises(UsageError, match="is of eval:held_out@0, which is never trained"):
        store.groups.fork(claim.episode_id, turn=1, k=2)


def test_law_2_a_fork_that_could_not_be_restored_does_not_begin_anew(store: RunStore) -> None:
    origin = played(store)
    store.groups.fork(origin.episode_id, turn=2, k=2)
    claim = store.leases.claim("v", 1, lease_s=10)[0]
    with pytest.raises(StoreError, match="a fork cannot start anew"):
        store.journal.restart_episode(claim.episode_id, claim.fence, "not replayable")


def test_a_lost_fork_is_not_played_again_and_tells_a_curriculum_nothing(store: RunStore) -> None:
    origin = played(store)
    before = store.reads.results()
    group = store.groups.fork(origin.episode_id, turn=2, k=2)
    for claim in store.leases.claim("v", 9, lease_s=10):
        play(store, claim, turns=3, stop=StopReason.ENV_FAILED, outcome=None)
    assert store.reads.group(group).state is GroupState.FAILED
    assert store.replays.counts(3).waiting == 0
    assert store.reads.results() == before, "its success is not that of the whole task"
    clean(store)


def test_forks_take_their_place_in_admission(store: RunStore) -> None:
    origin = played(store)
    store.groups.fork(origin.episode_id, turn=2, k=2)
    assert admit(store, groups_per_step=1, max_lag=2, group_size=2) == 1, "three groups, one played, one forked"


def test_the_audit_notices_a_fork_whose_beginning_learns_or_is_another(store: RunStore, path: Any) -> None:
    origin = played(store)
    group = store.groups.fork(origin.episode_id, turn=2, k=2)
    episode = store.reads.episodes(group_id=group)[0].id
    turns = f"(SELECT id FROM turns WHERE episode_id = {episode} AND idx = 1)"
    for change, words in (
        (f"UPDATE turns SET learns = 1, oldest_step = 0 WHERE id = {turns}", "trains turn 1"),
        (f"UPDATE tokens SET data = (SELECT data FROM tokens LIMIT 1) WHERE turn_id = {turns}", "turn 1 is not that"),
        (f"UPDATE episodes SET trial = 1 WHERE id = {episode}", "begun anew"),
    ):
        copy = path.with_name("copy.sqlite")
        copy.unlink(missing_ok=True)
        with sqlite3.connect(path) as connection:
            connection.execute(f"VACUUM INTO '{copy}'")
        with sqlite3.connect(copy) as connection:
            connection.execute(change)
        with RunStore.open(copy) as other:
            report, outside = audit(other), OutsideAuditor(copy).look()
        assert report.breaches["fork_broken"] == 1 and words in " ".join(one.detail for one in report.violations)
        learns = f"law 2: a fork learns from turns of its origin: episode: {episode}"
        assert (learns in outside) is ("is not that" not in words)


def test_weights_of_a_later_step_judge_a_fork_as_any_group(store: RunStore) -> None:
    origin = played(store)
    serve(store, 3)
    store.groups.fork(origin.episode_id, turn=2, k=2)
    for claim in store.leases.claim("v", 9, lease_s=10):
        play(store, claim, turns=3, version=2)
    groups = store.buffer.take(4, 1, max_lag=1)
    assert groups is not None and groups[0].started_step == 3
    clean(store)
