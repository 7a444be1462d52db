"""GRPO (Shao et al. 2024): an episode is judged by its siblings, and no critic is needed.

    A[i, t] = (R_i - b_i) + w (C[i, t] - c[i, t])                                    see `agentrl.algos.credit`
    loss    = - mean over tokens of  rho min(r A, clip(r, 1 - low, 1 + high) A)      see `agentrl.algos.clipped_loss`

With one update per step the ratio r is 1 and the clip does nothing: this is then REINFORCE with a leave-one-out
baseline and truncated importance weights. The paper's own settings are `baseline = "group_mean"`, `scale = "std"` and
`normalise = "sequence"`; others have names of their own (`agentrl.algos.grpo_variants`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from agentrl.algos.algorithm import ROUNDING, Share, Siblings
from agentrl.algos.clipped_loss import Clipped

if TYPE_CHECKING:
    from torch import Tensor


Scale = Literal["none", "std", "mean", "std_by_source", "leave_one_out_by_source"]


class GRPO(Clipped):
    """Judges an episode by the other episodes of its group: group-relative policy optimization."""

    kind: Literal["grpo"] = "grpo"

    baseline: Literal["leave_one_out", "group_mean", "none"] = "leave_one_out"
    """Baseline of an episode's return: the mean of the other members of its group ("leave_one_out"), the mean of all
    members ("group_mean", which depends on the episode that it judges), or 0 ("none")."""

    scale: Scale = "none"
    """Divisor of a group's advantages: the standard deviation of its returns ("std", as in the first GRPO), their mean
    ("mean", as in MaxRL), or 1 ("none"). "std" biases the gradient towards easy and hard tasks, "mean" towards tasks
    with few successes. Two values divide the outcome and each reward source by its own standard deviation: over the
    group ("std_by_source", as in GDPO) or over the siblings alone ("leave_one_out_by_source", for groups of at least
    3); they need `algo.discount` = 1."""

    discount: Share = 1.0
    """Discount of a reward per turn of distance; the outcome is earned at the last turn. 1 discounts nothing."""

    @property
    def least_members(self) -> int:
        return 3 if self.scale == "leave_one_out_by_source" else super().least_members  # one sibling has no spread

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.scales_sources and self.discount != 1:
            raise ValueError(f"discount = {self.discount:g} and scale = {self.scale!r}: leave one out")
        return self

    @property
    def scales_sources(self) -> bool:
        """Whether the outcome and each reward source are divided by themselves."""
        return self.scale in ("std_by_source", "leave_one_out_by_source")

    @property
    def compares(self) -> bool:
        return self.baseline != "none" and self.reward_weight > 0

    @property
    def judges_returns(self) -> bool:
        # By source, equal sums may hide streams that differ; a teacher and the environment's answers teach without
        # any reward. Such a group must not be skipped as silent.
        learns_anyway = self.scales_sources or self.distil_weight > 0 or self.observes
        return self.compares and not learns_anyway

    @property
    def turn_discount(self) -> float:
        return self.discount

    def prepare(self, siblings: Siblings) -> dict[str, Tensor]:
        from agentrl.algos.credit import stream_advantages, turn_advantages

        if self.scale == "std_by_source" or self.scale == "leave_one_out_by_source":
            return {
                "advantage": stream_advantages(
                    siblings.outcomes_G,
                    siblings.streams_KGT,
                    siblings.weights_K,
                    siblings.turns_G,
                    siblings.scored_G,
                    baseline=self.baseline,
                    scale="std" if self.scale == "std_by_source" else "leave_one_out",
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
            discount=self.discount,
        )
        return {"advantage": advantages_GT}

    def matters(self, tokens: Mapping[str, Tensor]) -> bool:
        if self.diverges or self.observes or self.entropy_weight > 0:
            return True
        return bool((tokens["advantage"].abs() > ROUNDING).any())
