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

from agentrl.algos.algorithm import ROUNDING

Baseline = Literal["leave_one_out", "group_mean", "none"]
Scale = Literal["none", "std", "mean"]

STD_FLOOR = 1e-4
"""Added to the standard deviation of a group, so that nearly equal returns are not blown up."""

SLACK = 2.0
"""A divisor that does not see what it divides may be smaller than one that does, but not by more than this factor."""


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
    judge_count = int(judges_G.sum())
    if judge_count == 0:
        return torch.zeros_like(returns_G)
    # A group whose returns are all 0.7 must give exactly 0: the mean of seven 0.7s is not 0.7 in floating point, and
    # a rest of 1e-17 over a tiny deviation is an advantage. Any one return will do as the origin.
    origin_return = returns_G[judges_G][0]
    total = torch.where(judging_G, returns_G - origin_return, 0.0).sum(0)
    centred_G = torch.where(mask_G, returns_G - origin_return, 0.0) - total / judge_count
    # r_i - mean of the others = (r_i - mean of all) n / (n - 1): one multiplication instead of a mean for each
    # member. A late member is in no mean, so it needs no factor.
    if kind == "leave_one_out" and judge_count > 1:
        centred_G = torch.where(judging_G, centred_G * (judge_count / (judge_count - 1)), centred_G)
    return torch.where(mask_G, centred_G, 0.0)


def spread(returns_GT: Tensor, scored_G: Tensor, kind: Scale, judges_G: Tensor | None = None) -> Tensor:
    """The divisor of each member's advantages, [G], from its returns from each turn on (or [G] whole returns). It is
    infinite where the returns say nothing of the scale: there the advantage is 0.

    `none`: 1. `std`: the sample standard deviation of the judges' whole returns plus `STD_FLOOR` (GRPO, Shao et al.
    2024, section 4.1). Judges that are fewer than two, or equal from each turn on, say nothing. Dividing by it is
    biased: easy and hard tasks weigh more (Dr. GRPO, Liu et al. 2025, section 3.1). `mean`: the mean of the judges'
    whole returns (MaxRL, see `agentrl.algos.grpo_variants`); judges whose mean is not above 0 say nothing.

    Rewards of opposite sign cancel in a sum: the divisor is at least 1 / `SLACK` of the deviation, or of the mean
    absolute value, of the returns from any turn on. A member that does not judge is not seen by the divisor, which
    does not depend on it: for it the divisor is at least 1 / `SLACK` of what it would be with the member among the
    judges. So its advantage is at most `SLACK` (n + 1) / n times that of the same member in time, n judges."""
    judges_G = scored_G if judges_G is None else judges_G
    returns_GT = returns_GT.reshape(len(returns_GT), -1)
    if kind == "none":
        return torch.ones_like(returns_GT[:, 0])
    judge_count = int(judges_G.sum())
    if judge_count == 0 or (kind == "std" and judge_count < 2):
        return torch.full_like(returns_GT[:, 0], torch.inf)
    judging_GT = returns_GT[judges_G]
    if kind == "mean":
        returns_G, total, size_T = returns_GT[:, 0], judging_GT[:, 0].sum(), judging_GT.abs().sum(0)
        has_spread = total > ROUNDING * judge_count
        divisor = torch.maximum(total, size_T.amax() / SLACK) / judge_count
        with_G = torch.maximum(total + returns_G, (size_T + returns_GT.abs()).amax(1) / SLACK) / (judge_count + 1)
        with_G = torch.where(total + returns_G > ROUNDING * judge_count, with_G, torch.inf)
    else:
        shifted_GT = returns_GT - judging_GT[0]  # equal returns are exactly 0, however their mean is rounded
        away_GT = shifted_GT - shifted_GT[judges_G].mean(0)
        squares_T = away_GT[judges_G].square().sum(0)
        of_turns_T = (squares_T / (judge_count - 1)).sqrt()
        # From any turn on, not only over whole returns: rewards that cancel in the sum may still differ in the
        # middle.
        has_spread = (of_turns_T > ROUNDING).any()
        divisor = torch.maximum(of_turns_T[0], of_turns_T.amax() / SLACK) + STD_FLOOR
        with_GT = ((squares_T + away_GT.square() * judge_count / (judge_count + 1)) / judge_count).sqrt()
        with_G = torch.maximum(with_GT[:, 0], with_GT.amax(1) / SLACK) + STD_FLOOR
    # A late member among judges that are nearly equal would be divided by next to nothing: one outlier would rule its
    # step. `tests/algos/test_late_scale.py` has the bound, and where outcomes of 0 and 1 never meet it.
    divisor_G = torch.where(judges_G, divisor, torch.maximum(divisor, with_G / SLACK))
    return torch.where(has_spread, divisor_G, torch.inf)


def state_advantages(
    returns_GT: Tensor, states_GT: Tensor, alive_GT: Tensor, judges_G: Tensor, *, baseline: Baseline, scale: Scale
) -> Tensor:
    """Returns from each turn on, less the mean of those of turns in the same state: [G, T]; 0 where not `alive_GT`, and
    for a turn without a judging one in its state.

    `leave_one_out`: over the turns of the judging siblings. `group_mean`: over the turns of all judges, the turn itself
    and its episode's other visits included (GiGPO, Feng et al. 2025). `scale="std"` divides by the sample deviation of
    the judges' turns in the state, plus `STD_FLOOR`; a state with less than two of them, or equal ones, says nothing.
    For a member that does not judge it is at least 1 / `SLACK` of the deviation with its own turns in the state."""
    place_N, member_N = alive_GT.flatten().nonzero()[:, 0], alive_GT.nonzero()[:, 0]
    returns_N = returns_GT.flatten()[place_N]
    _, state_N = torch.unique(states_GT.flatten()[place_N], return_inverse=True)
    state_count = int(state_N.max()) + 1 if len(state_N) else 0

    def total(values_N: Tensor) -> tuple[Tensor, Tensor]:
        """The sums over the turns in the same state, of all judges and of the turn's own member: [N] each."""
        zeros_SG = torch.zeros(state_count * len(judges_G), dtype=values_N.dtype, device=values_N.device)
        member_sums_SG = zeros_SG.index_add(0, state_N * len(judges_G) + member_N, values_N).view(
            state_count, len(judges_G)
        )
        return member_sums_SG[:, judges_G].sum(1)[state_N], member_sums_SG[state_N, member_N]

    judging_N = judges_G[member_N]
    (count_N, own_count_N), (sum_N, own_sum_N) = total(torch.ones_like(returns_N)), total(returns_N)
    mean_N = sum_N / count_N.clamp(min=1)
    divisor_N = torch.ones_like(returns_N)
    if scale == "std":
        away_N = returns_N - mean_N
        (squares_N, own_squares_N), (_, own_away_N) = total(away_N.square()), total(away_N)
        deviation_N = (squares_N / (count_N - 1).clamp(min=1)).sqrt()
        together_N = count_N + own_count_N
        with_N = squares_N + own_squares_N - own_away_N.square() / together_N
        with_N = (with_N / (together_N - 1).clamp(min=1)).sqrt()
        larger_N = torch.where(judging_N, deviation_N, torch.maximum(deviation_N, with_N / SLACK))
        divisor_N = torch.where((count_N > 1) & (deviation_N > ROUNDING), larger_N + STD_FLOOR, torch.inf)
    # The sums of the judged member's own visits are taken off: an episode that meets a state twice would otherwise
    # judge its first action by what followed it.
    if baseline == "leave_one_out":
        count_N = torch.where(judging_N, count_N - own_count_N, count_N)
        mean_N = torch.where(judging_N, sum_N - own_sum_N, sum_N) / count_N.clamp(min=1)
    advantages_N = torch.where(count_N > 0, returns_N - mean_N, 0.0) / divisor_N
    return torch.zeros_like(returns_GT).flatten().index_copy(0, place_N, advantages_N).view(returns_GT.shape)
