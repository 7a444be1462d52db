"""PPO with a critic (Schulman et al. 2017), for tokens that older weights may have sampled.

    A, target = traces of rewards and values                             see `agentrl.algos.gae`: GAE and V-trace
    policy    = - mean of  rho min(r A, clip(r, 1 - low, 1 + high) A)    see `agentrl.algos.clipped_loss`
    critic    = mean of  max((V - target)^2, (V_old + clip(V - V_old, +-eps) - target)^2) / 2

An action is a token, or a whole turn (`level`). Values are those of the critic at the start of the step, also for
tokens that older weights sampled. An episode is judged by itself: it needs no siblings, and a late one no record.

Stale tokens: `importance = "token"` weighs a token by its own ratio rho; the states that it was sampled in remain those
of the older policy, as in V-trace. `"prefix"` weighs it by the ratio of the whole episode up to this action: with
`gae_lambda = 1` and a cap that cuts nothing the gradient is then unbiased, at the price of variance. `"none"` is plain
GAE and is biased as soon as tokens are stale; so are the advantages, not the targets, of `"sequence"` and
`"geometric"`, since the ratio of the whole episode corrects them.
"""

# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from agentrl.algos.algorithm import Loss, Outputs, Positive, Share, Siblings, Slots, Weight
from agentrl.algos.clipped_loss import Clipped

if TYPE_CHECKING:
    from torch import Tensor


LENGTH_ALPHA = 0.05
"""Alpha of `gae_lambda = "length"`, as VAPO (Yue et al. 2025) has it: an episode of 1,000 actions gets 0.98."""


class PPO(Clipped):
    """Judges actions by a critic's values: proximal policy optimization with a value function."""

    kind: Literal["ppo"] = "ppo"

    clip_high: Positive = 0.2

    importance: Literal["token", "prefix", "sequence", "geometric", "none"] = "token"
    """Importance weight of stale tokens, as in other algorithms, or the product of the ratios over the episode up to
    this action ("prefix"), which is unbiased with `algo.gae_lambda = 1` and an `algo.trace_cap` that cuts nothing, and
    whose variance grows with the length. "none" is plain GAE."""

    level: Literal["token", "turn"] = "token"
    """Unit of an action, before which the critic gives a value: a token, or a whole turn."""

    discount: Share = 1.0
    """Discount of a reward per action of distance. 1 discounts nothing."""

    gae_lambda: Share | Literal["length"] = 1.0
    """Lambda of the policy's advantages in GAE. Below 1, the variance is smaller and the critic's errors bias the
    advantages. "length" is 1 - 1 / (0.05 * actions of the episode), at least 0 (VAPO)."""

    value_lambda: Share = 1.0
    """Lambda of the critic's targets. Below 1, they rely more on the critic's own values."""

    trace_cap: Positive = 1.0
    """Upper bound of each later action's ratio, of the policy at the start of the step to the policy that sampled, in
    advantages and the critic's targets. Above 1, their product can explode in long episodes."""

    value_clip: Weight = 0.2
    """Largest change of a value in a step that still lowers the critic's loss. 0 sets no limit."""

    value_weight: Positive = 0.5
    """Weight of the critic's loss beside the policy's loss."""

    critic: Literal["own", "shared"] = "own"
    """Trunk of the value head: a second model ("own"), or the policy itself ("shared"), which needs less memory and
    learns from both losses."""

    critic_lr: Positive | None = None
    """Learning rate of the value head and its own trunk, with the warmup and schedule of `train.lr`. Without it,
    `train.lr`."""

    centre: bool = True
    """Subtracts the mean advantage of the step's other episodes in the same turn of the same role. This removes a
    constant error of the critic without bias."""

    critic_warmup_steps: Annotated[int, Field(ge=0)] = 5
    """Number of first steps that train the critic alone."""

    @property
    def slots(self) -> Slots:
        return replace(super().slots, critic=self.critic, critic_lr=self.critic_lr)

    @property
    def ahead(self) -> bool:
        return True

    def prepare(self, siblings: Siblings) -> dict[str, Tensor]:
        from agentrl.algos.credit import reward_to_go

        return {
            "to_go": siblings.outcomes_G[:, None] + self.process_weight * reward_to_go(siblings.rewards_GT),
            "own_turn": siblings.rewards_GT.new_ones(siblings.rewards_GT.shape).cumsum(1),  # 1, 2, … of the role
        }

    def advantages(self, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        import torch

        from agentrl.algos.gae import Sequences, centred, lambda_of_length, traces
        from agentrl.algos.importance import bounded

        by_turn = self.level == "turn"
        sequences = Sequences.of(tokens["episode"], tokens["role"], tokens["turn"], by_turn=by_turn)
        gap_T = (tokens["proximal"] - tokens["behaviour"]).double() * self.corrects
        gap_BU, length_B = sequences.total(gap_T), sequences.length()
        to_go_BU = sequences.first(tokens["to_go"].double())  # an action earned what is no longer to come after it
        rewards_BU = to_go_BU - torch.nn.functional.pad(to_go_BU[:, 1:], (0, 1))

        def traced(lambda_B: Tensor, ratio_BU: Tensor) -> tuple[Tensor, Tensor]:
            return traces(
                rewards_BU,
                sequences.first(tokens["values"].double()),
                length_B,
                discount=self.discount,
                lambda_B=lambda_B,
                ratio_BU=ratio_BU,
                cap=self.trace_cap,
            )

        lambda_B = lambda_of_length(length_B, LENGTH_ALPHA)
        if self.gae_lambda != "length":
            lambda_B = torch.full_like(lambda_B, self.gae_lambda)
        of_sequence, ratio_BU = self.importance in ("sequence", "geometric"), gap_BU.exp()
        advantages_BU, _ = traced(lambda_B, torch.ones_like(ratio_BU) if of_sequence else ratio_BU)
        _, targets_BU = traced(torch.full_like(lambda_B, self.value_lambda), ratio_BU)
        log_weight_T = sequences.tokens(gap_BU.cumsum(1)) if self.importance == "prefix" else gap_T
        (lower_bound, upper_bound), bound_mode = self.importance_bounds, self.importance_mode
        advantage_T = sequences.tokens(advantages_BU)
        if self.centre:
            baseline_keys = (tokens["episode"], tokens["role"], tokens["own_turn"].long())
            advantage_T = centred(advantage_T, tokens["weight"], *baseline_keys)
        begins_T = sequences.begins()
        share_T = tokens["weight"] * begins_T
        new_columns = {
            "advantage": advantage_T,
            "target": sequences.tokens(targets_BU),
            "importance": bounded(log_weight_T.exp(), lower_bound, upper_bound, bound_mode),
            "value_share": share_T * (tokens["weight"].sum() / share_T.sum()),
        }
        corrected = super().advantages(tokens)
        if "kept" in corrected:
            new_columns["value_share"] = new_columns["value_share"] * corrected["kept"]
        return {
            **{column_name: column_T.to(tokens["weight"].dtype) for column_name, column_T in new_columns.items()},
            **corrected,
        }

    def trained(self, step: int) -> tuple[str, ...]:
        return ("policy", "critic") if step >= self.critic_warmup_steps else ("critic",)

    def loss(self, tokens: Mapping[str, Tensor], outputs: Outputs, step: int) -> Loss:
        """The critic's loss, plus the policy's loss once the critic is warm."""
        import torch

        assert outputs.values_K is not None
        values_K, old_K = outputs.values_K, tokens["values"]
        target_K, share_K = tokens["target"], tokens["value_share"]
        errors_K = (values_K - target_K).square()
        if self.value_clip:
            # The larger of two errors: a value that has moved further than the clip towards its target gains nothing
            # by moving on, since the error of the clipped value no longer changes.
            clipped_values_K = old_K + (values_K - old_K).clamp(-self.value_clip, self.value_clip)
            errors_K = torch.maximum(errors_K, (clipped_values_K - target_K).square())
        value_loss = (share_K * errors_K).sum() / 2
        policy_loss = super().loss(tokens, outputs, step)
        trains_policy = "policy" in self.trained(step)
        return Loss(
            total=self.value_weight * value_loss + (policy_loss.total if trains_policy else 0.0),
            clipped_K=policy_loss.clipped_K,
            importance_K=policy_loss.importance_K,
            log_ratio_K=policy_loss.log_ratio_K,
            gauges={
                **policy_loss.gauges,
                "value_loss": value_loss,
                "value_mean": (share_K * old_K).sum(),
                "target_mean": (share_K * target_K).sum(),
                "value_error": (share_K * (old_K - target_K).square()).sum(),
            },
            gauged=share_K.sum(),
        )
