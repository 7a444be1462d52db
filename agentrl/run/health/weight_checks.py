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
    counts = ", ".join(f"{n:.0f}" for n in facts.values("engines_behind"))
    return Advice(
        name="engine_left_behind",
        cause="an engine has not taken the last weights, so its tokens are old",
        evidence=f"engines_behind = {counts} in the last {len(facts.recent)} steps",
        settings=(f"engine.liveness_deadline_s={2 * facts.config.engine.liveness_deadline_s:g}",),
        commands=(f"agentrl logs {facts.path} engine-0", f"agentrl status {facts.path}"),
    )


def weights_not_served(facts: RunFacts) -> Advice | None:
    """Turns that began after new weights were confirmed were sampled with old ones."""
    lags = [turn.behind for turn in facts.turns if turn.behind is not None]
    late = [behind for behind in lags if behind >= _BEHIND]
    if len(lags) < _LEAST_TURNS or share(len(late), len(lags)) < _BEHIND_SHARE:
        return None
    return Advice(
        name="weights_not_served",
        cause="engines confirm new weights, or adapters, and go on sampling with old ones",
        evidence=f"{len(late)} of {len(lags)} turns began with weights {min(late)} to {max(late)} steps older than "
        "those served",
        settings=("engine.canary=true", *(("engine.sync=full",) if facts.config.sends_adapters else ())),
        commands=(f"agentrl logs {facts.path} engine-0",),
    )


def weights_not_applied(facts: RunFacts) -> Advice | None:
    """Tokens that say they are fresh fit the learner's weights less with each step."""
    values = facts.values("mismatch_mean", facts.steps)
    if len(values) < 4:
        return None
    base, (first, second, third) = middle(values[:-3]), values[-3:]
    if not (first < second < third and first >= _GROWN * base and third >= max(_NOT_ROUNDING, _GROWS * first)):
        return None
    return Advice(
        name="weights_not_applied",
        cause="engines name the new version of weights or adapter, and compute with other ones",
        evidence=f"mismatch_mean of fresh tokens {base:.2g} nats before, then {first:.2g}, {second:.2g}, {third:.2g}",
        settings=("engine.canary=true", *(("engine.sync=full",) if facts.config.sends_adapters else ())),
        commands=(f"agentrl logs {facts.path} engine-0",),
    )


def sampling_differs(facts: RunFacts) -> Advice | None:
    """Engine and learner give a fresh token other probabilities from the beginning: settings, precision, templates."""
    limit = facts.config.alarms.mismatch_above or 0.2
    fresh = facts.values("mismatch_mean")
    means, counts, sizes = (facts.values(f"ratios.token.{name}") for name in ("mean", "n", "ess"))
    full = len(means) == len(facts.recent) > 0 and min(counts) >= _LEAST_TOKENS and min(sizes) >= _STEADY_ESS
    biased = full and (all(mean < 1 - _BIAS for mean in means) or all(mean > 1 + _BIAS for mean in means))
    if not biased and sum(value > limit for value in fresh) < 2:
        return None
    shown = ", ".join(f"{mean:.3g}" for mean in means)
    figures = [f"mismatch_mean {', '.join(f'{figure:.2g}' for figure in fresh)} nats on fresh tokens"] if fresh else []
    return Advice(
        name="sampling_differs",
        cause="engines draw tokens from another distribution than the learner trains",
        evidence="; ".join([*figures, f"mean ratio of tokens {shown} (1 if they agree)"]),
        settings=("rollout.temperature=1.0", "rollout.top_p=1.0", "rollout.top_k=0", "rollout.min_p=0.0"),
        commands=("agentrl doctor",),
    )
