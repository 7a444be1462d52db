"""Rank 0 waits for what other ranks do beside its orders as long as they get on, and no longer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from torch import distributed

from agentrl.errors import RankLost, RunFailed
from agentrl.learner.parallel import ranks


def settled(
    monkeypatch: pytest.MonkeyPatch, *, progress_every: int, end: int, work: Callable[[], None] = lambda: None
) -> int:
    """Wait, with a deadline of 3 s, for a rank that gets on every so many seconds of a clock of our own and does `work`
    at the end; how often it was seen to get on."""
    store, now, seen = distributed.HashStore(), 0, list[None]()

    def told(progress: Callable[[], object]) -> None:
        progress()
        work()

    def sleep(_: float) -> None:
        nonlocal now
        now += 1
        if now == end:
            ranks._work(store, "key", 1, told)
        elif now % progress_every == 0:
            store.add(ranks._progress("key", 1), 1)

    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    ranks.settle_work(
        store,
        "key",
        [1],
        why_ended=lambda _: None,
        where=lambda rank: f"rank {rank} is here",
        deadline_s=3,
        progress=lambda: seen.append(None),
    )
    assert not store.check([ranks._end("key", 1)])  # the next one may have the same name
    return len(seen)


def test_a_rank_that_gets_on_may_take_longer_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled(monkeypatch, progress_every=2, end=11) == 5
    with pytest.raises(RankLost, match=r"rank 1 is here\. .* for 3 s \(half of train\.progress_deadline_s\)"):
        settled(monkeypatch, progress_every=5, end=11)


def test_an_error_of_another_rank_is_told_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("no such dtype")

    with pytest.raises(RunFailed, match="rank 1 could not write its part of a checkpoint: ValueError: no such dtype"):
        settled(monkeypatch, progress_every=2, end=2, work=fail)
