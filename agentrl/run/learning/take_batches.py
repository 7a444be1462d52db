"""When the next step may begin, and with which groups.

A learner waits for scored groups, for a run that is paused, for episodes at the lag bound that its step would make too
old, and before the last step for late members, which no later step trains. Owns this wait and what it says of it; the
store owns which groups are taken.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import trio

from agentrl.config.sections import BufferSettings
from agentrl.records import Group
from agentrl.run.alarms import LagBound
from agentrl.run.learning.step_edge import StepEdge
from agentrl.run.learning.store_calls import StoreCalls
from agentrl.store import Patience, Returns, RunStore, TakeOrder
from agentrl.store.run_values import LEARNER_WAITS, PAUSED, PHASE

_LONG_S = 30.0  # after which a wait for members is named
_PAUSED_S = 1.0  # between two looks at the requested settings while the run is paused; its end wakes the learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups of a step. The learner waited `idle_s` seconds for them, without pauses of the run (`paused_s`);
    `held_s` of these seconds for episodes at the lag bound."""

    groups: Sequence[Group]
    idle_s: float
    held_s: float
    paused_s: float


class BatchTaker:
    """Takes the groups of each of `steps` steps in `order`. `bound` is the lag bound in force. Live settings may change
    `group_deadline_s`, the longest wait for late members."""

    def __init__(
        self,
        edge: StepEdge,
        calls: StoreCalls,
        bound: LagBound,
        *,
        buffer: BufferSettings,
        quorum: int | None,
        steps: int,
        stall_deadline_s: float,
        group_deadline_s: float,
        order: TakeOrder,
        returns: Returns,
    ) -> None:
        self._edge, self._calls, self._bound, self._buffer, self._quorum = edge, calls, bound, buffer, quorum
        self._steps, self._stall_deadline_s, self._group_deadline_s = steps, stall_deadline_s, group_deadline_s
        self._order, self._returns = order, returns
        self._patience = Patience(buffer.patience)
        self._at_bound = 0  # episodes for which the learner waits at the lag bound
        self._whole_at = math.inf  # when the last step could have begun, without late members

    def worked(self, busy_s: float) -> None:
        """Note that a step took `busy_s` seconds: the patience at the lag bound is a multiple of it."""
        self._patience.worked(busy_s)

    async def take(self, step: int) -> Batch | None:
        """The batch of `step`; None after the last step, if no task is left or training is to end. Raises SystemExit if
        the run stops."""
        if step > self._steps:
            return None
        paused_s, group_count, naming_delay_s, is_named = 0.0, self._buffer.groups_per_step, _LONG_S, False
        wait_began_s, self._whole_at = trio.current_time(), math.inf
        while (run_phase := await self._calls(lambda store: PHASE.of(store.meta))) != "stop":
            if run_phase == "finish":
                return None
            await self._apply_settings()
            current_s = trio.current_time() - paused_s  # pauses of the run count for nothing
            if await self._calls(lambda store: PAUSED.of(store.meta)):
                self._patience.holds(False, current_s)
                paused_s += await self._stand_still()
                continue
            # At each look and not only between steps: a controller gives the learner's place away when it starves, and
            # a learner that starves begins no step.
            await self._edge.make_way()
            if run_phase == "drain":
                ready_groups = await self._calls(lambda store: store.buffer.ready_count())
                group_count = min(group_count, ready_groups)  # 0: only late members
            look_for_groups = partial(self._look, step=step, size=group_count, now=current_s)
            if (batch_groups := await self._calls(look_for_groups)) is not None:
                if is_named:
                    await self._calls(lambda store: LEARNER_WAITS.set(store, None))
                held_s, self._patience.held_s = self._patience.held_s, 0.0
                idle_s = trio.current_time() - paused_s - wait_began_s
                return Batch(groups=batch_groups, idle_s=idle_s, held_s=held_s, paused_s=paused_s)
            if current_s - wait_began_s > naming_delay_s:  # again and again: what is missing may change
                naming_delay_s, is_named = 2 * naming_delay_s, True
                wait_reason = await self._calls(partial(self._reason, step=step, size=group_count))
                await self._calls(partial(_name_wait, text=wait_reason))
            if group_count == 0:
                return None
            await self._edge.wait_a_moment()
        raise SystemExit(0)

    async def _stand_still(self) -> float:
        """Wait until the run goes on, or is to end. Returns how long that took, in seconds."""
        pause_began_s = trio.current_time()
        while await self._calls(_is_paused):
            await self._apply_settings()
            await self._edge.wait_a_moment(_PAUSED_S)
        return trio.current_time() - pause_began_s

    async def _apply_settings(self) -> None:
        if (new_config := await self._edge.apply_settings()) is not None:
            self._group_deadline_s = new_config.rollout.group_deadline_s

    @property
    def _late_s(self) -> float:
        """The longest wait for late members, in seconds."""
        # Half of the stall deadline at most: the last step waits for late members without any progress that the
        # supervisor could count, and must begin before it is taken for a run that stands still.
        return min(self._group_deadline_s, self._stall_deadline_s / 2)

    def _look(self, store: RunStore, step: int, size: int, now: float) -> list[Group] | None:
        """The groups of `step`, taken at `now`; None if there are too few, or the step may not begin yet."""
        group_buffer = store.buffer
        # Only before the last step: everywhere else a late member simply rides with a later step. No later step follows
        # here, and to drop the members that ran longest would bias the end of every run towards short episodes (law 5).
        if step >= self._steps and now <= self._whole_at + self._late_s and group_buffer.late_open():
            if group_buffer.ready_count() >= size:
                self._whole_at = min(self._whole_at, now)
            return None
        # Law 5 closes a group at the lag bound with the members that it has. Before it does, the learner may wait for
        # the members that still run: `Patience` says how long.
        at_bound = group_buffer.at_bound(step, max_lag=self._bound.now, quorum=self._quorum)
        would_lose = at_bound.episodes > 0 and size > 0 and group_buffer.ready_count() + at_bound.closable >= size
        self._at_bound = at_bound.episodes if self._patience.holds(would_lose, now) else 0
        if self._at_bound:
            return None
        return group_buffer.take(
            step,
            size,
            max_lag=self._bound.now,
            order=self._order,
            returns=self._returns,
            skip_at_most=self._buffer.skips,
            close_at_bound=0 if would_lose else self._quorum,
        )

    def _reason(self, store: RunStore, step: int, size: int) -> str:
        """Describe what the learner waits for before `step`, which takes `size` groups."""
        if self._at_bound:
            correction = (
                "lower rollout.step_deadline_s or raise buffer.max_lag; buffer.wait_at_bound=1 would lose some of them"
            )
            return f"step {step} waits for {self._at_bound} running episodes that it would make too old: {correction}"
        ready_count, late_count = store.buffer.ready_count(), store.buffer.late_open()
        if ready_count < size:
            missing_scores = f"{ready_count} of {size} are scored"
            return f"step {step} waits for groups: {missing_scores}; agentrl rewards RUN names late sources"
        if step >= self._steps and late_count:
            wait_limit = f"{self._late_s:g} s at most (rollout.group_deadline_s)"
            late_text = f"{late_count} late members, which no later step trains"
            return f"step {step} is the last: it waits for {late_text}, {wait_limit}"
        return (
            f"step {step} waits, though {ready_count} groups are scored: of these too few fit (buffer.max_lag, its"
            " order)"
        )


def _is_paused(store: RunStore) -> bool:
    return bool(PAUSED.of(store.meta)) and PHASE.of(store.meta) not in ("stop", "finish")


def _name_wait(store: RunStore, text: str) -> None:
    LEARNER_WAITS.set(store, text)
    print(f"agentrl learner: {text}", file=sys.stderr)
