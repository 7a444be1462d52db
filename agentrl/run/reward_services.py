"""The reward sources of a run: declared in its store, served by its first worker, rescored afterwards on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import trio

from agentrl.config import RunConfig
from agentrl.config.sections import RewardSource
from agentrl.errors import ScoreError, UsageError
from agentrl.rewards.score_failures import KIND, ScoreFailures, totals
from agentrl.rewards.scorer import Scorer, rewarder_of
from agentrl.run.teachers import teacher_of
from agentrl.sandbox import shared_backend
from agentrl.store import RunStore, Source
from agentrl.store.asynchronous.store import AsyncStore
from agentrl.store.interfaces import ControlStore, ReadStore, RewardStore


def declare(config: RunConfig, store: ControlStore) -> None:
    """Have training episodes wait for the sources of the run file.

    Raises, before anything is played, UsageError if a source cannot be imported, ConfigError if a key is not set."""
    for one in config.rewards:
        rewarder_of(one, teacher_of=partial(teacher_of, config, _nobody))
    store.declare_sources(
        [
            Source(
                name=one.source,
                version=one.version,
                weight=0.0 if one.kind == "teacher" else one.weight,
                deadline_s=one.deadline_s,
                late=one.late,
            )
            for one in config.rewards
        ]
    )


async def serve(config: RunConfig, store: RewardStore) -> None:
    """Score turns by every source of the run until cancelled. Raises UsageError if a source cannot be imported."""
    async with trio.open_nursery() as nursery:
        for settings in config.rewards:
            teacher = partial(teacher_of, config, store.meta)
            ask = rewarder_of(settings, artifacts_of=store.artifacts, teacher_of=teacher)
            nursery.start_soon(Scorer(settings, store, ask).serve)


async def _nobody(_: str) -> None:
    return None


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


def reports(store: ReadStore) -> Iterator[SourceReport]:
    """One line for each version of each source."""
    scores = store.scores()
    for source, version in sorted({(one.source, one.version) for one in scores}):
        own = [one for one in scores if (one.source, one.version) == (source, version)]
        values = [one.value for one in own]
        yield SourceReport(
            source=source,
            version=version,
            turns=len(own),
            counted=sum(one.counts for one in own),
            mean=fmean(values),
            least=min(values),
            most=max(values),
            took_s=fmean(one.took_s for one in own),
            cost=sum(one.cost for one in own),
        )


def failures(store: ReadStore) -> list[ScoreFailures]:
    """What each source of a run could not score, of those for which a call failed; as of at most 30 s ago."""
    return totals(row.values for row in store.metrics(KIND, undone=True))


_EDGE = 10  # steps at the begin and the end of a run


def by_function(steps: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The mean score of each of the environment's reward functions in the `first` and in the `last` steps of a run, by
    the rows of its steps."""
    found: dict[str, dict[str, float]] = {}
    names = dict.fromkeys(name for row in steps for name in row.get("reward_functions") or ())
    for name in names:
        values = [row["reward_functions"][name] for row in steps if name in (row.get("reward_functions") or ())]
        found[name] = {"first": fmean(values[:_EDGE]), "last": fmean(values[-_EDGE:])}
    return found


async def rescore(config: RunConfig, store: RunStore, source: str) -> tuple[int, int]:
    """Have a source of the run file score every turn again that was trained on or left out, under a new version: the
    scores used in training stay. Returns that version, and the number of turns that the source could not score.

    Raises UsageError for a source that the run file does not name."""
    settings = _named(config, source)
    said = [one.version for one in store.scores(source)]
    version = max([settings.version, *said]) + 1
    shared_backend.configure(config.sandbox.arguments())
    desk = AsyncStore(store)
    teacher = partial(teacher_of, config, desk.meta)
    scorer = Scorer(settings, desk, rewarder_of(settings, artifacts_of=desk.artifacts, teacher_of=teacher))
    limiter, failed = trio.CapacityLimiter(settings.concurrency), 0

    async def score(turn: str) -> None:
        nonlocal failed
        async with limiter:
            try:
                await scorer.score(turn, version=version)
            except ScoreError:
                failed += 1

    async with desk:
        for trajectory in store.trajectories("train"):
            async with trio.open_nursery() as nursery:
                for turn in trajectory.turns:
                    if turn.learns and turn.step is not None:
                        nursery.start_soon(score, turn.id)
    return version, failed


def _named(config: RunConfig, source: str) -> RewardSource:
    found = [one for one in config.rewards if one.source == source]
    if not found:
        known = ", ".join(one.source for one in config.rewards) or "none"
        raise UsageError(f"this run has no reward source {source!r}; it has: {known}")
    return found[0]
