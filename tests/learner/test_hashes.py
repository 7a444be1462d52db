"""A hash of a tensor: equal for equal bits, another for any other."""

from __future__ import annotations

import pytest
import torch
from each_case import each_case

from agentrl.learner import weight_export
from agentrl.learner.weight_export import hash_of


def test_equal_bits_have_equal_hashes_however_they_lie() -> None:
    values = torch.randn(300, 700)
    assert hash_of(values) == hash_of(values.clone()) == hash_of(values.T.contiguous().T)
    assert hash_of(values) != hash_of(values.T)


@each_case("at", [0, 1, 131_071, 131_072, 199_999])
def test_one_changed_bit_shows(at: int) -> None:
    values = torch.randn(200_000)
    before = hash_of(values)
    for bit in (0, 15, 31):
        values.view(torch.int32)[at] ^= 1 << bit if bit < 31 else -(1 << 31)
        assert hash_of(values) != before
        values.view(torch.int32)[at] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert hash_of(values) == before


def test_values_that_change_places_show() -> None:
    values = torch.arange(300_000, dtype=torch.float32)
    before = hash_of(values)
    for one, other in ((0, 1), (5, 131_077), (5, 262_149)):
        moved = values.clone()
        moved[[one, other]] = moved[[other, one]]
        assert hash_of(moved) != before


def test_lengths_of_zeros_and_signs_of_zero_show() -> None:
    found = {hash_of(torch.zeros(n)) for n in (0, 1, 2, 131_072)} | {hash_of(-torch.zeros(1))}
    assert len(found) == 5


@each_case("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_every_dtype_has_a_hash(dtype: torch.dtype) -> None:
    one, other = torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)
    assert hash_of(one) != hash_of(other)


def test_a_device_that_sums_more_at_once_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(500_000)
    one_row = hash_of(values)
    monkeypatch.setitem(weight_export._ROWS, "cpu", 3)
    assert hash_of(values) == one_row
