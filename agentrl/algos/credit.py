"""Credit: which turn earned how much of an episode's outcome and process rewards.

Converts rewards to one advantage per turn; every token of a turn gets its turn's. Never knows tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algos.advantages import Baseline, Scale, centred, spread


def reward_to_go(rewards_GT: Tensor, discount: float = 1.0) -> Tensor:
    """Sum of the rewards from each turn to the end, each times `discount` for every turn between: [G, T] -> [G, T]."""
    if discount == 1:
        return rewards_GT.flip(-1).cumsum(-1).flip(-1)
    to_go_GT = rewards_GT.clone()
    for t in range(rewards_GT.shape[-1] - 2, -1, -1):
        to_go_GT[..., t] += discount * to_go_GT[..., t + 1]
    return to_go_GT


def outcome_to_go(outcomes_G: Tensor, turns_G: Tensor, steps: int, discount: float) -> Tensor:
    """The outcome as seen from each turn, [G, steps]: times `discount` for every turn from there to the last one, which
    earns it. After the end it is the whole outcome. Undiscounted it is the same for all turns: [G, 1]."""
    if discount == 1:
        return outcomes_G[:, None]
    left_GT = turns_G[:, None] - 1 - torch.arange(steps, device=turns_G.device)
    return outcomes_G[:, None] * discount ** left_GT.clamp(min=0).to(outcomes_G.dtype)


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
    to_go_GT = reward_to_go(torch.where(alive_GT, rewards_GT, 0.0), discount) * process_weight
    outcome_GT = outcome_to_go(outcomes_G, turns_G, max(rewards_GT.shape[1], 1), discount)
    returns_GT = outcome_GT + to_go_GT if rewards_GT.shape[1] else outcome_GT
    divisor_G = spread(returns_GT, scored_G, scale, judges_G)
    outcome_GT = centred(outcome_GT, scored_G, baseline, judges_G)
    process_GT = centred(to_go_GT, scored_G, baseline, judges_G)
    advantages_GT = (outcome_GT + process_GT) / divisor_G[:, None]
    return torch.where(alive_GT, advantages_GT, 0.0)
