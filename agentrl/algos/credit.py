"""Credit: which turn earned how much of an episode's outcome and process rewards.

Converts rewards to one advantage per turn; every token of a turn gets its turn's. Several streams of rewards (outcome,
environment, each reward source) are first brought to one scale within a group: a stream with large or noisy numbers
else drowns the others, and different mixtures with one sum look the same. Never knows tokens, nor what a stream is.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agentrl.algos.advantages import SLACK, STD_FLOOR, Baseline, Scale, centred, spread
from agentrl.algos.algorithm import ROUNDING


def reward_to_go(rewards_GT: Tensor, discount: float = 1.0) -> Tensor:
    """Sum of the rewards from each turn to the end, each times `discount` for every turn between: [G, T] -> [G, T]."""
    if discount == 1:
        return rewards_GT.flip(-1).cumsum(-1).flip(-1)
    to_go_GT = rewards_GT.clone()
    # A loop over turns and not a closed form with powers of the discount: those underflow in long episodes, and would
    # have to be divided by again.
    for turn_index in range(rewards_GT.shape[-1] - 2, -1, -1):
        to_go_GT[..., turn_index] += discount * to_go_GT[..., turn_index + 1]
    return to_go_GT


def outcome_to_go(outcomes_G: Tensor, turns_G: Tensor, steps: int, discount: float) -> Tensor:
    """The outcome as seen from each turn, [G, steps]: times `discount` for every turn from there to the last one, which
    earns it. After the end it is the whole outcome. Undiscounted it is the same for all turns: [G, 1]."""
    if discount == 1:
        return outcomes_G[:, None]
    left_GT = turns_G[:, None] - 1 - torch.arange(steps, device=turns_G.device)
    return outcomes_G[:, None] * discount ** left_GT.clamp(min=0).to(outcomes_G.dtype)


# Why a turn is credited as one action, with the rewards that came after it.
#
# An episode has one outcome, and perhaps a reward after some of its turns. The simplest way gives their sum to every
# token. That is right in the mean, but a turn is then credited with rewards that were paid before it was sampled. It
# did not cause them, so they are noise, and there is more of it the more turns an episode has. So process rewards count
# from a turn on; the outcome comes at the end and counts for all.
#
# A finer grain than the turn is not there: the environment answers whole turns, and all tokens of a turn were sampled
# before it answered any of them. Another reward for each of them would have to be invented.
#
# The comparison is made turn by turn, since the rewards to come become fewer along an episode: the last turn of a long
# episode would look bad beside the first turn of a short one. A sibling that has stopped by then still judges, with
# nothing to come. Without it the last turns of long episodes would have few judges or none.
#
# A member that the infrastructure failed takes no part (law 3): a reward of 0 for it would count as bad work, and would
# change the baseline of the others.
#
# The price is noise of another kind: a turn is credited with all that comes after it, whether it helped or not. A
# critic can tell more (`agentrl/algos/ppo.py`). `tests/algos/test_credit.py` compares the estimate with the exact
# gradient, over all groups of a small problem in which the policy decides when to stop.
def turn_advantages(
    outcomes_G: Tensor,
    rewards_GT: Tensor,
    turns_G: Tensor,
    scored_G: Tensor,
    *,
    baseline: Baseline,
    scale: Scale,
    process_weight: float,
    judges_G: Tensor | None = None,
    discount: float = 1.0,
) -> Tensor:
    """One advantage per turn, [G, T]; 0 past an episode's end and for members that are not scored.

    `outcomes_G` outcome rewards, `rewards_GT` process rewards (anything past `turns_G` is ignored), `turns_G` how many
    turns each member took, `scored_G` which take part, `judges_G` the baseline's (default: all of them; see `centred`).

        A[i, t] = (R_i - b_i) + w (C[i, t] - c[i, t]),   C[i, t] = sum of r[i, u] for u >= t

    The outcome's advantage is the same for every turn. The baseline c[i, t] of the reward-to-go is taken over the
    siblings at the same turn index; a sibling that had already stopped contributes 0, which is its reward-to-go. With
    leave-one-out neither baseline depends on episode i, not even on its length, so the estimate of the policy gradient
    is unbiased where the policy decides when to stop (Williams 1992; Kool et al. 2019).
    `scale` divides everything by the spread, or the mean, of the episodes' returns (see `spread`), so that outcome and
    process rewards keep their proportion.

    With a `discount` the outcome is earned at the last turn, and R_i and C are discounted from turn t on. Each turn's
    advantage is then unbiased for the discounted return from that turn on; the gradient is not that of any one return,
    since later turns are not discounted themselves (Thomas 2014)."""
    index_T = torch.arange(rewards_GT.shape[1], device=rewards_GT.device)
    alive_GT = (index_T < turns_G[:, None]) & scored_G[:, None]
    # What stands past an episode's end may be anything, NaN included, so it is replaced and not multiplied by 0.
    to_go_GT = reward_to_go(torch.where(alive_GT, rewards_GT, 0.0), discount) * process_weight
    outcome_GT = outcome_to_go(outcomes_G, turns_G, max(rewards_GT.shape[1], 1), discount)
    returns_GT = outcome_GT + to_go_GT if rewards_GT.shape[1] else outcome_GT
    divisor_G = spread(returns_GT, scored_G, scale, judges_G)
    outcome_GT = centred(outcome_GT, scored_G, baseline, judges_G)
    process_GT = centred(to_go_GT, scored_G, baseline, judges_G)
    advantages_GT = (outcome_GT + process_GT) / divisor_G[:, None]
    return torch.where(alive_GT, advantages_GT, 0.0)


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)


StreamScale = Literal["std", "leave_one_out"]


def stream_advantages(
    outcomes_G: Tensor,
    streams_KGT: Tensor,
    weights_K: Tensor,
    turns_G: Tensor,
    scored_G: Tensor,
    *,
    baseline: Baseline,
    scale: StreamScale,
    process_weight: float,
    judges_G: Tensor | None = None,
) -> Tensor:
    """One advantage per turn, [G, T], as `credit.turn_advantages`, of `streams_KGT` process rewards by stream.

        A[i, t] = (R_i - b_i) / s_i + w sum_k w_k (C_k[i, t] - c_k[i, t]) / s_k,i

    The spread s of a stream is the sample standard deviation of its rewards-to-go at each turn index, its square
    averaged over turns. A stream without any spread says nothing.

    `std`: over the whole group, as GDPO (Liu et al. 2026, arXiv 2601.05242, equation 4; without its second
    normalisation over the batch, a common factor); for a late member it is at least 1 / `SLACK` of the
    deviation with it, see `advantages.spread`. Biased: the divisor depends on the episode that it scales, so the
    expected gradient is that of no mixture of the streams. `leave_one_out`: over the siblings alone. The divisor is
    independent of the judged episode, so the expected gradient of a task is exactly the sum over streams of
    w_k E[1 / s_k] times the stream's own gradient. It needs three members: with fewer, and for a member whose siblings
    do not differ in a stream, the stream says nothing. In a group where one member alone is rewarded, that stream thus
    speaks through the others. Centring alone (`turn_advantages`) is unbiased, and the same for streams as for sums."""
    judges_G = scored_G if judges_G is None else judges_G
    index_T = torch.arange(streams_KGT.shape[2], device=streams_KGT.device)
    alive_GT = (index_T < turns_G[:, None]) & scored_G[:, None]
    # The outcome is a stream of one turn, on the same scale as the others.
    total_GT = _scaled(outcomes_G[:, None], torch.ones_like(turns_G), scored_G, judges_G, baseline, scale)
    total_GT = total_GT.expand(-1, streams_KGT.shape[2])
    for rewards_GT, stream_weight in zip(streams_KGT, (weights_K * process_weight).tolist(), strict=True):
        to_go_GT = reward_to_go(torch.where(alive_GT, rewards_GT, 0.0))
        total_GT = total_GT + stream_weight * _scaled(to_go_GT, turns_G, scored_G, judges_G, baseline, scale)
    return torch.where(alive_GT, total_GT, 0.0)


def _scaled(
    values_GT: Tensor, turns_G: Tensor, scored_G: Tensor, judges_G: Tensor, baseline: Baseline, scale: StreamScale
) -> Tensor:
    """Values less their baseline, over their spread."""
    judges_inverse = _inverse_spread(values_GT, turns_G, judges_G)
    inverse_G = values_GT.new_full((len(values_GT),), judges_inverse)  # there may be no turn at all
    for member_index in (judges_G if scale == "leave_one_out" else scored_G & ~judges_G).nonzero().flatten().tolist():
        members_G = judges_G.clone()
        # `leave_one_out`: the deviation of a judge's siblings. `std`: that of the judges with a late member among them.
        members_G[member_index] = scale == "std"
        inverse_of_member = _inverse_spread(values_GT, turns_G, members_G)
        # The inverse, so that "says nothing" is a 0 to multiply by, and no division by zero has to be caught.
        inverse_G[member_index] = (
            inverse_of_member if judges_G[member_index] else min(judges_inverse, inverse_of_member * SLACK)
        )
    return centred(values_GT, scored_G, baseline, judges_G) * inverse_G[:, None]


def _inverse_spread(values_GT: Tensor, turns_G: Tensor, members_G: Tensor) -> float:
    """1 / spread of some members' values; 0 where they do not differ, or are fewer than two."""
    turn_count = int(turns_G[members_G].max()) if int(members_G.sum()) > 1 else 0
    if turn_count == 0:
        return 0.0
    # Only as far as the longest of them: columns past every end are 0 for all, and would shrink the mean.
    variance_T = values_GT[members_G][:, :turn_count].var(0, correction=1)
    deviation = float(variance_T.mean().sqrt())
    return 1.0 / (deviation + STD_FLOOR) if deviation > ROUNDING else 0.0
