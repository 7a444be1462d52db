"""Off-policy corrections: the tokens were sampled by older weights, and by another implementation of the model.

Owns importance weights and the gauges that say how far behaviour and learner are apart. `_T` are sampled tokens.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["truncate", "mask"]
Level = Literal["token", "sequence", "geometric"]


class Origin(IntEnum):
    """Why, besides its age, a token's log-prob at sampling may differ from the learner's.

    `PLAIN`: one version of the weights made it and, as far as is known, all keys and values that it attends to.
    `MIXED_KV`: its request began under another version and keys and values were kept, so it may have no single version.
    `UNDONE`: a rollback undid its version: its step does not tell its age, and the weights are different."""

    PLAIN = 0
    MIXED_KV = 1
    UNDONE = 2


# Why a stale token has two ratios, and not one.
#
# Three policies meet in a token: the one that sampled it (behaviour), the one that the step begins with (proximal), and
# the one that the updates of the step have made of it (current). PPO has one ratio, current to behaviour, and clips it.
# Its clip keeps an update near the place where it begins. Measured from a policy that is some steps older, the clip is
# used up before the update begins: tokens that the steps since then have moved past it have no gradient, and the older
# the data, the more of it says nothing.
#
# So the two distances are apart (decoupled PPO, Hilton et al. 2022). Proximal to behaviour is a weight, which corrects
# for who sampled and is constant during the step; current to proximal is the ratio that is clipped. For tokens of more
# than two steps the clip may hold from behaviour as well (`clip_from` in `clipped_loss.py` says why).
#
# The denominator is the log-probability that came with the token, and never one that the learner computes for old
# weights: the engine's kernels, dtype and kept set are part of the policy that sampled (law 1). So a fresh token has a
# ratio near 1 and not 1, and the gauges show how near.
#
# A ratio has no upper bound, and one token can rule a step. The cap bounds the variance and costs a bias; `Gauges`
# reports the share of tokens that it cut, so that a run which leans on it is seen (law 5).
#
# A step of one update needs no forward pass for it, since its own pass has the proximal log-probabilities. A step of
# several updates, or of an algorithm that looks ahead, needs one more. `tests/algos/test_corrections.py` has the
# weights by definition, and `tests/algos/test_stale.py` the exact bias and noise of each kind of weight.
def importance_weights(
    proximal_T: Tensor, behaviour_T: Tensor, cap: float, *, floor: float = 0.0, mode: Mode = "truncate"
) -> Tensor:
    """exp(proximal - behaviour) per token, within bounds (see `bounded`), without gradient: [T]."""
    return bounded((proximal_T - behaviour_T).detach().exp(), floor, cap, mode)


def bounded(ratio_T: Tensor, floor: float, cap: float, mode: Mode) -> Tensor:
    """Importance weights from ratios, which are not negative: [T].

    `truncate`: a ratio outside [floor, cap] becomes the nearer bound. This bounds the variance at the price of a bias
    towards the behaviour policy (V-trace's c-bar, Espeholt et al. 2018, section 4.1; truncated importance sampling for
    engine mismatch, Yao et al. 2025). `mask`: it becomes 0, so that the token says nothing; per token this is IcePop
    (Ling Team 2025), per sequence masked importance sampling. The token stays in the normalisation: the mean is over
    the same number of tokens, and no other token weighs more because one is masked."""
    if mode == "truncate":
        return ratio_T.clamp(floor, cap)
    return torch.where((ratio_T >= floor) & (ratio_T <= cap), ratio_T, 0.0)


def log_ratios(gap_T: Tensor, episode_T: Tensor, role_T: Tensor, level: Level) -> Tensor:
    """The logarithm of the ratio proximal / behaviour of each token, or of its sequence: float64 [T]. `gap_T` are
    differences of log-probs, behaviour -> proximal. A sequence is what one role sampled in an episode.

    `sequence`: the product of its tokens' ratios. Weighing an episode by it is unbiased; its variance grows with the
    length. `geometric`: their geometric mean, exp(mean gap), which has the same scale at any length, and a bias."""
    # The sum may be over thousands of tokens and becomes an exponent: float64 keeps its rounding out of the ratio.
    gap_T = gap_T.detach().double()
    if level == "token":
        return gap_T
    sequence_T, length_S = sequences(episode_T, role_T)
    gap_S = gap_T.new_zeros(len(length_S)).index_add(0, sequence_T, gap_T)
    return (gap_S / length_S if level == "geometric" else gap_S)[sequence_T]


def within(ratio_T: Tensor, episode_T: Tensor, role_T: Tensor, below: float, above: float) -> Tensor:
    """Whether all ratios of a token's sequence are within [below, above]: bool [T]."""
    sequence_T, length_S = sequences(episode_T, role_T)
    outside_T = ~((ratio_T >= below) & (ratio_T <= above))
    return torch.zeros_like(length_S).index_add(0, sequence_T, outside_T.long())[sequence_T] == 0


def sequences(episode_T: Tensor, role_T: Tensor) -> tuple[Tensor, Tensor]:
    """The number of each token's sequence, [T], and how many tokens each sequence has, [S]."""
    keys_2T = torch.stack([episode_T, role_T])
    _, sequence_T, length_S = torch.unique(keys_2T, dim=1, return_inverse=True, return_counts=True)
    return sequence_T, length_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """|difference of log-probs| between sampling and learner, in nats, over `tokens` tokens of one kind."""

    tokens: int
    mean: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """How far apart learner and behaviour policy are, over the tokens of a step.

    `ess`: effective sample size over sample size, (sum w)^2 / (n sum w^2), of the untruncated weights; 1 is on-policy.
    `kl_k1`, `kl_k3`: estimates of KL(behaviour || proximal) in nats per token; k1 is unbiased, k3 never negative.
    `truncated`: share of tokens whose weight the cap cut. `mismatch`: by kind of token, see `mismatch_by_kind`;
    `fresh` are those on which engine and learner should agree. `lag_mean`, `lag_max`: optimizer steps between sampling
    and training."""

    ess: float
    kl_k1: float
    kl_k3: float
    truncated: float
    mismatch: Mapping[str, Mismatch]
    lag_mean: float
    lag_max: int


def effective_sample_size(weights_T: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2), in (0, 1] (Kong 1992)."""
    return weights_T.sum() ** 2 / (len(weights_T) * weights_T.square().sum())


def mismatch_by_kind(gap_T: Tensor, lag_T: Tensor, origin_T: Tensor) -> dict[str, Mismatch]:
    """|gap| by kind; kinds without tokens are left out. Plain tokens are divided by age: `fresh` (lag 0; nothing but
    the two implementations differs), `lag_1`, `lag_2_3`, `lag_4_up`; the others, of any age, are `mixed_kv` and
    `undone`. Each token is of one kind. All are [T], `origin_T` of `Origin`."""
    plain_T = origin_T == Origin.PLAIN
    tokens_by_kind = {
        "fresh": plain_T & (lag_T == 0),
        "lag_1": plain_T & (lag_T == 1),
        "lag_2_3": plain_T & (lag_T >= 2) & (lag_T <= 3),
        "lag_4_up": plain_T & (lag_T >= 4),
        "mixed_kv": origin_T == Origin.MIXED_KV,
        "undone": origin_T == Origin.UNDONE,
    }
    gaps_by_kind = {kind_name: gap_T[of_T].abs() for kind_name, of_T in tokens_by_kind.items()}
    return {
        kind_name: Mismatch(tokens=len(kind_gaps), mean=float(kind_gaps.mean()), max=float(kind_gaps.max()))
        for kind_name, kind_gaps in gaps_by_kind.items()
        if len(kind_gaps)
    }


def gauges(proximal_T: Tensor, behaviour_T: Tensor, lag_T: Tensor, origin_T: Tensor, cap: float | Tensor) -> Gauges:
    """Measure a step. All are [T] with T >= 1 (`cap` may be), `lag_T` in optimizer steps, `origin_T` of `Origin`; see
    `Gauges`."""
    # Before any cap: a cut weight would hide how far the policies are apart.
    gap_T = (proximal_T - behaviour_T).detach().double()
    ratio_T = gap_T.exp()
    return Gauges(
        ess=float(effective_sample_size(ratio_T)),
        kl_k1=float(-gap_T.mean()),
        kl_k3=float((ratio_T - 1 - gap_T).mean()),
        truncated=float((ratio_T > cap).double().mean()),
        mismatch=mismatch_by_kind(gap_T, lag_T, origin_T),
        lag_mean=float(lag_T.double().mean()),
        lag_max=int(lag_T.max()),
    )
