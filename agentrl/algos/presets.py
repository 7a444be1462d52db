"""Algorithms that are `agentrl.algos.grpo` with other defaults, under the names that their papers gave them.

    rloo      A[i] = R_i - mean of the siblings' R                       Ahmadian et al. 2024
    dr_grpo   A[i] = R_i - mean of R, an episode's sum of losses is divided by a constant      Liu et al. 2025
    dapo      A[i] = (R_i - mean of R) / deviation, clip-higher, every token the same          Yu et al. 2025

DAPO has two more parts, which are no settings of the algorithm: dynamic sampling is `buffer.skip_without_signal`, which
is on by default for all of these, and soft overlong punishment a reward source of kind "overlong".
"""

from __future__ import annotations

from typing import Literal

from agentrl.algos.grpo import GRPO


class RLOO(GRPO):
    """REINFORCE, leave one out."""

    kind: Literal["rloo"] = "rloo"  # pyright: ignore[reportIncompatibleVariableOverride]


class DrGRPO(GRPO):
    """GRPO done right."""

    kind: Literal["dr_grpo"] = "dr_grpo"  # pyright: ignore[reportIncompatibleVariableOverride]
    baseline: Literal["leave_one_out", "group_mean", "none"] = "group_mean"  # what an outcome is compared with
    normalise: Literal["token", "sequence", "constant"] = "constant"  # what weighs the same in the mean, see `divisor`


class DAPO(GRPO):
    """Decoupled clip and dynamic sampling policy optimization."""

    kind: Literal["dapo"] = "dapo"  # pyright: ignore[reportIncompatibleVariableOverride]
    baseline: Literal["leave_one_out", "group_mean", "none"] = "group_mean"  # what an outcome is compared with
    scale: Literal["none", "std", "mean"] = "std"  # divides advantages by the spread, or the mean, of their group
