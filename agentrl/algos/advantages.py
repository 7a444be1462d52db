"""Group-relative advantages: a member's return compared with its siblings'.

Owns the baseline and the scale of a group. Never knows what the returns are made of, nor which tokens earned them.
Members that are not scored (law 3: infrastructure failed them) are neither judged nor used to judge; members that
ended after their group had closed are only judged.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["leave_one_out", "group_mean", "none"]
Scale = Literal["none", "std", "mean"]

STD_FLOOR = 1e-4
"""Added to the standard deviation of a group, so that nearly equal returns are not blown up."""

MEAN_FLOOR = 1e-9
"""A mean return up to this is 0: sums of rewards in another order differ by less."""


def centred(returns_G: Tensor, scored_G: Tensor, kind: Baseline, judges_G: Tensor | None = None) -> Tensor:
    """Returns minus the group's baseline; 0 for members that are not scored. `returns_G` is [G] or [G, ...].

    `judges_G` says which scored members form the baseline (default: all). A member outside it, which ended after its
    group had closed, is compared with all members in it, and changes nothing for them.

    `leave_one_out`: r_i - mean of the scored siblings j != i (RLOO, Ahmadian et al. 2024); unbiased, as the
    baseline never sees the judged episode. `group_mean`: r_i - mean of all (GRPO, Shao et al. 2024), which is
    leave-one-out times (n - 1) / n. `none`: r_i. A member without a judging sibling gets 0.
    Equal returns give exactly 0: the group is shifted by one of its own returns first, which changes no difference."""
    judges_G = scored_G if judges_G is None else judges_G
    per_member = (-1, *([1] * (returns_G.dim() - 1)))
    mask_G, judging_G = scored_G.reshape(per_member), judges_G.reshape(per_member)
    if kind == "none":
        return torch.where(mask_G, returns_G, 0.0)
    n = int(judges_G.sum())
    if n == 0:
        return torch.zeros_like(returns_G)
    pivot = returns_G[judges_G][0]
    total = torch.where(judging_G, returns_G - pivot, 0.0).sum(0)
    centred_G = torch.where(mask_G, returns_G - pivot, 0.0) - total / n
    if kind == "leave_one_out" and n > 1:
        centred_G = torch.where(judging_G, centred_G * (n / (n - 1)), centred_G)
    return torch.where(mask_G, centred_G, 0.0)


def spread(returns_G: Tensor, scored_G: Tensor, kind: Scale) -> Tensor:
    """The divisor of advantages, a scalar: 1, or the sample standard deviation of the scored returns plus
    `STD_FLOOR` (GRPO, Shao et al. 2024, section 4.1). Dividing by it is biased: easy and hard tasks
    weigh more (Dr. GRPO, Liu et al. 2025, section 3.1).

    `mean`: the mean of the scored returns (MaxRL, see `agentrl.algos.maxrl`); infinite where it is not above 0, so that
    a group without any success says nothing."""
    scored = returns_G[scored_G]
    one = torch.ones((), dtype=returns_G.dtype, device=returns_G.device)
    if kind == "mean" and len(scored):
        mean = scored.mean()
        return mean if mean > MEAN_FLOOR else one * torch.inf
    if kind != "std" or len(scored) < 2:
        return one
    return scored.std(correction=1) + STD_FLOOR
