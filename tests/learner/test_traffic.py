"""What 512 ranks would send, counted by hand for a tiny model. `test_ranks_context` has the same beside real ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from agentrl.learner.parallel.collective_trace import Collective, traffic

from .making import mixture
from .test_packing import row
from .test_ranks import config

Apart = Callable[..., list[Collective]]


@contextmanager
def process() -> Generator[Apart]:
    """What calls `traffic` in a process that has no ranks of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:

        def apart(plan: dict[str, int], folder: Path, tokens: int, **train: Any) -> list[Collective]:
            rows = [row([at % 20 for at in range(tokens)], range(12, tokens))]
            return pool.submit(traffic, config(parallel=plan, **train).learner, folder, rows).result(120)

        yield apart


@pytest.fixture(scope="module")
def apart() -> Generator[Apart]:
    with process() as made:
        yield made


TOKENS, HIDDEN, LAYERS, KV_HEADS, DIM = 512, 32, 2, 2, 8  # of tiny_qwen3


@pytest.mark.medium
def test_512_ranks_send_what_a_hand_counts(apart: Apart, qwen3_dir: Path) -> None:
    found = apart({"ranks": 512, "context": 4, "tensor": 2}, qwen3_dir, TOKENS)
    by_name = {one.name: one for one in found}
    gathered = by_name["keys and values of layer 1"]
    assert (gathered.kind, gathered.size) == ("all-gather", 4)
    assert gathered.nbytes == 4 * TOKENS * 2 * KV_HEADS * DIM / 2  # float32, a tensor rank has half of the heads
    assert gathered.sent == gathered.nbytes * 3 / 4
    back = by_name["keys and values of layer 1, backward"]
    assert (back.kind, back.nbytes) == ("reduce-scatter", gathered.nbytes)
    added = by_name["adding up model.layers.0.mlp.down_proj"]
    assert (added.kind, added.size, added.shape) == ("all-reduce", 2, (1, TOKENS // 4, HIDDEN))
    assert added.sent == added.nbytes
    logprobs = by_name["log-probs"]  # of 500 tokens, beside the entropies of their places
    assert (logprobs.size, logprobs.shape) == (8, (2 * 500,))
    matrices = by_name["gathering model.layers.0.self_attn.q_proj and what is cut as it"]
    assert matrices.size == 256 and matrices.nbytes >= 4 * HIDDEN * (2 * 32 + 2 * 16 + 3 * 48) / 2
    assert sum(one.name.startswith("adding up the gradients of") for one in found) == 2 * LAYERS + 1


@pytest.mark.medium
def test_passes_in_bfloat16_gather_half_of_the_bytes_of_matrices_and_add_up_all_of_their_gradients(
    apart: Apart, qwen3_dir: Path
) -> None:
    found = apart({"ranks": 4, "tensor": 2}, qwen3_dir, 20, dtype="bfloat16")
    matrices = (2 * 32 + 2 * 16 + 3 * 48) * HIDDEN // 2  # q and o, k and v, gate, up and down; half on a rank
    vectors = 2 * HIDDEN + 2 * DIM  # the norms of a layer, those of queries and keys
    outside = 24 * HIDDEN + HIDDEN  # the embedding, also the output layer, padded for four ranks; the last norm
    linear = "self_attn.q_proj and what is cut as it"
    layers = {f"model.layers.{at}": vectors for at in range(LAYERS)}
    linears = {f"{layer}.{linear}": matrices for layer in layers}
    sizes = {name: 4 * n for name, n in {**layers, **linears, "what is outside of layers": outside}.items()}
    gathered = {f"gathering {name}": nbytes // (2 if name in linears else 1) for name, nbytes in sizes.items()}
    added = {f"adding up the gradients of {name}": nbytes for name, nbytes in sizes.items()}
    assert {one.name: one.nbytes for one in found if one.kind == "all-gather"} == gathered
    assert {one.name: one.nbytes for one in found if one.kind == "reduce-scatter"} == added


@pytest.mark.medium
def test_tokens_go_to_experts_and_come_back(apart: Apart, tmp_path: Path) -> None:
    """Four ranks have an expert each; two of them share a pass, and each sends half of its tokens to two experts."""
    folder = mixture(tmp_path / "model", layers=2, kv_heads=2)
    found = apart({"ranks": 4, "tensor": 2, "expert": 4}, folder, 20, gradient_checkpointing=True)
    rows = 20 // 2 * 2
    moved = {one.name: (one.shape, one.nbytes, one.sent) for one in found if one.kind == "all-to-all"}
    tokens, counts = ((rows, HIDDEN), 4 * rows * HIDDEN, 4 * rows * HIDDEN * 3 / 4), ((4, 1), 8 * 4, 8 * 3)
    steps = {"tokens for {}": tokens, "answers of {}": tokens, "counts for {}": counts}
    expected = {
        name.format(f"model.layers.{at}.mlp.experts") + also: size
        for at in range(2)
        for name, size in steps.items()
        for also in (["", ", backward"] if size == tokens else [""])
    }
    assert moved == expected
    assert [one.kind for one in found].count("all-to-all") == 2 * (2 * 3 + 2)  # the backward pass computes layers again
    assert not any("experts and what is cut" in one.name for one in found)
