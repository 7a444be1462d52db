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
    return {"cases": [list(new_notice) for new_notice in taken]}


def record(metrics: Metrics, step: int, *, last: bool = False) -> None:
    """Write the new notices of this process; with `last` all that are left. They stay with the process if the store
    cannot take them."""
    if new_notices := notices.OF_PROCESS.take_new(last=last):
        try:
            metrics.record(KIND, step, as_row(new_notices))
        except BaseException:
            notices.OF_PROCESS.put_back(new_notices)
            raise


def totals(metrics: Metrics) -> list[dict[str, Any]]:
    """The notices of a run, the most frequent first: boundary, case, count and first place. Rows of undone steps count
    too: what was left out there was left out."""
    notice_sums: dict[tuple[str, str], dict[str, Any]] = {}
    for notice_row in metrics.values(KIND, undone=True):
        for boundary, case_text, case_count, first_place in cast(
            "list[tuple[str, str, int, str]]", notice_row.values["cases"]
        ):
            entry = {"boundary": boundary, "case": case_text, "count": 0, "place": first_place}
            notice_sums.setdefault((boundary, case_text), entry)["count"] += case_count
    return sorted(notice_sums.values(), key=lambda entry: -entry["count"])


def lines(entries: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each notice, for a person."""
    return [
        notices.line(notice_entry["boundary"], notice_entry["case"], notice_entry["count"], notice_entry["place"])
        for notice_entry in entries
    ]
