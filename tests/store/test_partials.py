"""Turns under way: their tokens are kept part by part, and only for whoever holds the episode (laws 1 and 2)."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from agentrl.engine.generation import Stitcher
from agentrl.protocols import Chunk
from agentrl.records import StopReason, VersionSpan
from agentrl.store import Claim, Ending, Partial, RunStore, StoreError
from agentrl.store.audit import audit

from .play import START, Clock, admit, serve, turn


def part(at: int = 0, n: int = 4, *, index: int = 0) -> Partial:
    """Tokens `at` to `at + n` of a turn, each at a log-prob that no float32 holds."""
    return Partial(
        index=index,
        parent=None,
        role="policy",
        prompt_ids=(7, 8, 9),
        token_ids=tuple(range(at, at + n)),
        logprobs=tuple(-0.1 - at - i for i in range(n)),
        spans=(VersionSpan(1, 0, n),),
        at=at,
        started_s=5.0,
        spent_s=1.0 + at,
    )


@pytest.fixture
def claim(store: RunStore) -> Claim:
    """An episode that has begun, and has no turn."""
    admit(store, limit=1)
    claim = store.leases.claim("first", 1, lease_s=30.0)[0]
    store.journal.begin(claim.episode_id, claim.fence, START)
    return claim


def again(store: RunStore, claim: Claim, clock: Clock, worker: str = "second") -> Claim:
    """The episode as the next worker gets it."""
    clock.now += 31.0
    return next(one for one in store.leases.claim(worker, 9, lease_s=30.0) if one.episode_id == claim.episode_id)


def rows(store: RunStore) -> int:
    with sqlite3.connect(store.path) as connection:
        return connection.execute("SELECT COUNT(*) FROM partials").fetchone()[0]


chunks = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(max_value=0, allow_nan=False)), min_size=1, max_size=5),
        st.integers(0, 3),  # the version of its tokens
        st.integers(0, 6),  # of how many tokens before it says another word
        st.booleans(),  # whether it is a new request's first
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.medium
@settings(max_examples=60, deadline=None)
@given(chunks)
def test_law_1_tokens_of_a_turn_under_way_come_back_as_they_were_sampled(
    tmp_path_factory: pytest.TempPathFactory, given_chunks: list[tuple[list[tuple[int, float]], int, int, bool]]
) -> None:
    stitcher, clock = Stitcher(), Clock()
    with RunStore.create(tmp_path_factory.mktemp("store") / "s.sqlite", "{}", clock=clock) as store:
        store.versions.confirm_version(store.versions.mint_version(0))
        admit(store, limit=1)
        claim = store.leases.claim("first", 1, lease_s=30.0)[0]
        store.journal.begin(claim.episode_id, claim.fence, START)
        at = 0
        for tokens, version, earlier, recomputed in given_chunks:
            ids, logprobs = tuple(id for id, _ in tokens), tuple(logprob for _, logprob in tokens)
            spans = (VersionSpan(version, -min(earlier, at), len(ids), recomputed),)
            stitcher.add(Chunk(token_ids=ids, logprobs=logprobs, spans=spans))
            one = replace(part(at), token_ids=ids, logprobs=logprobs, spans=spans)
            store.journal.journal_partial(claim.episode_id, claim.fence, one)
            at += len(ids)
        partial = again(store, claim, clock).partial
        whole = stitcher.generation("stop")
        assert partial is not None
        assert (partial.token_ids, partial.logprobs, partial.spans) == (
            whole.token_ids,
            whole.logprobs,
            whole.spans,
        )
        assert (partial.prompt_ids, partial.at, partial.started_s) == ((7, 8, 9), 0, 5.0)


def test_law_1_a_part_that_does_not_follow_is_refused(store: RunStore, claim: Claim, clock: Clock) -> None:
    id, fence = claim.episode_id, claim.fence
    store.journal.journal_partial(id, fence, part(0))
    for wrong in (0, 3, 8):
        with pytest.raises(StoreError, match=f"turn 0 has 4 tokens, and more came after {wrong}"):
            store.journal.journal_partial(id, fence, part(wrong))
    with pytest.raises(StoreError, match="turn 1 cannot be under way after turn -1"):
        store.journal.journal_partial(id, fence, part(4, index=1))
    with pytest.raises(StoreError, match="tokens so far cannot be written"):
        store.journal.journal_partial(id, fence, replace(part(4), token_ids=(-1, 0, 0, 0)))
    assert again(store, claim, clock).partial == part(0)


def test_the_audit_names_a_part_that_was_left_behind(store: RunStore, claim: Claim, path: Path) -> None:
    store.journal.finish(
        claim.episode_id, claim.fence, Ending(stop_reason=StopReason.ENGINE_FAILED, outcome=None, success=None)
    )
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO partials VALUES (1, 0, 0, 0, NULL, 'policy', '[]', 0, 0, x'00000000')")
    assert [one.detail for one in audit(store).violations] == ["episode 1 ended with a turn under way"]


def test_a_turn_costs_bytes_by_its_length_however_often_it_is_written(store: RunStore, claim: Claim) -> None:
    def cost() -> int:
        with sqlite3.connect(store.path) as connection:
            return connection.execute("SELECT SUM(LENGTH(data)) FROM partials").fetchone()[0]

    for at in range(0, 1000, 50):
        store.journal.journal_partial(claim.episode_id, claim.fence, part(at, 50))
    half = cost()
    for at in range(1000, 2000, 50):
        store.journal.journal_partial(claim.episode_id, claim.fence, part(at, 50))
    assert half < 1000 * 12 + 20 * 16 and cost() < 2.01 * half


def test_law_1_tokens_of_versions_that_a_rollback_undid_keep_them(store: RunStore, claim: Claim, clock: Clock) -> None:
    undone = serve(store, 1)
    one = replace(part(0), spans=(VersionSpan(undone, 0, 4),))
    store.journal.journal_partial(claim.episode_id, claim.fence, one)
    store.deaths.release_all()
    store.lineage.rollback(0)
    newer = serve(store, 0)
    second = again(store, claim, clock)
    assert second.partial == one and store.versions.is_undone(undone)
    spans = (VersionSpan(undone, 0, 2), VersionSpan(newer, 2, 3))
    store.journal.journal_turn(second.episode_id, second.fence, replace(turn(0, newer), spans=spans))
    assert store.reads.trajectory(second.episode_id).turns[0].spans == spans
