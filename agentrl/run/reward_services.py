"""The reward sources of a run: declared in its store, served by its first worker, rescored afterwards on request.

Teachers that engines serve are connected here, and checked before anything is played.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import httpx
import trio

from agentrl.algos.algorithm import Algorithm
from agentrl.config import RunConfig
from agentrl.config.sections import RewardSource
from agentrl.engine.rendering.renderer import Renderer
from agentrl.engine.scoring_client import ScoringClient
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    EngineTimeout,
    EngineUnavailable,
    ModelError,
    ScoreError,
    UsageError,
)
from agentrl.models.resolve import model_dir, renderer_of, vocabulary
from agentrl.rewards.score_failures import KIND, ScoreFailures, totals
from agentrl.rewards.scorer import Scorer, rewarder_of
from agentrl.rewards.teacher import Teacher, prefix_of
from agentrl.sandbox import shared_backend
from agentrl.store import RunStore, Source
from agentrl.store.interfaces import RewardStore
from agentrl.store.journal_writer import JournalWriter
from agentrl.store.run_values import ENGINE_URLS

POLICY = "policy"  # as a teacher's url: the run's own engines

# Accents, another script, an emoji, digits, runs of white space, code: places where tokenizers with the same words
# differ.
_PROBE = "A probe: naïve 東京 🙂 x_1 += 3.14e-2;\n\n\tdef f(x): return {'a': [1, 22, 333]}"


def teacher_of(config: RunConfig, meta: Callable[[str], Awaitable[str | None]], settings: RewardSource) -> Teacher:
    """Asks the server of a source of kind `teacher`, or, with the url `policy`, the engines that `meta` names at the
    time, under the weights that they have then. Raises ConfigError for a prompt that the chat template has no place
    for."""
    opened: dict[str, ScoringClient] = {}

    async def clients() -> Sequence[ScoringClient]:
        urls = [str(settings.url)]
        if settings.url == POLICY:
            urls = await ENGINE_URLS.awaited(meta)
        for url in urls:
            if url not in opened:
                opened[url] = _client(config, settings, url)
        return [opened[url] for url in urls]

    prefix: tuple[int, ...] = ()
    if settings.prompt is not None:
        try:
            prefix = prefix_of(renderer_of(config), settings.prompt)
        except ModelError as error:
            raise ConfigError("rewards.prompt", settings.prompt, str(error)) from None
    return Teacher(clients, prefix, frozenset(settings.envs))


def check_teachers(config: RunConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
    """Raises ConfigError if a teacher teaches nothing, if there should be one and is none, or if a server that should
    teach has other tokens than the policy. `transport` takes the place of the network."""
    served = [teacher for teacher in config.rewards if teacher.kind == "teacher"]
    pupils = [(_field_of(config, env), config.algo_of(env), env) for env in config.environments]
    for number, table in enumerate(config.roles):
        if table.algo is not None:
            pupils += [(f"roles.{number}.algo", table.algo, env) for env in config.environments]
    teaches = [source for pupil in pupils for source in _teachers(*pupil, served)]
    if idle := [teacher.source for teacher in served if teacher.source not in teaches]:
        raise ConfigError("rewards.source", idle[0], "it teaches nothing: give algo.distil_weight")
    if served and config.rollout.temperature != 1:
        hint = "engines say how probable a token is at temperature 1: give 1, or algo.teacher"
        raise ConfigError("rollout.temperature", config.rollout.temperature, hint)
    for teacher in served:
        teacher_of(config, _nobody, teacher)
        if teacher.url != POLICY:
            trio.run(_check_tokens, config, teacher, _client(config, teacher, str(teacher.url), transport))
        elif config.sends_adapters:
            hint = "engines know an adapter by the name of its version: give engine.sync = 'full'"
            raise ConfigError("rewards.url", POLICY, hint)


def _field_of(config: RunConfig, env: str) -> str:
    """Return the field of the run file at which the algorithm of an environment stands."""
    tables = enumerate(config.tasks)
    numbers = (number for number, table in tables if table.algo is not None and (table.id or config.env.id) == env)
    return next((f"tasks.{number}.algo" for number in numbers), "algo")


def _teachers(field: str, algo: Algorithm, env: str, served: Sequence[RewardSource]) -> list[str]:
    """The sources of kind `teacher` that an algorithm, which stands at `field`, learns from in an environment."""
    weight, slots = getattr(algo, "distil_weight", 0.0), algo.slots
    slot = slots.frozen.get("teacher") or slots.moving.get("teacher")
    teachers = [teacher.source for teacher in served if not teacher.envs or env in teacher.envs]
    if weight and slot is None and not teachers:
        hint = f"nobody teaches: give {field}.teacher, or a [[rewards]] table with kind = 'teacher'"
        raise ConfigError(f"{field}.distil_weight", weight, hint)
    if teachers and slot is not None:
        hint = f"[[rewards]] has the teacher {teachers[0]!r} of {env}: leave one out, or name its environments (`envs`)"
        raise ConfigError(f"{field}.teacher", slot, hint)
    return teachers if weight else []


async def _check_tokens(config: RunConfig, settings: RewardSource, client: ScoringClient) -> None:
    folder = model_dir(config.model)
    ours, size = Renderer(folder).tokens(_PROBE), vocabulary(folder)
    try:
        # The last id of the policy's vocabulary: a teacher with a smaller one refuses it here, and not in the first
        # turn that samples such a token.
        await client.logprobs([0, ours[0] if size is None else size - 1])
    except AgentRLError as error:
        hint = f"it does not say how probable the tokens of {config.model!r} are ({error})"
        raise ConfigError("rewards.url", settings.url, hint) from None
    try:
        theirs = await client.tokens(_PROBE)
    except (EngineTimeout, EngineUnavailable) as error:
        raise ConfigError("rewards.url", settings.url, str(error)) from None
    except AgentRLError:
        problem = f"does not say how it divides a text into tokens: is its tokenizer that of {config.model}?"
        print(f"agentrl: warning: {settings.url} {problem}", file=sys.stderr)
        return
    if theirs != ours:
        hint = f"it divides a text into other tokens than {config.model!r}: a teacher needs the policy's tokenizer"
        raise ConfigError("rewards.url", settings.url, hint)


def _client(
    config: RunConfig, settings: RewardSource, url: str, transport: httpx.AsyncBaseTransport | None = None
) -> ScoringClient:
    return ScoringClient(
        url,
        model=settings.model,
        api_key=config.engine.key_of(url) if settings.url == POLICY else settings.api_key(),
        concurrency=settings.concurrency,
        # Less than the caller's own deadline, so that a slow server is named by its URL and not as "the source did not
        # answer".
        deadline_s=0.9 * settings.call_deadline_s,
        transport=transport,
    )


async def _nobody(_: str) -> None:
    return None


def declare(config: RunConfig, store: RunStore) -> None:
    """Have training episodes wait for the sources of the run file.

    Raises, before anything is played, UsageError if a source cannot be imported, ConfigError if a key is not set."""
    for source in config.rewards:
        rewarder_of(source, teacher_of=partial(teacher_of, config, _nobody))
    store.scores.declare_sources(
        [
            Source(
                name=source.source,
                version=_FIRST_VERSION,
                # A teacher's score is a column of log-probs for the loss, not a reward: with a weight its mean would be
                # added to every turn's reward as well.
                weight=0.0 if source.kind == "teacher" else source.weight,
                deadline_s=source.deadline_s,
                late=source.late,
            )
            for source in config.rewards
        ]
    )


async def serve(config: RunConfig, store: RewardStore) -> None:
    """Score turns by every source of the run until cancelled. Raises UsageError if a source cannot be imported."""
    async with trio.open_nursery() as nursery:
        for settings in config.rewards:
            teacher = partial(teacher_of, config, store.meta)
            ask = rewarder_of(
                settings,
                turn_tokens=config.rollout.max_tokens_per_turn,
                artifacts_of=store.artifacts,
                teacher_of=teacher,
            )
            nursery.start_soon(Scorer(settings, store, ask).serve)


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
    scores = store.scores.recorded()
    for source, version in sorted({(score.source, score.version) for score in scores}):
        matching = [score for score in scores if (score.source, score.version) == (source, version)]
        values = [score.value for score in matching]
        yield SourceReport(
            source=source,
            version=version,
            turns=len(matching),
            counted=sum(score.counts for score in matching),
            mean=fmean(values),
            least=min(values),
            most=max(values),
            took_s=fmean(score.took_s for score in matching),
            cost=sum(score.cost for score in matching),
        )


def failures(store: RunStore) -> list[ScoreFailures]:
    """Return the failures of each source for which a call failed, as of at most 30 s ago."""
    return totals(row.values for row in store.metrics.values(KIND, undone=True))


_FIRST_VERSION = 1  # of the scores that training uses; `rescore` writes later ones beside them
_EDGE = 10  # steps at the begin and the end of a run


def by_function(steps: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The mean score of each of the environment's reward functions over what it judged in the `first` and in the `last`
    steps of a run, by the rows of its steps; and how many episodes it judged (`judged`), and did not judge in time
    (`late`), in all steps."""
    by_name: dict[str, dict[str, float]] = {}
    names = dict.fromkeys(name for row in steps for name in row.get("reward_functions") or ())
    late = sum((Counter[str](row.get("reward_functions_late")) for row in steps), Counter[str]())
    for name in names:
        means = [
            (row["reward_functions"][name], row["reward_functions_judged"][name])
            for row in steps
            if name in (row.get("reward_functions") or ())
        ]
        by_name[name] = {
            "first": _weighted_mean(means[:_EDGE]),
            "last": _weighted_mean(means[-_EDGE:]),
            "judged": sum(count for _, count in means),
            "late": late[name],
        }
    return by_name


def _weighted_mean(means: Sequence[tuple[float, int]]) -> float:
    return sum(mean * count for mean, count in means) / sum(count for _, count in means)


async def rescore(config: RunConfig, store: RunStore, source: str) -> tuple[int, int]:
    """Have a source of the run file score every turn again that was trained on or left out, under a new version: the
    scores used in training stay. Returns that version, and the number of turns that the source could not score.

    Raises UsageError for a source that the run file does not name."""
    settings = _named(config, source)
    earlier_versions = [score.version for score in store.scores.recorded(source)]
    version = max([_FIRST_VERSION, *earlier_versions]) + 1
    shared_backend.configure(config.sandbox.arguments())
    desk = JournalWriter(store)
    teacher = partial(teacher_of, config, desk.meta)
    turn_tokens = config.rollout.max_tokens_per_turn
    rewarder = rewarder_of(settings, turn_tokens=turn_tokens, artifacts_of=desk.artifacts, teacher_of=teacher)
    scorer = Scorer(settings, desk, rewarder)
    limiter, failed = trio.CapacityLimiter(settings.concurrency), 0

    async def score(turn: str) -> None:
        nonlocal failed
        async with limiter:
            try:
                await scorer.score(turn, version=version)
            except ScoreError:
                failed += 1

    async with desk:
        for trajectory in store.reads.trajectories("train"):
            async with trio.open_nursery() as nursery:
                for turn in trajectory.turns:
                    if turn.learns and turn.step is not None:
                        nursery.start_soon(score, turn.id)
    return version, failed


def _named(config: RunConfig, source: str) -> RewardSource:
    sources = [entry for entry in config.rewards if entry.source == source]
    if not sources:
        names = ", ".join(entry.source for entry in config.rewards) or "none"
        raise UsageError(f"this run has no reward source {source!r}; it has: {names}")
    return sources[0]
