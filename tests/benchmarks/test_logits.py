"""The benchmark of log-probs in chunks, at tiny size: both ways give the same gradients, one in less memory."""

from __future__ import annotations

import logits
import pytest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_give_the_gradients_of_the_whole_matrix_in_less_memory(dtype: str) -> None:
    found = logits.measure(tokens=96, vocab=8_000, hidden=64, layers=1, logits_mb=1, rounds=1, dtype=dtype)
    assert found["chunks"]["apart"] < (1e-5 if dtype == "float32" else 0.02)
    assert found["chunks"]["peak_mb"] < 0.8 * found["whole"]["peak_mb"]
