"""What 512 ranks would send, counted by hand for a tiny model. `test_ranks_context` has the same beside real ranks."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.train.parallel.traffic import Collective, traffic

from .test_packing import row
from .test_ranks import config


def apart(plan: dict[str, int], folder: Path, tokens: int, **train: Any) -> list[Collective]:
    """`traffic` in a process of its own."""
    rows = [row([at % 20 for at in range(tokens)], range(12, tokens))]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(traffic, config(parallel=plan, **train), folder, rows).result(120)


TOKENS, HIDDEN, LAYERS, KV_HEADS, DIM = 512, 32, 2, 2, 8  # of tiny_qwen3


def test_512_ranks_send_what_a_hand_counts(qwen3_dir: Path) -> None:
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


def test_experts_that_are_apart_are_not_counted(qwen3_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.parallel.expert = 2: which rank a token goes to"):
        traffic(config(parallel={"ranks": 4, "expert": 2}), qwen3_dir, [row([1, 2])])
