"""The live view of a run: step, reward, success, staleness, tokens per second, which part waits for which.

It reads the store and draws, in a terminal or a notebook; elsewhere it prints one line per step, of at most $COLUMNS
columns if that is set; what went wrong is never cut. `Warnings` prints nothing, and logs what a person must not miss.
If no step comes, it says who is waited for: a learner that hangs is seen by what it does not take.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from statistics import fmean
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.host import json_log
from agentrl.host.nonblocking_output import waiting_for_no_reader
from agentrl.host.terminal_text import printable
from agentrl.records import GroupState
from agentrl.run.alarms import moved, no_signal
from agentrl.run.health.examine import HealthLines
from agentrl.run.health.run_facts import read_facts
from agentrl.run.reporting import report, step_rates
from agentrl.run.reporting.failed_tasks import FailureLines, ScoreFailureLines
from agentrl.run.reporting.status import duration, eta_s
from agentrl.run.supervisor import MEASURING, TRAINING, Supervisor
from agentrl.store.run_values import LEARNER_WAITS

_LOOK_S = 2.0
_LONG_S = 30.0  # without a step, then twice as long each time


@dataclass(slots=True)
class WaitLines:
    """A line when nothing was trained for long, though groups are scored or should be; again at each doubling."""

    now: Callable[[], float] = time.monotonic
    _state: tuple[int, bool] = (-1, False)
    _looked: float = float("-inf")
    _since: float = 0.0
    _next_s: float = _LONG_S

    def lines(self, supervisor: Supervisor) -> Iterator[str]:
        """Yield the warning that is due since the last call."""
        run_store, current_s = supervisor.store, self.now()
        if supervisor.phase != TRAINING or current_s - self._looked < _LOOK_S:
            return
        self._looked = current_s
        current_step = run_store.versions.current_version().step
        ready_count = run_store.groups.counts().get(GroupState.SCORED, 0)
        has_enough = ready_count >= supervisor.config.buffer.groups_per_step
        wait_state = (current_step, has_enough)
        # The pair, not the step alone: from "groups are missing" to "enough groups are there" somebody else is to
        # blame, and has its own thirty seconds.
        if wait_state != self._state:
            self._state, self._since, self._next_s = wait_state, current_s, _LONG_S
        if current_s - self._since < self._next_s:
            return
        waited_s, self._next_s = current_s - self._since, 2 * self._next_s
        late_sources = ", ".join(
            f"reward source {source_name!r} has to score turns of {episode_count} ended episodes"
            for source_name, episode_count in run_store.scores.episodes_unscored().items()
        )
        logs_command = f"agentrl logs {supervisor.run.path}"
        if wait_reason := LEARNER_WAITS.of(run_store.meta):
            yield f"warning: no step for {waited_s:.0f} s: {wait_reason}" + (
                f"; {late_sources}" if late_sources else ""
            )
        elif has_enough and not run_store.lineage.stands_beyond(current_step):
            yield (
                f"warning: {ready_count} groups are scored, and the learner takes none for {waited_s:.0f} s, nor does"
                f" it say that it waits: {logs_command} learner"
            )
        elif late_sources and not has_enough and not run_store.lineage.stands_beyond(current_step):
            yield f"warning: no step for {waited_s:.0f} s: {late_sources}: {logs_command} worker-0"


_WINDOW = 10  # number of steps in a displayed mean
_DRAWN = 512  # steps whose metrics are read for a drawing, about
_STANDING = 256  # rows kept of steps that change no weight
_SPARKS = "▁▂▃▄▅▆▇█"


log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Alerts:
    """Lines that a person must not miss: failures, alarms, steps that change no weight, advice on the run's health."""

    _rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # since the weights moved, the newest
    _standing: int = 0  # steps since the weights moved
    _warned: int = 0
    _failures: FailureLines | None = None
    _unscored: ScoreFailureLines | None = None
    _waits: WaitLines = field(default_factory=WaitLines)
    _health: HealthLines | None = None

    def failures(self, supervisor: Supervisor) -> Iterator[str]:
        """The failures since the last call."""
        if self._failures is None:
            folder_stays = supervisor.phase != MEASURING
            self._failures = FailureLines(supervisor.run.path if folder_stays else None)
            self._unscored = ScoreFailureLines(supervisor.run.path) if supervisor.config.rewards else None
        yield from self._failures.lines(supervisor.store)
        if self._unscored is not None:
            yield from self._unscored.lines(supervisor.store)
        yield from self._waits.lines(supervisor)
        if supervisor.phase == TRAINING:
            run_store, run_config, run_path = supervisor.store, supervisor.config, supervisor.run.path
            self._health = self._health or HealthLines(run_path)
            current_step = run_store.versions.current_version().step
            yield from self._health.lines(current_step, lambda: read_facts(run_store, run_config, run_path, live=True))

    def of_step(self, row: dict[str, Any]) -> Iterator[str]:
        """The alarms of a step; and a warning when the steps stop changing the weights, then again each time that the
        number of such steps doubles."""
        for alarm_text in row.get("alarms", ()):
            yield f"alarm: {alarm_text}"
        if moved(row):
            self._rows, self._standing, self._warned = [], 0, 0
            return
        # Bounded: a run that learns nothing for a week would otherwise keep every row of it in memory to say so.
        self._rows = [*self._rows[1 - _STANDING :], row]
        self._standing += 1
        standstill = no_signal(self._rows)
        if standstill is not None and self._standing >= 2 * self._warned:
            self._warned = self._standing
            yield f"warning: {replace(standstill, steps=self._standing)}"


@dataclass(slots=True)
class Warnings:
    """A view that shows nothing: what a person must not miss is logged as a warning."""

    _alerts: _Alerts = field(default_factory=_Alerts)
    _logged: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def tick(self, supervisor: Supervisor) -> None:
        """Log what is new."""
        for alert_line in self._alerts.failures(supervisor):
            log.warning("%s", alert_line)
        if self._logged is None:
            self._logged = _resumed_after(supervisor)
        for step_row in supervisor.store.metrics.values("step", after=self._logged):
            self._logged = step_row.step
            for alert_line in self._alerts.of_step(step_row.values):
                log.warning("%s", alert_line)


@dataclass(slots=True)
class LiveView:
    """A context manager; pass its `tick` to a supervisor as `on_tick`."""

    console: Console = field(default_factory=Console)
    _live: Live | None = None
    _printing: ExitStack = field(default_factory=ExitStack)
    _printed: int | None = None
    _phase: str = ""
    _alerts: _Alerts = field(default_factory=_Alerts)

    def __enter__(self) -> Self:
        if not self.console.is_jupyter:  # a notebook's streams are no files, though they have a number
            self._printing.enter_context(waiting_for_no_reader())
        # Without widgets a notebook appends each redrawing to the cell, four times a second.
        if self.console.is_terminal or (self.console.is_jupyter and find_spec("ipywidgets") is not None):
            self._live = Live(console=self.console, refresh_per_second=4, transient=False)
            self._live.start()
        self._print("starting engines, workers and the learner")  # which takes seconds, and minutes for a large model
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self._printing.close()

    def tick(self, supervisor: Supervisor) -> None:
        """Draw the current state. Failures are lines, above a live table too: what failed once is not overdrawn."""
        for alert_line in self._alerts.failures(supervisor):
            self._print(alert_line)
        if self._live is not None:
            self._live.update(self._panel(supervisor))
        else:
            self._lines(supervisor)

    def _lines(self, supervisor: Supervisor) -> None:
        if supervisor.phase != self._phase:
            self._phase = supervisor.phase
            self._print(f"[{_age(supervisor)}] {self._phase}")
        if self._printed is None:
            self._printed = _resumed_after(supervisor)
            if self._printed:
                self._print(f"goes on after step {self._printed}; earlier steps: {supervisor.run.path}/metrics.jsonl")
        for step_row in supervisor.store.metrics.values("step", after=self._printed):
            self._printed = step_row.step
            values = step_row.values
            self._print(
                f"step {step_row.step:4d}  reward {_mean([values], 'outcome_mean')}  "
                f"success {_mean([values], 'success_mean')}  "
                f"lag {_mean([values], 'lag_mean')} (max {values['lag_max']})  "
                f"{step_rates.trained_tokens(values):6d} tokens trained  "
                f"busy {values['busy_s']:.2f} s  idle {values['idle_s']:.2f} s",
                cut=True,
            )
            for alert_line in self._alerts.of_step(values):
                self._print(alert_line)

    def _print(self, line: str, *, cut: bool = False) -> None:
        is_drawn = self._live is not None or self.console.is_jupyter
        self.console.print(line if is_drawn else one_line(line, cut=cut), markup=False, highlight=False, soft_wrap=True)

    def _panel(self, supervisor: Supervisor) -> RenderableType:
        run_config, run_store = supervisor.config, supervisor.store
        step_rows = run_store.metrics.sample("step", _DRAWN)
        recent_rows = [step_row.values for step_row in step_rows[-_WINDOW:]]
        last_step = step_rows[-1].step if step_rows else 0
        panel_table = Table.grid(padding=(0, 3))
        panel_table.add_column(style="dim", justify="right")
        panel_table.add_column()
        panel_table.add_row("phase", supervisor.phase)
        panel_table.add_row("step", _bar(last_step, run_config.train.steps, eta_s(step_rows, run_config.train.steps)))
        if recent_rows:
            self._numbers(panel_table, recent_rows, [step_row.values for step_row in step_rows])
        for alarm_text in recent_rows[-1].get("alarms", ()) if recent_rows else ():
            panel_table.add_row(Text("alarm", style="bold red"), Text(alarm_text, style="red"))
        if standstill := no_signal([step_row.values for step_row in step_rows]):
            panel_table.add_row(Text("no signal", style="bold red"), Text(str(standstill), style="red"))
        success_curve = list(report.during(run_store, run_config))
        if success_curve:
            panel_table.add_row(
                "held-out", "  ".join(f"{at_step}: {success:.2f}" for at_step, success in success_curve)
            )
        group_counts = run_store.groups.counts()
        panel_table.add_row(
            "groups",
            f"{group_counts.get(GroupState.RUNNING, 0)} running, {group_counts.get(GroupState.SCORED, 0)} ready, "
            f"{group_counts.get(GroupState.TAKEN, 0) + group_counts.get(GroupState.TRAINED, 0)} trained"
            + "".join(f", {drop_count} dropped ({reason})" for reason, drop_count in run_store.metrics.drops().items()),
        )
        for lost_task in run_store.deaths.quarantined()[-3:]:
            panel_table.add_row("not played again", Text(lost_task.reason))
        panel_title = f"agentrl · {run_config.name} · {run_config.env.id} · {_age(supervisor)}"
        return Panel(Group(panel_table), title=panel_title, border_style="blue", title_align="left")

    def _numbers(self, table: Table, recent: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
        idle_share = step_rates.idle_share(recent)
        table.add_row("reward", f"{_mean(recent, 'outcome_mean')}  {_spark(rows, 'outcome_mean')}")
        table.add_row("success", f"{_mean(recent, 'success_mean')}  {_spark(rows, 'success_mean')}")
        table.add_row("staleness", f"{_mean(recent, 'lag_mean')} steps, max {recent[-1]['lag_max']}")
        table.add_row("off-policy", _drift(recent))
        table.add_row("trained", f"{step_rates.trained_per_s(recent):,.0f} tokens/s")
        who_waits = "learner waits for episodes" if idle_share > 0.5 else "learner is busy"
        table.add_row("who waits", f"{who_waits}: idle {idle_share:.0%}")


def _resumed_after(supervisor: Supervisor) -> int:
    """The step after which a run goes on, 0 at its first start. The steps before it were printed by an earlier process;
    those after its newest checkpoint are made again, and are news."""
    checkpoint = supervisor.store.lineage.latest_checkpoint()
    return checkpoint.step if checkpoint else 0


def one_line(text: str, *, cut: bool = False) -> str:
    """A text as one line without control characters; `cut`, with an ellipsis, at $COLUMNS columns if that is set: a
    pager or a pane of logs that wraps lines hides where one begins. JSON is never cut."""
    width_text, printed_text = os.environ.get("COLUMNS", ""), Text(printable(text))
    if width_text.isascii() and width_text.isdecimal() and int(width_text) and cut and not json_log.is_on():
        printed_text.truncate(int(width_text), overflow="ellipsis")
    return printed_text.plain


def _age(supervisor: Supervisor) -> str:
    age_seconds = int(time.time() - supervisor.started_s)
    return f"{age_seconds // 60}:{age_seconds % 60:02d}"


def _bar(step: int, steps: int, left_s: float | None) -> RenderableType:
    bar_grid = Table.grid(padding=(0, 1))
    remaining = f"{duration(left_s)} left" if left_s else ""
    bar_grid.add_row(Text(f"{step}/{steps}"), ProgressBar(total=steps, completed=step, width=40), Text(remaining))
    return bar_grid


def _drift(rows: list[dict[str, Any]]) -> str:
    """How far learner and behaviour policy are apart, in one line."""
    kl_text, mismatch_text = _mean(rows, "kl_k3"), _mean(rows, "mismatch_mean")
    clipped_text = _mean(rows, "clip_fraction")
    return f"ESS {_mean(rows, 'ess')}, KL {kl_text}, clipped {clipped_text}, engine differs by {mismatch_text} nats"


def _values(rows: list[dict[str, Any]], key: str) -> list[float]:
    """The measured values; a step without any value to average has None."""
    return [float(step_row[key]) for step_row in rows if step_row[key] is not None]


def _mean(rows: list[dict[str, Any]], key: str) -> str:
    measured = _values(rows, key)
    return f"{fmean(measured):.3f}" if measured else "-"


def _spark(rows: list[dict[str, Any]], key: str, width: int = 40) -> str:
    measured = _values(rows, key)
    if not measured:
        return ""
    # Means of neighbours and not every n-th value: a reward is noisy from step to step, and a picked value would draw
    # the noise.
    window_size = max(1, len(measured) // width)
    window_means = [
        fmean(measured[first_position : first_position + window_size])
        for first_position in range(0, len(measured), window_size)
    ]
    lowest_mean, highest_mean = min(window_means), max(window_means)
    levels_per_unit = (len(_SPARKS) - 1) / (highest_mean - lowest_mean) if highest_mean > lowest_mean else 0.0
    return "".join(_SPARKS[int((window_mean - lowest_mean) * levels_per_unit)] for window_mean in window_means)
