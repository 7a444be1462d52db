"""The records of a step: its row of metrics, the alarms that the row raises, the lag bound after these, and the hashes
of its weights. The row itself is written with the push of these weights (`weight_push`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import trio

from agentrl.learner.step_report import StepReport
from agentrl.learner.weight_export import circumstances
from agentrl.run.alarms import LagBound, Raised, raised
from agentrl.run.league import League
from agentrl.run.learning.current_settings import CurrentSettings
from agentrl.run.learning.store_calls import StoreCalls
from agentrl.run.learning.take_batches import Batch
from agentrl.store.run_values import MAX_LAG


class StepRecords:
    """Makes the rows of steps. `bound` is the lag bound in force, `league` that of a run with past selves."""

    def __init__(
        self, calls: StoreCalls, settings: CurrentSettings, bound: LagBound, league: League | None = None
    ) -> None:
        self._calls, self._settings, self._bound, self._league = calls, settings, bound, league
        self._row_at = trio.current_time()

    def begin(self) -> None:
        """Begin to measure the time of the first step."""
        self._row_at = trio.current_time()

    async def row(
        self, report: StepReport, batch: Batch, *, idle_s: float, busy_s: float, max_lag: int
    ) -> tuple[dict[str, Any], Sequence[Raised]]:
        """The row of a step that was trained under the bound `max_lag`, and its alarms."""
        taken_groups = [group.id for group in batch.groups if not group.skipped]
        # With the row, since the store keeps no weight of a group: `agentrl retrain` has to repeat a step of a
        # prioritised order exactly.
        group_weights = {str(group.id): group.weight for group in batch.groups if group.weight != 1.0}
        step_row = {
            **asdict(report),
            "idle_s": idle_s,
            "busy_s": busy_s,
            "groups": taken_groups,
            "group_weights": group_weights,
        }
        step_row |= {"held_s": batch.held_s, "wall_s": self._wall_s(batch.paused_s)}
        step_alarms = raised(step_row, self._settings.config.alarms)
        if self._league is not None:
            step_row |= self._league.count(batch.groups)
        step_row |= {"max_lag": max_lag, "alarms": [alarm.text for alarm in step_alarms]}
        if changed_settings := await self._settings.changed():
            step_row["settings"] = changed_settings
        return step_row, step_alarms

    def _wall_s(self, paused_s: float) -> float:
        """Seconds since the row of the step before, without pauses of the run: all that the step cost, also what is
        neither its work nor its wait."""
        last_row_s, self._row_at = self._row_at, trio.current_time()
        return self._row_at - last_row_s - paused_s

    async def follow(self, step: int, alarms: Sequence[Raised], hashes: Mapping[str, str]) -> None:
        """Let the lag bound of the next step follow from the alarms of this one, and record the hashes of its weights,
        which `agentrl retrain` compares with its own. Only the store has them: they are no curve."""
        next_bound = self._bound.after(alarms)
        # In the store before the next batch is taken: admission reads it there, and a bound that only the learner knew
        # would let workers play episodes that it then refuses.
        await self._calls(lambda store: MAX_LAG.set(store, next_bound))
        hash_row = {"hashes": list(hashes.values()), "with": circumstances(self._settings.config.train)}
        await self._calls(lambda store: store.metrics.record("weights", step, hash_row))
