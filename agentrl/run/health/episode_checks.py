"""Checks of what ends episodes: limits, calls that nobody can read, tools, environments, machines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from agentrl.errors import split_place
from agentrl.records import StopReason
from agentrl.run.health.advice import Advice, percent, share
from agentrl.run.health.run_facts import EpisodeFacts, RunFacts
from agentrl.store.episodes.endings import FAILURES

_CUT = 0.5  # of the turns
_LIMITED = 0.5  # of the episodes: one limit ends them
_UNREAD = 0.9  # of the turns
_USELESS = 0.95  # of the calls of a tool
_LEAST_CALLS, _LEAST_TURNS, _LEAST_EPISODES = 12, 12, 12
_FAILED = 0.15  # of the episodes: replays and retries do not hide so many any more
_LEAST_FAILED = 4
_OF_ONE = 0.8  # of the failures: one machine's
_CHANCE = 0.01  # that failures which strike any host alike all fall on it
_SHOWN = 200  # characters of an error
_URL = re.compile(r"https?://[^\s/'\")]+")


def turns_cut(facts: RunFacts) -> Advice | None:
    """Most turns end by their length."""
    if not facts.lasts(lambda row: float(row.get("turns_cut") or 0.0) >= _CUT):
        return None
    token_limit = facts.config.rollout.max_tokens_per_turn
    return Advice(
        name="turns_cut",
        cause="most turns are cut before the model has ended them",
        evidence=f"{', '.join(percent(cut_share) for cut_share in facts.values('turns_cut'))} of the turns; "
        f"at most {token_limit} tokens",
        settings=(f"rollout.max_tokens_per_turn={2 * token_limit}",),
    )


def context_full(facts: RunFacts) -> Advice | None:
    """Episodes end since their context is full."""
    if not (ended_count := _limited(facts, (StopReason.CONTEXT_LIMIT,))):
        return None
    context_limit = facts.config.rollout.max_context
    return Advice(
        name="context_full",
        cause="conversations outgrow their context and end there",
        evidence=f"{ended_count} of the last {len(facts.episodes)} episodes ended by context_limit, at "
        f"{context_limit} tokens",
        settings=(f"rollout.max_context={2 * context_limit}", "rollout.compaction.how=drop_tools"),
    )


def time_runs_out(facts: RunFacts) -> Advice | None:
    """Episodes end by their clock."""
    if not (ended_count := _limited(facts, (StopReason.TIME_LIMIT, StopReason.TOOL_TIME_LIMIT))):
        return None
    rollout_settings = facts.config.rollout
    return Advice(
        name="time_runs_out",
        cause="the clock ends episodes that could go on",
        evidence=f"{ended_count} of the last {len(facts.episodes)} episodes ended by time_limit or tool_time_limit",
        settings=(
            f"rollout.episode_deadline_s={2 * rollout_settings.episode_deadline_s:g}",
            f"rollout.step_deadline_s={2 * rollout_settings.step_deadline_s:g}",
        ),
    )


def _limited(facts: RunFacts, reasons: Sequence[StopReason]) -> int:
    ended_count = sum(episode.stop_reason in reasons for episode in facts.episodes)
    is_frequent = len(facts.episodes) >= _LEAST_EPISODES and share(ended_count, len(facts.episodes)) >= _LIMITED
    return ended_count if is_frequent else 0


def calls_not_read(facts: RunFacts) -> Advice | None:
    """The model does not write calls as its environment reads them."""
    parse_failures = Counter(read_turn.parse_failure for read_turn in facts.turns if read_turn.parse_failure)
    if len(facts.turns) < _LEAST_TURNS or share(parse_failures.total(), len(facts.turns)) < _UNREAD:
        return None
    (failure_kind, _), *_ = parse_failures.most_common()
    env_settings = facts.config.env
    # A model that knows no dialect, such as the tiny coder outside of its own task, has to be shown one first.
    is_dialect_set = "tool_format" in env_settings.kwargs
    return Advice(
        name="calls_not_read",
        cause="the calls that the model writes cannot be read: it speaks another dialect or none, or its turns are cut",
        evidence=f"{parse_failures.total()} of {len(facts.turns)} turns failed to parse, most of them as "
        f"{failure_kind}",
        settings=() if is_dialect_set else ("env.kwargs.tool_format=hermes",),
        commands=(
            f"agentrl view {facts.path}",
            f"agentrl demos {env_settings.id} --out demonstrations.jsonl",
            "agentrl sft --help",
        ),
    )


def tool_fails(facts: RunFacts) -> Advice | None:
    """A tool answers every call with an error."""
    for tool_name in sorted({failing_tool for read_turn in facts.turns for failing_tool in read_turn.tool_errors}):
        failed_calls = sum(read_turn.tool_errors.get(tool_name, 0) for read_turn in facts.turns)
        worked_calls = sum(
            tool_name in read_turn.text
            for read_turn in facts.turns
            if not read_turn.parse_failure and tool_name not in read_turn.tool_errors
        )
        if failed_calls >= _LEAST_CALLS and share(failed_calls, failed_calls + worked_calls) >= _USELESS:
            error_answers = Counter(read_turn.answer for read_turn in facts.turns if tool_name in read_turn.tool_errors)
            (commonest_answer, _), *_ = error_answers.most_common()
            return Advice(
                name="tool_fails",
                cause=f"tool {tool_name!r} fails whenever it is called",
                evidence=f"{failed_calls} of {failed_calls + worked_calls} calls failed, most often with "
                f"{commonest_answer[:_SHOWN]!r}",
                commands=(f"agentrl play {facts.config.env.id}", f"agentrl view {facts.path}"),
            )
    return None


def _failures(facts: RunFacts, reason: StopReason) -> list[EpisodeFacts]:
    """The episodes that ended so, if they are many; else none."""
    failed_episodes = [episode for episode in facts.episodes if episode.stop_reason is reason]
    is_frequent = len(failed_episodes) >= _LEAST_FAILED and share(len(failed_episodes), len(facts.episodes)) >= _FAILED
    return failed_episodes if is_frequent else []


def _mostly(failed: Sequence[EpisodeFacts]) -> str:
    (commonest_cause, episode_count), *_ = Counter(
        "{1}{0}".format(*_placed(episode)) for episode in failed
    ).most_common()
    return f"{episode_count} of them: {commonest_cause[:_SHOWN]}"


def _placed(one: EpisodeFacts) -> tuple[str, str]:
    error_reason, error_place = split_place(one.detail or one.stop_reason.value)
    return error_reason, f"{error_place}: " if error_place else ""


def env_fails(facts: RunFacts) -> Advice | None:
    """The environment's own code raises."""
    if not (failed_episodes := _failures(facts, StopReason.ENV_FAILED)):
        return None
    return Advice(
        name="env_fails",
        cause="the environment raises, and its episodes leave no trace in the reward",
        evidence=f"{len(failed_episodes)} of the last {len(facts.episodes)} episodes; {_mostly(failed_episodes)}",
        commands=(f"agentrl tasks {facts.path} --failed", f"agentrl validate {facts.config.env.id}"),
    )


def sandbox_fails(facts: RunFacts) -> Advice | None:
    """Boxes cannot be made, or die."""
    if not (failed_episodes := _failures(facts, StopReason.SANDBOX_FAILED)):
        return None
    return Advice(
        name="sandbox_fails",
        cause="boxes fail, through no doing of the policy",
        evidence=f"{len(failed_episodes)} of the last {len(facts.episodes)} episodes; {_mostly(failed_episodes)}",
        settings=(f"rollout.max_running={max(1, facts.config.rollout.max_running // 2)}",),
        commands=("agentrl doctor", f"agentrl tasks {facts.path} --failed"),
    )


def engine_fails(facts: RunFacts) -> Advice | None:
    """Engines answer wrongly or not at all."""
    if not (failed_episodes := _failures(facts, StopReason.ENGINE_FAILED)):
        return None
    rollout_settings = facts.config.rollout
    return Advice(
        name="engine_fails",
        cause="engines answer wrongly, too late or not at all",
        evidence=f"{len(failed_episodes)} of the last {len(facts.episodes)} episodes; {_mostly(failed_episodes)}",
        settings=(
            f"rollout.turn_deadline_s={2 * rollout_settings.turn_deadline_s:g}",
            f"rollout.max_running={max(1, rollout_settings.max_running // 2)}",
        ),
        commands=(f"agentrl logs {facts.path} engine-0",),
    )


def host_fails(facts: RunFacts) -> Advice | None:
    """One machine has nearly all failures: a worker's host, or the engine that they name."""
    failed_episodes = [episode for episode in facts.episodes if episode.stop_reason in FAILURES]
    ended_count = sum(host_facts.ended for host_facts in facts.hosts.values())
    failed_count = sum(host_facts.failed for host_facts in facts.hosts.values())
    for host_name, host_facts in facts.hosts.items():
        # A host that plays most episodes has most failures. It is to blame only if it is unlikely that failures which
        # strike any episode alike all fell on it: its share of the episodes, to the power of its failures.
        has_most_failures = host_facts.failed >= max(_LEAST_FAILED, _OF_ONE * failed_count)
        if (
            has_most_failures
            and share(host_facts.ended, ended_count) ** host_facts.failed <= _CHANCE
            and share(host_facts.failed, host_facts.ended) >= _FAILED
        ):
            return _host(
                facts,
                host_name,
                f"{host_facts.failed} of {failed_count} failures, in {host_facts.ended} of {ended_count} episodes",
                failed_episodes,
            )
    url_counts = Counter(engine_url for episode in failed_episodes for engine_url in {*_URL.findall(episode.detail)})
    for engine_url, failure_count in url_counts.most_common(1):
        # With one engine, every failure of an engine names it, and saying so is no news.
        is_only_engine = len(facts.config.engine.places) < 2 and len(facts.config.engine.urls) < 2
        is_frequent = (
            failure_count >= max(_LEAST_FAILED, _OF_ONE * len(failed_episodes))
            and share(failure_count, len(facts.episodes)) >= _FAILED
        )
        if (
            is_frequent
            and not is_only_engine
            and any(episode.stop_reason is StopReason.ENGINE_FAILED for episode in failed_episodes)
        ):
            return _host(
                facts, engine_url, f"{failure_count} of {len(failed_episodes)} failures name it", failed_episodes
            )
    return None


def _host(facts: RunFacts, name: str, figures: str, failed: Sequence[EpisodeFacts]) -> Advice:
    return Advice(
        name="host_fails",
        cause=f"one machine has nearly all failures: {name}",
        evidence=f"{figures}; {_mostly(failed)}" if failed else figures,
        commands=(f"agentrl tasks {facts.path} --failed", f"agentrl logs {facts.path}"),
    )


def workers_die(facts: RunFacts) -> Advice | None:
    """Tasks killed their workers, and are not played again."""
    if not facts.quarantined:
        return None
    return Advice(
        name="workers_die",
        cause="tasks kill the workers that play them",
        evidence=f"{len(facts.quarantined)} tasks are not played again, the last: {facts.quarantined[-1]}",
        commands=(f"agentrl tasks {facts.path}", f"agentrl logs {facts.path} worker-0"),
    )
