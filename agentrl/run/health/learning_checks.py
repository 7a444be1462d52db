"""Does a step change the policy, and by how much?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.run.health.advice import Advice, mean, middle
from agentrl.run.health.run_facts import RECENT, RunFacts, number

_SETTLED = 0.1  # of the entropy at first
_EARLY = 3  # steps that say how it was at first
_BETTER = 0.1  # success or reward (of its range) that a settled policy has to have gained
_GOOD = 0.7  # success at which a policy may be certain
_SPIKE = 10.0  # times the usual gradient
_HIGHEST = 3.0  # and times the largest before
_USUAL = 5  # gradients that say what is usual
_FAR = 0.5  # nats per token from the reference: e^0.5, on average, for each single token


def rate_is_zero(facts: RunFacts) -> Advice | None:
    """The optimizer runs with a learning rate of zero."""
    if not facts.lasts(lambda row: row.get("lr") == 0):
        return None
    train_settings = facts.config.train
    return Advice(
        name="rate_is_zero",
        cause="the learning rate is 0, so no step changes a weight",
        evidence=f"lr = 0 in the last {RECENT} steps; {train_settings.lr_schedule!r}, step {facts.step} of "
        f"{train_settings.steps}",
        settings=(f"train.lr={train_settings.lr or 5e-4:g}", "train.lr_schedule=constant"),
    )


def weights_stand_still(facts: RunFacts) -> Advice | None:
    """There are advantages, and a gradient of zero."""
    if not facts.lasts(lambda row: bool(row.get("updated")) and row.get("grad_norm") == 0):
        return None
    return Advice(
        name="weights_stand_still",
        cause="tokens have advantages, and the gradient is 0: a clip cuts all, or nothing that trains is in the loss",
        evidence=f"grad_norm = 0 in the last {RECENT} steps, of {sum(facts.values('tokens_computed')):.0f} tokens",
        settings=(f"algo.clip_high={2 * getattr(facts.config.algo, 'clip_high', 0.2):g}", "train.grad_clip=1.0"),
        commands=(f"agentrl retrain {facts.path} --step {facts.step}",),
    )


def gradient_not_finite(facts: RunFacts) -> Advice | None:
    """Updates are skipped, since their loss or gradient is no number."""
    skipped_updates = facts.values("skipped_updates")
    if len(skipped_updates) < RECENT or sum(skip_count > 0 for skip_count in skipped_updates) < 2:
        return None
    return Advice(
        name="gradient_not_finite",
        cause="losses or gradients overflow, and their groups are lost",
        evidence=f"skipped_updates = {', '.join(f'{skip_count:.0f}' for skip_count in skipped_updates)} in the last "
        "steps",
        settings=(f"train.lr={facts.config.train.lr / 3:.2g}", "train.dtype=float32"),
        commands=(f"agentrl retrain {facts.path} --step {facts.step}",),
    )


def gradient_spikes(facts: RunFacts) -> Advice | None:
    """A gradient is many times what it was in all steps before."""
    former_norms = [gradient_norm for gradient_norm in facts.values("grad_norm", facts.before) if gradient_norm > 0]
    recent_norms = facts.values("grad_norm")
    # Against the median and against the highest value: gradients of RL are heavy-tailed, and ten times the median alone
    # is an ordinary step of many runs.
    if (
        len(former_norms) < _USUAL
        or not recent_norms
        or max(recent_norms) < max(_SPIKE * middle(former_norms), _HIGHEST * max(former_norms))
    ):
        return None
    spike_step = next(
        step_metrics["step"] for step_metrics in facts.recent if step_metrics.get("grad_norm") == max(recent_norms)
    )
    return Advice(
        name="gradient_spikes",
        cause="single batches throw the policy far: an outlier of a reward, or steps that are too large",
        evidence=f"grad_norm {max(recent_norms):.3g} at step {spike_step}, {middle(former_norms):.3g} in the middle "
        "before",
        settings=(f"train.grad_clip={3 * middle(former_norms):.2g}", f"train.lr={facts.config.train.lr / 3:.2g}"),
        commands=(f"agentrl retrain {facts.path} --step {spike_step}",),
    )


def entropy_collapse(facts: RunFacts) -> Advice | None:
    """The policy became certain without becoming good."""
    early_entropies = facts.values("entropy", facts.before[:_EARLY])
    recent_entropies = facts.values("entropy")
    if (
        len(early_entropies) < _EARLY
        or len(recent_entropies) < RECENT
        or max(recent_entropies) > _SETTLED * middle(early_entropies)
    ):
        return None
    # A policy that solves its tasks is certain, and should be. Low entropy is only a fault if nothing came of it.
    if _success(facts.recent) >= _GOOD or _gained(facts):
        return None
    entropy_weight = getattr(facts.config.algo, "entropy_weight", 0.0)
    return Advice(
        name="entropy_collapse",
        cause="the policy writes nearly the same each time, and is no better for it",
        evidence=f"entropy {mean(recent_entropies):.2g} nats, {middle(early_entropies):.2g} in the first steps; "
        f"success {_success(facts.recent):.2f}, {_success(facts.before[:_EARLY]):.2f} in the first steps",
        settings=(f"algo.entropy_weight={3 * entropy_weight or 0.003:g}", f"train.lr={facts.config.train.lr / 3:.2g}"),
    )


def _success(rows: Sequence[Mapping[str, Any]]) -> float:
    """The success of some steps, else their outcome reward."""
    success_rates = [
        step_value for step_metrics in rows if (step_value := number(step_metrics, "success_mean")) is not None
    ]
    return mean(
        success_rates
        or [step_value for step_metrics in rows if (step_value := number(step_metrics, "outcome_mean")) is not None]
    )


def _gained(facts: RunFacts) -> bool:
    return _success(facts.recent) - _success(facts.before[:_EARLY]) >= _BETTER


def moves_too_far(facts: RunFacts) -> Advice | None:
    """The learner is far from the policy that sampled: by KL, or by the tokens that its weights or its clip leave."""
    alarm_settings = facts.config.alarms
    measure_limits = {
        "kl_k3": alarm_settings.kl_above or 0.3,
        "ess": alarm_settings.ess_below or 0.3,
        "clip_fraction": alarm_settings.clip_above or 0.5,
    }
    beyond_limit = {
        "kl_k3": sum(kl_estimate > measure_limits["kl_k3"] for kl_estimate in facts.values("kl_k3")) >= 2,
        "ess": facts.lasts(lambda row: (size := number(row, "ess")) is not None and size < measure_limits["ess"]),
        "clip_fraction": facts.lasts(
            lambda row: (number(row, "clip_fraction") or 0.0) > measure_limits["clip_fraction"]
        ),
    }
    exceeded_limits = [
        f"{measure_name} {_shown(facts, measure_name)} (limit {measure_limits[measure_name]:g})"
        for measure_name, is_beyond in beyond_limit.items()
        if is_beyond
    ]
    if not exceeded_limits:
        return None
    return Advice(
        name="moves_too_far",
        cause="the policy moves too far between sampling and training",
        evidence=f"{'; '.join(exceeded_limits)}; tokens are {mean(facts.values('lag_mean')):.1f} steps old",
        settings=(f"train.lr={facts.config.train.lr / 3:.2g}", *_less_lag(facts)),
    )


def reference_far(facts: RunFacts) -> Advice | None:
    """The policy left its reference."""
    recent_divergences = facts.values("measures.kl_reference")
    if len(recent_divergences) < RECENT or min(recent_divergences) < _FAR:
        return None
    kl_weight = getattr(facts.config.algo, "kl_weight", 0.0)
    return Advice(
        name="reference_far",
        cause="the policy has left the reference that it should stay near",
        evidence=f"measures.kl_reference {_shown(facts, 'measures.kl_reference')} nats per token",
        settings=(f"algo.kl_weight={3 * kl_weight or 0.01:g}", f"train.lr={facts.config.train.lr / 3:.2g}"),
    )


def keeps_going_back(facts: RunFacts) -> Advice | None:
    """The learner dies again and again."""
    if facts.returns < RECENT:
        return None
    return Advice(
        name="keeps_going_back",
        cause="the run returns to its checkpoint again and again: its learner dies or hangs",
        evidence=f"{facts.returns} returns while the last {len(facts.recent) or len(facts.steps)} steps were made",
        settings=(f"train.tokens_per_batch={max(1, facts.config.train.tokens_per_batch // 2)}",),
        commands=(f"agentrl logs {facts.path} learner",),
    )


def _less_lag(facts: RunFacts) -> tuple[str, ...]:
    lag_bound = facts.config.buffer.max_lag
    return (f"buffer.max_lag={lag_bound // 2}",) if lag_bound else ()


def _shown(facts: RunFacts, name: str) -> str:
    return ", ".join(f"{step_value:.2g}" for step_value in facts.values(name))
