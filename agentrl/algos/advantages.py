"""Group-relative advantages: a member's return compared with its siblings'.

Owns the baseline and the scale of a group. Never knows what the returns are made of, nor which tokens earned them.
Members that are not scored (law 3: infrastructure failed them) are neither judged nor used to judge; members that
ended after their group had closed are only judged.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

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


def state_advantages(
    returns_GT: Tensor, states_GT: Tensor, alive_GT: Tensor, judges_G: Tensor, *, baseline: Baseline, scale: Scale
) -> Tensor:
    """Returns from each turn on, less the mean of those of turns in the same state: [G, T]; 0 where not `alive_GT`, and
    for a turn without a judging one in its state.

    `leave_one_out`: over the turns of the judging siblings. `group_mean`: over the turns of all judges, the turn itself
    and its episode's other visits included (GiGPO, Feng et al. 2025). `scale="std"` divides by the sample deviation of
    the judges' turns in the state, plus `STD_FLOOR`; a state with less than two of them says nothing."""
    place_N, member_N = alive_GT.flatten().nonzero()[:, 0], alive_GT.nonzero()[:, 0]
    returns_N = returns_GT.flatten()[place_N]
    _, state_N = torch.unique(states_GT.flatten()[place_N], return_inverse=True)
    states = int(state_N.max()) + 1 if len(state_N) else 0

    def total(values_N: Tensor) -> Tensor:
        """The sum of the judges' values by state and member, [S, G]."""
        of_judges_N = torch.where(judges_G[member_N], values_N, 0.0)
        zeros_SG = torch.zeros(states * len(judges_G), dtype=values_N.dtype, device=values_N.device)
        return zeros_SG.index_add(0, state_N * len(judges_G) + member_N, of_judges_N).view(states, len(judges_G))

    count_SG, sum_SG = total(torch.ones_like(returns_N)), total(returns_N)
    count_N, sum_N = count_SG.sum(1)[state_N], sum_SG.sum(1)[state_N]
    mean_N = sum_N / count_N.clamp(min=1)
    divisor_N = torch.ones_like(returns_N)
    if scale == "std":
        squares_S = total((returns_N - mean_N).square()).sum(1)
        deviation_N = (squares_S[state_N] / (count_N - 1).clamp(min=1)).sqrt() + STD_FLOOR
        divisor_N = torch.where(count_N > 1, deviation_N, torch.inf)
    if baseline == "leave_one_out":
        count_N, sum_N = count_N - count_SG[state_N, member_N], sum_N - sum_SG[state_N, member_N]
        mean_N = sum_N / count_N.clamp(min=1)
    found_N = torch.where(count_N > 0, returns_N - mean_N, 0.0) / divisor_N
    return torch.zeros_like(returns_GT).flatten().index_copy(0, place_N, found_N).view(returns_GT.shape)
