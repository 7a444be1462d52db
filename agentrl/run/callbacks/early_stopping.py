"""Ends training when a metric has stopped getting better, or is good enough. Counts in memory, from the run's first
step on: a resumed run counts as if it had never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any, Literal

from agentrl.errors import UsageError
from agentrl.registry import nearest
from agentrl.run.callbacks.callback import Callback, EvalEnded, StepEnded, StopTraining


class EarlyStopping(Callback):
    """Stops when the metric has not been better than its best by more than `min_delta` for `patience` values in a row,
    or has reached `target`. One of both may be left out.

    `on = "step"`: a metric of the optimizer steps (`docs/reference/metrics.md`), as mean over the last `window`;
    `"eval"`: `success`, `outcome`, `turns` or `tokens` of the held-out set `eval_set`, by default of any. Values that
    were not measured count for nothing. Raises UsageError for settings that would never stop anything."""

    # Counted anew from the store at each start instead of kept in a file: a file could disagree with the run after a
    # rollback, and the events of a long run are read in a moment.
    from_start = True

    def __init__(
        self,
        metric: str,
        *,
        on: Literal["step", "eval"] = "step",
        mode: Literal["max", "min"] = "max",
        patience: int | None = None,
        min_delta: float = 0.0,
        target: float | None = None,
        window: int = 1,
        eval_set: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name or f"EarlyStopping({metric})")
        if patience is None and target is None:
            raise UsageError("EarlyStopping would never stop: give it patience=…, target=… or both")
        for field_name, field_value, least_value in (
            ("patience", patience, 1),
            ("window", window, 1),
            ("min_delta", min_delta, 0),
        ):
            if field_value is not None and field_value < least_value:
                raise UsageError(f"EarlyStopping: {field_name} = {field_value!r}: give at least {least_value}")
        if on not in ("step", "eval") or mode not in ("max", "min"):
            raise UsageError(
                f"EarlyStopping: on = {on!r}, mode = {mode!r}: on is 'step' or 'eval', mode 'max' or 'min'"
            )
        self.metric, self.on, self.patience, self.min_delta = metric, on, patience, min_delta
        self.target, self.window, self.eval_set = target, window, eval_set
        self._sign = 1.0 if mode == "max" else -1.0
        self._values: dict[int, float] = {}  # by step, in its order

    def on_step(self, step: StepEnded) -> None:
        """Count a step."""
        if self.on == "step":
            self._count(step.step, step.values)

    def on_eval(self, evaluation: EvalEnded) -> None:
        """Count an evaluation."""
        if self.on == "eval" and self.eval_set in (None, evaluation.name):
            eval_values = {
                metric_name: getattr(evaluation, metric_name)
                for metric_name in ("success", "outcome", "turns", "tokens")
            }
            self._count(evaluation.step, eval_values)

    def _count(self, step: int, values: Mapping[str, Any]) -> None:
        if self.metric not in values:
            nearest_names = ", ".join(nearest(self.metric, list(values))) or ", ".join(values)
            raise UsageError(f"EarlyStopping: no {self.on} has a metric {self.metric!r}: give {nearest_names}")
        metric_value = values[self.metric]
        if not isinstance(metric_value, int | float):
            return
        # Undone steps are trained again.
        self._values = {
            earlier_step: earlier_value for earlier_step, earlier_value in self._values.items() if earlier_step < step
        }
        self._values[step] = float(metric_value)
        if stop_reason := self._reason():
            raise StopTraining(f"{stop_reason}, at step {step}")

    def _reason(self) -> str:
        """Why training is to end; "" while it is not."""
        value_steps, metric_values = list(self._values), list(self._values.values())
        if len(metric_values) < self.window:
            return ""
        window_means = [
            fmean(metric_values[position - self.window : position])
            for position in range(self.window, len(metric_values) + 1)
        ]
        signed_means = [self._sign * window_mean for window_mean in window_means]
        if self.target is not None and signed_means[-1] >= self._sign * self.target:
            return f"{self.metric} is {window_means[-1]:g} (target {self.target:g})"
        best_position = 0
        for position, signed_mean in enumerate(signed_means):
            # Compared with the best so far and not with the value before: a metric that creeps up by less than
            # `min_delta` a step would never count as better, although it gets far in a hundred steps.
            best_position = position if signed_mean > signed_means[best_position] + self.min_delta else best_position
        if self.patience is not None and len(signed_means) - 1 - best_position >= self.patience:
            since_text = f"since {window_means[best_position]:g} at step {value_steps[best_position + self.window - 1]}"
            return f"{self.metric} has not got better for {len(signed_means) - 1 - best_position} values, {since_text}"
        return ""
