"""A long run's file: it grows by transcripts, and the space of dropped token arrays is used again."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.records import RoutedExperts, StopReason, Task, Turn
from agentrl.store import Claim, Ending, EnvSnapshot, RunStore

from .play import START, Clock, admit, answer, part, serve, turn

KEEP, TOKENS = 2, 4000


def long_turn(index: int, version: int, rng: random.Random) -> Turn:
    """A turn whose tokens and experts do not compress: about 28 KB."""
    plain = turn(index, version, TOKENS)
    experts = RoutedExperts(start=0, layers=1, per_token=1, width=1, data=rng.randbytes(TOKENS))
    ids = tuple(rng.randrange(1 << 32) for _ in range(TOKENS))
    return replace(plain, token_ids=ids, logprobs=tuple(-rng.random() for _ in ids), experts=experts)


def play_long(store: RunStore, claim: Claim, version: int, rng: random.Random, stop: StopReason) -> None:
    """An episode that starts anew once, with everything that a running episode writes."""
    id, fence = claim.episode_id, claim.fence
    store.journal.begin(id, fence, START)
    store.journal.journal_turn(id, fence, long_turn(0, version, rng))
    store.journal.restart_episode(id, fence, "its box died")
    store.journal.begin(id, fence, START)
    whole = long_turn(0, version, rng)
    store.journal.journal_partial(id, fence, part(whole, 0, TOKENS // 2))
    store.journal.journal_turn(id, fence, whole)
    store.journal.journal_step(id, fence, 0, answer(0, last=True))
    store.journal.keep_snapshot(id, fence, EnvSnapshot(turn=0, data=rng.randbytes(20_000)))
    outcome = 1.0 if stop.by_policy else None
    store.journal.finish(id, fence, Ending(stop_reason=stop, outcome=outcome, success=None))


@pytest.mark.medium
def test_a_long_runs_file_does_not_grow_by_what_retention_drops(path: Path, clock: Clock) -> None:
    rng, sizes = random.Random(0), list[int]()
    with RunStore.create(path, "{}", clock=clock) as store:
        version = serve(store, 0)
        connection = store._db.driver.connection  # pyright: ignore[reportPrivateUsage]
        for step in range(1, 19):
            clock.now += 100  # later than any outage
            admit(store, group_size=2, groups_per_step=2, limit=2)
            store.groups.add_groups([Task(index=step, env="e", seed=step)], size=1, purpose=f"eval:held_out@{step}")
            store.groups.add_groups([Task(index=step, env="e", seed=step)], size=2, purpose="train")
            for claim in store.leases.claim("w", 100, lease_s=30.0):
                failed = claim.purpose == "train" and claim.task.env == "e"
                play_long(store, claim, version, rng, StopReason.ENGINE_FAILED if failed else StopReason.DONE)
            assert store.buffer.take(step, 2, max_lag=4) is not None
            version = serve(store, step)
            store.lineage.checkpoint(step, version, "checkpoint")
            store.lineage.retain(step, keep_steps=KEEP, keep_sample=0.0)
            sizes.append(connection.execute("PRAGMA page_count").fetchone()[0] * 4096)
        count = {
            table: connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
            for table in ("tokens", "experts", "partials", "snapshots", "unscored", "endings", "outages", "restarts")
        }
    step_bytes = 7 * 2 * TOKENS * 7  # seven episodes of two turns: ids, log-probs and experts
    assert sizes[7] > KEEP * step_bytes, "what is kept is in the file"
    assert (sizes[-1] - sizes[7]) / (len(sizes) - 8) < step_bytes / 10, "a step leaves its transcripts, no tokens"
    trained, others = KEEP * 4 * 2, 3 * 2  # turns of the last two steps, and of what was admitted for the last one
    assert count["tokens"] == count["experts"] == trained + others
    assert count["partials"] == count["snapshots"] == count["unscored"] == count["endings"] == 0
    assert count["outages"] == 18 and count["restarts"] == 7 * 18, "rows of some bytes that people read"
