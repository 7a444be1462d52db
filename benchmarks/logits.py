"""Log-probs in chunks beside the whole [tokens, vocabulary] matrix: peak memory and time of a pass and its gradients.

One model of random weights, one row of so many tokens, each of them scored. Chunks are those of `train.logits_mb`; the
other way is plain torch, as the learner computed before. Both take turns; times are medians. On a GPU the memory is
what the allocator had at most, beyond what lay there before the pass; on a CPU it is the tensors that live at once.
With `--ranks`, also the share of one of so many ranks that divide the rows of the logits (`train.parallel.tensor`). One
line of JSON for each way.

    python benchmarks/logits.py [--tokens 512] [--vocab 151936] [--hidden 64] [--layers 2] [--logits-mb 64]
    python benchmarks/logits.py --device cuda --dtype bfloat16 --tokens 8192 --hidden 1024 --layers 4 --logits-mb 1024
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.learner.data.prefix_trees import Branch, Pack
from agentrl.learner.memory_budget import Tracker
from agentrl.learner.model.policy import PolicyModel

TEMPERATURE = 0.7
Way = Callable[[PolicyModel, Pack], tuple[torch.Tensor, torch.Tensor]]
SIZES = {"tokens": 512, "vocab": 151_936, "hidden": 64, "layers": 2, "logits-mb": 64, "rounds": 3, "ranks": 1}


def measure(**given: Any) -> dict[str, dict[str, float]]:
    """By way, `chunks`, `whole` or `share`: `peak_mb`, `gflops` and `seconds`, and how far its gradients are from those
    of `whole`, norm of the difference over the norm. `given` are the arguments of the command line, `logits_mb` for
    `--logits-mb`."""
    sizes = {name.replace("-", "_"): size for name, size in SIZES.items()} | given
    device, dtype = torch.device(sizes.get("device", "cpu")), getattr(torch, sizes.get("dtype", "float32"))
    with tempfile.TemporaryDirectory() as folder:
        _save(Path(folder), sizes)
        policy = PolicyModel(Path(folder), device=device, dtype=dtype, logits_mb=sizes["logits_mb"])
    pack = _pack(sizes["tokens"], sizes["vocab"], device)
    ways: dict[str, Way] = {"chunks": _chunks, "whole": _whole}
    if sizes["ranks"] > 1:
        ways["share"] = partial(_share, sizes["ranks"])
    peaks, flops = dict[str, float](), dict[str, float]()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    gradients: dict[str, torch.Tensor] = {}
    for round_ in range(sizes["rounds"] + 1):
        for name, way in ways.items():
            if round_ == 0:  # to warm up, too: to count tensors takes time
                peaks[name] = _peak(way, policy, pack)
                with Flops() as counter:
                    _step(way, policy, pack)
                flops[name] = counter.total / 1e9
            else:
                started = time.perf_counter()
                _step(way, policy, pack)
                seconds[name].append(time.perf_counter() - started)
            gradients[name] = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
            for parameter in policy.parameters():
                parameter.grad = None
    whole = gradients["whole"]
    return {
        name: {
            "peak_mb": round(peaks[name], 1),
            "gflops": round(flops[name], 1),
            "seconds": round(statistics.median(seconds[name]), 4),
            **({} if name == "share" else {"apart": float((gradients[name] - whole).norm() / whole.norm())}),
        }
        for name in ways
    }


class Flops(TorchDispatchMode):
    """Inside, counts the floating-point operations of matrix products; attention's do not count."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.total += 2 * args[0].numel() * args[1].shape[1]
        return made


def _chunks(policy: PolicyModel, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    return policy.logprobs(pack, temperature=TEMPERATURE, entropy_grad=True)


def _share(ranks: int, policy: PolicyModel, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    own = slice(len(pack.predictors_P) // ranks)
    parts = {name: getattr(pack, name)[own] for name in ("predictors_P", "predictor_K", "target_K")}
    return _chunks(policy, replace(pack, **parts))


def _whole(policy: PolicyModel, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=policy.dtype == torch.bfloat16):
        logits_PV = policy.module(
            input_ids=pack.token_ids_N[None],
            position_ids=pack.depth_N[None],
            use_cache=False,
            logits_to_keep=pack.predictors_P,
            layout=policy.layout(pack.branches),
        ).logits[0]
    logprobs_PV = (logits_PV.float() / TEMPERATURE).log_softmax(-1)
    entropy_P = -(logprobs_PV.exp() * logprobs_PV).sum(-1)
    return logprobs_PV[pack.predictor_K, pack.target_K], entropy_P[pack.predictor_K]


def _save(folder: Path, sizes: Mapping[str, Any]) -> None:
    torch.manual_seed(0)
    width = sizes["hidden"]
    config = Qwen3Config(
        vocab_size=sizes["vocab"],
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=sizes["layers"],
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 128),
        head_dim=64,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _pack(tokens: int, vocab: int, device: torch.device) -> Pack:
    ids = torch.arange(tokens + 1, device=device) * 7919 % vocab
    numbers = torch.arange(tokens + 1, device=device)
    none = numbers[:0]
    return Pack(
        policy=None,
        token_ids_N=ids,
        depth_N=numbers,
        branches=(Branch(0, tokens + 1, numbers),),
        predictors_P=numbers[:-1],
        predictor_K=numbers[:-1],
        target_K=ids[1:],
        columns={},
        algo=None,  # type: ignore[arg-type]
        row_tokens=tokens + 1,
        observer_O=none,
        observed_O=none,
        observed_weight_O=none.float(),
    )


def _step(way: Way, policy: PolicyModel, pack: Pack) -> None:
    logprobs_K, entropy_K = way(policy, pack)
    (logprobs_K.mean() + 0.01 * entropy_K.mean()).backward()
    if policy.device.type == "cuda":
        torch.cuda.synchronize()


def _peak(way: Way, policy: PolicyModel, pack: Pack) -> float:
    """In MiB."""
    if policy.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _step(way, policy, pack)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with Tracker() as tracker:
        _step(way, policy, pack)
    return tracker.peak / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    chosen = vars(parser.parse_args())
    for way, row in measure(**chosen).items():
        print(json.dumps({"logprobs": way, **row, **chosen}))


if __name__ == "__main__":
    main()
