"""Figures of a run's reward sources and reward functions, for people: read from its store, nothing is scored.

Apart from `agentrl.run.reward_services`, which serves the sources: `agentrl status` shall not load engines for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from agentrl.rewards.score_failures import KIND, ScoreFailures, totals
from agentrl.store import RunStore

_EDGE = 10  # steps at the begin and the end of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """The scores of one version of a source: `turns` scored, of which `counted` are part of a reward; `mean`, `least`
    and `most` of the values; `took_s` the mean seconds per turn; `cost` (calls) of all turns together."""

    source: str
    version: int
    turns: int
    counted: int
    mean: float
    least: float
    most: float
    took_s: float
    cost: float


def reports(store: RunStore) -> Iterator[SourceReport]:
    """One line for each version of each source."""
    stored_scores = store.scores.recorded()
    for source_name, version in sorted({(stored_score.source, stored_score.version) for stored_score in stored_scores}):
        matching = [
            stored_score
            for stored_score in stored_scores
            if (stored_score.source, stored_score.version) == (source_name, version)
        ]
        score_values = [stored_score.value for stored_score in matching]
        yield SourceReport(
            source=source_name,
            version=version,
            turns=len(matching),
            counted=sum(stored_score.counts for stored_score in matching),
            mean=fmean(score_values),
            least=min(score_values),
            most=max(score_values),
            took_s=fmean(stored_score.took_s for stored_score in matching),
            cost=sum(stored_score.cost for stored_score in matching),
        )


def failures(store: RunStore) -> list[ScoreFailures]:
    """Return the failures of each source for which a call failed, as of at most 30 s ago."""
    return totals(metric_row.values for metric_row in store.metrics.values(KIND, undone=True))


def by_function(steps: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The mean score of each of the environment's reward functions over what it judged in the `first` and in the `last`
    steps of a run, by the rows of its steps; and how many episodes it judged (`judged`), and did not judge in time
    (`late`), in all steps."""
    figures_by_name: dict[str, dict[str, float]] = {}
    function_names = dict.fromkeys(
        function_name for step_row in steps for function_name in step_row.get("reward_functions") or ()
    )
    late_counts = sum((Counter[str](step_row.get("reward_functions_late")) for step_row in steps), Counter[str]())
    for function_name in function_names:
        step_means = [
            (step_row["reward_functions"][function_name], step_row["reward_functions_judged"][function_name])
            for step_row in steps
            if function_name in (step_row.get("reward_functions") or ())
        ]
        figures_by_name[function_name] = {
            "first": _weighted_mean(step_means[:_EDGE]),
            "last": _weighted_mean(step_means[-_EDGE:]),
            "judged": sum(judged_count for _, judged_count in step_means),
            "late": late_counts[function_name],
        }
    return figures_by_name


def _weighted_mean(means: Sequence[tuple[float, int]]) -> float:
    return sum(step_mean * judged_count for step_mean, judged_count in means) / sum(
        judged_count for _, judged_count in means
    )
