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
    train = facts.config.train
    return Advice(
        name="rate_is_zero",
        cause="the learning rate is 0, so no step changes a weight",
        evidence=f"lr = 0 in the last {RECENT} steps; {train.lr_schedule!r}, step {facts.step} of {train.steps}",
        settings=(f"train.lr={train.lr or 5e-4:g}", "train.lr_schedule=constant"),
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
    skipped = facts.values("skipped_updates")
    if len(skipped) < RECENT or sum(n > 0 for n in skipped) < 2:
        return None
    return Advice(
        name="gradient_not_finite",
        cause="losses or gradients overflow, and their groups are lost",
        evidence=f"skipped_updates = {', '.join(f'{n:.0f}' for n in skipped)} in the last steps",
        settings=(f"train.lr={facts.config.train.lr / 3:.2g}", "train.dtype=float32"),
        commands=(f"agentrl retrain {facts.path} --step {facts.step}",),
    )


def gradient_spikes(facts: RunFacts) -> Advice | None:
    """A gradient is many times what it was in all steps before."""
    usual = [value for value in facts.values("grad_norm", facts.before) if value > 0]
    recent = facts.values("grad_norm")
    # Against the median and against the highest value: gradients of RL are heavy-tailed, and ten times the median alone
    # is an ordinary step of many runs.
    if len(usual) < _USUAL or not recent or max(recent) < max(_SPIKE * middle(usual), _HIGHEST * max(usual)):
        return None
    step = next(row["step"] for row in facts.recent if row.get("grad_norm") == max(recent))
    return Advice(
        name="gradient_spikes",
        cause="single batches throw the policy far: an outlier of a reward, or steps that are too large",
        evidence=f"grad_norm {max(recent):.3g} at step {step}, {middle(usual):.3g} in the middle before",
        settings=(f"train.grad_clip={3 * middle(usual):.2g}", f"train.lr={facts.config.train.lr / 3:.2g}"),
        commands=(f"agentrl retrain {facts.path} --step {step}",),
    )


def entropy_collapse(facts: RunFacts) -> Advice | None:
    """The policy became certain without becoming good."""
    early = facts.values("entropy", facts.before[:_EARLY])
    now = facts.values("entropy")
    if len(early) < _EARLY or len(now) < RECENT or max(now) > _SETTLED * middle(early):
        return None
    # A policy that solves its tasks is certain, and should be. Low entropy is only a fault if nothing came of it.
    if _success(facts.recent) >= _GOOD or _gained(facts):
        return None
    weight = getattr(facts.config.algo, "entropy_weight", 0.0)
    return Advice(
        name="entropy_collapse",
        cause="the policy writes nearly the same each time, and is no better for it",
        evidence=f"entropy {mean(now):.2g} nats, {middle(early):.2g} in the first steps; success "
        f"{_success(facts.recent):.2f}, {_success(facts.before[:_EARLY]):.2f} in the first steps",
        settings=(f"algo.entropy_weight={3 * weight or 0.003:g}", f"train.lr={facts.config.train.lr / 3:.2g}"),
    )


def _success(rows: Sequence[Mapping[str, Any]]) -> float:
    """The success of some steps, else their outcome reward."""
    rates = [value for row in rows if (value := number(row, "success_mean")) is not None]
    return mean(rates or [value for row in rows if (value := number(row, "outcome_mean")) is not None])


def _gained(facts: RunFacts) -> bool:
    return _success(facts.recent) - _success(facts.before[:_EARLY]) >= _BETTER


def moves_too_far(facts: RunFacts) -> Advice | None:
    """The learner is far from the policy that sampled: by KL, or by the tokens that its weights or its clip leave."""
    alarms = facts.config.alarms
    limits = {
        "kl_k3": alarms.kl_above or 0.3,
        "ess": alarms.ess_below or 0.3,
        "clip_fraction": alarms.clip_above or 0.5,
    }
    beyond = {
        "kl_k3": sum(value > limits["kl_k3"] for value in facts.values("kl_k3")) >= 2,
        "ess": facts.lasts(lambda row: (size := number(row, "ess")) is not None and size < limits["ess"]),
        "clip_fraction": facts.lasts(lambda row: (number(row, "clip_fraction") or 0.0) > limits["clip_fraction"]),
    }
    shown = [
        f"{name} {_shown(facts, name)} (limit {limits[name]:g})" for name, is_beyond in beyond.items() if is_beyond
    ]
    if not shown:
        return None
    return Advice(
        name="moves_too_far",
        cause="the policy moves too far between sampling and training",
        evidence=f"{'; '.join(shown)}; tokens are {mean(facts.values('lag_mean')):.1f} steps old",
        settings=(f"train.lr={facts.config.train.lr / 3:.2g}", *_less_lag(facts)),
    )


def reference_far(facts: RunFacts) -> Advice | None:
    """The policy left its reference."""
    now = facts.values("measures.kl_reference")
    if len(now) < RECENT or min(now) < _FAR:
        return None
    weight = getattr(facts.config.algo, "kl_weight", 0.0)
    return Advice(
        name="reference_far",
        cause="the policy has left the reference that it should stay near",
        evidence=f"measures.kl_reference {_shown(facts, 'measures.kl_reference')} nats per token",
        settings=(f"algo.kl_weight={3 * weight or 0.01:g}", f"train.lr={facts.config.train.lr / 3:.2g}"),
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
    lag = facts.config.buffer.max_lag
    return (f"buffer.max_lag={lag // 2}",) if lag else ()


def _shown(facts: RunFacts, name: str) -> str:
    return ", ".join(f"{value:.2g}" for value in facts.values(name))
