"""Off-policy corrections: the tokens were sampled by older weights, and by another implementation of the model.

Owns importance weights and the gauges that say how far behaviour and learner are apart. `_T` are sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


def importance_weights(proximal_T: Tensor, behaviour_T: Tensor, cap: float) -> Tensor:
    """min(cap, exp(proximal - behaviour)) per token, without gradient: [T].

    Truncation bounds the variance at the price of a bias towards the behaviour policy (V-trace's c-bar, Espeholt et
    al. 2018, section 4.1; truncated importance sampling for engine mismatch, Yao et al. 2025)."""
    return (proximal_T - behaviour_T).detach().exp().clamp(max=cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """How far apart learner and behaviour policy are, over the tokens of a step.

    `ess`: effective sample size over sample size, (sum w)^2 / (n sum w^2), of the untruncated weights; 1 is on-policy.
    `kl_k1`, `kl_k3`: estimates of KL(behaviour || proximal) in nats per token; k1 is unbiased, k3 never negative.
    `truncated`: share of tokens whose weight the cap cut. `mismatch_mean`, `mismatch_max`: |difference of log-probs|
    in nats over tokens of lag 0, which engine and learner should agree on; None without such tokens.
    `lag_mean`, `lag_max`: optimizer steps between sampling and training."""

    ess: float
    kl_k1: float
    kl_k3: float
    truncated: float
    mismatch_mean: float | None
    mismatch_max: float | None
    lag_mean: float
    lag_max: int


def effective_sample_size(weights_T: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2), in (0, 1] (Kong 1992)."""
    return weights_T.sum() ** 2 / (len(weights_T) * weights_T.square().sum())


def gauges(proximal_T: Tensor, behaviour_T: Tensor, lag_T: Tensor, cap: float) -> Gauges:
    """Measure a step. All are [T] with T >= 1, `lag_T` in optimizer steps; see `Gauges`."""
    gap_T = (proximal_T - behaviour_T).detach().double()
    ratio_T = gap_T.exp()
    fresh = gap_T[lag_T == 0].abs()
    return Gauges(
        ess=float(effective_sample_size(ratio_T)),
        kl_k1=float(-gap_T.mean()),
        kl_k3=float((ratio_T - 1 - gap_T).mean()),
        truncated=float((ratio_T > cap).double().mean()),
        mismatch_mean=float(fresh.mean()) if len(fresh) else None,
        mismatch_max=float(fresh.max()) if len(fresh) else None,
        lag_mean=float(lag_T.double().mean()),
        lag_max=int(lag_T.max()),
    )
