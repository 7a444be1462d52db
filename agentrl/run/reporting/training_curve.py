"""The success of a training run over its steps, with intervals.

A step trains a few groups, so its success is mostly luck: seen step by step, a curve rises and falls without a reason.
The unit is the task, that is the group: members of one group share its difficulty. Each interval is Wilson's over
groups, as that of pass@k (`agentrl.algos.pass_at_k`), and is too wide rather than too narrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentrl.algos.pass_at_k import wilson


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The success of the steps `first` to `last`, of so many `groups`, with the ends of its 95% interval."""

    first: int
    last: int
    success: float
    low: float
    high: float
    groups: int


def training_curve(steps: Sequence[tuple[int, float, int]], points: int) -> list[CurvePoint]:
    """At most `points` points of a curve, each of about as many steps; `steps` are (step, success, groups) in order. A
    step without a group says nothing and is left out."""
    judged_steps = [step for step in steps if step[2] > 0]
    return [_point(part_steps) for part_steps in _parts(judged_steps, points)]


def _parts(steps: Sequence[tuple[int, float, int]], points: int) -> Iterator[Sequence[tuple[int, float, int]]]:
    part_count = min(points, len(steps))
    for part_index in range(part_count):
        yield steps[part_index * len(steps) // part_count : (part_index + 1) * len(steps) // part_count]


def _point(steps: Sequence[tuple[int, float, int]]) -> CurvePoint:
    group_count = sum(step_groups for _, _, step_groups in steps)
    # Weighted by groups: a step that lost most of its groups would else count as much as a whole one.
    mean_success = sum(step_success * step_groups for _, step_success, step_groups in steps) / group_count
    low, high = wilson(mean_success, group_count)
    return CurvePoint(steps[0][0], steps[-1][0], mean_success, low, high, group_count)
