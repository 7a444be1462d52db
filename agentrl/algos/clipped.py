"""What algorithms with a clipped ratio share: the surrogate, the importance of stale tokens, KL and entropy terms.

    loss = sum over tokens of  weight (rho (surrogate(r, A) + kl) - entropy)

r is the ratio of the current policy to that of the step's start, and rho the importance weight from the policy that
sampled to that of the step's start (decoupled PPO, Hilton et al. 2022). With one update per step r is 1. A token whose
weight is 0, and an episode that is rejected, stay in the normalisation.
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
    importance: Literal["token", "sequence", "geometric", "none"] = "token"  # the ratio that weighs stale tokens
    importance_floor: Weight = 0.0  # importance weights are at least this, see `importance_mode`
    importance_mode: Literal["truncate", "mask"] = "truncate"  # a weight out of floor and cap: the bound, or 0 (IcePop)
    reject: Literal["none", "token", "sequence", "geometric"] = "none"  # an episode is left out if this ratio
    reject_below: Weight = 0.5  # is below this, `token`: of any of its tokens
    reject_above: Positive = 2.0  # or above this
    kl_weight: Weight = 0.0  # of a penalty on leaving the reference
    kl_gradient: Literal["k3", "k2"] = "k3"  # k3 pulls along KL(reference || policy), k2 along KL(policy || reference)
    entropy_weight: Weight = 0.0  # bonus on the entropy of the policy

    @model_validator(mode="after")
    def _dual(self) -> Self:
        if 0 < self.dual_clip <= 1 + self.clip_high:
            least = f"1 + clip_high = {1 + self.clip_high:g}"
            raise ValueError(f"dual_clip = {self.dual_clip:g}: must be above {least}, or 0 for no bound")
        return self

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        for low, high in (("importance_floor", "importance_cap"), ("reject_below", "reject_above")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(f"{low} = {getattr(self, low):g} must be below {high} = {getattr(self, high):g}")
        if self.importance_mode == "mask" and self.importance == "none":
            raise ValueError("importance_mode = 'mask' and importance = 'none': give importance = 'token'")
        return self

    @property
    def corrects(self) -> bool:
        return self.importance != "none"

    @property
    def ahead(self) -> bool:
        return self.importance in ("sequence", "geometric") or self.reject != "none"

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

    def advantages(self, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What needs whole sequences, if the settings ask for it: their `importance`, and whether they are `kept`."""
        from agentrl.algos.corrections import bounded, ratios, within

        columns: dict[str, Tensor] = {}
        if not self.ahead:
            return columns
        gap_T, keys = tokens["proximal"] - tokens["behaviour"], (tokens["episode"], tokens["role"])
        if self.importance == "sequence" or self.importance == "geometric":
            ratio_T = ratios(gap_T, *keys, self.importance)
            weight_T = bounded(ratio_T, self.importance_floor, self.importance_cap, self.importance_mode)
            columns["importance"] = weight_T.to(gap_T.dtype)
        if self.reject != "none":
            ratio_T = ratios(gap_T, *keys, self.reject)
            columns["kept"] = within(ratio_T, *keys, self.reject_below, self.reject_above)
        return columns

    def correction(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """The importance weight of each token, without gradient: [K]."""
        from agentrl.algos.corrections import importance_weights

        if "importance" in tokens:
            return tokens["importance"]
        if not self.corrects:
            return tokens["proximal"].new_ones(tokens["proximal"].shape)
        floor, cap = self.importance_floor, self.importance_cap
        return importance_weights(tokens["proximal"], tokens["behaviour"], cap, floor=floor, mode=self.importance_mode)

    def loss(self, tokens: Mapping[str, Tensor], outputs: Outputs, step: int) -> Loss:
        from agentrl.algos.losses import kl_penalty, policy_loss

        surrogate_K, clipped_K = self.surrogate(tokens, outputs)
        kl_K = None
        if self.kl_weight > 0:
            kl_K = kl_penalty(outputs.logprobs_K, tokens["reference"], self.kl_gradient)
        importance_K = self.correction(tokens)
        total = policy_loss(
            surrogate_K,
            tokens["weight"] * tokens["kept"] if "kept" in tokens else tokens["weight"],
            importance_K,
            kl_T=kl_K,
            kl_weight=self.kl_weight,
            entropy_T=outputs.entropy_K if self.entropy_weight > 0 else None,
            entropy_weight=self.entropy_weight,
        )
        return Loss(total=total, clipped_K=clipped_K, importance_K=importance_K)
