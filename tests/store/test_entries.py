"""Turns, answers, parts of turns and ends that are written at once: each as if alone. Both databases run these."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from agentrl.errors import LeaseLost
from agentrl.records import StopReason, VersionSpan
from agentrl.store import Claim, Ending, RunStore, Source
from agentrl.store.audit import audit
from agentrl.store.codec import unpack_record
from agentrl.store.episodes.entries import EpisodeWrite

from .play import START, admit, answer, part, turn


def begun(store: RunStore, n: int = 4) -> list[Claim]:
    """Claims of episodes that have begun."""
    admit(store, group_size=n, groups_per_step=1, limit=1)
    claims = store.leases.claim("w", n, lease_s=1e9)
    for one in claims:
        store.journal.begin(one.episode_id, one.fence, START)
    return claims


def errors(store: RunStore, *entries: EpisodeWrite) -> list[str]:
    return [str(result.error or "") for result in store.together(entries, shared=store.shares)]


def rows(store: RunStore, sql: str) -> list[tuple[Any, ...]]:
    with store._db.read():  # pyright: ignore[reportPrivateUsage]
        return store._db.rows(sql)  # pyright: ignore[reportPrivateUsage]


def count(store: RunStore, table: str) -> int:
    return rows(store, f"SELECT COUNT(*) FROM {table}")[0][0]


def test_of_entries_at_once_those_that_may_not_be_written_leave_the_others(store: RunStore) -> None:
    one, two, three, four = begun(store)
    unknown = replace(turn(0, 1), spans=(VersionSpan(99, 0, 3),))
    found = store.together(
        [
            store.journal.turn_entry(one.episode_id, one.fence, turn(0, 1)),
            store.journal.turn_entry(two.episode_id, two.fence + 1, turn(0, 1)),
            store.journal.turn_entry(three.episode_id, three.fence, unknown),
            store.journal.turn_entry(one.episode_id, one.fence, turn(0, 1)),
            store.journal.step_entry(one.episode_id, one.fence, 0, answer(0)),
            store.journal.step_entry(one.episode_id, one.fence, 0, answer(0)),
            store.journal.step_entry(four.episode_id, four.fence, 0, answer(0)),
            store.journal.turn_entry(999, 1, turn(0, 1)),
            store.journal.turn_entry(four.episode_id, four.fence, turn(0, 1, step=answer(0))),
            store.journal.turn_entry(four.episode_id, four.fence, turn(1, 1)),
        ],
        shared=store.shares,
    )
    why = ["", "claimed anew", "version 99 was never minted", "turn 0 cannot follow turn 0", "", "is answered already"]
    why += ["turn 0 was never journaled", "episode 999 does not exist", "", ""]
    for result, said in zip(found, why, strict=True):
        assert (result.error is None) == (said == "") and said in str(result.error or "")
    assert isinstance(found[1].error, LeaseLost) and isinstance(found[7].error, LeaseLost)
    journaled = [store.reads.trajectory(claim.episode_id).turns for claim in (one, two, three, four)]
    assert [[own.token_ids for own in turns] for turns in journaled] == [
        [turn(0, 1).token_ids], [], [], [turn(0, 1).token_ids, turn(1, 1).token_ids]
    ]  # fmt: skip
    assert [own.step for own in (*journaled[0], *journaled[3])] == [answer(0), answer(0), None]
    assert audit(store).violations == []


def test_a_turn_under_way_ends_with_its_turn_also_if_all_of_it_comes_at_once(store: RunStore) -> None:
    one, two, *_ = begun(store)
    long, after = turn(0, 1, 6), turn(1, 1, 5)
    assert errors(store, store.journal.part_entry(one.episode_id, one.fence, part(long, 0, 2))) == [""]
    assert errors(
        store,
        store.journal.part_entry(one.episode_id, one.fence, part(long, 2, 2)),
        store.journal.part_entry(two.episode_id, two.fence, part(long, 0, 2)),
        store.journal.part_entry(two.episode_id, two.fence, part(long, 3, 2)),
        store.journal.turn_entry(one.episode_id, one.fence, replace(long, step=answer(0))),
        store.journal.part_entry(one.episode_id, one.fence, part(after, 0, 3)),
        store.journal.part_entry(one.episode_id, one.fence, part(after, 3, 1)),
    ) == ["", "", f"episode {two.episode_id}: turn 0 has 2 tokens, and more came after 3", "", "", ""]
    under_way = [store.leases.reload(claim).partial for claim in (one, two)]
    assert [(own.index, own.token_ids) for own in under_way if own] == [
        (1, after.token_ids[:4]), (0, long.token_ids[:2])
    ]  # fmt: skip
    assert errors(store, store.journal.turn_entry(one.episode_id, one.fence, after)) == [""]
    assert store.leases.reload(one).partial is None and count(store, "partials") == 1


def test_entries_may_answer_a_turn_that_is_not_the_last(store: RunStore) -> None:
    one, *_ = begun(store)
    assert errors(store, *(store.journal.turn_entry(one.episode_id, one.fence, turn(n, 1)) for n in range(2))) == [
        "",
        "",
    ]
    found = errors(
        store,
        store.journal.step_entry(one.episode_id, one.fence, 0, answer(0)),
        store.journal.step_entry(one.episode_id, one.fence, 1, answer(1)),
        store.journal.step_entry(one.episode_id, one.fence, 2, answer(2)),
    )
    assert found == ["", "", f"episode {one.episode_id}: turn 2 was never journaled"]
    again = errors(store, store.journal.step_entry(one.episode_id, one.fence, 0, answer(0)))
    assert again == [f"episode {one.episode_id}: turn 0 is answered already"]


def test_sources_score_turns_that_came_at_once_but_none_that_does_not_learn(store: RunStore) -> None:
    claims = begun(store)
    store.scores.declare_sources([Source(name="prm", late="neutral"), Source(name="judge", late="neutral")])
    turns = [replace(turn(0, 1, step=answer(0)), learns=n > 0) for n in range(len(claims))]
    entries = (store.journal.turn_entry(own.episode_id, own.fence, one) for own, one in zip(claims, turns, strict=True))
    assert errors(store, *entries) == [""] * 4
    assert len(store.scores.awaiting("prm", 99)) == len(store.scores.awaiting("judge", 99)) == 3


def test_a_fork_copies_turns_that_came_at_once(store: RunStore) -> None:
    one, *_ = begun(store)
    for n in range(2):
        own = turn(n, 1, step=answer(n, last=n == 1))
        assert errors(store, store.journal.turn_entry(one.episode_id, one.fence, own)) == [""]
    store.journal.finish(one.episode_id, one.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True))
    store.groups.fork(one.episode_id, turn=1, k=2)
    forks = [claim for claim in store.leases.claim("v", 9, lease_s=1e9) if claim.fork_turn == 1]
    assert [[own.token_ids for own in claim.turns] for claim in forks] == [[turn(0, 1).token_ids]] * 2
    assert audit(store).violations == []


def test_of_ends_at_once_those_that_may_not_be_leave_the_others(store: RunStore) -> None:
    claims = begun(store, 3)
    for claim in claims:
        own = turn(0, 1, step=answer(0, last=True))
        store.journal.journal_turn(claim.episode_id, claim.fence, own)
    store.journal.journal_partial(claims[2].episode_id, claims[2].fence, part(turn(1, 1, 4), 0, 2))
    good, bad = (Ending(stop_reason=StopReason.DONE, outcome=n, success=n > 0) for n in (1.0, 0.0))
    one, two, three = claims
    found = store.together(
        [
            store.journal.end_entry(one.episode_id, one.fence, good),
            store.journal.end_entry(two.episode_id, two.fence + 1, good),
            store.journal.end_entry(one.episode_id, one.fence, bad),
            store.journal.end_entry(999, 1, bad),
            partial(store.meta, "config"),
            store.journal.end_entry(two.episode_id, two.fence, bad),
            store.journal.end_entry(three.episode_id, three.fence, replace(good, stop_reason=StopReason.ENV_FAILED)),
        ]
    )
    why = ["", "claimed anew", "is finished, no longer running", "episode 999 does not exist", "", "", ""]
    for result, said in zip(found, why, strict=True):
        assert (result.error is None) == (said == "") and said in str(result.error or "")
    ((_, state, n, record),) = rows(store, "SELECT id, state, n_scored, record FROM groups")
    assert (state, n, sorted(unpack_record(record))) == ("scored", 2, [one.member, two.member])
    ends = rows(store, "SELECT outcome, stop_reason, n_turns, n_tokens, newest_step FROM episodes ORDER BY id")
    assert ends == [(1.0, "done", 1, 3, 0), (0.0, "done", 1, 3, 0), (1.0, "env_failed", 1, 3, 0)]
    assert count(store, "partials") == 0 and rows(store, "SELECT episodes FROM outages") == [(1,)]
    assert audit(store).violations == []


def test_ends_at_once_wait_for_their_sources_and_only_once(store: RunStore) -> None:
    one, two, *_ = begun(store, 2)
    store.scores.declare_sources([Source(name="prm", late="neutral")])
    for claim in (one, two):
        store.journal.journal_turn(claim.episode_id, claim.fence, turn(0, 1, step=answer(0, last=True)))
    store.scores.score(f"{two.episode_id}.0.0", "prm", 2.0)
    done = Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
    ends = [store.journal.end_entry(claim.episode_id, claim.fence, done) for claim in (one, two, one)]
    held, ended, again = store.together(ends)
    assert held.error is None and ended.error is None and "was claimed anew" in str(again.error)
    assert rows(store, "SELECT episode_id FROM endings") == [(one.episode_id,)] and store.buffer.ready_count() == 0
    store.scores.score(f"{one.episode_id}.0.0", "prm", 3.0)
    assert store.buffer.ready_count() == 1 and count(store, "endings") == 0 and audit(store).violations == []
    ((record,),) = rows(store, "SELECT record FROM groups")
    assert {id: own.streams["policy"]["prm"] for id, own in unpack_record(record).items()} == {0: (3.0,), 1: (2.0,)}
