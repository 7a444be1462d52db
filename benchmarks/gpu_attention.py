"""Attention over trees on a GPU: each backend's error against float32, its time and its memory, forward and backward.

One line of JSON per case. `layer` cases are one layer's attention at the head shapes of Qwen3-0.6B and Qwen3-4B over
groups of eight members; `model` cases are four whole layers of Qwen3-0.6B's shape, with and without compiling and
checkpointing. `error` is the largest difference from sdpa in float32, branch by branch, divided by the largest number:
of the output and of the gradients. `mib` is the peak above what lay there before; `graphs` counts what torch.compile
has made so far. Figures are medians.

    python benchmarks/gpu_attention.py [--rounds 5]
    python benchmarks/gpu_attention.py --device cpu --tiny        # a dry run
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.errors import ConfigError
from agentrl.learner.data.prefix_trees import Branch, PrefixTree, build_tree
from agentrl.learner.model.attention import AttentionShape, Layout, choose
from agentrl.learner.model.policy import PolicyModel

MEMBERS = 8
HEADS = {"0.6B": (16, 8, 128), "4B": (32, 8, 128)}
BACKENDS = ("sdpa", "varlen", "flex")
VOCAB = 1000

transformers.utils.logging.disable_progress_bar()


def tree_of(prompt: int, turns: int, turn: int, forks: int) -> PrefixTree:
    """A group: a prompt that all share, then members of so many turns; each forks so often, for two turns more."""
    rng = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(n)]

    shared, rows = tokens(prompt), []
    for _ in range(MEMBERS):
        whole = shared + tokens(turns * turn)
        rows.append(whole)
        for fork in range(1, forks + 1):
            rows.append(whole[: prompt + fork * (turns // (forks + 1)) * turn] + tokens(2 * turn))
    return build_tree([SimpleNamespace(token_ids=tuple(row)) for row in rows])


def exact(branches: Sequence[Branch], parts: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """Output [1, N, H, D] and gradients of sdpa in float32, one branch at a time."""
    fine = [part.detach().float().requires_grad_() for part in parts]
    outputs = []
    for branch in branches:
        n, length = branch.stop - branch.start, len(branch.path)
        repeat = fine[0].shape[1] // fine[1].shape[1]
        key, value = (part[:, :, branch.path].repeat_interleave(repeat, 1) for part in fine[1:])
        mask = torch.ones(n, length, dtype=torch.bool, device=branch.path.device).tril(length - n)
        query = fine[0][:, :, branch.start : branch.stop]
        output = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
        (output * weights[:, branch.start : branch.stop]).sum().backward()
        outputs.append(output.detach())
    return [torch.cat(outputs, 1), *(part.grad for part in fine if part.grad is not None)]


def outcome(layout: Layout, parts: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """Output [1, N, H, D] and gradients of a backend."""
    output = layout.attend(parts[0], parts[1], parts[2], None, None)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), parts)]


def measured(work: Callable[[], Any], device: torch.device, rounds: int) -> dict[str, float]:
    """Median milliseconds of `work` after one call, and its peak memory in MiB."""
    work()
    used: list[float] = []
    base = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        used.append(1000 * (time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated() - base if device.type == "cuda" else 0
    return {"ms": round(statistics.median(used), 2), "mib": round(peak / 2**20)}


def told(**line: Any) -> None:
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(json.dumps({**line, "graphs": graphs}), flush=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def failure(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def layers(trees: dict[str, PrefixTree], device: torch.device, rounds: int) -> None:
    for model, (heads, kv_heads, dim) in HEADS.items():
        for name, tree in trees.items():
            torch.manual_seed(0)
            branches = [Branch(b.start, b.stop, b.path.to(device)) for b in tree.branches]
            n, row_tokens = len(tree.token_ids_N), sum(map(len, tree.paths))
            parts = [
                torch.randn(1, h, n, dim, device=device, dtype=torch.bfloat16).requires_grad_()
                for h in (heads, kv_heads, kv_heads)
            ]
            weights = torch.randn(1, n, heads, dim, device=device, dtype=torch.bfloat16)
            expected = exact(branches, parts, weights.float())
            case = {"case": "layer", "heads": model, "tree": name, "nodes": n, "rows": row_tokens}
            for backend in BACKENDS:
                try:
                    shape = AttentionShape(heads=heads, kv_heads=kv_heads, head_dim=dim)
                    layout = choose(backend, device, torch.bfloat16, shape)(branches)
                    work = partial(outcome, layout, parts, weights)
                    errors = [
                        float((a.float() - b).abs().max() / b.abs().max())
                        for a, b in zip(work(), expected, strict=True)
                    ]
                    line = {"error": [f"{error:.1e}" for error in errors], **measured(work, device, rounds)}
                except (ConfigError, RuntimeError) as error:  # memory is a RuntimeError
                    line = {"failed": failure(error)}
                told(**case, backend=backend, **line)


def models(tree: PrefixTree, device: torch.device, rounds: int, tiny: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        heads, kv_heads, dim = (4, 2, 16) if tiny else HEADS["0.6B"]
        config = Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64 if tiny else 1024,
            intermediate_size=64 if tiny else 3072,
            num_hidden_layers=4,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=dim,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder)
        n = len(tree.token_ids_N)
        pack: Any = SimpleNamespace(
            token_ids_N=torch.tensor(tree.token_ids_N, device=device),
            depth_N=torch.tensor(tree.depth_N, device=device),
            branches=[Branch(b.start, b.stop, b.path.to(device)) for b in tree.branches],
            predictors_P=torch.arange(0, n, 7, device=device),
            predictor_K=torch.arange(len(range(0, n, 7)), device=device),
            target_K=torch.arange(len(range(0, n, 7)), device=device) % VOCAB,
            observer_O=torch.zeros(0, dtype=torch.long, device=device),
            observed_O=torch.zeros(0, dtype=torch.long, device=device),
            ragged={},
        )
        with torch.no_grad():
            exact_K = PolicyModel(Path(folder), device=device, attention="sdpa").logprobs(pack, temperature=1.0)[0]
        told(case="auto", layout=choose("auto", device, torch.bfloat16, AttentionShape()).__name__)
        for backend in BACKENDS:
            for checkpointing, compiled in ((False, False), (True, False), (True, True)):
                case = {"case": "model", "nodes": n, "checkpointing": checkpointing, "compiled": compiled}
                try:
                    policy = PolicyModel(
                        Path(folder),
                        device=device,
                        dtype=torch.bfloat16,
                        attention=backend,
                        checkpointing=checkpointing,
                        compiled=compiled,
                    )

                    def work(policy: PolicyModel = policy) -> Tensor:
                        policy.module.zero_grad()
                        logprobs_K, _ = policy.logprobs(pack, temperature=1.0)
                        logprobs_K.sum().backward()
                        return logprobs_K.detach()

                    off = (work() - exact_K).abs()
                    line = {"nats_mean": f"{float(off.mean()):.1e}", "nats_max": f"{float(off.max()):.1e}"}
                    line |= measured(work, device, rounds) | {"layout": policy.layout.__name__}
                except (ConfigError, RuntimeError) as error:
                    line = {"failed": failure(error)}
                told(**case, backend=backend, **line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small trees: to see that it runs")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    small = 32 if chosen.tiny else 1
    trees = {
        "4k + 8 x 1k": tree_of(4096 // small, 1, 1024 // small, 0),
        "8k + 8 x 8k": tree_of(8192 // small, 1, 8192 // small, 0),
        "2k + 8 x 20 turns, 3 forks": tree_of(2048 // small, 20, 256 // small, 3),
    }
    if chosen.tiny:
        HEADS.update({"0.6B": (4, 2, 16), "4B": (8, 2, 16)})
    told(case="machine", torch=torch.__version__, device=device.type, tf32=torch.get_float32_matmul_precision())
    layers(trees, device, chosen.rounds)
    models(trees["4k + 8 x 1k"], device, chosen.rounds, chosen.tiny)


if __name__ == "__main__":
    main()
