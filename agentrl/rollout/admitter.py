"""Admission: which tasks start next. One per run, in the supervisor.

It owns the task source, and the curriculum that learns from results. The store alone decides how many groups may start,
and holds the position in the source: an admitter that was killed anywhere is followed by one that goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import trio

from agentrl.config import RunConfig
from agentrl.env.tasks import Curriculum, TaskSource
from agentrl.host.disk_space import wait_for_space
from agentrl.records import Task
from agentrl.rollout.branching import Pivots
from agentrl.store import RunStore
from agentrl.store.async_calls import Aside, Waiting
from agentrl.store.buffer.admission import AdmissionBounds
from agentrl.tokens import staleness

_SKIPPED = 64  # tasks that one admission passes over at most: quarantined ones, and those to be skipped
_LOOK_S = 1.0  # admission looks so often even if nothing changed


def bounds_of(config: RunConfig) -> AdmissionBounds:
    """The bounds of admission in a run file."""
    return AdmissionBounds(
        group_size=config.rollout.group_size,
        groups_per_step=config.buffer.groups_per_step,
        max_lag=config.buffer.max_lag,
        max_running=config.rollout.max_running,
        steps_total=config.train.steps,
        max_replays=config.rollout.max_replays,
        max_tokens=config.buffer.max_tokens,
    )


def bounds_now(bounds: AdmissionBounds, lowered: int | None) -> AdmissionBounds:
    """The bounds that hold now, if alarms `lowered` that of the lag."""
    return replace(bounds, max_lag=staleness.bound_now(lowered, bounds.max_lag))


@dataclass(slots=True)
class Admitter:
    """Starts groups of the tasks of `tasks`, as many as `bounds` allow."""

    store: RunStore
    tasks: TaskSource
    bounds: AdmissionBounds
    max_lag: Callable[[], int | None] = lambda: None  # what alarms lowered the lag bound to, if they did
    pivots: Pivots | None = None
    skips: Callable[[Task], bool] = lambda _: False  # whether a task is not to be trained on
    _seen: int = 0  # the last group that the curriculum has seen

    async def run(self, aside: Aside[Any]) -> None:
        """Admit for ever, whenever there may be room, in calls that `aside` makes. On a full disk, try again."""
        wait_for_work = Waiting(self.store)
        while True:
            # At most one step's groups a call, again and again while there is room: a start that admits a whole horizon
            # at once would hold the store's write lock while all workers wait for their first claim.
            while await wait_for_space(lambda: aside(lambda _: self.admit(self.bounds.groups_per_step))):
                await trio.lowlevel.checkpoint()
            await wait_for_work("control", _LOOK_S)

    def admit(self, limit: int) -> int:
        """Start at most `limit` groups; returns how many. Forks that are due come first, as long as there are tasks
        whose places they can take; then tasks that infrastructure lost, then new ones."""
        self._observe()
        current_bounds = bounds_now(self.bounds, self.max_lag())
        started_groups = passed_over = 0
        while started_groups < limit and passed_over < _SKIPPED:
            group_room = self.store.groups.admissible(current_bounds, limit=limit - started_groups)
            end_index = group_room.first + group_room.groups - group_room.replays
            end_index = end_index if self.tasks.size is None else min(end_index, self.tasks.size)
            # Tasks are made before the transaction that admits them, since a task source may be the user's own code and
            # slow. By then the room may be gone or the next task another one; the store notices (`first`), and the loop
            # looks again.
            next_tasks = [self.tasks.task(index) for index in range(group_room.first, end_index)]
            if not next_tasks and not group_room.replays:
                break
            if next_tasks and self.pivots is not None and self.pivots.fork():
                started_groups += 1
                continue
            skipped_indices = [task.index for task in next_tasks if self.skips(task)]
            admitted_groups = self.store.groups.admit(
                next_tasks,
                first=group_room.first,
                bounds=current_bounds,
                limit=limit - started_groups,
                skipped=skipped_indices,
            )
            # Tasks that were passed over are bounded too: a source of which everything is in quarantine would otherwise
            # be walked through to its end in one call.
            started_groups += admitted_groups
            passed_over += group_room.groups - admitted_groups
        return started_groups

    def _observe(self) -> None:
        if not isinstance(self.tasks, Curriculum):
            return
        for group_result in self.store.reads.results(self._seen):
            self._seen = group_result.id
            # A group whose members report no success (all failed by infrastructure, for instance) teaches a curriculum
            # nothing: to count it as 0 would make a broken sandbox look like a task that is too hard (law 3).
            if group_result.plays:
                self.tasks.observe(group_result.task, group_result.success, plays=group_result.plays)
