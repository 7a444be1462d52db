"""Algorithms that are `agentrl.algos.grpo` with other defaults, under the names that their papers gave them.

    rloo      A[i] = R_i - mean of the siblings' R                       Ahmadian et al. 2024
    dr_grpo   A[i] = R_i - mean of R, an episode's sum of losses is divided by a constant      Liu et al. 2025
    dapo      A[i] = (R_i - mean of R) / deviation, clip-higher, every token the same          Yu et al. 2025
    maxrl     A[i] = (R_i - mean of R) / mean of R, 0 if no member succeeds           Tajwar et al. 2026
    distil    A_t = - w (log pi(a_t | s_t) - log teacher(a_t | s_t))                  Agarwal et al. 2024

DAPO has two more parts, which are no settings of the algorithm: dynamic sampling is `buffer.skip_without_signal`, which
is on by default for all of these, and soft overlong punishment a reward source of kind "overlong".
"""

from __future__ import annotations

from typing import Literal

from agentrl.algos.algorithm import Count, Weight
from agentrl.algos.grpo import GRPO, Scale


class RLOO(GRPO):
    """Judges an episode by the mean of its siblings: REINFORCE, leave one out."""

    kind: Literal["rloo"] = "rloo"  # pyright: ignore[reportIncompatibleVariableOverride]


class DrGRPO(GRPO):
    """Removes the biases of GRPO that come from lengths and deviations: GRPO done right."""

    kind: Literal["dr_grpo"] = "dr_grpo"  # pyright: ignore[reportIncompatibleVariableOverride]

    baseline: Literal["leave_one_out", "group_mean", "none"] = "group_mean"
    normalise: Literal["token", "sequence"] | Count = 256


class DAPO(GRPO):
    """Scales by the group's deviation with a wider upper clip: decoupled clip and dynamic sampling policy
    optimization."""

    kind: Literal["dapo"] = "dapo"  # pyright: ignore[reportIncompatibleVariableOverride]

    baseline: Literal["leave_one_out", "group_mean", "none"] = "group_mean"
    scale: Scale = "std"


class MaxRL(GRPO):
    """Maximum-likelihood reinforcement learning (arXiv 2602.02710): maximise the likelihood of success, not its
    probability.

    For outcomes of 0 and 1 and a chance of success p the gradient of log p is that of p, divided by p: hard tasks weigh
    more. It is the sum over k of (1 - p)^(k - 1) times the gradient of p, and a group of n members estimates the first
    terms of the sum without bias: with `baseline = "none"`, which averages the successes alone, the first n; by
    default, with less variance, the first n - 1, since groups without a success say nothing. With more members it comes
    nearer to log p.

    For the gradient of expected reward this is a bias, and it is meant. Returns must not be negative: a group whose
    mean is 0 or less says nothing."""

    kind: Literal["maxrl"] = "maxrl"  # pyright: ignore[reportIncompatibleVariableOverride]

    baseline: Literal["leave_one_out", "group_mean", "none"] = "group_mean"
    scale: Scale = "mean"


class Distil(GRPO):
    """On-policy distillation (GKD; Lu et al. 2025): the teacher's log-probs are the only reward.

    The student is corrected where it goes, one number for each token (`agentrl.algos.divergence`), and no outcome is
    needed: `group_size = 1` will do. Any other kind mixes this with its rewards: give it a `distil_weight`. Here
    `reward_weight` mixes rewards in, which then have no baseline unless `baseline` names one."""

    kind: Literal["distil"] = "distil"  # pyright: ignore[reportIncompatibleVariableOverride]

    baseline: Literal["leave_one_out", "group_mean", "none"] = "none"
    reward_weight: Weight = 0.0
    distil_weight: Weight = 1.0
