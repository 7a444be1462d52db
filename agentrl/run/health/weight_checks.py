"""Do engines sample from the learner's weights, as the learner would?"""

from __future__ import annotations

from agentrl.run.health.advice import Advice, middle, share
from agentrl.run.health.run_facts import RunFacts

_BEHIND = 2  # steps: one is a turn that began while the weights were on their way
_BEHIND_SHARE = 0.25  # of turns: a single engine of several that took none has at least its share
_LEAST_TURNS = 8
_GROWN = 10.0  # times what rounding made of it before
_GROWS = 1.5  # times in two steps: updates add up
_NOT_ROUNDING = 1e-3  # nats: float32 on both sides stays below a hundredth of it
_BIAS = 0.1  # of the mean ratio: its expectation is 1 whatever the staleness
_LEAST_TOKENS = 100
_STEADY_ESS = 0.5  # below, a mean ratio is that of a few tokens


def engine_left_behind(facts: RunFacts) -> Advice | None:
    """Some engines did not get the last versions."""
    if not facts.lasts(lambda row: bool(row.get("engines_behind"))):
        return None
    behind_counts = ", ".join(f"{engine_count:.0f}" for engine_count in facts.values("engines_behind"))
    return Advice(
        name="engine_left_behind",
        cause="an engine has not taken the last weights, so its tokens are old",
        evidence=f"engines_behind = {behind_counts} in the last {len(facts.recent)} steps",
        settings=(f"engine.liveness_deadline_s={2 * facts.config.engine.liveness_deadline_s:g}",),
        commands=(f"agentrl logs {facts.path} engine-0", f"agentrl status {facts.path}"),
    )


def weights_not_served(facts: RunFacts) -> Advice | None:
    """Turns that began after new weights were confirmed were sampled with old ones."""
    turn_lags = [read_turn.behind for read_turn in facts.turns if read_turn.behind is not None]
    late_lags = [turn_lag for turn_lag in turn_lags if turn_lag >= _BEHIND]
    if len(turn_lags) < _LEAST_TURNS or share(len(late_lags), len(turn_lags)) < _BEHIND_SHARE:
        return None
    return Advice(
        name="weights_not_served",
        cause="engines confirm new weights, or adapters, and go on sampling with old ones",
        evidence=f"{len(late_lags)} of {len(turn_lags)} turns began with weights {min(late_lags)} to {max(late_lags)} "
        "steps older than those served",
        settings=("engine.canary=true", *(("engine.sync=full",) if facts.config.sends_adapters else ())),
        commands=(f"agentrl logs {facts.path} engine-0",),
    )


def weights_not_applied(facts: RunFacts) -> Advice | None:
    """Tokens that say they are fresh fit the learner's weights less with each step."""
    mismatch_means = facts.values("mismatch_mean", facts.steps)
    if len(mismatch_means) < 4:
        return None
    former_mismatch = middle(mismatch_means[:-3])
    first_mismatch, second_mismatch, third_mismatch = mismatch_means[-3:]
    if not (
        first_mismatch < second_mismatch < third_mismatch
        and first_mismatch >= _GROWN * former_mismatch
        and third_mismatch >= max(_NOT_ROUNDING, _GROWS * first_mismatch)
    ):
        return None
    return Advice(
        name="weights_not_applied",
        cause="engines name the new version of weights or adapter, and compute with other ones",
        evidence=f"mismatch_mean of fresh tokens {former_mismatch:.2g} nats before, then {first_mismatch:.2g}, "
        f"{second_mismatch:.2g}, {third_mismatch:.2g}",
        settings=("engine.canary=true", *(("engine.sync=full",) if facts.config.sends_adapters else ())),
        commands=(f"agentrl logs {facts.path} engine-0",),
    )


def sampling_differs(facts: RunFacts) -> Advice | None:
    """Engine and learner give a fresh token other probabilities from the beginning: settings, precision, templates."""
    mismatch_limit = facts.config.alarms.mismatch_above or 0.2
    fresh_mismatches = facts.values("mismatch_mean")
    ratio_means, token_counts, effective_sizes = (
        facts.values(f"ratios.token.{ratio_name}") for ratio_name in ("mean", "n", "ess")
    )
    is_complete = (
        len(ratio_means) == len(facts.recent) > 0
        and min(token_counts) >= _LEAST_TOKENS
        and min(effective_sizes) >= _STEADY_ESS
    )
    is_biased = is_complete and (
        all(ratio_mean < 1 - _BIAS for ratio_mean in ratio_means)
        or all(ratio_mean > 1 + _BIAS for ratio_mean in ratio_means)
    )
    if not is_biased and sum(mismatch > mismatch_limit for mismatch in fresh_mismatches) < 2:
        return None
    shown_means = ", ".join(f"{ratio_mean:.3g}" for ratio_mean in ratio_means)
    shown_mismatches = ", ".join(f"{mismatch:.2g}" for mismatch in fresh_mismatches)
    evidence_parts = [f"mismatch_mean {shown_mismatches} nats on fresh tokens"] if fresh_mismatches else []
    return Advice(
        name="sampling_differs",
        cause="engines draw tokens from another distribution than the learner trains",
        evidence="; ".join([*evidence_parts, f"mean ratio of tokens {shown_means} (1 if they agree)"]),
        settings=("rollout.temperature=1.0", "rollout.top_p=1.0", "rollout.top_k=0", "rollout.min_p=0.0"),
        commands=("agentrl doctor",),
    )
