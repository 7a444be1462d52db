"""Notices of all processes of a run: each process hands its counts to the store, a reader adds them up.

A process writes a kind of case again when its count has doubled, and all counts when it ends. So a kind that comes with
every episode costs a long run a few dozen rows, and a reader sees at least half of the cases at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from agentrl import notices
from agentrl.notices import NewNotice
from agentrl.records import Json
from agentrl.store.metrics import Metrics

KIND: Final = "notices"
"""The kind of the rows among the store's metrics."""


def as_row(taken: Sequence[NewNotice]) -> dict[str, Json]:
    """The values of a row."""
    return {"cases": [list(case) for case in taken]}


def record(metrics: Metrics, step: int, *, last: bool = False) -> None:
    """Write the new notices of this process; with `last` all that are left. They stay with the process if the store
    cannot take them."""
    if taken := notices.OF_PROCESS.take_new(last=last):
        try:
            metrics.record(KIND, step, as_row(taken))
        except BaseException:
            notices.OF_PROCESS.put_back(taken)
            raise


def totals(metrics: Metrics) -> list[dict[str, Any]]:
    """The notices of a run, the most frequent first: boundary, case, count and first place. Rows of undone steps count
    too: what was left out there was left out."""
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for row in metrics.values(KIND, undone=True):
        for boundary, case, count, place in cast("list[tuple[str, str, int, str]]", row.values["cases"]):
            entry = {"boundary": boundary, "case": case, "count": 0, "place": place}
            sums.setdefault((boundary, case), entry)["count"] += count
    return sorted(sums.values(), key=lambda entry: -entry["count"])


def lines(entries: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each notice, for a person."""
    return [notices.line(entry["boundary"], entry["case"], entry["count"], entry["place"]) for entry in entries]
