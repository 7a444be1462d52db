"""Which share of the machine's matrix products a step of the learner reaches, on a real model.

A step is whole: rows from groups, packing, passes, clipping, AdamW. Its operations are the model's by the learner's own
formula (`agentrl.learner.flops`). The machine's rate is that of plain products of the same model's matrices, forward
and both of backward, with as many rows as a pass has, in the same dtype and with the same threads, the head
included. Both take turns; the table has medians.

    agentrl bench learner_rate [--model agentrl/smollm2-135m] [--groups 2] [--rounds 3] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from _learner_shapes import SHAPES

from agentrl.algos.grpo import GRPO
from agentrl.config import EnvSource, Rollout, RunConfig, Train
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.data.shares import weigh
from agentrl.learner.learner import Learner
from agentrl.models.resolve import model_dir
from agentrl.records import Group

Dtype = Literal["float32", "bfloat16"]
HEAD_ROWS = 512  # of a product with the head: what the learner computes at once is of this order


def build(folder: Path, dtype: Dtype, budget: int) -> Learner:
    """A learner whose steps change next to nothing, so that all rounds do the same."""
    config = RunConfig(
        model=str(folder),
        env=EnvSource(id="benchmark"),
        algo=GRPO(importance="none"),
        rollout=Rollout(max_context=budget),
        train=Train(lr=1e-9, warmup_steps=0, tokens_per_batch=budget, dtype=dtype),
    )
    return Learner(config.learner, folder)


def step_tflops(learner: Learner, groups: list[Group]) -> float:
    now = learner.step_index
    return learner.step(groups, step_of=lambda _: now).use.tflops


def products_tflops(module: Any, rows: int, dtype: torch.dtype) -> float:
    """Per second, of each product that the matrices of one layer and of the head take part in."""
    head = module.get_output_embeddings().weight
    layer = [weight for name, weight in module.named_parameters() if ".layers.0." in name and weight.dim() == 2]
    seconds = operations = 0.0
    layers = module.config.get_text_config().num_hidden_layers
    for weight, n, times in [*((weight, rows, layers) for weight in layer), (head, HEAD_ROWS, rows / HEAD_ROWS)]:
        given = weight.detach().to(dtype)
        x, dy = torch.randn(n, given.shape[1], dtype=dtype), torch.randn(n, given.shape[0], dtype=dtype)
        began = time.perf_counter()
        x @ given.t()
        dy @ given
        dy.t() @ x
        seconds += times * (time.perf_counter() - began)
        operations += times * 6 * n * given.numel()
    return operations / seconds / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="agentrl/smollm2-135m")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["prompt"])
    parser.add_argument("--dtypes", nargs="+", choices=get_args(Dtype), default=get_args(Dtype))
    for name, default in {"groups": 2, "rounds": 3, "threads": 2, "tokens-per-batch": 4096}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    folder = model_dir(chosen.model)
    print("| shape | dtype | nodes | step, GFLOP/s | plain products, GFLOP/s | share |\n|---|---|---|---|---|---|")
    for dtype in chosen.dtypes:
        learner = build(folder, dtype, chosen.tokens_per_batch)
        for shape in chosen.shapes:
            groups = SHAPES[shape](chosen.groups)
            ready = [group_rows(g, GRPO(importance="none"), step_of=lambda _: 0, step_now=0, max_lag=0) for g in groups]
            sizes = [len(pack.token_ids_N) for pack in packs(weigh([ready])[0], chosen.tokens_per_batch)]
            rates: list[tuple[float, float]] = []
            for round_ in range(chosen.rounds + 1):
                plain = products_tflops(learner.model.module, sum(sizes) // len(sizes), getattr(torch, dtype))
                rates.append((step_tflops(learner, groups), plain))
                print(f"round {round_}, {shape}, {dtype}: {rates[-1]}", file=sys.stderr)
            steps, plains = zip(*rates[1:], strict=True)
            share = statistics.median(step / plain for step, plain in rates[1:])
            step, plain = (1e3 * statistics.median(each) for each in (steps, plains))
            print(f"| {shape} | {dtype} | {sum(sizes)} | {step:.0f} | {plain:.0f} | {share:.2f} |")


if __name__ == "__main__":
    main()
