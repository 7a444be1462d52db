"""Bounds on numbers that differ only by the order of sums, which every CPU and number of threads has in its own way.

An absolute bound on a weight after a step of Adam holds on one CPU and not on the next: Adam divides a gradient by its
own size, so the rounding of a gradient near zero becomes a step of the full learning rate. Gradients are therefore
compared before the optimizer, relative to the norm of all of them, and weights with bounds that follow from the
learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor


def numbers_of(record: Any) -> dict[str, float]:
    """The fields of a dataclass of numbers; -1 for one that is None, which `pytest.approx` would not compare."""
    return {name: -1 if value is None else value for name, value in asdict(record).items()}


def norm_of(tensors: Mapping[Any, Tensor]) -> float:
    """The norm of all numbers of `tensors` together."""
    return float(torch.stack([tensor.detach().double().norm() for tensor in tensors.values()]).norm())


def assert_gradients_alike(
    found: Mapping[Any, Tensor], expected: Mapping[Any, Tensor], *, norm: float | None = None, rel: float = 3e-5
) -> None:
    """Check that no gradient is off by more than `rel` of the norm of all of them. Sums in float32 err by about 1e-6 of
    it, by 6e-6 without fused multiplication. Weights after a step of 1 against their gradients are compared so too,
    with the `norm` of these."""
    assert found.keys() == expected.keys()
    bound = rel * (norm_of(expected) if norm is None else norm)
    assert bound > 0
    for name, gradient in expected.items():
        apart = float((found[name].detach().double() - gradient.detach().double()).abs().max())
        assert apart <= bound, f"{name} is off by {apart:.3g}, allowed {bound:.3g}"


def assert_moved_alike(found: Mapping[Any, Tensor], expected: Mapping[Any, Tensor], *, lr: float, steps: int) -> None:
    """Check weights after some `steps` of AdamW of `lr` without decay. A weight whose gradient is only rounding may go
    the other way in every step; nearly all others agree within a thousandth of the way that they can have gone."""
    assert found.keys() == expected.keys()
    way, astray, count = lr * steps, 0, 0
    for name, tensor in expected.items():
        apart = (found[name].detach().double() - tensor.detach().double()).abs()
        assert float(apart.max()) <= 2.5 * way, (
            f"{name} is off by {float(apart.max()):.3g}, further than it can have gone"
        )
        assert float(apart.median()) <= 1e-3 * way, f"half of {name} is off by {float(apart.median()):.3g} or more"
        astray += int((apart > 1e-3 * way).sum())
        count += apart.numel()
    assert astray <= max(2, count // 100), f"{astray} of {count} weights are off by more than {1e-3 * way:.3g}"
