"""On-policy distillation (Agarwal et al. 2024, GKD; Lu et al. 2025): the teacher's log-probs are the only reward.

    A_t  = - w (log pi(a_t | s_t) - log teacher(a_t | s_t))      on the policy's own tokens: `agentrl.algos.divergence`
    loss = - mean over tokens of  rho min(r A, clip(r, 1 - low, 1 + high) A)             `agentrl.algos.clipped`

The student is corrected where it goes, one number for each token, and no outcome is needed: `group_size = 1` will do.
Any other kind mixes this with its rewards: give it a `distil_weight`. Here `reward_weight` mixes rewards in, which then
have no baseline unless `baseline` names one.
"""

from __future__ import annotations

from typing import Literal

from agentrl.algos.algorithm import Weight
from agentrl.algos.grpo import GRPO


class Distil(GRPO):
    """On-policy distillation."""

    kind: Literal["distil"] = "distil"  # pyright: ignore[reportIncompatibleVariableOverride]
    baseline: Literal["leave_one_out", "group_mean", "none"] = "none"  # what an outcome is compared with
    reward_weight: Weight = 0.0  # of the advantage from rewards; 0: distillation alone
    distil_weight: Weight = 1.0  # of a penalty on leaving the teacher
