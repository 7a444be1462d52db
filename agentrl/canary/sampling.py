"""Which settings of sampling turn a model's log-probs into those that a server reports.

Each kind of setting is tried by itself over its range, and the nearest value is refined. Suffixes: N tokens, V
vocabulary. numpy alone; never knows servers or models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["temperature", "top_k", "top_p", "penalty"]
Floats = NDArray[np.float64]

_SHRINKS = 0.05  # of the difference that a setting may leave, to count as its explanation
_MOST_TOP_K = 1024
_REFINEMENTS = 40  # halvings of the interval around the nearest value of a grid


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting, by the name that APIs have for it, and what it leaves of the difference: nats, rms over tokens."""

    kind: Kind
    name: str
    value: float
    residual: float


def rms(differences: Floats | Sequence[float]) -> float:
    """Quadratic mean."""
    return float(np.sqrt(np.mean(np.square(differences))))


def explain(
    logits_NV: NDArray[np.float32],
    tokens: Sequence[int],
    before: Sequence[int],
    reported: Sequence[float],
    limit: float,
) -> Setting | None:
    """The setting that leaves the least of the difference between `reported` log-probs of `tokens` and the model's;
    None if even the best leaves more than rounding, `limit` nats (rms), and more than a twentieth of the difference, or
    does not halve it. `before` are the tokens of the prompt."""
    double_logits = logits_NV.astype(np.float64)
    reported_logprobs = np.asarray(reported, dtype=np.float64)
    picked_indices = np.arange(len(tokens)), np.asarray(tokens)

    def residual(candidate_N: Floats) -> float:
        return rms(reported_logprobs - candidate_N)

    plain_residual = residual(_log_softmax(double_logits)[picked_indices])
    settings = [_temperature(double_logits, picked_indices, residual), *_cuts(double_logits, picked_indices, residual)]
    settings += _penalties(double_logits, tokens, before, picked_indices, residual)
    best_setting = min(settings, key=lambda setting: setting.residual)
    # A cut that keeps all tokens, or a temperature of 1, leaves all of it and explains nothing.
    return (
        best_setting
        if best_setting.residual <= max(limit, _SHRINKS * plain_residual) and best_setting.residual < plain_residual / 2
        else None
    )


def tempered(logits_NV: NDArray[np.float32], tokens: Sequence[int], temperature: float) -> Floats:
    """The log-probs of tokens that were drawn at a temperature."""
    return _log_softmax(logits_NV.astype(np.float64) / temperature)[np.arange(len(tokens)), np.asarray(tokens)]


_Picked = tuple[NDArray[np.int_], NDArray[np.int_]]


def _log_softmax(logits_NV: Floats) -> Floats:
    shifted_NV = logits_NV - logits_NV.max(-1, keepdims=True)
    return shifted_NV - np.log(np.exp(shifted_NV).sum(-1, keepdims=True))


def _temperature(logits: Floats, picked: _Picked, residual: Callable[[Floats], float]) -> Setting:
    def cost(inverse: float) -> float:
        return residual(_log_softmax(logits * inverse)[picked])

    inverse_temperature, least_residual = _minimum(cost, np.geomspace(0.1, 10, 41))
    return Setting("temperature", "temperature", 1 / inverse_temperature, least_residual)


def _cuts(logits: Floats, picked: _Picked, residual: Callable[[Floats], float]) -> list[Setting]:
    logprobs = _log_softmax(logits)
    ordered_NV = -np.sort(-logprobs, axis=-1)
    mass_NV = np.cumsum(np.exp(ordered_NV), axis=-1)
    logprobs_N = logprobs[picked]
    # A token that the cut left out has no log-prob; it is reported as one that no sum explains.
    top_k, top_k_residual = min(
        (
            (
                k,
                residual(
                    np.where(logprobs_N >= ordered_NV[:, k - 1], logprobs_N - np.log(mass_NV[:, k - 1]), logprobs_N)
                ),
            )
            for k in range(1, min(_MOST_TOP_K, logits.shape[1]) + 1)
        ),
        key=lambda pair: pair[1],
    )

    def cost(p: float) -> float:
        last_kept = np.minimum((mass_NV < p).sum(-1), logits.shape[1] - 1)
        return residual(logprobs_N - np.log(mass_NV[np.arange(len(logprobs_N)), last_kept]))

    top_p, top_p_residual = min(((p, cost(p)) for p in np.linspace(0.01, 0.99, 99)), key=lambda pair: pair[1])
    return [Setting("top_k", "top_k", top_k, top_k_residual), Setting("top_p", "top_p", float(top_p), top_p_residual)]


def _penalties(
    logits: Floats, tokens: Sequence[int], before: Sequence[int], picked: _Picked, residual: Callable[[Floats], float]
) -> list[Setting]:
    counts_NV = np.zeros_like(logits)  # of each token among the sampled ones before
    for token_position, sampled_token in enumerate(tokens[:-1]):
        counts_NV[token_position + 1 :, sampled_token] += 1
    seen_NV = counts_NV > 0
    seen_NV[:, np.unique(np.asarray(before))] = True

    def repetition(factor: float) -> float:
        reduced_logits = np.where(logits > 0, logits / factor, logits * factor)
        return residual(_log_softmax(np.where(seen_NV, reduced_logits, logits))[picked])

    def presence(size: float) -> float:
        return residual(_log_softmax(logits - size * (counts_NV > 0))[picked])

    def frequency(size: float) -> float:
        return residual(_log_softmax(logits - size * counts_NV)[picked])

    penalty_sizes = np.linspace(-2, 2, 41)
    cost_grids = {
        "repetition_penalty": (repetition, np.geomspace(0.5, 2, 41)),
        "presence_penalty": (presence, penalty_sizes),
        "frequency_penalty": (frequency, penalty_sizes),
    }
    return [
        Setting("penalty", penalty_name, *_minimum(penalty_cost, penalty_grid))
        for penalty_name, (penalty_cost, penalty_grid) in cost_grids.items()
    ]


def _minimum(cost: Callable[[float], float], grid: Floats) -> tuple[float, float]:
    """The place of the least cost between neighbours of the cheapest value of a grid, and that cost."""
    grid_costs = [cost(float(grid_value)) for grid_value in grid]
    nearest_index = int(np.argmin(grid_costs))
    lower_end, upper_end = float(grid[max(0, nearest_index - 1)]), float(grid[min(len(grid) - 1, nearest_index + 1)])
    for _ in range(_REFINEMENTS):
        third_width = (upper_end - lower_end) / 3
        if cost(lower_end + third_width) < cost(upper_end - third_width):
            upper_end -= third_width
        else:
            lower_end += third_width
    midpoint = (lower_end + upper_end) / 2
    return midpoint, cost(midpoint)
