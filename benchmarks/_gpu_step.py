"""Cases of `benchmarks/gpu.py`: whole learner steps at the shapes of real models, with random weights."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _gpu_case import Bench, Row
from _gpu_shapes import VOCABULARY, config_of, forked, save_random, shared_prompt

from agentrl.algos.grpo import GRPO
from agentrl.config import Train
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import build_tree, packs
from agentrl.learner.data.rows import Row as TrainingRow
from agentrl.learner.data.shares import weigh
from agentrl.learner.flops import operations, peak_of
from agentrl.learner.learner import Learner
from agentrl.learner.memory_budget import held
from agentrl.records import Group

Variants = Mapping[str, Mapping[str, Any]]
"""Settings of [train] by label; one that this agentrl does not have is left out."""

SMALL: Variants = {
    "default": {},
    "sdpa": {"attention": "sdpa"},
    "flex": {"attention": "flex"},
    "compile": {"compile": True},
    "checkpointing": {"gradient_checkpointing": True},
    "lora": {"lora_rank": 16},
}
LARGE: Variants = {
    "lora, checkpointing": {"lora_rank": 16, "gradient_checkpointing": True},
    "checkpointing": {"gradient_checkpointing": True},
    "flex, lora, passes of 15k": {
        "attention": "flex",
        "lora_rank": 16,
        "gradient_checkpointing": True,
        "tokens_per_batch": 16_384,
    },
}


def small(bench: Bench) -> Iterator[Row]:
    yield from _steps(bench, "Qwen3-0.6B", SMALL, rounds=3)


def large(bench: Bench) -> Iterator[Row]:
    yield from _steps(bench, "Qwen3-4B", LARGE, rounds=2)


def groups_of(bench: Bench) -> dict[str, list[Group]]:
    """What a step trains on, by shape."""
    if bench.tiny:
        return {
            "60% prompt": shared_prompt(1, members=3, prompt=12, sampled=8, vocab=64),
            "20 turns, forks": forked(1, members=3, turns=4, prompt=6, said=2, sampled=2, vocab=64),
        }
    return {"60% prompt": shared_prompt(4, vocab=VOCABULARY), "20 turns, forks": forked(4, vocab=VOCABULARY)}


def _steps(bench: Bench, shape: str, variants: Variants, *, rounds: int) -> Iterator[Row]:
    model = bench.work / shape
    save_random(model, "tiny" if bench.tiny else shape, vocab=64 if bench.tiny else VOCABULARY, device=bench.device)
    for label, settings in variants.items():
        if unknown := settings.keys() - Train.model_fields.keys():
            yield {"variant": label, "note": f"this agentrl has no train.{sorted(unknown)[0]}"}
            continue
        if bench.tiny and label not in ("default", "lora, checkpointing"):
            continue  # the same code with other settings
        try:
            yield from _measured(bench, model, label, settings, rounds)
        except torch.cuda.OutOfMemoryError as error:
            said = str(error).split(". ")
            yield {"variant": label, "note": "; ".join(said[:2])}
        gc.collect()
        if bench.device == "cuda":
            torch.cuda.empty_cache()


def _measured(bench: Bench, model: Path, label: str, settings: Mapping[str, Any], rounds: int) -> Iterator[Row]:
    given: dict[str, Any] = {
        "dtype": "bfloat16",
        "tokens_per_batch": 64 if bench.tiny else 8192,
        "device": bench.device,
        "warmup_steps": 0,
        "lr": 1e-6,
        **settings,
    }
    train = Train(**given)
    config = config_of(model, algo=GRPO(), train=train, max_tokens_per_turn=32 if bench.tiny else 2048)
    began = time.perf_counter()
    learner = Learner(config.learner, model, bench.device)
    loaded = time.perf_counter() - began
    for shape, groups in groups_of(bench).items():
        if bench.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        now = learner.step_index
        reports = [learner.step(groups, step_of=lambda _, now=now: now) for _ in range(rounds + 1)][1:]
        took = median(sum(report.seconds.values()) for report in reports)
        report = reports[-1]
        unshared = by_rows(learner, groups, train.tokens_per_batch)
        peak = peak_of(learner.model.device, learner.model.dtype)
        parts = static(learner)
        row: Row = {
            "variant": label,
            "groups": shape,
            "row tokens": report.tokens_row,
            "distinct": report.tokens_distinct,
            "s a step": took,
            "row tokens/s": report.tokens_row / took,
            "distinct/s": report.tokens_distinct / took,
            "MFU": report.use.tflops * sum(report.seconds.values()) / took / peak if peak else None,
            "MFU by rows": unshared / took / 1e12 / peak if peak else None,
            "seconds": " ".join(f"{part} {s:.2f}" for part, s in report.seconds.items()),
        }
        planned = held(config.learner, model, largest(learner, groups), on_gpu=True).total / 2**30
        row |= {"load s": loaded, **parts, "planned GiB": planned}
        if bench.device == "cuda":
            row["peak GiB"] = max(one.use.peak_memory_mb for one in reports) / 1024
        yield row


def static(learner: Learner) -> dict[str, float]:
    """What stays on the device between steps, and the gradients, in GiB."""
    weights = sum(p.nbytes for p in learner.model.module.parameters())
    states = [t for o in learner.models.optimizers.values() for state in o.state.values() for t in state.values()]
    kept = sum(t.nbytes for t in states if isinstance(t, torch.Tensor) and t.numel() > 1)
    gradients = sum(p.nbytes for p in learner.model.parameters())
    parts = {"weights GiB": weights, "gradients GiB": gradients, "optimizer GiB": kept}
    return {name: size / 2**30 for name, size in parts.items()}


def rows_of(learner: Learner, groups: Sequence[Group]) -> list[list[TrainingRow]]:
    """The rows of each group."""
    algo = learner.settings.algo
    return weigh([[group_rows(group, algo, step_of=lambda _: 0, step_now=0, max_lag=0) for group in groups]])[0]


def largest(learner: Learner, groups: Sequence[Group]) -> list[TrainingRow]:
    """The rows of the largest pass, as the learner lays them."""
    budget = learner.settings.train.tokens_per_batch
    fits: list[list[TrainingRow]] = []
    for rows in rows_of(learner, groups):
        if fits and sum(len(build_tree(own).token_ids_N) for own in (*fits, rows)) > budget:
            break
        fits.append(rows)
    return [row for rows in fits for row in rows]


def by_rows(learner: Learner, groups: Sequence[Group], budget: int) -> float:
    """Operations of the same step if no row shared a token with another."""
    rows = [row for group in rows_of(learner, groups) for row in group]
    return sum(operations(learner.model.module, pack) for row in rows for pack in packs([[row]], budget))
