"""What a checkpoint costs the learner: `python benchmarks/checkpoints.py [--rounds N] [--ranks N] [--beside CHECKOUT]`.

A random Qwen3 of 93M in float32 with AdamW takes steps on recorded groups. Each round is a process of its own: a
checkpoint that the learner waits for, a step alone, and a copy that is written on a thread beside the next step.
Medians, in seconds, and the memory that rank 0 takes at most beyond what it had. With `--beside` each round is also run
with the code of another checkout of agentrl, in turn.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from _learner_shapes import prompt
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.config import EnvSource, RunConfig, Train
from agentrl.config.sections import BufferSettings
from agentrl.learner.learner import Learner
from agentrl.learner.parallel.ranks import ALONE, Leader

T = TypeVar("T")

HERE = Path(__file__).resolve()


def save_model(folder: Path) -> None:
    """The random model, with a tokenizer beside it."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 64, "tie_word_embeddings": True}
    layers = {"vocab_size": 32_768, "hidden_size": 640, "num_hidden_layers": 14, "intermediate_size": 2048}
    Qwen3ForCausalLM(Qwen3Config(**layers, **heads, max_position_embeddings=2048)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def forget_peak() -> int:
    """Returns what the process has now, without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def measure(root: Path, size: int) -> dict[str, float]:
    """One round: seconds and MiB by what they are of."""
    train = Train(threads=max(1, 2 // size), tokens_per_batch=2048, keep_checkpoints=2, lr=1e-6)
    config = RunConfig(
        model="unused", env=EnvSource(id="test/none"), train=train, buffer=BufferSettings(groups_per_step=1)
    )
    ranks = ALONE if size == 1 else Leader([torch.device("cpu")] * size, deadline_s=600, start_s=600)
    found: dict[str, float] = {}

    def timed(name: str, call: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = call()
        found[f"{name}, s"] = time.perf_counter() - started
        return result

    def step() -> None:
        learner.step(groups, step_of=lambda _: learner.step_index)

    try:
        learner, groups = Learner(config.learner, root / "model", ranks=ranks), prompt(1, members=2)
        with tempfile.TemporaryDirectory(dir=root) as runs, ThreadPoolExecutor(1) as thread:
            step()
            before = forget_peak()
            timed("stop: the learner waits for the write", lambda: learner.save(Path(runs)))
            found["rank 0, at most, while it waits for the write, MiB"] = (memory("VmHWM") - before) / 2**20
            timed("a step alone", step)
            before = forget_peak()
            write = timed("stop: the learner waits for the copy", lambda: learner.copy(Path(runs)))
            assert write is not None
            found["rank 0, at most, while it waits for the copy, MiB"] = (memory("VmHWM") - before) / 2**20
            writing = thread.submit(timed, "the write, beside a step", lambda: write(lambda: None))
            timed("a step beside the write", step)
            writing.result()
            files = next(Path(runs).iterdir()).rglob("*")
            found["a checkpoint, MB"] = sum(file.stat().st_size for file in files if file.is_file()) / 1e6
    finally:
        ranks.close()
    return found


def main() -> None:
    """Print a table of what the learner waits for, and of its memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--beside", type=Path, help="another checkout of agentrl")
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)  # the folder of the model: one round, here
    given = parser.parse_args()
    if given.once is not None:
        print(json.dumps(measure(given.once, given.ranks)))
        return
    ways = {"here": HERE.parents[1]} | ({"beside": given.beside.resolve()} if given.beside else {})
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as scratch:
        save_model(Path(scratch) / "model")
        for _ in range(given.rounds):
            for way, code in ways.items():
                command = [sys.executable, str(HERE), "--once", scratch, "--ranks", str(given.ranks)]
                path = os.pathsep.join([str(code), str(HERE.parent)])
                env = {**os.environ, "PYTHONPATH": path}
                said = subprocess.run(command, cwd=code, env=env, stdout=subprocess.PIPE, check=True, timeout=1800)
                found[way].append(json.loads(said.stdout.splitlines()[-1]))
                print(way, found[way][-1], file=sys.stderr)
    print(f"| | {' | '.join(f'{way} | longest' for way in ways)} |\n|---|{'---|---|' * len(ways)}")
    for name in found["here"][0]:
        each = [[one[name] for one in rounds] for rounds in found.values()]
        print(f"| {name} | {' | '.join(f'{statistics.median(all_):.2f} | {max(all_):.2f}' for all_ in each)} |")


if __name__ == "__main__":
    main()
