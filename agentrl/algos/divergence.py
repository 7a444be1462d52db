"""The cost of a token in divergence from another model: a reference, or a teacher (on-policy distillation).

    gap_t    = log pi(a_t | s_t) - log other(a_t | s_t)       k1: its mean over the policy's tokens is the reverse KL
    token    A_t -= weight gap_t                               Agarwal et al. 2024 (GKD, lambda = 1); Lu et al. 2025
    episode  A_t -= weight (sum of gap_v, v >= t, - b)         Ouyang et al. 2022, section 3.4, equation 2

`token` follows the divergence at each state and holds fixed how often states are visited: its expected gradient is that
of the sum over states of d(s) KL(pi(.|s) || other(.|s)), d without gradient. It is not that of the divergence between
whole episodes, but has far less variance. `episode` is exactly that, since the gradient of KL(episodes) is the mean of
the score times the sum of gaps (past gaps and the derivative of k1 itself have mean 0). Its baseline b is the mean over
the step's other episodes at the same place, which the judged episode has no part in.

The policy is that of the step's start. Suffixes: T tokens, B sequences of U tokens, E episodes. A 1 in the place of a
log-prob marks a token that the other model has not scored: its gap is 0. Never knows where the other's log-probs come
from.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from agentrl.algos.gae import Sequences


def gap(tokens: Mapping[str, Tensor], name: str) -> Tensor:
    """k1 of each token to the model `name`: [T], without gradient."""
    return torch.where(_is_scored(tokens[name]), tokens["proximal"] - tokens[name], 0.0).detach()


# A log-prob is never above 0, so 1 can stand for "none" in a plain column of floats; a NaN would spread through every
# sum that touches it. 0.5 is safe from rounding on either side.
def _is_scored(other_T: Tensor) -> Tensor:
    return other_T < 0.5


def charge(tokens: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Charge each token for the rest of its episode, by the weights of the models diverged from: [T].

    Roles of an episode are charged apart, each for its own tokens."""
    gap_T = torch.stack([weight * gap(tokens, model) for model, weight in weights.items()]).sum(0).double()
    sequences = Sequences.of(tokens["episode"], tokens["role"], tokens["turn"], by_turn=False)
    # In float64: a sum over thousands of gaps, from which another such sum is taken off.
    to_go_BU = sequences.first(gap_T).flip(-1).cumsum(-1).flip(-1)
    episode_B = sequences.first(tokens["episode"])[:, 0]
    _, own_B, size_E = torch.unique(episode_B, return_inverse=True, return_counts=True)
    own_EU = to_go_BU.new_zeros(len(size_E), to_go_BU.shape[1]).index_add(0, own_B, to_go_BU)
    # The other episodes of the step, and not the siblings: a divergence is no property of a task, and the step has
    # more of them.
    others_E1 = (len(own_B) - size_E)[:, None]
    baseline_EU = torch.where(others_E1 > 0, (own_EU.sum(0) - own_EU) / others_E1.clamp(min=1), 0.0)
    return sequences.tokens(to_go_BU - baseline_EU[own_B]).to(tokens["proximal"].dtype)


def gauges(tokens: Mapping[str, Tensor], *, reference: bool, teacher: bool) -> dict[str, Tensor]:
    """Sums over tokens, by their share of the loss: `kl_reference` and `kl_teacher` of k1, and `untaught` of the tokens
    that the teacher has not scored."""
    weight_T = tokens["weight"]
    gauge_sums = {}
    if reference:
        gauge_sums["kl_reference"] = (weight_T * gap(tokens, "reference")).sum()
    if teacher:
        gauge_sums["kl_teacher"] = (weight_T * gap(tokens, "teacher")).sum()
        gauge_sums["untaught"] = (weight_T * ~_is_scored(tokens["teacher"])).sum()
    return gauge_sums
