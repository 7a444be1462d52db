"""Cases of `benchmarks/gpu.py`: a learner that leaves its GPU, writes beside its steps, or is divided over two."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _gpu_case import Bench, Row, Skipped
from _gpu_checks import VOCAB, random_groups
from _gpu_shapes import VOCABULARY, config_of, save_mixture, save_random, shared_prompt

from agentrl.algos.grpo import GRPO
from agentrl.config import Train
from agentrl.learner.learner import Learner
from agentrl.learner.optimizers.offload import Parking
from agentrl.learner.parallel.ranks import ALONE, Leader, Ranks
from agentrl.records import Group

LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "shards": {},
    "muon": {},
    "offload": {},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
    "expert": {"expert": 2},
}
"""Settings of [train.parallel] for two ranks; the last is of a mixture."""

_ALSO: Mapping[str, Mapping[str, Any]] = {"muon": {"optimizer": "muon"}, "offload": {"offload_optimizer": True}}
"""Settings of [train] that belong to a layout."""

APART = 1e-4  # of losses in float32: other orders of the same sums
ROUNDED = 1e-2  # the same of steps in bfloat16, whose sums on a GPU have no fixed order
_DEADLINE_S = 60.0  # of a collective, and of the start of a rank


def learner_of(bench: Bench, model: Path, *, ranks: Ranks = ALONE, **train: Any) -> Learner:
    tiny = model.name.startswith("parity")
    own = {"dtype": "float32", "tokens_per_batch": 256} if tiny else {"dtype": "bfloat16", "tokens_per_batch": 8192}
    settings = {**own, "device": bench.device, "warmup_steps": 0, "lr": 1e-4, **train}
    config = config_of(model, algo=GRPO(), train=Train(**settings), max_tokens_per_turn=32 if tiny else 2048)
    return Learner(config.learner, model, bench.device, ranks=ranks)


def model_of(bench: Bench, shape: str) -> tuple[Path, list[Group]]:
    """A model and what it is trained on."""
    if shape == "tiny":
        return save_random(bench.work / "parity", "tiny", vocab=VOCAB, device="cpu"), random_groups(2, members=4)
    return save_random(bench.work / shape, shape, device=bench.device), shared_prompt(2, vocab=VOCABULARY)


def shapes(bench: Bench) -> tuple[str, ...]:
    return ("tiny",) if bench.tiny else ("tiny", "Qwen3-0.6B")


def step(learner: Learner, groups: list[Group]) -> tuple[float, float]:
    """Its loss, and its seconds."""
    began, now = time.perf_counter(), learner.step_index
    report = learner.step(groups, step_of=lambda _: now)
    if learner.model.device.type == "cuda":
        torch.cuda.synchronize()
    return report.loss, time.perf_counter() - began


def parking(bench: Bench) -> Iterator[Row]:
    """Steps of a learner that leaves the device between them, beside one that stays."""
    for shape in shapes(bench):
        yield from _parked(bench, shape)


def _parked(bench: Bench, shape: str) -> Iterator[Row]:
    folder, groups = model_of(bench, shape)
    cuda = bench.device == "cuda"
    learner = learner_of(bench, folder)
    stayed = [step(learner, groups) for _ in range(3)]
    before = learner.hashes()
    del learner
    learner = learner_of(bench, folder)
    away = Parking(learner.models, least=1 if shape == "tiny" else 1 << 16)
    held = torch.cuda.memory_reserved() if cuda else 0
    for number, (loss, alone_s) in enumerate(stayed):
        ours, took = step(learner, groups)
        began = time.perf_counter()
        away.begin()
        away.leave()
        left = time.perf_counter()
        here = torch.cuda.memory_reserved() if cuda else 0
        away.back()
        if cuda:
            torch.cuda.synchronize()
        back = time.perf_counter()
        yield {
            "model": shape,
            "step": number,
            "loss": loss,
            "by turns": ours,
            "s a step": alone_s,
            "s by turns": took,
            "leave s": left - began,
            "back s": back - left,
            "GB": away.bytes / 1e9,
            "GB/s": away.bytes / 1e9 / (back - left),
            "reserved GB": held / 1e9,
            "reserved GB, left": here / 1e9,
        }
        if abs(ours - loss) > (APART if shape == "tiny" else ROUNDED) * max(1.0, abs(loss)):
            raise AssertionError(f"step {number}: the loss is {ours}, of a learner that stayed {loss}")
    if bench.tiny and learner.hashes() != before:
        raise AssertionError("a learner that left and came back has other weights")


def checkpoints(bench: Bench) -> Iterator[Row]:
    """A checkpoint that is written beside the next steps, and read again."""
    folder, groups = model_of(bench, shapes(bench)[-1])
    learner = learner_of(bench, folder)
    alone = median(step(learner, groups)[1] for _ in range(3))
    with ThreadPoolExecutor(1) as thread:
        began = time.perf_counter()
        write = learner.copy(bench.work / "checkpoints")
        if write is None:
            raise AssertionError("host memory has no room for a copy")
        copied, hashes = time.perf_counter() - began, learner.hashes()
        written = thread.submit(write, lambda: None)
        beside: list[float] = []
        while not beside or not written.done():
            beside.append(step(learner, groups)[1])
        path = written.result()
        wrote = time.perf_counter() - began - copied
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    row = {"copy s": copied, "write s": wrote, "steps beside": len(beside), "GB": size / 1e9}
    yield {"s a step": alone, "s beside": median(beside), **row}
    learner.load(path)
    if learner.hashes() != hashes:
        raise AssertionError("what was read is not what was copied")


def ranks(bench: Bench) -> Iterator[Row]:
    """Steps of two ranks beside those of one, in float32: over NCCL on two GPUs, over gloo on the CPU."""
    seen = torch.cuda.device_count()
    if bench.device == "cuda" and seen < 2:
        raise Skipped(f"it needs two GPUs, and torch sees {seen}")
    devices = [torch.device("cuda", rank) if bench.device == "cuda" else torch.device("cpu") for rank in range(2)]
    dense = save_random(bench.work / "parity", "tiny", vocab=VOCAB, device="cpu")
    two = Leader(devices, deadline_s=_DEADLINE_S, start_s=_DEADLINE_S)
    try:
        for name, layout in LAYOUTS.items():
            if bench.tiny and name in ("shards", "offload", "context"):
                continue  # the same code with other settings
            model = save_mixture(bench.work / "parity-mixture", vocab=VOCAB) if "expert" in layout else dense
            groups = random_groups(2, members=4)
            also = _ALSO.get(name, {})
            alone = learner_of(bench, model, **also)
            shared = learner_of(bench, model, ranks=two, parallel={"ranks": 2, **layout}, **also)
            for number in range(2):
                (loss, alone_s), (ours, took) = step(alone, groups), step(shared, groups)
                yield {"layout": name, "step": number, "loss": loss, "two": ours, "s alone": alone_s, "s of two": took}
                if abs(ours - loss) > APART * max(1.0, abs(loss)):
                    raise AssertionError(f"{name}, step {number}: two ranks have the loss {ours}, one has {loss}")
    finally:
        two.close()
