"""Metrics of a step's tokens: how far behaviour and learner are apart, entropy, clips, signs of advantages.

Owns the numbers, over all tokens, by age and by turn. Never knows rows, groups or models. `_T` are sampled tokens.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from agentrl.algos.importance import Level, log_ratios, sequences

LEVELS: Final[tuple[Level, ...]] = ("token", "sequence", "geometric")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Measures of some tokens. `gap` is log proximal - log behaviour, `ratio` its exponential.

    `ess`: effective sample size over sample size, of the uncut ratios. `chi_square`: mean of (ratio - 1)^2, an estimate
    of chi^2(proximal || behaviour), never negative. `kl_k1`, `kl_k3`: of KL(behaviour || proximal), in nats per token.
    `mismatch`: mean of |gap|. `clip_low`, `clip_high`: shares of tokens that a clip cut since the ratio it is on fell,
    or rose. `kl_reference`: mean of k3 of KL(policy || reference), None without one. `entropy`: of the policy, nats.
    `advantage_positive`, `advantage_negative`: shares; the others are 0."""

    tokens: int
    ess: float
    chi_square: float
    kl_k1: float
    kl_k3: float
    mismatch: float
    clip_low: float
    clip_high: float
    entropy: float
    kl_reference: float | None
    advantage_positive: float | None
    advantage_negative: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Statistics of `n` ratios proximal / behaviour: of tokens, or of sequences. `mean` estimates 1 where it is a ratio
    of probabilities, so not for geometric means. A ratio too large for a float is infinite; `ess` is right then too."""

    n: int
    mean: float
    min: float
    max: float
    ess: float


def measured(tokens: Mapping[str, Tensor]) -> Measures:
    """Measure tokens, at least one, by their columns [T]: `proximal`, `behaviour`, `entropy`, and `clip`, which is -1
    or 1 where a clip cut the gradient; `reference_k3` and `advantage` where they are known."""
    gap_T = (tokens["proximal"] - tokens["behaviour"]).double()
    ratio_T, clip_T = gap_T.exp(), tokens["clip"]
    reference_T, advantage_T = tokens.get("reference_k3"), tokens.get("advantage")
    return Measures(
        tokens=len(gap_T),
        ess=_ess(gap_T),
        chi_square=_mean((ratio_T - 1).square()),
        kl_k1=_mean(-gap_T),
        kl_k3=_mean(ratio_T - 1 - gap_T),
        mismatch=_mean(gap_T.abs()),
        clip_low=_mean(clip_T < 0),
        clip_high=_mean(clip_T > 0),
        entropy=_mean(tokens["entropy"]),
        kl_reference=None if reference_T is None else _mean(reference_T),
        advantage_positive=None if advantage_T is None else _mean(advantage_T > 0),
        advantage_negative=None if advantage_T is None else _mean(advantage_T < 0),
    )


def by_number(tokens: Mapping[str, Tensor], name: str) -> dict[str, Measures]:
    """Measure tokens by a column of whole numbers from 0, such as `lag` or `turn`, in ranges that double: `0`, `1`,
    `2_3`, `4_7` and so on, so that long episodes make few."""
    _, range_T = torch.frexp(tokens[name].double())  # 0 -> 0, 1 -> 1, 2 to 3 -> 2, 4 to 7 -> 3
    measures_by_range: dict[str, Measures] = {}
    for exponent in torch.unique(range_T).tolist():
        first_number, last_number = (2 ** (exponent - 1), 2**exponent - 1) if exponent else (0, 0)
        range_label = str(first_number) if first_number == last_number else f"{first_number}_{last_number}"
        measures_by_range[range_label] = measured(
            {column_name: column_T[range_T == exponent] for column_name, column_T in tokens.items()}
        )
    return measures_by_range


def ratios_by_level(tokens: Mapping[str, Tensor]) -> dict[str, Ratios]:
    """The ratios of a step's tokens, of its sequences, and the geometric means of these. Each token stands once in the
    columns `proximal`, `behaviour`, `episode` and `role`."""
    gap_T = (tokens["proximal"] - tokens["behaviour"]).double()
    sequence_T, length_S = sequences(tokens["episode"], tokens["role"])
    ratios_of_level: dict[str, Ratios] = {}
    for level in LEVELS:
        level_log_ratio = log_ratios(gap_T, tokens["episode"], tokens["role"], level)
        if level != "token":  # one of each sequence
            level_log_ratio = level_log_ratio.new_zeros(len(length_S)).index_put((sequence_T,), level_log_ratio)
        level_ratio = level_log_ratio.exp()
        ratios_of_level[level] = Ratios(
            n=len(level_log_ratio),
            mean=_mean(level_ratio),
            min=float(level_ratio.min()),
            max=float(level_ratio.max()),
            ess=_ess(level_log_ratio),
        )
    return ratios_of_level


def _ess(log_T: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of w = exp(log), in (0, 1], whatever the scale."""
    # In logarithms, since the ratio of a long sequence is beyond any float: infinity over infinity would report a NaN
    # for exactly the steps that one wants to see.
    once, twice = torch.logsumexp(log_T, 0), torch.logsumexp(2 * log_T, 0)
    return float((2 * once - twice - math.log(len(log_T))).exp())


def _mean(values_T: Tensor) -> float:
    return float(values_T.double().mean())
