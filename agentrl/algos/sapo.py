"""SAPO (Gao et al. 2025): a soft gate on the ratio of each token in the place of a clip.

    loss = - mean of  rho f(r) A,   f(r) = 4 / tau sigmoid(tau (r - 1)),   tau = tau[1] if A < 0

Advantages are GRPO's. A token whose ratio left 1 counts less and less, but never stops to count at once; with a
negative advantage sooner, as tau[1] > tau[0]: such a token makes all others of the vocabulary likelier,
whatever they are. With one update per step r is 1, and this is GRPO.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from agentrl.algos.algorithm import Outputs, Positive
from agentrl.algos.grpo import GRPO

if TYPE_CHECKING:
    from torch import Tensor


class SAPO(GRPO):
    """Weakens tokens by a soft gate instead of a clip: soft adaptive policy optimization."""

    unused: ClassVar = frozenset({"clip_low", "clip_high", "dual_clip", "clip_from"})

    kind: Literal["sapo"] = "sapo"  # pyright: ignore[reportIncompatibleVariableOverride]

    tau: Annotated[tuple[Positive, Positive], Field(strict=False)] = (1.0, 1.05)
    """Sharpness of the soft gate for tokens with a positive and with a negative advantage: the larger, the sooner a
    token counts less as its ratio leaves 1. The second is larger by default, since a negative advantage makes all other
    tokens likelier."""

    def surrogate(self, tokens: Mapping[str, Tensor], outputs: Outputs) -> tuple[Tensor, Tensor]:
        from agentrl.algos.losses import gated_surrogate

        gated_K = gated_surrogate(
            outputs.logprobs_K,
            tokens["proximal"],
            tokens["advantage"],
            tau_positive=self.tau[0],
            tau_negative=self.tau[1],
        )
        return gated_K, gated_K.isnan()  # nothing is cut
