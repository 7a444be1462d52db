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
from agentrl.errors import split_place
from agentrl.host.terminal_text import printable
from agentrl.records import Task
from agentrl.run.reporting.reward_figures import failures as score_failures
from agentrl.store import FailedTask, RunStore
from agentrl.store.episodes.endings import FAILURES
from agentrl.task_ids import row_id, task_id

MOST_ROWS = 20
"""Rows of a table in a summary: `agentrl tasks RUN --failed` has all."""
_LOOK_S = 2.0  # between two looks at the failed episodes of a run in progress


def id_of(task: Task, config: RunConfig) -> str:
    """The id to skip a failed task by: that of its row, if it is one of a data set."""
    has_rows = any(
        task_table.rows is not None and (task_table.id or config.env.id) == task.env for task_table in config.tasks
    )
    return row_id(task) if has_rows and task.options else task_id(task)


def skips(task: Task, skipped: Sequence[str]) -> bool:
    """Whether the list names a task."""
    return bool(skipped) and (task_id(task) in skipped or row_id(task) in skipped)


def as_rows(failures: Sequence[FailedTask], config: RunConfig) -> list[dict[str, Any]]:
    """Plain data, the most frequent failures first; `place` is "" if no code of anybody raised it."""
    failure_rows: list[dict[str, Any]] = []
    for failure in sorted(failures, key=lambda failure: (-failure.times, failure.episode)):
        reason, code_place = split_place(failure.detail or failure.reason.value)
        failure_rows.append(
            {
                "id": id_of(failure.task, config),
                "environment": failure.task.env,
                "seed": failure.task.seed,
                "purpose": failure.purpose,
                "kind": failure.reason.value,
                "reason": printable(reason),
                "place": printable(code_place),
                "times": failure.times,
                "episode": failure.episode,
            }
        )
    return failure_rows


def all_rows(store: RunStore, config: RunConfig) -> list[dict[str, Any]]:
    """Plain data on every task that was played, as it was first met: how many of its episodes the policy ended, how
    many succeeded (of those that say so), how many failed through no doing of the policy."""
    by_task: dict[str, dict[str, Any]] = {}
    after_id = 0
    while episodes := store.reads.episodes(after=after_id):
        after_id = episodes[-1].id
        for episode in episodes:
            if episode.stop_reason is None:
                continue
            shown_id = id_of(episode.task, config)
            task_row = by_task.setdefault(
                f"{episode.purpose} {shown_id}",
                {"id": shown_id, "environment": episode.task.env, "seed": episode.task.seed, "purpose": episode.purpose}
                | dict.fromkeys(("episodes", "succeeded", "failed"), 0),
            )
            task_row["episodes"] += episode.stop_reason.by_policy
            task_row["succeeded"] += bool(episode.success)
            task_row["failed"] += episode.stop_reason in FAILURES
    return list(by_task.values())


def tasks_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A table of `all_rows`."""
    task_table = Table()
    column_names = ("id", "environment", "seed", "purpose", "episodes", "succeeded", "failed")
    for column_name in column_names:
        task_table.add_column("task" if column_name == "id" else column_name, overflow="fold")
    for task_row in rows:
        task_table.add_row(*(escape(str(task_row[column_name])) for column_name in column_names))
    return task_table


def table(rows: Sequence[dict[str, Any]], *, most: int | None = None) -> Table:
    """A table of `as_rows`, at most so many."""
    shown_rows = rows if most is None else rows[:most]
    table_title = "episodes that failed through no doing of the policy"
    if len(shown_rows) < len(rows):
        table_title += f" (the first {len(shown_rows)} of {len(rows)} tasks and reasons)"
    failure_table = Table(title=table_title, title_justify="left")
    for column_name in ("task", "environment", "seed", "times", "reason", "place"):
        failure_table.add_column(
            column_name, justify="right" if column_name in ("seed", "times") else "left", overflow="fold"
        )
    for failure_row in shown_rows:
        cell_values = (
            failure_row["id"],
            failure_row["environment"],
            failure_row["seed"],
            failure_row["times"],
            failure_row["reason"],
            failure_row["place"],
        )
        failure_table.add_row(*(escape(str(cell_value)) for cell_value in cell_values))
    return failure_table


def skip_hint(rows: Sequence[dict[str, Any]], path: object) -> str:
    """Return a line with the command that resumes the run without these training tasks; "" if there are none."""
    skipped_ids = list(dict.fromkeys(failure_row["id"] for failure_row in rows if failure_row["purpose"] == "train"))
    if not skipped_ids:
        return ""
    listed_ids = ",".join(f'"{skipped_id}"' for skipped_id in skipped_ids)
    return (
        f"to go on without those of training: agentrl train --resume {path} --set 'rollout.skip_tasks=[{listed_ids}]'"
    )


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
        failure_counts, current_s = store.metrics.failures(), self.now()
        if failure_counts.failed == self._counted or current_s - self._looked < _LOOK_S:
            return
        self._counted, self._looked = failure_counts.failed, current_s
        new_failures = store.metrics.failed_tasks(after_s=self._after_s)
        for failure in new_failures:
            # By the time of the ends and not by ids: an episode with a low id may fail last, and would never be named.
            self._after_s = max(self._after_s, failure.last_s)
            reason, code_place = split_place(failure.detail or failure.reason.value)
            failure_kind = (failure.task.env, code_place or reason)
            self._kinds[failure_kind] += failure.times
            if self._kinds[failure_kind] == failure.times:
                yield printable(
                    f"failed: seed {failure.task.seed}, episode {failure.episode}: "
                    f"{failure.detail or failure.reason.value}"
                )
        if failure_counts.failed >= 2 * self._reported:
            self._reported = failure_counts.failed
            tasks_hint = "" if self.path is None else f": agentrl tasks {self.path} --failed"
            failed_share = f"{failure_counts.failed} of {failure_counts.ended} episodes so far"
            yield f"failed: {failed_share}, through no doing of the policy{tasks_hint}"


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
