"""MaxRL (Tajwar et al. 2026, arXiv 2602.02710): maximise the likelihood of success, not its probability.

    A[i] = (R_i - mean of R) / mean of R,   0 if no member succeeds
    loss as in GRPO                                                           see `agentrl.algos.clipped`

For outcomes of 0 and 1 and a chance of success p the gradient of log p is that of p, divided by p: hard tasks weigh
more. It is the sum over k of (1 - p)^(k - 1) times the gradient of p, and a group of n members estimates the first
terms of the sum without bias: with `baseline = "none"`, which averages the successes alone, the first n; as above, with
less variance, the first n - 1, since groups without a success say nothing. With more members it comes nearer to log p.

For the gradient of expected reward this is a bias, and it is meant. Returns must not be negative: a group whose mean is
0 or less says nothing.
"""

from __future__ import annotations

from typing import Literal

from agentrl.algos.grpo import GRPO


class MaxRL(GRPO):
    """Maximum-likelihood reinforcement learning."""

    kind: Literal["maxrl"] = "maxrl"  # pyright: ignore[reportIncompatibleVariableOverride]
    baseline: Literal["leave_one_out", "group_mean", "none"] = "group_mean"  # what an outcome is compared with
    scale: Literal["none", "std", "mean"] = "mean"  # divides advantages by the spread, or the mean, of their group
