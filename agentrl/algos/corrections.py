"""Off-policy corrections: the tokens were sampled by older weights, and by another implementation of the model.

Owns importance weights and the gauges that say how far behaviour and learner are apart. `_T` are sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class Origin(IntEnum):
    """Why, besides its age, a token's log-prob at sampling may differ from the learner's.

    `PLAIN`: one version of the weights made it and, as far as is known, all keys and values that it attends to.
    `MIXED_KV`: its turn began under another version and keys and values were kept, so it may have no single version.
    `UNDONE`: a rollback undid its version: its step does not tell its age, and the weights are different."""

    PLAIN = 0
    MIXED_KV = 1
    UNDONE = 2


def importance_weights(proximal_T: Tensor, behaviour_T: Tensor, cap: float) -> Tensor:
    """min(cap, exp(proximal - behaviour)) per token, without gradient: [T].

    Truncation bounds the variance at the price of a bias towards the behaviour policy (V-trace's c-bar, Espeholt et
    al. 2018, section 4.1; truncated importance sampling for engine mismatch, Yao et al. 2025)."""
    return (proximal_T - behaviour_T).detach().exp().clamp(max=cap)


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
    kinds = {
        "fresh": plain_T & (lag_T == 0),
        "lag_1": plain_T & (lag_T == 1),
        "lag_2_3": plain_T & (lag_T >= 2) & (lag_T <= 3),
        "lag_4_up": plain_T & (lag_T >= 4),
        "mixed_kv": origin_T == Origin.MIXED_KV,
        "undone": origin_T == Origin.UNDONE,
    }
    found = {name: gap_T[of_T].abs() for name, of_T in kinds.items()}
    return {
        name: Mismatch(tokens=len(of), mean=float(of.mean()), max=float(of.max()))
        for name, of in found.items()
        if len(of)
    }


def gauges(proximal_T: Tensor, behaviour_T: Tensor, lag_T: Tensor, origin_T: Tensor, cap: float) -> Gauges:
    """Measure a step. All are [T] with T >= 1, `lag_T` in optimizer steps, `origin_T` of `Origin`; see `Gauges`."""
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
