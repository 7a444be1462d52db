"""Trackers of a run file's `[trackers.ID]`: callbacks that send a run's figures to somebody else's program.

Owns how they are made from the run file, how a row of metrics becomes numbers with names, and how the summary and the
plot are handed over. A package offers a tracker of its own under the entry points `agentrl.trackers`.
"""

from __future__ import annotations

import sys
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from agentrl import registry
from agentrl.errors import AgentRLError, ConfigError, boundary
from agentrl.records import Json
from agentrl.run.callbacks.callback import Callback, EvalEnded, StepEnded
from agentrl.run.evaluation.held_out import FIGURES


class MetricTracker(Callback):
    """Sends numbers by name and step. Write `log` and, where there is a place for them, `log_summary` and `on_start`
    (whose event has the run file). Its thread may wait: training does not. What raises is a warning, and no end of the
    run; a method that takes longer than `deadline_s` is named, and not waited for at the end."""

    errors: Literal["stop", "warn"] = "warn"
    deadline_s: float = 30.0

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int, time_s: float) -> None:
        """Numbers of optimizer step `step` at `time_s` (Unix time). A step that a restart undid comes again."""

    def log_summary(self, summary: Mapping[str, Any], plot: Path, step: int) -> None:
        """The run is over: what `summary.json` holds, and a PNG file of its curves. Called once, after `on_end`."""

    def on_step(self, step: StepEnded, /) -> None:
        """Send the step's metrics under the names of `docs/reference/metrics.md`."""
        self.log(dict(numbers(step.values)), step.step, step.time_s)

    def on_eval(self, evaluation: EvalEnded, /) -> None:
        """Send how a held-out set went, as `eval/NAME/success` and so on, `eval/NAME/pass_at/8/low`."""
        figures = {figure_name: getattr(evaluation, figure_name) for figure_name in FIGURES}
        self.log(dict(numbers({"eval": {evaluation.name: figures}})), evaluation.step, evaluation.time_s)


def numbers(values: Mapping[str, Json], above: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a row of metrics, with its name; one in a table is `table/name`. Texts, lists and null are left
    out; true is 1."""
    for metric_name, metric_value in values.items():
        if isinstance(metric_value, Mapping):
            yield from numbers(cast("Mapping[str, Json]", metric_value), f"{above}{metric_name}/")
        elif isinstance(metric_value, bool | int | float):
            yield above + metric_name, float(metric_value)


def made(tables: Mapping[str, Mapping[str, Any]]) -> list[MetricTracker]:
    """The trackers of the run file's `[trackers]`. Raises ConfigError for an unknown id, for arguments that a tracker
    does not take, and for one whose package is not installed."""
    return [_made(tracker_id, arguments) for tracker_id, arguments in tables.items()]


def _made(id: str, arguments: Mapping[str, Any]) -> MetricTracker:
    config_field = f"trackers.{id}"
    try:
        tracker_maker = registry.resolve("trackers", id)
        with boundary(lambda line: ConfigError(config_field, dict(arguments), line), "it cannot be made:", place=True):
            tracker = tracker_maker(**arguments)
    except ConfigError:
        raise
    except AgentRLError as error:
        raise ConfigError(config_field, dict(arguments), str(error)) from None
    if not isinstance(tracker, MetricTracker):
        raise ConfigError(
            config_field, id, "it makes no agentrl.run.callbacks.tracker.MetricTracker: derive its class from that"
        )
    tracker.name = f"trackers.{id}"
    return tracker


def hand_over(trackers: Sequence[MetricTracker], summary: Mapping[str, Any], plot: Path, step: int) -> None:
    """Give each tracker the summary and the plot, for at most its deadline. What goes wrong is one line on stderr."""

    def give(tracker: MetricTracker) -> None:
        try:
            tracker.log_summary(summary, plot, step)
        except Exception as error:
            _warn(tracker, f"has no summary: {type(error).__name__}: {' '.join(str(error).split())}")

    # All at once and each in a thread: the run is over and its user waits for the prompt. Three servers that are down
    # cost one deadline, not three.
    summary_threads = [threading.Thread(target=give, args=[tracker], daemon=True) for tracker in trackers]
    for summary_thread in summary_threads:
        summary_thread.start()
    for tracker, summary_thread in zip(trackers, summary_threads, strict=True):
        summary_thread.join(tracker.deadline_s)
        if summary_thread.is_alive():
            _warn(tracker, f"has not taken the summary for {tracker.deadline_s:.0f} s; the run ends without it")


def _warn(tracker: MetricTracker, line: str) -> None:
    print(f"agentrl: warning: {tracker.name}: {line}", file=sys.stderr)
