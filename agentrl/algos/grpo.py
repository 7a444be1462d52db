"""GRPO (Shao et al. 2024): an episode is judged by its siblings, and no critic is needed.

    A[i, t] = (R_i - b_i) + w (C[i, t] - c[i, t])                  see `agentrl.algos.credit`
    loss    = - mean over tokens of  rho min(r A, clip(r, 1 - low, 1 + high) A)  + kl - entropy

r is the ratio of the current policy to that of the step's start, rho the truncated importance weight from the policy
that sampled to that of the step's start (decoupled PPO, Hilton et al. 2022). With one update per step r is 1 and the
clip does nothing: this is then REINFORCE with a leave-one-out baseline and truncated importance weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from agentrl.algos.algorithm import ROUNDING, Algorithm, Loss, Outputs, Positive, Siblings, Slots, Weight

if TYPE_CHECKING:
    from torch import Tensor


class GRPO(Algorithm):
    """Group-relative policy optimization."""

    kind: Literal["grpo"] = "grpo"
    baseline: Literal["leave_one_out", "group_mean", "none"] = "leave_one_out"  # what an outcome is compared with
    scale: Literal["none", "std"] = "none"  # whether advantages are divided by the spread of their group
    source_scale: Literal["none", "std", "leave_one_out"] = (
        "none"  # or outcome and each reward source by its own spread
    )
    clip_low: Positive = 0.2  # PPO: the ratio may fall by so much
    clip_high: Positive = 0.28  # and rise by so much
    importance: Literal["token", "none"] = "token"  # behaviour -> proximal correction
    kl_weight: Weight = 0.0  # of a penalty on leaving the reference
    kl_gradient: Literal["k3", "k2"] = "k3"  # k3 pulls along KL(reference || policy), k2 along KL(policy || reference)
    entropy_weight: Weight = 0.0  # bonus on the entropy of the policy

    @property
    def slots(self) -> Slots:
        return Slots(frozen={"reference": None} if self.kl_weight > 0 else {})

    @property
    def entropy_gradient(self) -> bool:
        return self.entropy_weight > 0

    @property
    def compares(self) -> bool:
        return self.baseline != "none"

    @property
    def least_members(self) -> int:
        return 3 if self.source_scale == "leave_one_out" else super().least_members  # one sibling has no spread

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.source_scale != "none" and self.scale != "none":
            raise ValueError(f"scale = {self.scale!r} and source_scale = {self.source_scale!r}: leave one of them out")
        return self

    @property
    def corrects(self) -> bool:
        return self.importance != "none"

    def prepare(self, siblings: Siblings) -> dict[str, Tensor]:
        from agentrl.algos.credit import turn_advantages
        from agentrl.algos.streams import stream_advantages

        if self.source_scale != "none":
            return {
                "advantage": stream_advantages(
                    siblings.outcomes_G,
                    siblings.streams_KGT,
                    siblings.weights_K,
                    siblings.turns_G,
                    siblings.scored_G,
                    baseline=self.baseline,
                    scale=self.source_scale,
                    process_weight=self.process_weight,
                    judges_G=siblings.judges_G,
                )
            }
        advantages_GT = turn_advantages(
            siblings.outcomes_G,
            siblings.rewards_GT,
            siblings.turns_G,
            siblings.scored_G,
            baseline=self.baseline,
            scale=self.scale,
            process_weight=self.process_weight,
            judges_G=siblings.judges_G,
        )
        return {"advantage": advantages_GT}

    def matters(self, tokens: Mapping[str, Tensor]) -> bool:
        penalised = self.kl_weight > 0 or self.entropy_weight > 0
        return penalised or bool((tokens["advantage"].abs() > ROUNDING).any())

    def loss(self, tokens: Mapping[str, Tensor], outputs: Outputs, step: int) -> Loss:
        from agentrl.algos.corrections import importance_weights
        from agentrl.algos.losses import clipped_surrogate, kl_penalty, policy_loss

        logprobs_K, proximal_K = outputs.logprobs_K, tokens["proximal"]
        surrogate_K, clipped_K = clipped_surrogate(
            logprobs_K, proximal_K, tokens["advantage"], clip_low=self.clip_low, clip_high=self.clip_high
        )
        behaviour_K = tokens["behaviour"] if self.corrects else proximal_K
        total = policy_loss(
            surrogate_K,
            tokens["weight"],
            importance_weights(proximal_K, behaviour_K, self.importance_cap if self.corrects else 1.0),
            kl_T=kl_penalty(logprobs_K, tokens["reference"], self.kl_gradient) if self.kl_weight > 0 else None,
            kl_weight=self.kl_weight,
            entropy_T=outputs.entropy_K if self.entropy_weight > 0 else None,
            entropy_weight=self.entropy_weight,
        )
        return Loss(total=total, clipped_K=clipped_K)
