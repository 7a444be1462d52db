"""What algorithms with a clipped ratio share: the surrogate, the importance of stale tokens, KL and entropy terms.

    loss = sum over tokens of  weight (rho (surrogate(r, A) + kl) - entropy)

r is the ratio of the current policy to that of the step's start, and rho the importance weight from the policy that
sampled to that of the step's start (decoupled PPO, Hilton et al. 2022). With one update per step r is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from agentrl.algos.algorithm import Algorithm, Loss, Outputs, Positive, Slots, Weight

if TYPE_CHECKING:
    from torch import Tensor


class Clipped(Algorithm):
    """The settings of the policy's loss, and the loss."""

    clip_low: Positive = 0.2  # PPO: the ratio may fall by so much
    clip_high: Positive = 0.28  # and rise by so much
    dual_clip: Weight = 0.0  # bound on it with a negative advantage, such as 3 (Ye et al. 2020); 0: none
    kl_weight: Weight = 0.0  # of a penalty on leaving the reference
    kl_gradient: Literal["k3", "k2"] = "k3"  # k3 pulls along KL(reference || policy), k2 along KL(policy || reference)
    entropy_weight: Weight = 0.0  # bonus on the entropy of the policy

    @model_validator(mode="after")
    def _dual(self) -> Self:
        if 0 < self.dual_clip <= 1 + self.clip_high:
            least = f"1 + clip_high = {1 + self.clip_high:g}"
            raise ValueError(f"dual_clip = {self.dual_clip:g}: must be above {least}, or 0 for no bound")
        return self

    @property
    def slots(self) -> Slots:
        return Slots(frozen={"reference": None} if self.kl_weight > 0 else {})

    @property
    def entropy_gradient(self) -> bool:
        return self.entropy_weight > 0

    def surrogate(self, tokens: Mapping[str, Tensor], outputs: Outputs) -> tuple[Tensor, Tensor]:
        """Loss per token before importance and penalties, and where a clip cut its gradient: both [K]."""
        from agentrl.algos.losses import clipped_surrogate

        return clipped_surrogate(
            outputs.logprobs_K,
            tokens["proximal"],
            tokens["advantage"],
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )

    def correction(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """The importance weight of each token, without gradient: [K]."""
        from agentrl.algos.corrections import importance_weights

        if not self.corrects:
            return tokens["proximal"].new_ones(tokens["proximal"].shape)
        return importance_weights(tokens["proximal"], tokens["behaviour"], self.importance_cap)

    def loss(self, tokens: Mapping[str, Tensor], outputs: Outputs, step: int) -> Loss:
        from agentrl.algos.losses import kl_penalty, policy_loss

        surrogate_K, clipped_K = self.surrogate(tokens, outputs)
        kl_K = None
        if self.kl_weight > 0:
            kl_K = kl_penalty(outputs.logprobs_K, tokens["reference"], self.kl_gradient)
        total = policy_loss(
            surrogate_K,
            tokens["weight"],
            self.correction(tokens),
            kl_T=kl_K,
            kl_weight=self.kl_weight,
            entropy_T=outputs.entropy_K if self.entropy_weight > 0 else None,
            entropy_weight=self.entropy_weight,
        )
        return Loss(total=total, clipped_K=clipped_K)
