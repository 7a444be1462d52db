"""The KL penalty to the reference as a term of the loss: the values k1, k2 and k3, and whose gradient each has.

As a cost in the reward, and for distillation, see `divergence`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

from typing import Literal

from torch import Tensor

KLGradient = Literal["k3", "k2", "k1"]


def kl_penalty(
    logprobs_T: Tensor, reference_T: Tensor, gradient: KLGradient = "k3", proximal_T: Tensor | None = None
) -> Tensor:
    """A penalty on leaving the reference, per token of the policy, never negative: [T].

    Its value is k3 = r - log r - 1 with r = reference / policy, an unbiased estimate of KL(policy || reference)
    (Schulman, "Approximating KL divergence", 2020). Its gradient is another matter: autograd does not see that the
    tokens were sampled from the policy, and the expectation of k3's own gradient, (1 - r) grad log policy, is that of
    the *forward* divergence KL(reference || policy), as in GRPO (Shao et al. 2024, eq. 4).

    `gradient="k2"` keeps the value and has the gradient of k2 = (log r)^2 / 2 (straight-through): -log r grad log
    policy, whose expectation is the gradient of KL(policy || reference). The score-function forms of k1 and of k3 come
    to the same for each token. Either is the gradient of one token's divergence after a fixed prefix; a token's effect
    on the divergence of later ones is left out.

    `gradient="k1"` keeps the value and has the gradient of ratio * k1, k1 = -log r held fixed and ratio = policy /
    proximal (default: 1, with its gradient): the same as k2 while the policy is the proximal one, and the gradient of
    KL(policy || reference) also after it has left it, where k2's expectation is over the wrong tokens. (Autograd of
    k1 alone has expectation 0: it would penalise nothing.)"""
    gap_T = reference_T - logprobs_T
    k3_T = gap_T.exp() - gap_T - 1
    if gradient == "k3":
        return k3_T
    if gradient == "k2":
        pull_T = gap_T.square() / 2
    else:
        pull_T = -gap_T.detach() * (logprobs_T - (logprobs_T.detach() if proximal_T is None else proximal_T)).exp()
    # Straight-through: the value of one estimator with the gradient of another. The metric stays never negative,
    # whichever gradient is chosen.
    return k3_T.detach() + pull_T - pull_T.detach()
