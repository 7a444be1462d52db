"""Name what enters from outside and is not honoured: one line for each kind of case, with its count and first place.

Law 8: nothing from outside is dropped in silence. A boundary (data rows, messages, tool schemas, test logs, reward
files, task folders, answers of endpoints, model folders) that leaves something out calls `note`:

    note("data rows", "the key 'weight' is not used here", place="train.jsonl, line 3")

The first case of a kind is logged at once, later ones are counted. Whoever reads many records wraps the loop in
`gathered()`, so that one line with the count comes at the end. A process of a run hands its counts to the run store
with `take_new`; `agentrl status`, the summary and the page add them up.

With `--strict` (the variable AGENTRL_STRICT) a notice about the user's own data is a refusal: `note` raises
StrictInputError. What a policy or its program sent is never refused that way (`by_policy=True`): law 3 forbids that an
episode is lost by something that its policy can cause.

This module never knows what a boundary reads. It uses the standard library alone, so that every room may import it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from agentrl.errors import StrictInputError

STRICT_VARIABLE = "AGENTRL_STRICT"
_MOST_KINDS = 200  # per process: `what` may quote a key from outside, and outside has no end of keys
_MOST_TEXT = 300

_log = logging.getLogger(__name__)
_place: ContextVar[str] = ContextVar("place", default="")


@contextmanager
def at(place: str) -> Generator[None]:
    """Give the notices of a block this place, so that code that never knows files can name what it met in one."""
    context_token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(context_token)


NewNotice = tuple[str, str, int, str]
"""Boundary, case, count and first place."""


@dataclass(slots=True)
class NoticeCount:
    """How often a kind of case was seen, where first, and how many of these cases `take_new` has not handed out."""

    count: int = 0
    place: str = ""
    new: int = 0


class NoticeBoard:
    """The notices of one process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], NoticeCount] = {}
        self._gathering = 0
        self._logged: dict[tuple[str, str], int] = {}  # the count that a line has reported

    def note(self, boundary: str, what: str, *, place: str = "", by_policy: bool = False) -> None:
        """Count one case. `boundary` names the kind of input in the plural, `what` says what was not honoured, `place`
        where it stands (default: the place of the surrounding `at`). Raises StrictInputError under AGENTRL_STRICT
        unless the policy sent the input."""
        place = place or _place.get()
        notice_kind = (boundary, what[:_MOST_TEXT])
        if os.environ.get(STRICT_VARIABLE) == "1" and not by_policy:
            raise StrictInputError(
                f"{boundary}: {notice_kind[1]}{f' ({place})' if place else ''}, and --strict refuses that"
            )
        with self._lock:
            # Bounded, as `what` may quote what a policy has written: without a bound, a policy could fill the memory of
            # its worker and the run's store with kinds.
            if notice_kind not in self._counts and len(self._counts) >= _MOST_KINDS:
                notice_kind = (boundary, "more kinds of input that is not used")
            notice_count = self._counts.setdefault(notice_kind, NoticeCount(place=place[:_MOST_TEXT]))
            notice_count.count += 1
            notice_count.new += 1
            is_first = notice_kind not in self._logged and not self._gathering
            if is_first:
                self._logged[notice_kind] = 1
        if is_first:
            _log.warning("%s", line(*notice_kind, 1, place))

    def forget(self) -> None:
        """Begin anew, as a process that has seen nothing."""
        with self._lock:
            self._counts.clear()
            self._logged.clear()

    def totals(self) -> dict[tuple[str, str], NoticeCount]:
        """All counts since the start of the process, by boundary and case."""
        with self._lock:
            return {
                notice_kind: NoticeCount(notice_count.count, notice_count.place)
                for notice_kind, notice_count in self._counts.items()
            }

    def take_new(self, *, last: bool = False) -> list[NewNotice]:
        """Cases since an earlier call, of kinds whose count has doubled since; with `last` of all kinds. The caller has
        to record them."""
        new_notices: list[NewNotice] = []
        with self._lock:
            for notice_kind, notice_count in self._counts.items():
                # At each doubling: a case that comes with every turn is recorded twenty times in a million, and a rare
                # one at once.
                if notice_count.new and (last or notice_count.new >= notice_count.count - notice_count.new):
                    new_notices.append((*notice_kind, notice_count.new, notice_count.place))
                    notice_count.new = 0
        return new_notices

    def put_back(self, taken: list[NewNotice]) -> None:
        """Hand cases back that could not be recorded."""
        with self._lock:
            for boundary_name, notice_subject, case_count, _ in taken:
                self._counts[boundary_name, notice_subject].new += case_count

    @contextmanager
    def gathered(self) -> Generator[None]:
        """Log the notices of a block at its end, one line for each kind, with its count."""
        with self._lock:
            self._gathering += 1
            counts_before = {notice_kind: notice_count.count for notice_kind, notice_count in self._counts.items()}
        try:
            yield
        finally:
            with self._lock:
                self._gathering -= 1
                log_lines = [
                    line(*notice_kind, notice_count.count - counts_before.get(notice_kind, 0), notice_count.place)
                    for notice_kind, notice_count in self._counts.items()
                    if notice_count.count > counts_before.get(notice_kind, 0)
                ]
                self._logged |= {notice_kind: notice_count.count for notice_kind, notice_count in self._counts.items()}
            for log_line in log_lines:
                _log.warning("%s", log_line)


def line(boundary: str, what: str, count: int, place: str) -> str:
    """One notice in words, as a log and `agentrl status` show it."""
    if count == 1:
        return f"{boundary}: {what}{f' ({place})' if place else ''}"
    return f"{boundary}: {what} ({count} times{f', first: {place}' if place else ''})"


OF_PROCESS = NoticeBoard()
"""The notices of this process."""

note = OF_PROCESS.note
gathered = OF_PROCESS.gathered
