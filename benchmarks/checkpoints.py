"""How long a checkpoint stops the learner: `python benchmarks/checkpoints.py [--rounds N]`.

A random Qwen3 of 93M in float32 with AdamW takes steps on recorded groups. Each round has a step alone, a checkpoint
that the learner waits for, and a copy that is written on a thread beside the next step; medians, in seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from _learner_shapes import prompt
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.config import EnvSource, RunConfig, Train
from agentrl.settings import Buffer
from agentrl.train.learner import Learner


def save_model(folder: Path) -> None:
    """The random model, with a tokenizer beside it."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 64, "tie_word_embeddings": True}
    layers = {"vocab_size": 32_768, "hidden_size": 640, "num_hidden_layers": 14, "intermediate_size": 2048}
    Qwen3ForCausalLM(Qwen3Config(**layers, **heads, max_position_embeddings=2048)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def main() -> None:
    """Print a table of what the learner waits for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(1) as thread:
        root = Path(scratch)
        save_model(root / "model")
        train = Train(threads=2, tokens_per_batch=2048, keep_checkpoints=2, lr=1e-6)
        config = RunConfig(model="unused", env=EnvSource(id="test/none"), train=train, buffer=Buffer(groups_per_step=1))
        learner, groups = Learner(config, root / "model"), prompt(1, members=2)
        found: dict[str, list[float]] = {}

        def timed(name: str, call: object) -> object:
            started = time.perf_counter()
            result = call()  # pyright: ignore
            found.setdefault(name, []).append(time.perf_counter() - started)
            return result

        def step() -> None:
            learner.step(groups, step_of=lambda _: learner.step_index)

        step()
        for _ in range(rounds):
            timed("a step alone", step)
            timed("stop: the learner waits for the write", lambda: learner.save(root / "runs"))
            step()
            write = timed("stop: the learner waits for the copy", lambda: learner.copy(root / "runs"))
            assert write is not None
            writing = thread.submit(timed, "the write, beside steps", lambda: write(lambda: None))  # noqa: B023
            timed("a step beside the write", step)
            writing.result()
        size = sum(file.stat().st_size for file in next((root / "runs").iterdir()).rglob("*") if file.is_file())
    print(f"{size:,} bytes a checkpoint\n\n| | s | longest |\n|---|---|---|")
    for name, times in found.items():
        print(f"| {name} | {statistics.median(times):.2f} | {max(times):.2f} |")


if __name__ == "__main__":
    main()
