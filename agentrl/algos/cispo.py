"""CISPO (MiniMax-M1, 2025): the importance weight is cut, and every token keeps its gradient.

    loss = - mean of  stop_gradient(clip(pi / behaviour, 1 - low, 1 + high)) A log pi          eq. 4

Advantages are GRPO's. PPO's clip drops the tokens whose ratio left the interval, often the rare ones that turn an
answer round; here they only count less. One ratio, to the policy that sampled, corrects staleness and bounds the step,
so there is no proximal policy, and `importance_bounds` is not used.
"""

# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from agentrl.algos.algorithm import Outputs, Positive
from agentrl.algos.grpo import GRPO

if TYPE_CHECKING:
    from torch import Tensor


class CISPO(GRPO):
    """Bounds the importance weight and keeps every token's gradient: clipped importance-sampling policy
    optimization."""

    unused: ClassVar = frozenset({"importance_bounds", "importance_mode", "dual_clip", "clip_from"})

    kind: Literal["cispo"] = "cispo"

    clip_low: Positive = 1.0
    """Distance of the lower bound of a token's weight from 1. 1 sets no lower bound."""

    clip_high: Positive = 4.0
    """Distance of the upper bound of a token's weight from 1."""

    importance: Literal["token", "none"] = "token"
    """Policy that a token's ratio divides by: the one that sampled it ("token"), or the one at the start of the step
    ("none")."""

    def log_ratio(self, tokens: Mapping[str, Tensor], outputs: Outputs) -> Tensor:
        return outputs.logprobs_K - (tokens["behaviour"] if self.corrects else tokens["proximal"])

    def surrogate(self, tokens: Mapping[str, Tensor], outputs: Outputs) -> tuple[Tensor, Tensor]:
        # Detached: the ratio is a weight here, and the gradient goes through log pi alone. That is why a token beyond
        # the bound still has one.
        ratio_K = self.log_ratio(tokens, outputs).detach().exp()
        weight_K = ratio_K.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight_K * tokens["advantage"] * outputs.logprobs_K, weight_K != ratio_K

    def correction(self, tokens: Mapping[str, Tensor]) -> Tensor:
        return tokens["proximal"].new_ones(tokens["proximal"].shape)
