"""Cases of `benchmarks/gpu.py`: whole runs of `agentrl train`, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from _gpu_case import Bench, Row, Skipped

ROOT = Path(__file__).resolve().parents[1]
PAUSE_MS = 100.0  # that new weights of 500M may cost an engine that holds a second copy
RUN_FILE = ROOT / "examples" / "tiny_locksmith.toml"


def run(bench: Bench) -> Iterator[Row]:
    steps = 3 if bench.tiny else 60
    row = _trained(bench, "embedded", [f"train.device={bench.device}", f"train.steps={steps}"])
    yield row
    if not bench.tiny and row["last reward"] <= row["first reward"] + 1:
        raise AssertionError(f"nothing was learned: {row['first reward']:.2f} to {row['last reward']:.2f}")


def attention(bench: Bench) -> Iterator[Row]:
    """The lines of `gpu_attention.py`, as they come."""
    if bench.tiny:
        raise Skipped("minutes of a compiler on a CPU: benchmarks/gpu_attention.py --device cpu --tiny")
    yield from _said("gpu_attention.py", "--rounds", "3")


def staged(bench: Bench) -> Iterator[Row]:
    """The lines of `weights.py`: new weights into a vLLM that generates, as a second copy that is swapped in."""
    if bench.tiny or importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed: pip install vllm, then --only staged")
    for row in _said("weights.py", "--size", "500M", "--path", "shm", "--rounds", "5"):
        yield row
        if row["pause_ms"] > PAUSE_MS:
            raise AssertionError(f"the engine paused for {row['pause_ms']:.0f} ms, more than {PAUSE_MS:g}")


def colocated(bench: Bench) -> Iterator[Row]:
    """Engine and learner by turns: the embedded engine on a CPU, vLLM on the learner's GPU."""
    vllm = ["engine.kind=vllm", "engine.dtype=bfloat16", "train.steps=8"]
    if not bench.tiny and importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed: pip install vllm, then --only colocated")
    settings = ["train.steps=3"] if bench.tiny else vllm
    settings += ["engine.colocated=true", f"train.device={bench.device}"]
    yield _trained(bench, "colocated", settings)
    costs = ("turn_wait_s", "sleep_s", "restore_s", "park_s", "asleep_s", "pause_s", "swap_bytes", "canary_error")
    for step in _steps(bench.work / "colocated"):
        yield {"run": f"step {step['step']}", **{name: step[name] for name in costs}}


def _said(script: str, *options: str) -> Iterator[Row]:
    """The lines of JSON of a script in this folder, as they come."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
    if process.returncode:
        raise AssertionError(f"{script} ended with {process.returncode}")


def vllm(bench: Bench) -> Iterator[Row]:
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed: pip install vllm, then --only vllm")
    shared = ["engine.kind=vllm", "engine.dtype=bfloat16", "train.steps=8", f"train.device={bench.device}"]
    yield _trained(bench, "vllm-files", [*shared, "engine.sync=full"])
    if bench.device == "cuda":
        yield _trained(bench, "vllm-ipc", [*shared, "engine.sync=ipc"])
        if torch.cuda.device_count() > 1:
            yield _trained(bench, "vllm-nccl", [*shared, "engine.sync=nccl", "engine.replicas=[[1]]"])
        else:
            yield {"run": "vllm-nccl", "note": "needs a second GPU"}


def _steps(out: Path) -> list[Row]:
    """The metrics of a run's steps."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward_mean" in line and "step" in line]


def _trained(bench: Bench, name: str, settings: list[str]) -> Row:
    out = bench.work / name
    less = ["eval.every=1000", "buffer.skip_without_signal=false"]
    less += ["eval.sets=[]", "env.kwargs.dials=2"] if bench.tiny else []
    words = [word for setting in (*settings, *less) for word in ("--set", setting)]
    command = [sys.executable, "-c", "from agentrl_command import main; main()", "train", str(RUN_FILE)]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, "--out", str(out), *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise AssertionError(f"agentrl train ended with {done.returncode}: {done.stderr.strip()[-600:]}")
    steps = _steps(out)
    few = max(1, len(steps) // 10)
    return {
        "run": name,
        "steps": len(steps),
        "s": time.perf_counter() - began,
        "first reward": sum(step["reward_mean"] for step in steps[:few]) / few,
        "last reward": sum(step["reward_mean"] for step in steps[-few:]) / few,
        "mismatch": max(step["mismatch_max"] or 0.0 for step in steps),
        "busy s a step": sum(step["busy_s"] for step in steps) / len(steps),
    }
