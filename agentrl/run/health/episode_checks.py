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
    most = facts.config.rollout.max_tokens_per_turn
    return Advice(
        name="turns_cut",
        cause="most turns are cut before the model has ended them",
        evidence=f"{', '.join(percent(value) for value in facts.values('turns_cut'))} of the turns; "
        f"at most {most} tokens",
        settings=(f"rollout.max_tokens_per_turn={2 * most}",),
    )


def context_full(facts: RunFacts) -> Advice | None:
    """Episodes end since their context is full."""
    if not (ended := _limited(facts, (StopReason.CONTEXT_LIMIT,))):
        return None
    most = facts.config.rollout.max_context
    return Advice(
        name="context_full",
        cause="conversations outgrow their context and end there",
        evidence=f"{ended} of the last {len(facts.episodes)} episodes ended by context_limit, at {most} tokens",
        settings=(f"rollout.max_context={2 * most}", "rollout.compaction.how=drop_tools"),
    )


def time_runs_out(facts: RunFacts) -> Advice | None:
    """Episodes end by their clock."""
    if not (ended := _limited(facts, (StopReason.TIME_LIMIT, StopReason.TOOL_TIME_LIMIT))):
        return None
    rollout = facts.config.rollout
    return Advice(
        name="time_runs_out",
        cause="the clock ends episodes that could go on",
        evidence=f"{ended} of the last {len(facts.episodes)} episodes ended by time_limit or tool_time_limit",
        settings=(
            f"rollout.episode_deadline_s={2 * rollout.episode_deadline_s:g}",
            f"rollout.step_deadline_s={2 * rollout.step_deadline_s:g}",
        ),
    )


def _limited(facts: RunFacts, reasons: Sequence[StopReason]) -> int:
    ended = sum(episode.stop_reason in reasons for episode in facts.episodes)
    enough = len(facts.episodes) >= _LEAST_EPISODES and share(ended, len(facts.episodes)) >= _LIMITED
    return ended if enough else 0


def calls_not_read(facts: RunFacts) -> Advice | None:
    """The model does not write calls as its environment reads them."""
    unread = Counter(turn.parse_failure for turn in facts.turns if turn.parse_failure)
    if len(facts.turns) < _LEAST_TURNS or share(unread.total(), len(facts.turns)) < _UNREAD:
        return None
    (kind, _), *_ = unread.most_common()
    env = facts.config.env
    # A model that knows no dialect, such as the tiny coder outside of its own task, has to be shown one first.
    is_dialect_set = "tool_format" in env.kwargs
    return Advice(
        name="calls_not_read",
        cause="the calls that the model writes cannot be read: it speaks another dialect or none, or its turns are cut",
        evidence=f"{unread.total()} of {len(facts.turns)} turns failed to parse, most of them as {kind}",
        settings=() if is_dialect_set else ("env.kwargs.tool_format=hermes",),
        commands=(
            f"agentrl view {facts.path}",
            f"agentrl demos {env.id} --out demonstrations.jsonl",
            "agentrl sft --help",
        ),
    )


def tool_fails(facts: RunFacts) -> Advice | None:
    """A tool answers every call with an error."""
    for tool in sorted({name for turn in facts.turns for name in turn.tool_errors}):
        failed = sum(turn.tool_errors.get(tool, 0) for turn in facts.turns)
        worked = sum(
            tool in turn.text for turn in facts.turns if not turn.parse_failure and tool not in turn.tool_errors
        )
        if failed >= _LEAST_CALLS and share(failed, failed + worked) >= _USELESS:
            answers = Counter(turn.answer for turn in facts.turns if tool in turn.tool_errors)
            (answer, _), *_ = answers.most_common()
            return Advice(
                name="tool_fails",
                cause=f"tool {tool!r} fails whenever it is called",
                evidence=f"{failed} of {failed + worked} calls failed, most often with {answer[:_SHOWN]!r}",
                commands=(f"agentrl play {facts.config.env.id}", f"agentrl view {facts.path}"),
            )
    return None


def _failures(facts: RunFacts, reason: StopReason) -> list[EpisodeFacts]:
    """The episodes that ended so, if they are many; else none."""
    failed = [episode for episode in facts.episodes if episode.stop_reason is reason]
    many = len(failed) >= _LEAST_FAILED and share(len(failed), len(facts.episodes)) >= _FAILED
    return failed if many else []


def _mostly(failed: Sequence[EpisodeFacts]) -> str:
    (cause, n), *_ = Counter("{1}{0}".format(*_placed(episode)) for episode in failed).most_common()
    return f"{n} of them: {cause[:_SHOWN]}"


def _placed(one: EpisodeFacts) -> tuple[str, str]:
    reason, place = split_place(one.detail or one.stop_reason.value)
    return reason, f"{place}: " if place else ""


def env_fails(facts: RunFacts) -> Advice | None:
    """The environment's own code raises."""
    if not (failed := _failures(facts, StopReason.ENV_FAILED)):
        return None
    return Advice(
        name="env_fails",
        cause="the environment raises, and its episodes leave no trace in the reward",
        evidence=f"{len(failed)} of the last {len(facts.episodes)} episodes; {_mostly(failed)}",
        commands=(f"agentrl tasks {facts.path} --failed", f"agentrl validate {facts.config.env.id}"),
    )


def sandbox_fails(facts: RunFacts) -> Advice | None:
    """Boxes cannot be made, or die."""
    if not (failed := _failures(facts, StopReason.SANDBOX_FAILED)):
        return None
    return Advice(
        name="sandbox_fails",
        cause="boxes fail, through no doing of the policy",
        evidence=f"{len(failed)} of the last {len(facts.episodes)} episodes; {_mostly(failed)}",
        settings=(f"rollout.max_running={max(1, facts.config.rollout.max_running // 2)}",),
        commands=("agentrl doctor", f"agentrl tasks {facts.path} --failed"),
    )


def engine_fails(facts: RunFacts) -> Advice | None:
    """Engines answer wrongly or not at all."""
    if not (failed := _failures(facts, StopReason.ENGINE_FAILED)):
        return None
    rollout = facts.config.rollout
    return Advice(
        name="engine_fails",
        cause="engines answer wrongly, too late or not at all",
        evidence=f"{len(failed)} of the last {len(facts.episodes)} episodes; {_mostly(failed)}",
        settings=(
            f"rollout.turn_deadline_s={2 * rollout.turn_deadline_s:g}",
            f"rollout.max_running={max(1, rollout.max_running // 2)}",
        ),
        commands=(f"agentrl logs {facts.path} engine-0",),
    )


def host_fails(facts: RunFacts) -> Advice | None:
    """One machine has nearly all failures: a worker's host, or the engine that they name."""
    failed = [episode for episode in facts.episodes if episode.stop_reason in FAILURES]
    ended = sum(host.ended for host in facts.hosts.values())
    broken = sum(host.failed for host in facts.hosts.values())
    for name, host in facts.hosts.items():
        # A host that plays most episodes has most failures. It is to blame only if it is unlikely that failures which
        # strike any episode alike all fell on it: its share of the episodes, to the power of its failures.
        of_one = host.failed >= max(_LEAST_FAILED, _OF_ONE * broken)
        if of_one and share(host.ended, ended) ** host.failed <= _CHANCE and share(host.failed, host.ended) >= _FAILED:
            return _host(
                facts, name, f"{host.failed} of {broken} failures, in {host.ended} of {ended} episodes", failed
            )
    urls = Counter(url for episode in failed for url in {*_URL.findall(episode.detail)})
    for url, n in urls.most_common(1):
        # With one engine, every failure of an engine names it, and saying so is no news.
        alone = len(facts.config.engine.places) < 2 and len(facts.config.engine.urls) < 2
        many = n >= max(_LEAST_FAILED, _OF_ONE * len(failed)) and share(n, len(facts.episodes)) >= _FAILED
        if many and not alone and any(episode.stop_reason is StopReason.ENGINE_FAILED for episode in failed):
            return _host(facts, url, f"{n} of {len(failed)} failures name it", failed)
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
