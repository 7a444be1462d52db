"""The cases of `benchmarks/gpu.py` by name, and what a case is given."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Row = dict[str, Any]


class Skipped(Exception):
    """This machine cannot run the case; the message says why."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a case runs: `work` is a folder that all cases share, `tiny` asks for a size that a CPU computes soon."""

    device: str
    tiny: bool
    work: Path

    @classmethod
    def here(cls, work: Path, *, tiny: bool) -> Bench:
        return cls("cpu" if tiny else "cuda", tiny, work)

    def check(self) -> None:
        """Raises RuntimeError if the device is not there."""
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} sees no GPU: give --tiny to run the cases on a CPU")


@dataclass(frozen=True, slots=True)
class Case:
    """`function` is `module:name` in this folder: a generator of rows, imported when the case runs."""

    name: str
    deadline_s: int
    function: str
    says: str

    def run(self, bench: Bench) -> Iterator[Row]:
        module, _, name = self.function.partition(":")
        code: Callable[[Bench], Iterator[Row]] = getattr(importlib.import_module(module), name)
        return code(bench)


CASES: Final = {
    case.name: case
    for case in (
        Case("machine", 60, "_gpu_checks:machine", "Ceilings as measured: what a share of the peak is a share of."),
        Case(
            "parity",
            180,
            "_gpu_checks:parity",
            "One step of the same learner on the same groups, on the CPU and on the GPU, in float32 (no TF32) and "
            "bfloat16: relative difference of gradient and update (norm of the difference over the norm).",
        ),
        Case("small", 240, "_gpu_step:small", "Learner steps at Qwen3-0.6B's shape, random weights, bfloat16."),
        Case("run", 150, "_gpu_run:run", "A whole run of `agentrl train`: learner on the GPU, engine on the CPU."),
        Case("parking", 90, "_gpu_learner:parking", "A learner that leaves the GPU between steps, and one that stays."),
        Case("colocated", 240, "_gpu_run:colocated", "A whole run with vLLM and learner by turns on one GPU."),
        Case("staged", 180, "_gpu_run:staged", "New weights of 500M into vLLM while it generates: the pause, in ms."),
        Case("ipc", 90, "_gpu_weights:ipc", "Weights shared with another process on the same GPU, as IPC sync does."),
        Case("canary", 90, "_gpu_weights:canary", "The canary's log-probs on the GPU beside the CPU's, in nats."),
        Case("checkpoints", 90, "_gpu_learner:checkpoints", "A checkpoint at Qwen3-0.6B's shape beside next steps."),
        Case(
            "ranks", 90, "_gpu_learner:ranks", "Two ranks over NCCL beside one: optimizers, tensor, context, experts."
        ),
        Case("large", 240, "_gpu_step:large", "Learner steps at Qwen3-4B's shape, random weights, bfloat16."),
        Case("attention", 150, "_gpu_run:attention", "Attention over trees by backend: see `gpu_attention.py`."),
        Case("exports", 120, "_gpu_weights:exports", "A snapshot and a file of the weights in bfloat16."),
        Case("vllm", 390, "_gpu_run:vllm", "Whole runs with vLLM: files, side by side over IPC, NCCL to another GPU."),
    )
}
