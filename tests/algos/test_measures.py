"""What a step says of its tokens, against loops over Python floats."""

from __future__ import annotations

import math
import random

import pytest
import torch

from agentrl.algos.token_metrics import by_number, measured, ratios_by_level

N = 40


def drawn() -> dict[str, list[float]]:
    rng = random.Random(5)
    return {
        "behaviour": [-rng.uniform(0.5, 3) for _ in range(N)],
        "proximal": [-rng.uniform(0.5, 3) for _ in range(N)],
        "entropy": [rng.uniform(0, 2) for _ in range(N)],
        "clip": [rng.choice([-1, 0, 0, 1]) for _ in range(N)],
        "reference_k3": [rng.uniform(0, 0.1) for _ in range(N)],
        "advantage": [rng.choice([-1.0, 0.0, 2.0]) for _ in range(N)],
        "lag": [rng.choice([0, 1, 2, 3, 5]) for _ in range(N)],
        "turn": [rng.randrange(9) for _ in range(N)],
        "episode": [rng.choice([7, 8, 9]) for _ in range(N)],
        "role": [rng.choice([0, 1]) for _ in range(N)],
    }


def by_loop(columns: dict[str, list[float]], chosen: list[int]) -> dict[str, float]:
    n = len(chosen)
    gaps = [columns["proximal"][t] - columns["behaviour"][t] for t in chosen]
    ratios = [math.exp(gap) for gap in gaps]
    return {
        "tokens": n,
        "ess": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
        "chi_square": sum((r - 1) ** 2 for r in ratios) / n,
        "kl_k1": -sum(gaps) / n,
        "kl_k3": sum(r - 1 - gap for r, gap in zip(ratios, gaps, strict=True)) / n,
        "mismatch": sum(abs(gap) for gap in gaps) / n,
        "clip_low": sum(columns["clip"][t] == -1 for t in chosen) / n,
        "clip_high": sum(columns["clip"][t] == 1 for t in chosen) / n,
        "entropy": sum(columns["entropy"][t] for t in chosen) / n,
        "kl_reference": sum(columns["reference_k3"][t] for t in chosen) / n,
        "advantage_positive": sum(columns["advantage"][t] > 0 for t in chosen) / n,
        "advantage_negative": sum(columns["advantage"][t] < 0 for t in chosen) / n,
    }


def tensors(columns: dict[str, list[float]]) -> dict[str, torch.Tensor]:
    whole = ("lag", "turn", "episode", "role", "clip")
    return {
        name: torch.tensor(values, dtype=torch.long if name in whole else torch.float64)
        for name, values in columns.items()
    }


def test_the_measures_are_their_definitions() -> None:
    columns = drawn()
    got, expected = measured(tensors(columns)), by_loop(columns, list(range(N)))
    assert {name: getattr(got, name) for name in expected} == pytest.approx(expected)
    bare = {name: column for name, column in tensors(columns).items() if name not in ("reference_k3", "advantage")}
    assert (measured(bare).kl_reference, measured(bare).advantage_positive) == (None, None)


@pytest.mark.parametrize(
    ("name", "ranges"),
    [
        ("lag", {"0": (0, 0), "1": (1, 1), "2_3": (2, 3), "4_7": (4, 7)}),
        ("turn", {"0": (0, 0), "1": (1, 1), "2_3": (2, 3), "4_7": (4, 7), "8_15": (8, 15)}),
    ],
)
def test_they_are_also_given_by_age_and_by_turn(name: str, ranges: dict[str, tuple[int, int]]) -> None:
    columns = drawn()
    got = by_number(tensors(columns), name)
    assert got.keys() == ranges.keys()
    for label, (first, last) in ranges.items():
        expected = by_loop(columns, [t for t in range(N) if first <= columns[name][t] <= last])
        assert {field: getattr(got[label], field) for field in expected} == pytest.approx(expected)


def test_ratios_of_tokens_of_sequences_and_their_geometric_means() -> None:
    columns = drawn()
    gaps: dict[tuple[float, float], list[float]] = {}
    for t in range(N):
        key = columns["episode"][t], columns["role"][t]
        gaps.setdefault(key, []).append(columns["proximal"][t] - columns["behaviour"][t])
    logs = {
        "token": [gap for own in gaps.values() for gap in own],
        "sequence": [sum(own) for own in gaps.values()],
        "geometric": [sum(own) / len(own) for own in gaps.values()],
    }
    got = ratios_by_level(tensors(columns))
    for level, log in logs.items():
        ratios, found = [math.exp(one) for one in log], got[level]
        ess = sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios))
        expected = (len(ratios), sum(ratios) / len(ratios), min(ratios), max(ratios), ess)
        assert (found.n, found.mean, found.min, found.max, found.ess) == pytest.approx(expected)


def test_the_sample_size_of_ratios_beyond_any_float_is_right() -> None:
    tokens = tensors({"proximal": [0.0] * 4, "behaviour": [-900.0, -900.0, -1800.0, -1e5]})
    keys = torch.tensor([0, 1, 2, 2])
    got = ratios_by_level({**tokens, "episode": keys, "role": torch.zeros_like(keys)})
    assert (got["sequence"].ess, got["sequence"].max) == (pytest.approx(1 / 3), math.inf)
