"""Episodes that failed through no doing of the policy, for people: which tasks, why, where, how often; and turns that
a reward source could not score.

Reads the store's `failed_tasks` and metrics. Never knows a process, and changes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

from agentrl.config import RunConfig
from agentrl.env.gymnasium_wrappers import printable
from agentrl.env.tasks import row_id, task_id
from agentrl.errors import split_place
from agentrl.records import Task
from agentrl.run.reward_services import failures as score_failures
from agentrl.store import FailedTask, RunStore
from agentrl.store.episodes.endings import FAILURES

MOST_ROWS = 20
"""Rows of a table in a summary: `agentrl tasks RUN --failed` has all."""
_LOOK_S = 2.0  # between two looks at the failed episodes of a run in progress


def id_of(task: Task, config: RunConfig) -> str:
    """The id to skip a failed task by: that of its row, if it is one of a data set."""
    rows = any(table.rows is not None and (table.id or config.env.id) == task.env for table in config.tasks)
    return row_id(task) if rows and task.options else task_id(task)


def skips(task: Task, skipped: Sequence[str]) -> bool:
    """Whether the list names a task."""
    return bool(skipped) and (task_id(task) in skipped or row_id(task) in skipped)


def as_rows(failures: Sequence[FailedTask], config: RunConfig) -> list[dict[str, Any]]:
    """Plain data, the most frequent failures first; `place` is "" if no code of anybody raised it."""
    rows: list[dict[str, Any]] = []
    for failure in sorted(failures, key=lambda failure: (-failure.times, failure.episode)):
        reason, place = split_place(failure.detail or failure.reason.value)
        rows.append(
            {
                "id": id_of(failure.task, config),
                "environment": failure.task.env,
                "seed": failure.task.seed,
                "purpose": failure.purpose,
                "kind": failure.reason.value,
                "reason": printable(reason),
                "place": printable(place),
                "times": failure.times,
                "episode": failure.episode,
            }
        )
    return rows


def all_rows(store: RunStore, config: RunConfig) -> list[dict[str, Any]]:
    """Plain data on every task that was played, as it was first met: how many of its episodes the policy ended, how
    many succeeded (of those that say so), how many failed through no doing of the policy."""
    by_task: dict[str, dict[str, Any]] = {}
    after = 0
    while episodes := store.reads.episodes(after=after):
        after = episodes[-1].id
        for episode in episodes:
            if episode.stop_reason is None:
                continue
            id = id_of(episode.task, config)
            row = by_task.setdefault(
                f"{episode.purpose} {id}",
                {"id": id, "environment": episode.task.env, "seed": episode.task.seed, "purpose": episode.purpose}
                | dict.fromkeys(("episodes", "succeeded", "failed"), 0),
            )
            row["episodes"] += episode.stop_reason.by_policy
            row["succeeded"] += bool(episode.success)
            row["failed"] += episode.stop_reason in FAILURES
    return list(by_task.values())


def tasks_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A table of `all_rows`."""
    drawn = Table()
    columns = ("id", "environment", "seed", "purpose", "episodes", "succeeded", "failed")
    for column in columns:
        drawn.add_column("task" if column == "id" else column, overflow="fold")
    for row in rows:
        drawn.add_row(*(escape(str(row[column])) for column in columns))
    return drawn


def table(rows: Sequence[dict[str, Any]], *, most: int | None = None) -> Table:
    """A table of `as_rows`, at most so many."""
    shown = rows if most is None else rows[:most]
    title = "episodes that failed through no doing of the policy"
    if len(shown) < len(rows):
        title += f" (the first {len(shown)} of {len(rows)} tasks and reasons)"
    drawn = Table(title=title, title_justify="left")
    for column in ("task", "environment", "seed", "times", "reason", "place"):
        drawn.add_column(column, justify="right" if column in ("seed", "times") else "left", overflow="fold")
    for row in shown:
        cells = (row["id"], row["environment"], row["seed"], row["times"], row["reason"], row["place"])
        drawn.add_row(*(escape(str(cell)) for cell in cells))
    return drawn


def skip_hint(rows: Sequence[dict[str, Any]], path: object) -> str:
    """Return a line with the command that resumes the run without these training tasks; "" if there are none."""
    ids = list(dict.fromkeys(row["id"] for row in rows if row["purpose"] == "train"))
    if not ids:
        return ""
    listed = ",".join(f'"{id}"' for id in ids)
    return f"to go on without those of training: agentrl train --resume {path} --set 'rollout.skip_tasks=[{listed}]'"


@dataclass(slots=True)
class FailureLines:
    """The failures of a run in progress, line by line: the first of each kind at once, then a count whenever their
    number has doubled. `path` is the run's folder, None of one that is not kept."""

    path: object | None
    now: Callable[[], float] = time.monotonic
    _kinds: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    _counted: int = 0
    _reported: int = 0
    _after_s: float = 0.0
    _looked: float = float("-inf")

    def lines(self, store: RunStore) -> Iterator[str]:
        """Yield the lines that are new since the last call."""
        counts, now = store.metrics.failures(), self.now()
        if counts.failed == self._counted or now - self._looked < _LOOK_S:
            return
        self._counted, self._looked = counts.failed, now
        new = store.metrics.failed_tasks(after_s=self._after_s)
        for failure in new:
            # By the time of the ends and not by ids: an episode with a low id may fail last, and would never be named.
            self._after_s = max(self._after_s, failure.last_s)
            reason, place = split_place(failure.detail or failure.reason.value)
            kind = (failure.task.env, place or reason)
            self._kinds[kind] += failure.times
            if self._kinds[kind] == failure.times:
                yield printable(
                    f"failed: seed {failure.task.seed}, episode {failure.episode}: "
                    f"{failure.detail or failure.reason.value}"
                )
        if counts.failed >= 2 * self._reported:
            self._reported = counts.failed
            more = "" if self.path is None else f": agentrl tasks {self.path} --failed"
            yield f"failed: {counts.failed} of {counts.ended} episodes so far, through no doing of the policy{more}"


@dataclass(slots=True)
class ScoreFailureLines:
    """The reward sources that fail in a run in progress: a line for each at once, and again whenever the number of its
    failed calls has doubled."""

    path: object
    now: Callable[[], float] = time.monotonic
    _reported: dict[str, int] = field(default_factory=dict[str, int])
    _looked: float = float("-inf")

    def lines(self, store: RunStore) -> Iterator[str]:
        """Yield the lines that are new since the last call."""
        if self.now() - self._looked < _LOOK_S:
            return
        self._looked = self.now()
        for failure in score_failures(store):
            if failure.matters and failure.calls_failed >= 2 * self._reported.get(failure.source, 0):
                self._reported[failure.source] = failure.calls_failed
                yield printable(f"warning: {failure}: agentrl rewards {self.path}")
