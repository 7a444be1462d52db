"""The reward sources of a run: declared in its store, served by its first worker, rescored afterwards on request.

Teachers that engines serve are connected here, and checked before anything is played.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

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
    open_clients: dict[str, ScoringClient] = {}

    async def clients() -> Sequence[ScoringClient]:
        server_urls = [str(settings.url)]
        if settings.url == POLICY:
            server_urls = await ENGINE_URLS.awaited(meta)
        for server_url in server_urls:
            if server_url not in open_clients:
                open_clients[server_url] = _client(config, settings, server_url)
        return [open_clients[server_url] for server_url in server_urls]

    prompt_prefix: tuple[int, ...] = ()
    if settings.prompt is not None:
        try:
            prompt_prefix = prefix_of(renderer_of(config), settings.prompt)
        except ModelError as error:
            raise ConfigError("rewards.prompt", settings.prompt, str(error)) from None
    return Teacher(clients, prompt_prefix, frozenset(settings.envs))


def check_teachers(config: RunConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
    """Raises ConfigError if a teacher teaches nothing, if there should be one and is none, or if a server that should
    teach has other tokens than the policy. `transport` takes the place of the network."""
    served_teachers = [teacher for teacher in config.rewards if teacher.kind == "teacher"]
    pupils = [
        (_field_of(config, environment), config.algo_of(environment), environment)
        for environment in config.environments
    ]
    for role_number, role_table in enumerate(config.roles):
        if role_table.algo is not None:
            pupils += [
                (f"roles.{role_number}.algo", role_table.algo, environment) for environment in config.environments
            ]
    teaching_sources = [source_name for pupil in pupils for source_name in _teachers(*pupil, served_teachers)]
    if idle_sources := [teacher.source for teacher in served_teachers if teacher.source not in teaching_sources]:
        raise ConfigError("rewards.source", idle_sources[0], "it teaches nothing: give algo.distil_weight")
    if served_teachers and config.rollout.temperature != 1:
        correction = "engines say how probable a token is at temperature 1: give 1, or algo.teacher"
        raise ConfigError("rollout.temperature", config.rollout.temperature, correction)
    for teacher in served_teachers:
        teacher_of(config, _nobody, teacher)
        if teacher.url != POLICY:
            trio.run(_check_tokens, config, teacher, _client(config, teacher, str(teacher.url), transport))
        elif config.sends_adapters:
            correction = "engines know an adapter by the name of its version: give engine.sync = 'full'"
            raise ConfigError("rewards.url", POLICY, correction)


def _field_of(config: RunConfig, env: str) -> str:
    """Return the field of the run file at which the algorithm of an environment stands."""
    numbered_tables = enumerate(config.tasks)
    table_numbers = (
        table_number
        for table_number, task_table in numbered_tables
        if task_table.algo is not None and (task_table.id or config.env.id) == env
    )
    return next((f"tasks.{table_number}.algo" for table_number in table_numbers), "algo")


def _teachers(field: str, algo: Algorithm, env: str, served: Sequence[RewardSource]) -> list[str]:
    """The sources of kind `teacher` that an algorithm, which stands at `field`, learns from in an environment."""
    distil_weight, model_slots = getattr(algo, "distil_weight", 0.0), algo.slots
    teacher_slot = model_slots.frozen.get("teacher") or model_slots.moving.get("teacher")
    teacher_names = [teacher.source for teacher in served if not teacher.envs or env in teacher.envs]
    if distil_weight and teacher_slot is None and not teacher_names:
        correction = f"nobody teaches: give {field}.teacher, or a [[rewards]] table with kind = 'teacher'"
        raise ConfigError(f"{field}.distil_weight", distil_weight, correction)
    if teacher_names and teacher_slot is not None:
        named_teacher = f"the teacher {teacher_names[0]!r} of {env}"
        correction = f"[[rewards]] has {named_teacher}: leave one out, or name its environments (`envs`)"
        raise ConfigError(f"{field}.teacher", teacher_slot, correction)
    return teacher_names if distil_weight else []


async def _check_tokens(config: RunConfig, settings: RewardSource, client: ScoringClient) -> None:
    model_folder = model_dir(config.model)
    policy_tokens, vocabulary_size = Renderer(model_folder).tokens(_PROBE), vocabulary(model_folder)
    try:
        # The last id of the policy's vocabulary: a teacher with a smaller one refuses it here, and not in the first
        # turn that samples such a token.
        await client.logprobs([0, policy_tokens[0] if vocabulary_size is None else vocabulary_size - 1])
    except AgentRLError as error:
        correction = f"it does not say how probable the tokens of {config.model!r} are ({error})"
        raise ConfigError("rewards.url", settings.url, correction) from None
    try:
        teacher_tokens = await client.tokens(_PROBE)
    except (EngineTimeout, EngineUnavailable) as error:
        raise ConfigError("rewards.url", settings.url, str(error)) from None
    except AgentRLError:
        problem = f"does not say how it divides a text into tokens: is its tokenizer that of {config.model}?"
        print(f"agentrl: warning: {settings.url} {problem}", file=sys.stderr)
        return
    if teacher_tokens != policy_tokens:
        correction = (
            f"it divides a text into other tokens than {config.model!r}: a teacher needs the policy's tokenizer"
        )
        raise ConfigError("rewards.url", settings.url, correction)


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
    for reward_source in config.rewards:
        rewarder_of(reward_source, teacher_of=partial(teacher_of, config, _nobody))
    store.scores.declare_sources(
        [
            Source(
                name=reward_source.source,
                version=_FIRST_VERSION,
                # A teacher's score is a column of log-probs for the loss, not a reward: with a weight its mean would be
                # added to every turn's reward as well.
                weight=0.0 if reward_source.kind == "teacher" else reward_source.weight,
                deadline_s=reward_source.deadline_s,
                late=reward_source.late,
            )
            for reward_source in config.rewards
        ]
    )


async def serve(config: RunConfig, store: RewardStore) -> None:
    """Score turns by every source of the run until cancelled. Raises UsageError if a source cannot be imported."""
    async with trio.open_nursery() as nursery:
        for source_settings in config.rewards:
            make_teacher = partial(teacher_of, config, store.meta)
            rewarder = rewarder_of(
                source_settings,
                turn_tokens=config.rollout.max_tokens_per_turn,
                artifacts_of=store.artifacts,
                teacher_of=make_teacher,
            )
            nursery.start_soon(Scorer(source_settings, store, rewarder).serve)


_FIRST_VERSION = 1  # of the scores that training uses; `rescore` writes later ones beside them


async def rescore(config: RunConfig, store: RunStore, source: str) -> tuple[int, int]:
    """Have a source of the run file score every turn again that was trained on or left out, under a new version: the
    scores used in training stay. Returns that version, and the number of turns that the source could not score.

    Raises UsageError for a source that the run file does not name."""
    source_settings = _named(config, source)
    earlier_versions = [stored_score.version for stored_score in store.scores.recorded(source)]
    new_version = max([_FIRST_VERSION, *earlier_versions]) + 1
    shared_backend.configure(config.sandbox.arguments())
    journal = JournalWriter(store)
    make_teacher = partial(teacher_of, config, journal.meta)
    turn_tokens = config.rollout.max_tokens_per_turn
    rewarder = rewarder_of(
        source_settings, turn_tokens=turn_tokens, artifacts_of=journal.artifacts, teacher_of=make_teacher
    )
    scorer = Scorer(source_settings, journal, rewarder)
    limiter, failed_turns = trio.CapacityLimiter(source_settings.concurrency), 0

    async def score(turn: str) -> None:
        nonlocal failed_turns
        async with limiter:
            try:
                await scorer.score(turn, version=new_version)
            except ScoreError:
                failed_turns += 1

    async with journal:
        for trajectory in store.reads.trajectories("train"):
            async with trio.open_nursery() as nursery:
                for trained_turn in trajectory.turns:
                    if trained_turn.learns and trained_turn.step is not None:
                        nursery.start_soon(score, trained_turn.id)
    return new_version, failed_turns


def _named(config: RunConfig, source: str) -> RewardSource:
    named_sources = [reward_source for reward_source in config.rewards if reward_source.source == source]
    if not named_sources:
        source_names = ", ".join(reward_source.source for reward_source in config.rewards) or "none"
        raise UsageError(f"this run has no reward source {source!r}; it has: {source_names}")
    return named_sources[0]
