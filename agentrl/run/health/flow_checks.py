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
    idle_seconds = facts.values("idle_s")
    step_seconds = [step_rates.wall_s(step_metrics) for step_metrics in facts.recent]
    if facts.config.engine.colocated:  # they take turns on one GPU
        return None
    if (
        len(idle_seconds) < RECENT
        or not facts.span_s > 0
        or min(share(*idle_and_spent) for idle_and_spent in zip(idle_seconds, step_seconds, strict=True)) < _IDLE
    ):
        return None
    bound_share = share(sum(facts.values("held_s")), sum(idle_seconds))
    mean_running = sum(facts.played(playing_span) for playing_span in facts.playing) / facts.span_s
    run_config = facts.config
    is_near_limit = mean_running >= 0.7 * run_config.rollout.max_running
    if facts.config.engine.kind == "embedded" and facts.load is not None and facts.load > _BUSY_CORES:
        # Everything computes on the same cores: more episodes, engines or workers would only share them anew.
        return Advice(
            name="learner_starves",
            cause="the learner waits for episodes nearly all the time, and the cores of this machine are busy",
            evidence=f"idle {percent(sum(idle_seconds), sum(step_seconds))} of {RECENT} steps; load {facts.load:.1f} "
            "a core",
            settings=(),
            commands=(f"agentrl view {facts.path}",),
        )
    # A number would put engines whose GPUs the run file names onto the first GPU.
    more_engines = () if run_config.engine.gpus else (f"engine.replicas={len(run_config.engine.places) + 1}",)
    settings = (
        (f"rollout.max_running={2 * run_config.rollout.max_running}", *more_engines)
        if is_near_limit
        else (*more_engines, f"rollout.workers={run_config.rollout.workers + 1}")
    )
    return Advice(
        name="learner_starves",
        cause="the learner waits for episodes nearly all the time",
        evidence=f"idle {percent(sum(idle_seconds), sum(step_seconds))} of {RECENT} steps, {percent(bound_share)} of "
        f"it at the lag bound; {mean_running:.1f} episodes at once, at most {run_config.rollout.max_running}",
        settings=settings if bound_share < 0.5 else (f"buffer.max_lag={run_config.buffer.max_lag + 1}", *settings),
        commands=(f"agentrl view {facts.path}",),
    )


def rollouts_wait(facts: RunFacts) -> Advice | None:
    """For nearly all of the time no episode is played, since the learner cannot keep up."""
    if not facts.span_s > 0:
        return None
    covered_seconds, reached_time = 0.0, -math.inf
    # The union of the spans, not their sum: sixteen episodes that wait for the learner together are one wait.
    for span_begin, span_end in sorted(facts.playing):
        covered_seconds += facts.played((max(span_begin, reached_time), span_end))
        reached_time = max(reached_time, span_end)
    busy_seconds, step_seconds = sum(facts.values("busy_s")), sum(map(step_rates.wall_s, facts.recent))
    if covered_seconds > (1 - _EMPTY) * facts.span_s or share(busy_seconds, step_seconds) < _EMPTY:
        return None
    return Advice(
        name="rollouts_wait",
        cause="engines and workers wait for the learner nearly all the time",
        evidence=f"no episode in {percent(1 - covered_seconds / facts.span_s)} of the last {RECENT} steps, the "
        f"learner busy in {percent(busy_seconds, step_seconds)}",
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
    seconds_ago = facts.now_s - facts.times[-1]
    if seconds_ago <= max(_LATE_S, _LATE * facts.pace_s):
        return None
    return Advice(
        name="stalled",
        cause="no step comes any more",
        evidence=f"the last one was {seconds_ago:.0f} s ago, and took {facts.pace_s:.2g} s",
        commands=(f"agentrl status {facts.path}", f"agentrl logs {facts.path} learner"),
    )


def tokens_too_old(facts: RunFacts) -> Advice | None:
    """Many tokens are older than the lag bound when their turn comes."""
    stale_tokens, used_tokens = sum(facts.values("tokens_stale")), sum(facts.values("tokens_scored"))
    if (
        not facts.lasts(lambda row: bool(row.get("tokens_stale")))
        or share(stale_tokens, stale_tokens + used_tokens) < _STALE
    ):
        return None
    return Advice(
        name="tokens_too_old",
        cause="many tokens are too old when they could be trained",
        evidence=f"{stale_tokens:.0f} of {stale_tokens + used_tokens:.0f} tokens of the last {RECENT} steps are older "
        f"than {facts.config.buffer.max_lag} steps",
        settings=_room(facts),
    )


def long_episodes_lost(facts: RunFacts) -> Advice | None:
    """Episodes left out for their age, or by a deadline, are longer than trained ones: short episodes win."""
    trained_lengths = [episode.tokens for episode in facts.settled if episode.trained]
    # A share of lost episodes alone would be no fault: what biases training is that the lost ones are longer than the
    # trained ones (law 5).
    for loss_reason, settings in (("stale", _room(facts)), ("deadline", (_deadline(facts),))):
        lost_lengths = [episode.tokens for episode in facts.settled if episode.lost == loss_reason]
        is_frequent = (
            len(lost_lengths) >= _LEAST_LOST
            and share(len(lost_lengths), len(lost_lengths) + len(trained_lengths)) >= _LOST
        )
        if is_frequent and trained_lengths and mean(lost_lengths) >= _BIASED * mean(trained_lengths):
            return Advice(
                name="long_episodes_lost",
                cause="long episodes are left out more often than short ones, so the policy learns to be short",
                evidence=f"{len(lost_lengths)} episodes of {mean(lost_lengths):.0f} tokens lately lost "
                f"({loss_reason}), {len(trained_lengths)} of {mean(trained_lengths):.0f} trained",
                settings=settings,
            )
    return None


def _room(facts: RunFacts) -> tuple[str, ...]:
    run_config = facts.config
    running_limit = max(run_config.rollout.group_size, run_config.rollout.max_running // 2)
    return (f"rollout.max_running={running_limit}", f"buffer.max_lag={2 * run_config.buffer.max_lag or 1}")


def groups_expire(facts: RunFacts) -> Advice | None:
    """Groups, or late members, miss their deadline."""
    lost_count = sum(episode.lost == "deadline" for episode in facts.settled)
    trained_count = sum(episode.trained for episode in facts.settled)
    if lost_count < _LEAST_LOST or share(lost_count, lost_count + trained_count) < _LOST:
        return None
    return Advice(
        name="groups_expire",
        cause="episodes miss the deadline of their group, and their work is lost",
        evidence=f"{lost_count} episodes lately lost to {_deadline(facts, 1)}, {trained_count} trained",
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
    for evaluation in facts.evaluations:
        if evaluation.finished and evaluation.failed > evaluation.n:
            return Advice(
                name="evaluation_fails",
                cause=f"episodes of the held-out set {evaluation.name!r} fail, so it says nothing of the policy",
                evidence=f"after step {evaluation.step} {evaluation.failed} of {evaluation.failed + evaluation.n} "
                "episodes failed",
                commands=(f"agentrl tasks {facts.path} --failed",),
            )
    return None


def evaluation_late(facts: RunFacts) -> Advice | None:
    """An evaluation that is due is not there, or not done when the next one is due."""
    eval_interval, held_out_sets = facts.config.eval.every, facts.config.eval.sets
    due_step = (facts.step - max(eval_interval, _PATIENCE)) // eval_interval * eval_interval if eval_interval else 0
    if due_step <= 0 or not held_out_sets:
        return None
    first_set_results = [evaluation for evaluation in facts.evaluations if evaluation.name == held_out_sets[0].name]
    unfinished_steps = [
        evaluation.step for evaluation in first_set_results if not evaluation.finished and evaluation.step <= due_step
    ]
    finished_steps = [
        evaluation.step for evaluation in first_set_results if evaluation.finished and evaluation.step >= due_step
    ]
    if finished_steps and not unfinished_steps:
        return None
    lateness = (
        f"that of step {unfinished_steps[0]} is not finished"
        if unfinished_steps
        else f"none since step {_newest([evaluation.step for evaluation in first_set_results])}"
    )
    return Advice(
        name="evaluation_late",
        cause="held-out sets are not measured as they should be",
        evidence=f"due every {eval_interval} steps; at step {facts.step} {lateness}",
        settings=(f"eval.n_during={max(1, facts.config.eval.n_during // 2)}", f"eval.every={2 * eval_interval}"),
        commands=(f"agentrl logs {facts.path} worker-0",),
    )


def _newest(steps: Sequence[int]) -> int:
    return max(steps, default=0)
