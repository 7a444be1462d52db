"""REINFORCE++ (Hu et al. 2025): no critic and no siblings; the whole step is the baseline.

    A = (G - mean of G) / (deviation of G + 1e-4)    G the return from the turn on, over all tokens of the step
    loss as in PPO                                   see `agentrl.algos.clipped_loss`

The mean holds the episode's own return, so a step of n episodes shrinks the gradient by about 1 / n; the deviation
scales the whole step alike. Tasks of different difficulty share one baseline: an easy task's failures look worse, and
its successes better, than siblings would say, which adds variance but no bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from agentrl.algos.algorithm import Siblings
from agentrl.algos.clipped_loss import Clipped

if TYPE_CHECKING:
    from torch import Tensor


class Reinforce(Clipped):
    """Compares an episode with the whole step, which gives the baseline and the scale: REINFORCE++."""

    kind: Literal["reinforce++"] = "reinforce++"

    def prepare(self, siblings: Siblings) -> dict[str, Tensor]:
        from agentrl.algos.credit import reward_to_go

        # Nothing is compared within the group: the baseline is one of the step, which is known in `advantages` only.
        return {"to_go": siblings.outcomes_G[:, None] + self.process_weight * reward_to_go(siblings.rewards_GT)}

    def advantages(self, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the column `advantage` [T]: the return of each token of the step, centred and scaled over the whole
        step. The columns that the settings of every clipped algorithm ask for come beside it."""
        from agentrl.algos.advantages import STD_FLOOR

        returns_T = tokens["to_go"]
        shifted_T = returns_T - returns_T[:1]  # equal returns are exactly 0, however their mean is rounded
        centred_T = shifted_T - shifted_T.mean()
        advantage_T = centred_T / (centred_T.square().mean().sqrt() + STD_FLOOR)
        return {"advantage": advantage_T, **super().advantages(tokens)}
