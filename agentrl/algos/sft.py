"""Supervised learning on demonstrations: the cross-entropy of the tokens that a policy should say.

    loss = - mean over tokens of  log p(token)

`normalise` says what weighs the same in the mean: every token, or every demonstration. Not chosen by `[algo] kind`:
demonstrations are not sampled by a run. `agentrl sft` trains with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from agentrl.algos.algorithm import Algorithm, Loss, Outputs, Siblings

if TYPE_CHECKING:
    from torch import Tensor


class Supervised(Algorithm):
    """Maximises the likelihood of demonstrations."""

    kind: Literal["sft"] = "sft"

    @property
    def corrects(self) -> bool:
        return False

    def prepare(self, siblings: Siblings) -> dict[str, Tensor]:
        return {}

    def loss(self, tokens: Mapping[str, Tensor], outputs: Outputs, step: int) -> Loss:
        # A mask of the right shape and device that is False everywhere.
        nowhere_K = tokens["weight"] < 0
        return Loss(total=-(tokens["weight"] * outputs.logprobs_K).sum(), clipped_K=nowhere_K)
