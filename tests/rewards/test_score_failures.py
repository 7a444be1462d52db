"""A source that fails on some texts is named while it happens, and its failures are counted by text."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from agentrl.config.sections import RewardSource
from agentrl.records import Trajectory
from agentrl.rewards.score_failures import FailureCount, totals
from agentrl.rewards.scorer import Scorer
from agentrl.run.reporting import reward_figures
from agentrl.run.reporting.failed_tasks import ScoreFailureLines
from agentrl.store import RunStore
from agentrl.store.journal_writer import JournalWriter
from tests.rewards.test_sources import eventually
from tests.store.play import play_all


def settings(**changes: Any) -> RewardSource:
    return RewardSource(
        **{"source": "taste", "kind": "callable", "call": "tests.rewards.test_sources:length", **changes}
    )


@pytest.mark.parametrize("nothing", [float("nan"), 1e308])
async def test_a_source_that_gives_no_number_for_some_texts_is_named_at_once_and_counted_by_text(
    store: RunStore, autojump_clock: MockClock, nothing: float
) -> None:
    """Two episodes say "action 0", then "action 1", for which the source has no number. The second "action 0" is known.
    With one retry that is 1 call for the first turn, and 2 for each second one."""

    async def ask(seen: Trajectory) -> float:
        return nothing if seen.turns[-1].text == "action 1" else 0.5

    play_all(store)
    scorer = Scorer(settings(concurrency=1, retries=1, deadline_s=1000.0), JournalWriter(store, inline=True), ask)
    lines = ScoreFailureLines("runs/mine", now=iter(range(0, 100, 10)).__next__)
    assert list(lines.lines(store)) == []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scorer.serve)
        await eventually(lambda: any(one.turns_failed == 2 for one in reward_figures.failures(store)))
        nursery.cancel_scope.cancel()
    (found,) = reward_figures.failures(store)
    assert (found.source, found.calls, found.calls_failed, found.turns, found.turns_failed) == ("taste", 5, 4, 3, 2)
    assert found.texts_failed == 1
    assert [(text.text, text.turns, text.reason) for text in found.texts] == [
        ("action 1", 2, f"{nothing} is no reward")
    ]
    (line,) = lines.lines(store)
    assert line == (
        "warning: reward source 'taste' gave no score for 2 of 3 turns (4 of 5 calls failed), the last: "
        f"{nothing} is no reward; one text never got a score, most often 'action 1' (2 turns): "
        "agentrl rewards runs/mine"
    )
    assert list(lines.lines(store)) == [], "a line, not a flood"


def test_lines_come_again_when_failures_have_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    count = FailureCount("taste", life="a")
    rows: list[Any] = []
    monkeypatch.setattr("agentrl.run.reporting.failed_tasks.score_failures", lambda _: totals(rows[-1:]))
    lines = ScoreFailureLines("runs/mine", now=iter(range(0, 10_000, 10)).__next__)
    seen = 0
    for n in range(100):
        count.failed(f"text {n}", 1, "nan is no reward")
        if (row := count.row()) is not None:
            rows.append(row)
        seen += len(list(lines.lines(None)))  # type: ignore[arg-type]
    assert seen == 7, "at 1, 2, 4, 8, 16, 32, 64"
    assert rows[-1]["calls_failed"] >= 98 and len(rows) < 100, "rows come as failures grow by a fiftieth"
    assert len(totals(rows[-1:])[0].texts) == 5


def test_a_text_that_is_scored_later_is_none_that_the_source_cannot_score() -> None:
    count = FailureCount("taste", life="a")
    count.failed("one", 3, "no answer within 2 s")
    count.failed("two", 3, "nan is no reward")
    count.scored("one", 2, "no answer within 2 s")
    (found,) = totals([count.row() or {}])
    assert (found.calls, found.calls_failed, found.turns, found.turns_failed) == (8, 7, 3, 2)
    assert [text.text for text in found.texts] == ["two"]


def test_processes_of_a_run_are_added_up_and_a_few_failed_calls_are_no_matter() -> None:
    def row(life: str, calls: int, failed: int, turns: int) -> dict[str, Any]:
        texts = [{"digest": "x", "text": "bad", "turns": turns, "reason": "nan is no reward"}] if turns else []
        counts = {"calls": calls, "calls_failed": failed, "turns": calls, "turns_failed": turns, "texts_failed": turns}
        return {"source": "taste", "life": life, "reason": "nan is no reward", "texts": texts, **counts}

    (found,) = totals([row("a", 10, 1, 1), row("b", 5, 0, 0), row("a", 20, 4, 2), row("b", 30, 6, 1)])
    assert (found.calls, found.calls_failed, found.turns_failed) == (50, 10, 3)
    assert [(text.text, text.turns) for text in found.texts] == [("bad", 3)]
    assert found.matters
    (rescued,) = totals([row("a", 1000, 30, 0)])
    assert not rescued.matters, "each of these turns was scored by another call"
    (many,) = totals([row("a", 100, 33, 0)])
    assert many.matters


def test_a_rollback_forgets_no_failure(store: RunStore) -> None:
    count = FailureCount("taste", life="a")
    count.failed("bad", 1, "nan is no reward")
    row = count.row()
    assert row is not None and count.row() is None, "nothing is new"
    store.metrics.record("reward_failures", 0, row)
    store.lineage.rollback(0)
    assert [str(one) for one in reward_figures.failures(store)] == [
        "reward source 'taste' gave no score for 1 of 1 turns (1 of 1 calls failed), the last: nan is no reward; "
        "one text never got a score, most often 'bad' (1 turns)"
    ]
