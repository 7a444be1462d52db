"""Cases of `benchmarks/gpu.py`: what leaves the learner. The canary's numbers, weight files, and shared GPU memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from _gpu_case import Bench, Row
from _gpu_shapes import VOCABULARY, config_of, save_random
from torch import multiprocessing

from agentrl.algos.grpo import GRPO
from agentrl.config import Train
from agentrl.engine.weight_sync import fingerprints
from agentrl.engine.weight_sync.canary import TOLERANCE, probe_tokens
from agentrl.learner.learner import Learner
from agentrl.learner.step_report import Stopwatch
from agentrl.learner.weight_export import take

_BUFFER = 1 << 30
_DEADLINE_S = 60


def canary(bench: Bench) -> Iterator[Row]:
    """Log-probs of the canary's probe, and hashes of the weights, on the device and on the CPU."""
    for shape in ("tiny",) if bench.tiny else ("tiny", "Qwen3-0.6B"):
        vocab = 512 if shape == "tiny" else VOCABULARY
        folder = bench.work / ("canary" if shape == "tiny" else shape)
        model = save_random(folder, shape, vocab=vocab, device=bench.device)
        here, there = _learner(model, bench.device), _learner(model, "cpu")
        tokens = probe_tokens(vocab, 32 if shape == "tiny" else 128)
        row: Row = {"model": shape}
        for dtype in (torch.float32, torch.bfloat16):
            pairs = zip(here.score(tokens, dtype), there.score(tokens, dtype), strict=True)
            name = str(dtype).removeprefix("torch.")
            row[f"apart, weights {name}"] = worst = max(abs(a - b) for a, b in pairs)
            if worst > TOLERANCE["float32"]:
                raise AssertionError(f"{shape}, {name}: log-probs are {worst:.1e} apart")
        if here.hashes() != there.hashes():
            raise AssertionError(f"{shape}: the same weights have other hashes on the device")
        yield row


def exports(bench: Bench) -> Iterator[Row]:
    """A copy on the device, and a file in shared memory, of the weights in bfloat16."""
    for shape in ("tiny",) if bench.tiny else ("Qwen3-0.6B", "Qwen3-4B"):
        vocab = 64 if shape == "tiny" else VOCABULARY
        row, clock = Row({"model": shape}), Stopwatch()
        model = save_random(bench.work / shape, shape, vocab=vocab, device=bench.device)
        clock.lap("make s")
        learner = _learner(model, bench.device)
        clock.lap("load s")
        snapshot = take(learner.model.module, torch.bfloat16)
        assert snapshot is not None
        clock.lap("snapshot s")
        snapshot.fingerprints()
        clock.lap("fingerprints s")
        del snapshot
        file = learner.export(bench.work / "export" / "model.safetensors", dtype=torch.bfloat16)
        clock.lap("file s")
        yield {**row, **clock.seconds, "file GB": file.size_bytes / 1e9}
        file.path.unlink()
        del learner
        if bench.device == "cuda":
            torch.cuda.empty_cache()


def _learner(model: Any, device: str) -> Learner:
    return Learner(
        config_of(model, algo=GRPO(), train=Train(device=device, threads=os.cpu_count() or 1)).learner, model, device
    )


def ipc(bench: Bench) -> Iterator[Row]:
    """Chunks of a buffer that another process on the same GPU maps by handle, as vLLM's IPC sync packs them; the other
    process tells the fingerprints of what it sees, and never copies through the host."""
    shape = "tiny" if bench.tiny else "Qwen3-0.6B"
    model = save_random(bench.work / shape, shape, vocab=64 if bench.tiny else VOCABULARY, device=bench.device)
    snapshot = take(_learner(model, bench.device).model.module, torch.bfloat16)
    assert snapshot is not None
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=_receive, args=(theirs,), daemon=True)
    receiver.start()
    theirs.close()
    began, found = 0.0, {}
    room = max(snapshot.largest_bytes, min(snapshot.size_bytes, _BUFFER))
    buffer = torch.empty(room, dtype=torch.uint8, device=bench.device)
    filled: list[tuple[str, torch.dtype, tuple[int, ...], int]] = []
    at = 0

    def flush() -> None:
        if bench.device == "cuda":
            torch.cuda.synchronize()
        ours.send((buffer, filled))
        found.update(_answer(ours))

    try:
        _answer(ours)  # it has started
        began = time.perf_counter()
        for name, tensor in snapshot:
            if at + tensor.nbytes > room:
                flush()
                filled, at = [], 0
            buffer[at : at + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
            filled.append((name, tensor.dtype, tuple(tensor.shape), at))
            at += -(-tensor.nbytes // 16) * 16
            at = min(at, room)
        flush()
        took = time.perf_counter() - began
        ours.send(None)
        receiver.join(_DEADLINE_S)
    finally:
        receiver.kill()
    if found != snapshot.fingerprints():
        raise AssertionError("the other process sees other weights")
    size = snapshot.size_bytes
    yield {"model": shape, "GB": size / 1e9, "s": took, "GB/s with fingerprints": size / took / 1e9}


def _answer(pipe: Any) -> dict[str, str]:
    if not pipe.poll(_DEADLINE_S):
        raise AssertionError(f"the other process says nothing for {_DEADLINE_S} s")
    return pipe.recv()


def _receive(pipe: Any) -> None:
    pipe.send({})
    while (told := pipe.recv()) is not None:
        buffer, filled = told
        tensors: dict[str, torch.Tensor] = {}
        for name, dtype, shape, start in filled:
            size = dtype.itemsize * torch.Size(shape).numel()
            tensors[name] = buffer[start : start + size].view(dtype).view(shape)
        pipe.send(fingerprints.of_tensors(tensors))
