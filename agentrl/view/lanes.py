"""Who did something in the last minutes: engines, workers and the learner, each as a lane of bins. Knows no HTTP.

A turn is an engine's from its request to its last token, its queue included; an episode under way without such a turn
is in its environment. A turn that still goes on is in no store yet: it counts as the environment's until it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

from agentrl.run import steering
from agentrl.run.reporting import step_rates
from agentrl.store.metrics import Metric
from agentrl.view.opened_runs import OpenedRun

Json = dict[str, Any]
_MINUTES_S: Final = 600.0
_BINS: Final = 60
_MOST_TURNS: Final = 4000
_QUIET_S: Final = 20.0  # workers report every 5 s: after so long without a report none was there


def lanes(opened: OpenedRun, now: Callable[[], float] = time.time) -> Json | None:
    """The last ten minutes, or as many of them as the newest turns tell of; None for a run in which nothing was played.
    Times are in seconds since the epoch, a bin's values are means over it. Those of a run that is over end with its
    last sign of life."""
    steps = opened.steps()[-500:]
    with opened.store() as store:
        turns, episodes = store.metrics.activity(_MOST_TURNS)
        served_versions, checkpoint_steps = store.versions.served_versions(), set(store.lineage.checkpoint_steps())
        reports = sorted(row.time_s for row in store.metrics.values("fleet", undone=True, after=_first_step(steps) - 2))
    if not turns:
        return None
    last_sign = max([ended for _, ended, _ in turns] + [row.time_s for row in steps])
    until = max(last_sign, now()) if steering.under_way(opened.run) else last_sign
    first_sign = min([began for began, _, _ in turns] + [began for began, _ in episodes])
    if len(turns) == _MOST_TURNS:  # there are older ones
        first_sign = min(ended for _, ended, _ in turns)
    # At least a second, or a run that has just begun would have bins of no width to divide by.
    since = min(max(until - _MINUTES_S, first_sign), until - 1.0)
    bin_width = (until - since) / _BINS

    def spread(spans: Iterable[tuple[float, float, float]]) -> list[float]:
        return _spread(spans, since, bin_width)

    in_engine = spread((began, ended, 1.0) for began, ended, _ in turns)
    # An episode that a resume continues was claimed before the stop: while nobody ran, it was not under way.
    quiet_spans = [(before, after) for before, after in pairwise(reports) if after - before > _QUIET_S]
    playing_spans = [piece for a, b in episodes for piece in _outside(a, until if b is None else b, quiet_spans)]
    under_way = spread((began, ended, 1.0) for began, ended in playing_spans)
    sampled_rates = spread((began, ended, n / max(ended - began, 1e-9)) for began, ended, n in turns)
    busy_spans, idle_spans, trained_spans = _learner(steps)
    learner_busy, learner_idle = spread(busy_spans), spread(idle_spans)
    busy_or_idle = [a + b for a, b in zip(learner_busy, learner_idle, strict=True)]
    return {
        "since_s": since,
        "until_s": until,
        "engine": {
            "turns": in_engine,
            "tokens_per_s": sampled_rates,
            "idle": _idle([(a, b) for a, b, _ in turns], since, until),
        },
        "worker": {
            "episodes": under_way,
            # A difference of two measurements of different processes, whose clocks need not agree: below zero it is
            # their error.
            "environment": [max(0.0, a - b) for a, b in zip(under_way, in_engine, strict=True)],
            "idle": _idle(playing_spans, since, until),
        },
        "learner": {
            "busy": learner_busy,
            "tokens_per_s": spread(trained_spans),
            # Of the time that the steps account for, not of the ten minutes: the step under way is in no row yet, and
            # would count as idle.
            "idle": sum(learner_idle) / sum(busy_or_idle) if sum(busy_or_idle) else None,
        },
        "marks": [
            *(
                {"kind": "weights", "time_s": version.confirmed_s, "step": version.step}
                for version in served_versions
                if version.confirmed_s >= since
            ),
            *(
                {"kind": "checkpoint", "time_s": row.time_s, "step": row.step}
                for row in steps
                if row.step in checkpoint_steps and row.time_s >= since
            ),
        ],
    }


def _first_step(steps: Sequence[Metric]) -> int:
    return steps[0].step if steps else 0


def _outside(began: float, ended: float, stops: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of a span that lie outside of the stops, which are in order and apart."""
    remaining_spans: list[tuple[float, float]] = []
    for paused_at, resumed_at in stops:
        if paused_at < ended and resumed_at > began:
            if paused_at > began:
                remaining_spans.append((began, paused_at))
            began = resumed_at
    return [*remaining_spans, (began, ended)] if ended > began else remaining_spans


def _learner(steps: Sequence[Metric]) -> tuple[list[tuple[float, float, float]], ...]:
    """The times in which the learner was busy and idle, and the tokens a second that its steps trained. A step is
    recorded at its end; before it worked, it waited."""
    busy_spans: list[tuple[float, float, float]] = []
    idle_spans: list[tuple[float, float, float]] = []
    trained_spans: list[tuple[float, float, float]] = []
    for step_row in steps:
        worked_s, waited_s = (float(step_row.values.get(name) or 0.0) for name in ("busy_s", "idle_s"))  # pyright: ignore[reportArgumentType]
        whole_s = max(step_rates.wall_s(step_row.values), worked_s + waited_s)
        tokens = step_rates.trained_tokens(step_row.values)
        busy_spans.append((step_row.time_s - worked_s, step_row.time_s, 1.0))
        idle_spans.append((step_row.time_s - worked_s - waited_s, step_row.time_s - worked_s, 1.0))
        trained_spans.append((step_row.time_s - whole_s, step_row.time_s, tokens / max(whole_s, 1e-9)))
    return busy_spans, idle_spans, trained_spans


def _spread(spans: Iterable[tuple[float, float, float]], since: float, width: float) -> list[float]:
    """The mean over each bin of the sum of values that hold from a time to another."""
    bin_values = [0.0] * _BINS
    until = since + _BINS * width
    for began, ended, span_value in spans:
        began, ended = max(began, since), min(ended, until)
        if ended <= began:
            continue
        first_bin, last_bin = int((began - since) / width), min(_BINS - 1, int((ended - since) / width))
        # Spans are divided exactly over bins, not sampled at their middles: turns are shorter than a bin, and would
        # flicker in and out of a sample.
        if first_bin == last_bin:
            bin_values[first_bin] += span_value * (ended - began)
            continue
        bin_values[first_bin] += span_value * (since + (first_bin + 1) * width - began)
        for bin_number in range(first_bin + 1, last_bin):
            bin_values[bin_number] += span_value * width
        bin_values[last_bin] += span_value * (ended - since - last_bin * width)
    return [round(span_value / width, 3) for span_value in bin_values]


def _idle(spans: Iterable[tuple[float, float]], since: float, until: float) -> float:
    """The share of the time in which none of the spans was."""
    covered_s, reached_s = 0.0, since
    # A sweep over the beginnings: what is covered already reaches up to `reached_s`, and each span adds only what lies
    # beyond.
    for began, ended in sorted(spans):
        covered_s += max(0.0, min(ended, until) - max(began, reached_s))
        reached_s = max(reached_s, min(ended, until))
    return 1.0 - covered_s / (until - since)
