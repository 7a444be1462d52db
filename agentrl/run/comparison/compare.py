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

from agentrl.algos.pass_at_k import pass_at_k
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
    " success and pass@k."
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
    _match_keys([model for side in sides for model in side.models])
    pairs = list(combinations(sides, 2))
    comparisons = [_sequence(a, b, len(pairs)) if sequential else _fixed(a, b) for a, b in pairs]
    if not sequential:
        adjusted = holm([pair.measures[0].p or 0.0 for pair in comparisons])
        for pair, p in zip(comparisons, adjusted, strict=True):
            first = pair.measures[0]
            pair.p_adjusted, pair.is_shown = p, p < _ALPHA and not first.low <= 0 <= first.high
    for pair in comparisons:
        pair.sentence = _sentence(pair, sequential)
        if len(pairs) > 1 and pair.p_adjusted is not None:
            pair.sentence += f"; p {pair.p_adjusted:.2g} after Holm's correction"
    return comparisons, _notes(sides, comparisons, sequential)


def _check(sides: Sequence[Side], sequential: bool) -> None:
    names = [side.name for side in sides]
    if len(sides) < 2 or len(set(names)) < len(names):
        raise UsageError(f"compare takes two or more that have different names, got: {', '.join(names) or 'none'}")
    if sequential and any(side.is_group for side in sides):
        raise UsageError("--sequential looks at tasks as they come, --group at seeds: leave out one of them")
    for side in sides:
        if side.is_group and len(side.models) < 2:
            raise UsageError(f"group {side.name} has one run: seeds can be compared from two runs a side")


def _match_keys(models: Sequence[Results]) -> None:
    """Where the rows of some file lack a part of a task's identity, compare all by the rest of it."""
    parts = ("env", "arguments")
    lacking = {part: "" for part in parts if not all(getattr(key, part) for model in models for key in model.tasks)}
    for model in models:
        tasks = {key._replace(**lacking): episodes for key, episodes in model.tasks.items()}
        if len(tasks) < len(model.tasks):
            raise UsageError(f"tasks of {model.name} differ by {' and '.join(lacking)}, which other rows do not name")
        model.tasks, model.unfinished = tasks, {key._replace(**lacking) for key in model.unfinished}


def _paired(a: Side, b: Side) -> tuple[list[TaskKey], dict[str, int]]:
    """Return the tasks that all models of both sides have, in the order of the first model; and how many each lacks."""
    models = [*a.models, *b.models]
    played = [{key for key, episodes in model.tasks.items() if episodes} for model in models]
    everywhere = played[0].intersection(*played[1:])
    left_out: dict[str, int] = {}
    for model, keys_of_model in zip(models, played, strict=True):
        left_out[f"tasks of {model.name} that others have not"] = len(keys_of_model - everywhere)
        left_out[f"episodes of {model.name} that infrastructure ended"] = model.failed
        left_out[f"tasks of {model.name} that have not ended"] = len(model.unfinished)
    keys = [key for key in models[0].tasks if key in everywhere and not any(key in m.unfinished for m in models)]
    if len(keys) < 2:
        seeds = [{key._replace(arguments="") for key in keys_of_model} for keys_of_model in played]
        same_seeds = len(seeds[0].intersection(*seeds[1:])) > len(keys)
        hint = "arguments or options of the environment differ" if same_seeds else "other environments, seeds or rows"
        raise UsageError(f"{a.name} and {b.name} have {len(keys)} tasks in common ({hint}): play the same tasks")
    return keys, {cause: number for cause, number in left_out.items() if number}


def _values(most_samples: int) -> Mapping[str, Value]:
    """Return the measures by name, each a function of the episodes of a task; None if it is not known for that task."""

    def mean(name: str) -> Value:
        def value(episodes: Sequence[Episode]) -> float | None:
            numbers = [getattr(episode, name) for episode in episodes]
            return None if None in numbers else fmean(numbers)

        return value

    def solved(k: int) -> Value:
        def value(episodes: Sequence[Episode]) -> float | None:
            successes = [episode.success for episode in episodes]
            if None in successes or len(successes) < k:
                return None
            return pass_at_k(len(successes), sum(map(bool, successes)), k)

        return value

    ks = [1 << power for power in range(1, most_samples.bit_length())]
    return {
        "success": mean("success"),
        **{f"pass@{k}": solved(k) for k in ks},
        **{name: mean(name) for name in NUMBERS},
    }


def _fixed(a: Side, b: Side) -> Comparison:
    """Compare a pair once, all of its tasks played."""
    keys, left_out = _paired(a, b)
    sizes = [len(model.tasks[key]) for side in (a, b) for model in side.models for key in keys]
    comparison = Comparison(
        a=a.name, b=b.name, tasks=len(keys), samples=(min(sizes), max(sizes)), measures=[], left_out=left_out
    )
    for name, value in _values(max(sizes)).items():
        table, complete = _table(a, b, keys, value)
        if len(complete) < 2:
            continue
        first, second = table[: len(a.models)], table[len(a.models) :]
        if a.is_group or b.is_group:
            interval = over_seeds(first.mean(axis=1).tolist(), second.mean(axis=1).tolist())
        else:
            differences = second[0] - first[0]
            interval = over_tasks(differences, is_success=is_share(name))
            # Where a handful of tasks differ, no approximation is good enough: the exact p decides with the interval.
            if name == "success" and max(sizes) == 1:
                p = mcnemar(int((differences < 0).sum()), int((differences > 0).sum()))
                comparison.is_exact, interval = True, interval._replace(p=p)
        comparison.measures.append(_measured(name, first, second, interval, len(keys) - len(complete)))
    if not comparison.measures:
        raise UsageError(f"{a.name} and {b.name} have no measure in common: each needs success or outcome")
    return comparison


def _sequence(a: Side, b: Side, pairs: int) -> Comparison:
    """Look at a pair while its tasks are played: at the success of those before the first that has not ended, as quick
    tasks end first. With several pairs each has its share of the error."""
    keys, left_out = _paired(a, b)
    (first,), (second,) = a.models, b.models
    unfinished = first.unfinished | second.unfinished
    ended = set(takewhile(lambda key: key not in unfinished, first.tasks))
    # Episodes that end early are the easy ones: tasks behind one that goes on would come in an order by result.
    before = [key for key in keys if key in ended]
    if len(before) < len(keys):
        left_out["tasks behind the first that has not ended"] = len(keys) - len(before)
    table, complete = _table(a, b, before, _values(1)["success"])
    if len(complete) < 2:
        raise UsageError(f"{a.name} and {b.name}: fewer than two tasks have a success before the first that goes on")
    differences, alpha = table[1] - table[0], _ALPHA / pairs
    low, high = (float(end) for end in confidence_sequence.sequence(differences, alpha=alpha))
    after = confidence_sequence.decided_after(differences, alpha=alpha)
    sizes = [len(model.tasks[key]) for model in (first, second) for key in complete]
    interval = Interval(differences.mean(), low, high, None)
    return Comparison(
        a=a.name,
        b=b.name,
        tasks=len(complete),
        samples=(min(sizes), max(sizes)),
        measures=[_measured("success", table[:1], table[1:], interval, len(before) - len(complete))],
        left_out=left_out,
        is_shown=after is not None and low <= high,  # else the order of the tasks matters, and nothing is shown
        decided_after=after,
    )


def _table(a: Side, b: Side, keys: Sequence[TaskKey], value: Value) -> tuple[Array, list[TaskKey]]:
    """Return the values of a measure, a row for each model of `a` and then `b`, a column for each complete task."""
    models = [*a.models, *b.models]
    columns = {key: [value(model.tasks[key]) for model in models] for key in keys}
    complete = [key for key, column in columns.items() if None not in column]
    return np.array([columns[key] for key in complete], dtype=np.float64).T, complete


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
    first = pair.measures[0]
    # A difference that is shown is said of the better one, so that its numbers are above 0.
    sign = -1 if pair.is_shown and first.difference < 0 else 1
    low, high = sorted((sign * first.low, sign * first.high))
    unit = " points" if is_share(first.name) else f" of {first.name}"
    fewest, most = pair.samples
    samples = f"{fewest} to {most}" if fewest < most else f"{most}"
    numbers = (
        f"{in_units(first.name, sign * first.difference)}{unit}, {LEVEL:.0%} interval {in_units(first.name, low)} to"
        f" {in_units(first.name, high)}; {first.n} tasks, {samples} sample{'s' * (most > 1)} each"
    )
    if not pair.is_shown:
        verdict = "go on, nothing is decided" if sequential else "no difference is shown"
        return f"{verdict}: {pair.b} minus {pair.a} is {numbers}"
    better, other = (pair.b, pair.a) if sign > 0 else (pair.a, pair.b)
    decided = f"decided after {pair.decided_after} tasks: " if sequential else ""
    return f"{decided}{better} is better than {other} by {numbers}"


def is_share(measure: str) -> bool:
    """Whether a measure is a probability."""
    return measure == "success" or measure.startswith("pass@")


def in_units(measure: str, value: float) -> str:
    """A mean or a difference for people: success and pass@k in percent or its points."""
    return f"{100 * value:.1f}" if is_share(measure) else f"{value:.3g}"


def _notes(sides: Sequence[Side], comparisons: Sequence[Comparison], sequential: bool) -> list[str]:
    grouped, pairs = any(side.is_group for side in sides), len(comparisons)
    notes = [_SEQUENTIAL if sequential else _OVER_SEEDS if grouped else _OVER_TASKS]
    if any(pair.is_exact for pair in comparisons):
        notes.append("With one sample a task, success differs only if McNemar's exact test (p) agrees.")
    if pairs > 1:
        correction = "the error is divided among them (Bonferroni)" if sequential else "Holm's correction decides"
        notes.append(f"{pairs} pairs: {correction}{'' if sequential else '; each interval is of its pair alone'}.")
    if not sequential:
        notes.append(f"The verdict is on {comparisons[0].measures[0].name}; p of other measures is not corrected.")
        if not grouped and (tasks := min(pair.tasks for pair in comparisons)) < _FEW:
            notes.append(f"{tasks} tasks are few: intervals of turns, tokens and outcome may be too narrow.")
    return notes if grouped else [*notes, _MODELS]
