"""Checks of who waits for whom, what is lost on the way to the loss, and what is not measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentrl.run.health.advice import Advice, mean, percent, share
from agentrl.run.health.run_facts import RECENT, RunFacts
from agentrl.run.reporting import step_rates

_BUSY_CORES = 1.5  # runnable processes for each core
_IDLE = 0.95  # of the learner's time, in each step: on shared cores, engines use what it leaves
_EMPTY = 0.9  # of the time without any episode
_STALE = 0.2  # of the tokens
_LOST = 0.15  # of the episodes
_BIASED = 1.5  # times the length of trained episodes
_LEAST_LOST = 5
_PATIENCE = 2  # steps that an evaluation may take, or until the next one is due
_LATE, _LATE_S = 10.0, 60.0  # times a step's usual time, and at least so many seconds


def learner_starves(facts: RunFacts) -> Advice | None:
    """The learner waits for episodes nearly all the time."""
    idle, spent = facts.values("idle_s"), [step_rates.wall_s(row) for row in facts.recent]
    if facts.config.engine.colocated:  # they take turns on one GPU
        return None
    if (
        len(idle) < RECENT
        or not facts.span_s > 0
        or min(share(*pair) for pair in zip(idle, spent, strict=True)) < _IDLE
    ):
        return None
    bound_share = share(sum(facts.values("held_s")), sum(idle))
    at_once = sum(facts.played(span) for span in facts.playing) / facts.span_s
    config = facts.config
    full = at_once >= 0.7 * config.rollout.max_running
    if facts.config.engine.kind == "embedded" and facts.load is not None and facts.load > _BUSY_CORES:
        # Everything computes on the same cores: more episodes, engines or workers would only share them anew.
        return Advice(
            name="learner_starves",
            cause="the learner waits for episodes nearly all the time, and the cores of this machine are busy",
            evidence=f"idle {percent(sum(idle), sum(spent))} of {RECENT} steps; load {facts.load:.1f} a core",
            settings=(),
            commands=(f"agentrl view {facts.path}",),
        )
    # A number would put engines whose GPUs the run file names onto the first GPU.
    more_engines = () if config.engine.gpus else (f"engine.replicas={len(config.engine.places) + 1}",)
    settings = (
        (f"rollout.max_running={2 * config.rollout.max_running}", *more_engines)
        if full
        else (*more_engines, f"rollout.workers={config.rollout.workers + 1}")
    )
    return Advice(
        name="learner_starves",
        cause="the learner waits for episodes nearly all the time",
        evidence=f"idle {percent(sum(idle), sum(spent))} of {RECENT} steps, {percent(bound_share)} of it at the lag "
        f"bound; {at_once:.1f} episodes at once, at most {config.rollout.max_running}",
        settings=settings if bound_share < 0.5 else (f"buffer.max_lag={config.buffer.max_lag + 1}", *settings),
        commands=(f"agentrl view {facts.path}",),
    )


def rollouts_wait(facts: RunFacts) -> Advice | None:
    """For nearly all of the time no episode is played, since the learner cannot keep up."""
    if not facts.span_s > 0:
        return None
    covered, reached = 0.0, -math.inf
    # The union of the spans, not their sum: sixteen episodes that wait for the learner together are one wait.
    for began, ended in sorted(facts.playing):
        covered += facts.played((max(began, reached), ended))
        reached = max(reached, ended)
    busy, spent = sum(facts.values("busy_s")), sum(map(step_rates.wall_s, facts.recent))
    if covered > (1 - _EMPTY) * facts.span_s or share(busy, spent) < _EMPTY:
        return None
    return Advice(
        name="rollouts_wait",
        cause="engines and workers wait for the learner nearly all the time",
        evidence=f"no episode in {percent(1 - covered / facts.span_s)} of the last {RECENT} steps, the learner busy in "
        f"{percent(busy, spent)}",
        settings=(
            f"train.threads={2 * facts.config.train.threads}",
            f"buffer.max_lag={facts.config.buffer.max_lag + 1}",
        ),
        commands=(f"agentrl view {facts.path}",),
    )


def stalled(facts: RunFacts) -> Advice | None:
    """No step comes any more."""
    if not facts.training or not facts.times or not facts.pace_s > 0:
        return None
    ago = facts.now_s - facts.times[-1]
    if ago <= max(_LATE_S, _LATE * facts.pace_s):
        return None
    return Advice(
        name="stalled",
        cause="no step comes any more",
        evidence=f"the last one was {ago:.0f} s ago, and took {facts.pace_s:.2g} s",
        commands=(f"agentrl status {facts.path}", f"agentrl logs {facts.path} learner"),
    )


def tokens_too_old(facts: RunFacts) -> Advice | None:
    """Many tokens are older than the lag bound when their turn comes."""
    stale, used = sum(facts.values("tokens_stale")), sum(facts.values("tokens_scored"))
    if not facts.lasts(lambda row: bool(row.get("tokens_stale"))) or share(stale, stale + used) < _STALE:
        return None
    return Advice(
        name="tokens_too_old",
        cause="many tokens are too old when they could be trained",
        evidence=f"{stale:.0f} of {stale + used:.0f} tokens of the last {RECENT} steps are older than "
        f"{facts.config.buffer.max_lag} steps",
        settings=_room(facts),
    )


def long_episodes_lost(facts: RunFacts) -> Advice | None:
    """Episodes left out for their age, or by a deadline, are longer than trained ones: short episodes win."""
    trained = [episode.tokens for episode in facts.settled if episode.trained]
    # A share of lost episodes alone would be no fault: what biases training is that the lost ones are longer than the
    # trained ones (law 5).
    for reason, settings in (("stale", _room(facts)), ("deadline", (_deadline(facts),))):
        lost = [episode.tokens for episode in facts.settled if episode.lost == reason]
        some = len(lost) >= _LEAST_LOST and share(len(lost), len(lost) + len(trained)) >= _LOST
        if some and trained and mean(lost) >= _BIASED * mean(trained):
            return Advice(
                name="long_episodes_lost",
                cause="long episodes are left out more often than short ones, so the policy learns to be short",
                evidence=f"{len(lost)} episodes of {mean(lost):.0f} tokens lately lost ({reason}), {len(trained)} of "
                f"{mean(trained):.0f} trained",
                settings=settings,
            )
    return None


def _room(facts: RunFacts) -> tuple[str, ...]:
    config = facts.config
    running = max(config.rollout.group_size, config.rollout.max_running // 2)
    return (f"rollout.max_running={running}", f"buffer.max_lag={2 * config.buffer.max_lag or 1}")


def groups_expire(facts: RunFacts) -> Advice | None:
    """Groups, or late members, miss their deadline."""
    lost, trained = (
        sum(episode.lost == "deadline" for episode in facts.settled),
        sum(episode.trained for episode in facts.settled),
    )
    if lost < _LEAST_LOST or share(lost, lost + trained) < _LOST:
        return None
    return Advice(
        name="groups_expire",
        cause="episodes miss the deadline of their group, and their work is lost",
        evidence=f"{lost} episodes lately lost to {_deadline(facts, 1)}, {trained} trained",
        settings=(_deadline(facts), "buffer.close=quorum"),
    )


def _deadline(facts: RunFacts, times: int = 2) -> str:
    return f"rollout.group_deadline_s={times * facts.config.rollout.group_deadline_s:g}"


def disk_full(facts: RunFacts) -> Advice | None:
    """The run waits for space."""
    if not facts.disk:
        return None
    return Advice(
        name="disk_full",
        cause="the disk of the run is full: it waits, and loses nothing",
        evidence=facts.disk,
        settings=("train.keep_checkpoints=1", f"buffer.keep_steps={facts.config.buffer.keep_steps // 2}"),
        commands=(f"agentrl status {facts.path}",),
    )


def evaluation_fails(facts: RunFacts) -> Advice | None:
    """A held-out set was played, and nothing of it counts."""
    for result in facts.evaluations:
        if result.finished and result.failed > result.n:
            return Advice(
                name="evaluation_fails",
                cause=f"episodes of the held-out set {result.name!r} fail, so it says nothing of the policy",
                evidence=f"after step {result.step} {result.failed} of {result.failed + result.n} episodes failed",
                commands=(f"agentrl tasks {facts.path} --failed",),
            )
    return None


def evaluation_late(facts: RunFacts) -> Advice | None:
    """An evaluation that is due is not there, or not done when the next one is due."""
    every, sets = facts.config.eval.every, facts.config.eval.sets
    due = (facts.step - max(every, _PATIENCE)) // every * every if every else 0
    if due <= 0 or not sets:
        return None
    of_first = [result for result in facts.evaluations if result.name == sets[0].name]
    open_ones = [result.step for result in of_first if not result.finished and result.step <= due]
    done = [result.step for result in of_first if result.finished and result.step >= due]
    if done and not open_ones:
        return None
    shown = (
        f"that of step {open_ones[0]} is not finished"
        if open_ones
        else f"none since step {_newest([result.step for result in of_first])}"
    )
    return Advice(
        name="evaluation_late",
        cause="held-out sets are not measured as they should be",
        evidence=f"due every {every} steps; at step {facts.step} {shown}",
        settings=(f"eval.n_during={max(1, facts.config.eval.n_during // 2)}", f"eval.every={2 * every}"),
        commands=(f"agentrl logs {facts.path} worker-0",),
    )


def _newest(steps: Sequence[int]) -> int:
    return max(steps, default=0)
