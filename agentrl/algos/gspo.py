"""GSPO (Zheng et al. 2025): the ratio that is clipped is that of a whole response, here a turn.

    s    = exp(mean over the turn's tokens of  log pi - log pi_proximal)                                   eq. 7
    loss = - mean of  rho min(s A, clip(s, 1 - low, 1 + high) A),  the same s for all tokens of a turn     eq. 5

Advantages are GRPO's. The ratio of a response is nearer to 1 than those of its tokens: the clip is a thousand times
narrower. With one update per step s is 1, and this is GRPO.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from agentrl.algos.algorithm import Outputs, Positive
from agentrl.algos.grpo import GRPO

if TYPE_CHECKING:
    from torch import Tensor


class GSPO(GRPO):
    """Clips the ratio of a whole turn: group sequence policy optimization."""

    unused: ClassVar = frozenset({"clip_from"})

    kind: Literal["gspo"] = "gspo"  # pyright: ignore[reportIncompatibleVariableOverride]

    clip_low: Positive = 3e-4
    """Distance below 1 at which the ratio of a whole turn, the geometric mean over its tokens, is clipped. Below it, a
    turn with a negative advantage adds no gradient."""

    clip_high: Positive = 4e-4
    """Distance above 1 at which the ratio of a whole turn, the geometric mean over its tokens, is clipped. Above it, a
    turn with a positive advantage adds no gradient."""

    def log_ratio(self, tokens: Mapping[str, Tensor], outputs: Outputs) -> Tensor:
        import torch

        # A turn and not the episode: the paper's response is what the policy says before anybody answers, and a turn
        # is that here.
        keys_2K = torch.stack([tokens["episode"], tokens["turn"]])
        _, turn_K, length_S = torch.unique(keys_2K, dim=1, return_inverse=True, return_counts=True)
        gap_K = outputs.logprobs_K - tokens["proximal"]
        # With gradient: each token of a turn gets its share of the gradient of the turn's ratio, which is the
        # difference to a clip of tokens.
        gap_S = gap_K.new_zeros(len(length_S)).index_add(0, turn_K, gap_K) / length_S
        return gap_S[turn_K]

    def surrogate(self, tokens: Mapping[str, Tensor], outputs: Outputs) -> tuple[Tensor, Tensor]:
        import torch

        from agentrl.algos.losses import clipped_surrogate

        # `clipped_surrogate` clips exp(first - second). The ratio of a turn is a mean over tokens and has no log-probs
        # to subtract, so its logarithm is the first and 0 the second.
        log_ratio_K = self.log_ratio(tokens, outputs)
        return clipped_surrogate(
            log_ratio_K,
            torch.zeros_like(log_ratio_K),
            tokens["advantage"],
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
