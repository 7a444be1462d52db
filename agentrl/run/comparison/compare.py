"""Pair the results of several models by task, and say of each pair whether a difference is shown.

Owns the pairing, what is left out, and the words. The numbers come from `agentrl.statistics`; never reads a run or a
file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile
from statistics import fmean
from typing import Final

import numpy as np

from agentrl.algos.pass_at_k import pass_all_k, pass_at_k
from agentrl.errors import UsageError
from agentrl.run.comparison.results import NUMBERS, Episode, Results, TaskKey
from agentrl.statistics import confidence_sequence
from agentrl.statistics.paired import LEVEL, Array, Interval, holm, mcnemar, over_seeds, over_tasks

Value = Callable[[Sequence[Episode]], float | None]
_ALPHA: Final = 1 - LEVEL
_FEW = 30  # tasks, below which a t interval leans on the shape of the differences

_MODELS: Final = (
    "These are trained models, not algorithms: seeds of training are a level of their own. To compare algorithms, train"
    " several seeds of each and give --group NAME=RUN,RUN."
)
_OVER_TASKS: Final = (
    "Intervals: t over tasks, samples of a task being one cluster; with Agresti and Min's two tasks more for"
    " success, pass@k and pass^k."
)
_OVER_SEEDS: Final = "Intervals: Welch's over seeds of training, on these tasks; each trained model counts once."
_SEQUENTIAL: Final = (
    "A confidence sequence (Waudby-Smith and Ramdas 2024): look as often as you like, at tasks whose order does not"
    " depend on their results."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the compared: a model, or the trained models of an algorithm (`is_group`), one for each seed."""

    name: str
    models: Sequence[Results]
    is_group: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measure of a pair: both means over `n` tasks, the difference b - a with its interval, the p-value
    (None: a confidence sequence has none). `left_out` counts paired tasks that lack it."""

    name: str
    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float | None
    n: int
    left_out: int


@dataclass(slots=True, kw_only=True)
class Comparison:
    """A pair. The first measure decides: `p_adjusted` is its p-value, corrected for the number of pairs."""

    a: str
    b: str
    tasks: int
    samples: tuple[int, int]
    measures: list[Measured]
    left_out: dict[str, int]
    p_adjusted: float | None = None
    is_shown: bool = False
    is_exact: bool = False
    decided_after: int | None = None
    sentence: str = ""


def compare(sides: Sequence[Side], *, sequential: bool = False) -> tuple[list[Comparison], list[str]]:
    """Compare every pair, and return the notes that belong to all of them. Raises UsageError for sides that have no
    two tasks in common, or a group of a single model."""
    _check(sides, sequential)
    _match_keys([side_model for compared_side in sides for side_model in compared_side.models])
    side_pairs = list(combinations(sides, 2))
    comparisons = [
        _sequence(first_side, second_side, len(side_pairs)) if sequential else _fixed(first_side, second_side)
        for first_side, second_side in side_pairs
    ]
    if not sequential:
        adjusted = holm([comparison.measures[0].p or 0.0 for comparison in comparisons])
        for comparison, adjusted_p in zip(comparisons, adjusted, strict=True):
            deciding_measure = comparison.measures[0]
            comparison.p_adjusted = adjusted_p
            comparison.is_shown = adjusted_p < _ALPHA and not deciding_measure.low <= 0 <= deciding_measure.high
    for comparison in comparisons:
        comparison.sentence = _sentence(comparison, sequential)
        if len(side_pairs) > 1 and comparison.p_adjusted is not None:
            comparison.sentence += f"; p {comparison.p_adjusted:.2g} after Holm's correction"
    return comparisons, _notes(sides, comparisons, sequential)


def _check(sides: Sequence[Side], sequential: bool) -> None:
    side_names = [compared_side.name for compared_side in sides]
    if len(sides) < 2 or len(set(side_names)) < len(side_names):
        raise UsageError(f"compare takes two or more that have different names, got: {', '.join(side_names) or 'none'}")
    if sequential and any(compared_side.is_group for compared_side in sides):
        raise UsageError("--sequential looks at tasks as they come, --group at seeds: leave out one of them")
    for compared_side in sides:
        if compared_side.is_group and len(compared_side.models) < 2:
            raise UsageError(f"group {compared_side.name} has one run: seeds can be compared from two runs a side")


def _match_keys(models: Sequence[Results]) -> None:
    """Where the rows of some file lack a part of a task's identity, compare all by the rest of it."""
    key_parts = ("env", "arguments")
    lacking_parts = {
        key_part: ""
        for key_part in key_parts
        if not all(getattr(task_key, key_part) for compared_model in models for task_key in compared_model.tasks)
    }
    for compared_model in models:
        tasks_by_key = {
            task_key._replace(**lacking_parts): episodes for task_key, episodes in compared_model.tasks.items()
        }
        if len(tasks_by_key) < len(compared_model.tasks):
            raise UsageError(
                f"tasks of {compared_model.name} differ by {' and '.join(lacking_parts)}, which other rows do not name"
            )
        compared_model.tasks = tasks_by_key
        compared_model.unfinished = {task_key._replace(**lacking_parts) for task_key in compared_model.unfinished}


def _paired(a: Side, b: Side) -> tuple[list[TaskKey], dict[str, int]]:
    """Return the tasks that all models of both sides have, in the order of the first model; and how many each lacks."""
    all_models = [*a.models, *b.models]
    played_keys = [
        {task_key for task_key, episodes in compared_model.tasks.items() if episodes} for compared_model in all_models
    ]
    everywhere = played_keys[0].intersection(*played_keys[1:])
    left_out: dict[str, int] = {}
    for compared_model, keys_of_model in zip(all_models, played_keys, strict=True):
        left_out[f"tasks of {compared_model.name} that others have not"] = len(keys_of_model - everywhere)
        left_out[f"episodes of {compared_model.name} that infrastructure ended"] = compared_model.failed
        left_out[f"tasks of {compared_model.name} that have not ended"] = len(compared_model.unfinished)
    common_keys = [
        task_key
        for task_key in all_models[0].tasks
        if task_key in everywhere and not any(task_key in other_model.unfinished for other_model in all_models)
    ]
    if len(common_keys) < 2:
        seed_keys = [{task_key._replace(arguments="") for task_key in keys_of_model} for keys_of_model in played_keys]
        same_seeds = len(seed_keys[0].intersection(*seed_keys[1:])) > len(common_keys)
        likely_cause = (
            "arguments or options of the environment differ" if same_seeds else "other environments, seeds or rows"
        )
        raise UsageError(
            f"{a.name} and {b.name} have {len(common_keys)} tasks in common ({likely_cause}): play the same tasks"
        )
    return common_keys, {omission: omitted_count for omission, omitted_count in left_out.items() if omitted_count}


def _values(most_samples: int) -> Mapping[str, Value]:
    """Return the measures by name, each a function of the episodes of a task; None if it is not known for that task."""

    def mean(name: str) -> Value:
        def value(episodes: Sequence[Episode]) -> float | None:
            episode_numbers = [getattr(episode, name) for episode in episodes]
            return None if None in episode_numbers else fmean(episode_numbers)

        return value

    def solved(k: int, estimate: Callable[[int, int, int], float]) -> Value:
        def value(episodes: Sequence[Episode]) -> float | None:
            successes = [episode.success for episode in episodes]
            if None in successes or len(successes) < k:
                return None
            return estimate(len(successes), sum(map(bool, successes)), k)

        return value

    k_values = [1 << exponent for exponent in range(1, most_samples.bit_length())]
    return {
        "success": mean("success"),
        **{f"pass@{k}": solved(k, pass_at_k) for k in k_values},
        **{f"pass^{k}": solved(k, pass_all_k) for k in k_values},
        **{number_name: mean(number_name) for number_name in NUMBERS},
    }


def _fixed(a: Side, b: Side) -> Comparison:
    """Compare a pair once, all of its tasks played."""
    common_keys, left_out = _paired(a, b)
    sample_counts = [
        len(side_model.tasks[task_key])
        for compared_side in (a, b)
        for side_model in compared_side.models
        for task_key in common_keys
    ]
    comparison = Comparison(
        a=a.name,
        b=b.name,
        tasks=len(common_keys),
        samples=(min(sample_counts), max(sample_counts)),
        measures=[],
        left_out=left_out,
    )
    for measure_name, task_value in _values(max(sample_counts)).items():
        value_table, complete = _table(a, b, common_keys, task_value)
        if len(complete) < 2:
            continue
        first_values, second_values = value_table[: len(a.models)], value_table[len(a.models) :]
        if a.is_group or b.is_group:
            interval = over_seeds(first_values.mean(axis=1).tolist(), second_values.mean(axis=1).tolist())
        else:
            differences = second_values[0] - first_values[0]
            interval = over_tasks(differences, is_success=is_share(measure_name))
            # Where a handful of tasks differ, no approximation is good enough: the exact p decides with the interval.
            if measure_name == "success" and max(sample_counts) == 1:
                exact_p = mcnemar(int((differences < 0).sum()), int((differences > 0).sum()))
                comparison.is_exact, interval = True, interval._replace(p=exact_p)
        comparison.measures.append(
            _measured(measure_name, first_values, second_values, interval, len(common_keys) - len(complete))
        )
    if not comparison.measures:
        raise UsageError(f"{a.name} and {b.name} have no measure in common: each needs success or outcome")
    return comparison


def _sequence(a: Side, b: Side, pairs: int) -> Comparison:
    """Look at a pair while its tasks are played: at the success of those before the first that has not ended, as quick
    tasks end first. With several pairs each has its share of the error."""
    common_keys, left_out = _paired(a, b)
    (first_model,), (second_model,) = a.models, b.models
    unfinished = first_model.unfinished | second_model.unfinished
    ended_keys = set(takewhile(lambda key: key not in unfinished, first_model.tasks))
    # Episodes that end early are the easy ones: tasks behind one that goes on would come in an order by result.
    leading_keys = [task_key for task_key in common_keys if task_key in ended_keys]
    if len(leading_keys) < len(common_keys):
        left_out["tasks behind the first that has not ended"] = len(common_keys) - len(leading_keys)
    value_table, complete = _table(a, b, leading_keys, _values(1)["success"])
    if len(complete) < 2:
        raise UsageError(f"{a.name} and {b.name}: fewer than two tasks have a success before the first that goes on")
    differences, pair_alpha = value_table[1] - value_table[0], _ALPHA / pairs
    lower_bound, upper_bound = (
        float(interval_bound) for interval_bound in confidence_sequence.sequence(differences, alpha=pair_alpha)
    )
    decided_after = confidence_sequence.decided_after(differences, alpha=pair_alpha)
    sample_counts = [
        len(compared_model.tasks[task_key]) for compared_model in (first_model, second_model) for task_key in complete
    ]
    interval = Interval(differences.mean(), lower_bound, upper_bound, None)
    return Comparison(
        a=a.name,
        b=b.name,
        tasks=len(complete),
        samples=(min(sample_counts), max(sample_counts)),
        measures=[_measured("success", value_table[:1], value_table[1:], interval, len(leading_keys) - len(complete))],
        left_out=left_out,
        # With crossed bounds the order of the tasks matters, and nothing is shown.
        is_shown=decided_after is not None and lower_bound <= upper_bound,
        decided_after=decided_after,
    )


def _table(a: Side, b: Side, keys: Sequence[TaskKey], value: Value) -> tuple[Array, list[TaskKey]]:
    """Return the values of a measure, a row for each model of `a` and then `b`, a column for each complete task."""
    all_models = [*a.models, *b.models]
    values_by_task = {
        task_key: [value(compared_model.tasks[task_key]) for compared_model in all_models] for task_key in keys
    }
    complete = [task_key for task_key, task_values in values_by_task.items() if None not in task_values]
    return np.array([values_by_task[task_key] for task_key in complete], dtype=np.float64).T, complete


def _measured(name: str, a: Array, b: Array, interval: Interval, left_out: int) -> Measured:
    return Measured(
        name=name,
        a=float(a.mean()),
        b=float(b.mean()),
        difference=float(interval.estimate),
        low=float(interval.low),
        high=float(interval.high),
        p=None if interval.p is None else float(interval.p),
        n=a.shape[1],
        left_out=left_out,
    )


def _sentence(pair: Comparison, sequential: bool) -> str:
    deciding_measure = pair.measures[0]
    # A difference that is shown is said of the better one, so that its numbers are above 0.
    direction = -1 if pair.is_shown and deciding_measure.difference < 0 else 1
    lower_bound, upper_bound = sorted((direction * deciding_measure.low, direction * deciding_measure.high))
    unit_text = " points" if is_share(deciding_measure.name) else f" of {deciding_measure.name}"
    fewest_samples, most_samples = pair.samples
    sample_text = f"{fewest_samples} to {most_samples}" if fewest_samples < most_samples else f"{most_samples}"
    difference_text = (
        f"{in_units(deciding_measure.name, direction * deciding_measure.difference)}{unit_text}, {LEVEL:.0%} interval "
        f"{in_units(deciding_measure.name, lower_bound)} to {in_units(deciding_measure.name, upper_bound)}; "
        f"{deciding_measure.n} tasks, {sample_text} sample{'s' * (most_samples > 1)} each"
    )
    if not pair.is_shown:
        verdict = "go on, nothing is decided" if sequential else "no difference is shown"
        return f"{verdict}: {pair.b} minus {pair.a} is {difference_text}"
    better_name, other_name = (pair.b, pair.a) if direction > 0 else (pair.a, pair.b)
    decided_text = f"decided after {pair.decided_after} tasks: " if sequential else ""
    return f"{decided_text}{better_name} is better than {other_name} by {difference_text}"


def is_share(measure: str) -> bool:
    """Whether a measure is a probability."""
    return measure == "success" or measure.startswith(("pass@", "pass^"))


def in_units(measure: str, value: float) -> str:
    """A mean or a difference for people: success, pass@k and pass^k in percent or its points."""
    return f"{100 * value:.1f}" if is_share(measure) else f"{value:.3g}"


def _notes(sides: Sequence[Side], comparisons: Sequence[Comparison], sequential: bool) -> list[str]:
    has_groups, pair_count = any(compared_side.is_group for compared_side in sides), len(comparisons)
    note_lines = [_SEQUENTIAL if sequential else _OVER_SEEDS if has_groups else _OVER_TASKS]
    if any(comparison.is_exact for comparison in comparisons):
        note_lines.append("With one sample a task, success differs only if McNemar's exact test (p) agrees.")
    if pair_count > 1:
        correction = "the error is divided among them (Bonferroni)" if sequential else "Holm's correction decides"
        note_lines.append(
            f"{pair_count} pairs: {correction}{'' if sequential else '; each interval is of its pair alone'}."
        )
    if not sequential:
        note_lines.append(f"The verdict is on {comparisons[0].measures[0].name}; p of other measures is not corrected.")
        if not has_groups and (task_count := min(comparison.tasks for comparison in comparisons)) < _FEW:
            note_lines.append(f"{task_count} tasks are few: intervals of turns, tokens and outcome may be too narrow.")
    return note_lines if has_groups else [*note_lines, _MODELS]
