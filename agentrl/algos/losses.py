"""Losses of the policy, token by token. `_T` are the sampled tokens of a batch in any order.

Owns surrogate, penalties and normalisation. Never knows which model made the log-probabilities, nor more about a
token's row than its number.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Normalise = Literal["token", "sequence"] | int


def clipped_surrogate(
    logprobs_T: Tensor,
    proximal_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Loss per token, and where the clip cut its gradient (bool): both [T].

        -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A),   ratio = exp(logprob - proximal)

    PPO's pessimistic clip (Schulman et al. 2017, eq. 7) with a wider upper bound, "clip-higher" (DAPO, Yu et al. 2025,
    section 3.1). `proximal_T` are log-probs under the policy the update must stay near, which need not be the one that
    sampled (decoupled PPO, Hilton et al. 2022, section 3).

    With `dual_clip` = c > 1 (0: off) what is gained is at least c A if A < 0 (dual-clip PPO, Ye et al. 2020): the
    pessimistic clip has no bound there, so a token that became many times likelier would rule the whole step."""
    ratio_T = (logprobs_T - proximal_T).exp()
    free_T = ratio_T * advantages_T
    held_T = ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T
    # Strictly smaller: at ratio 1 both are equal, and a token on policy must not be reported as cut.
    gained_T, cut_T = torch.minimum(free_T, held_T), held_T < free_T
    if dual_clip:
        least_T = torch.where(advantages_T < 0, dual_clip * advantages_T, -torch.inf)
        gained_T, cut_T = torch.maximum(gained_T, least_T), cut_T | (gained_T < least_T)
    return -gained_T, cut_T


def gated_surrogate(
    logprobs_T: Tensor, proximal_T: Tensor, advantages_T: Tensor, *, tau_positive: float, tau_negative: float
) -> Tensor:
    """Loss per token, [T], with a soft gate in the place of a clip (SAPO, Gao et al. 2025).

        -f(ratio) A,   f(ratio) = 4 / tau sigmoid(tau (ratio - 1)),   tau = tau_positive if A > 0, else tau_negative

    The weight of a token's policy gradient is ratio A f'(ratio), with f'(1) = 1: on policy it is that of REINFORCE, and
    it decays smoothly as the ratio leaves 1 on either side."""
    tau_T = torch.where(advantages_T > 0, tau_positive, tau_negative)
    ratio_T = (logprobs_T - proximal_T).exp()
    return -4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1)) * advantages_T


def token_weights(sequence_T: Tensor, normalise: Normalise) -> Tensor:
    """Each token's share of the loss: [T]. `sequence_T` numbers the episode of each token.

    `token`: every token the same (DAPO, section 3.3: long episodes count by their length). `sequence`: every episode
    the same, with equal shares for its tokens (GRPO, Shao et al. 2024, section 4.1). In both the shares sum to 1, and
    both turn the gradient away from that of the expected return, since an episode's share depends on lengths: the
    policy's own and its siblings'. A number: 1 / (episodes * number), whatever the lengths (Dr. GRPO, Liu et al. 2025,
    section 3.1): the true direction."""
    if normalise == "token" or not len(sequence_T):
        return torch.full(sequence_T.shape, 1.0 / max(len(sequence_T), 1), device=sequence_T.device)
    if isinstance(normalise, int):
        return torch.full(sequence_T.shape, 1.0 / (len(torch.unique(sequence_T)) * normalise), device=sequence_T.device)
    _, place_T, length_S = torch.unique(sequence_T, return_inverse=True, return_counts=True)
    return 1.0 / (length_S[place_T] * len(length_S))


def policy_loss(
    surrogate_T: Tensor,
    weights_T: Tensor,
    importance_T: Tensor,
    *,
    kl_T: Tensor | None = None,
    kl_weight: float = 0.0,
    entropy_T: Tensor | None = None,
    entropy_weight: float = 0.0,
) -> Tensor:
    """The scalar to minimise: sum of weight * (importance * (surrogate + kl_weight * kl) - entropy_weight * entropy).

    Weights are those of a whole update, so that the losses of its passes add up to its loss. `importance_T` corrects
    expectations taken under the behaviour policy (`importance.importance_weights`) and carries no gradient."""
    loss_T = surrogate_T if kl_T is None else surrogate_T + kl_weight * kl_T
    # The penalty is an expectation under the policy too, so it is weighed as the surrogate is. The entropy bonus is
    # not: it is a property of the distribution at a state, whoever sampled the token.
    loss_T = importance_T * loss_T
    if entropy_T is not None:
        loss_T = loss_T - entropy_weight * entropy_T
    return (weights_T * loss_T).sum()
