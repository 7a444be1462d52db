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
    logits = logits_NV.astype(np.float64)
    numbers = np.asarray(reported, dtype=np.float64)
    picked = np.arange(len(tokens)), np.asarray(tokens)

    def residual(candidate_N: Floats) -> float:
        return rms(numbers - candidate_N)

    plain = residual(_log_softmax(logits)[picked])
    settings = [_temperature(logits, picked, residual), *_cuts(logits, picked, residual)]
    settings += _penalties(logits, tokens, before, picked, residual)
    best = min(settings, key=lambda setting: setting.residual)
    # A cut that keeps all tokens, or a temperature of 1, leaves all of it and explains nothing.
    return best if best.residual <= max(limit, _SHRINKS * plain) and best.residual < plain / 2 else None


def tempered(logits_NV: NDArray[np.float32], tokens: Sequence[int], temperature: float) -> Floats:
    """The log-probs of tokens that were drawn at a temperature."""
    return _log_softmax(logits_NV.astype(np.float64) / temperature)[np.arange(len(tokens)), np.asarray(tokens)]


_Picked = tuple[NDArray[np.int_], NDArray[np.int_]]


def _log_softmax(logits_NV: Floats) -> Floats:
    shifted = logits_NV - logits_NV.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _temperature(logits: Floats, picked: _Picked, residual: Callable[[Floats], float]) -> Setting:
    def cost(inverse: float) -> float:
        return residual(_log_softmax(logits * inverse)[picked])

    inverse, least = _minimum(cost, np.geomspace(0.1, 10, 41))
    return Setting("temperature", "temperature", 1 / inverse, least)


def _cuts(logits: Floats, picked: _Picked, residual: Callable[[Floats], float]) -> list[Setting]:
    logprobs = _log_softmax(logits)
    ordered = -np.sort(-logprobs, axis=-1)
    mass_NV = np.cumsum(np.exp(ordered), axis=-1)
    logprobs_N = logprobs[picked]
    # A token that the cut left out has no log-prob; it is reported as one that no sum explains.
    top_k, least_k = min(
        (
            (k, residual(np.where(logprobs_N >= ordered[:, k - 1], logprobs_N - np.log(mass_NV[:, k - 1]), logprobs_N)))
            for k in range(1, min(_MOST_TOP_K, logits.shape[1]) + 1)
        ),
        key=lambda pair: pair[1],
    )

    def cost(p: float) -> float:
        last = np.minimum((mass_NV < p).sum(-1), logits.shape[1] - 1)
        return residual(logprobs_N - np.log(mass_NV[np.arange(len(logprobs_N)), last]))

    top_p, least_p = min(((p, cost(p)) for p in np.linspace(0.01, 0.99, 99)), key=lambda pair: pair[1])
    return [Setting("top_k", "top_k", top_k, least_k), Setting("top_p", "top_p", float(top_p), least_p)]


def _penalties(
    logits: Floats, tokens: Sequence[int], before: Sequence[int], picked: _Picked, residual: Callable[[Floats], float]
) -> list[Setting]:
    counts_NV = np.zeros_like(logits)  # of each token among the sampled ones before
    for place, token in enumerate(tokens[:-1]):
        counts_NV[place + 1 :, token] += 1
    seen_NV = counts_NV > 0
    seen_NV[:, np.unique(np.asarray(before))] = True

    def repetition(factor: float) -> float:
        reduced = np.where(logits > 0, logits / factor, logits * factor)
        return residual(_log_softmax(np.where(seen_NV, reduced, logits))[picked])

    def presence(size: float) -> float:
        return residual(_log_softmax(logits - size * (counts_NV > 0))[picked])

    def frequency(size: float) -> float:
        return residual(_log_softmax(logits - size * counts_NV)[picked])

    sizes = np.linspace(-2, 2, 41)
    grids = {
        "repetition_penalty": (repetition, np.geomspace(0.5, 2, 41)),
        "presence_penalty": (presence, sizes),
        "frequency_penalty": (frequency, sizes),
    }
    return [Setting("penalty", name, *_minimum(cost, grid)) for name, (cost, grid) in grids.items()]


def _minimum(cost: Callable[[float], float], grid: Floats) -> tuple[float, float]:
    """The place of the least cost between neighbours of the cheapest value of a grid, and that cost."""
    costs = [cost(float(value)) for value in grid]
    nearest = int(np.argmin(costs))
    low, high = float(grid[max(0, nearest - 1)]), float(grid[min(len(grid) - 1, nearest + 1)])
    for _ in range(_REFINEMENTS):
        third = (high - low) / 3
        if cost(low + third) < cost(high - third):
            high -= third
        else:
            low += third
    middle = (low + high) / 2
    return middle, cost(middle)
