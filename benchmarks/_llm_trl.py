"""The peer of the benchmark on a real language model: TRL's synchronous GRPO on the same tasks, in its own environment.

Reads the tasks from a file, as the environment draws them: lines of {"prompt": text, "answer": text}. Knows nothing of
agentrl. Set in TRL's favour: both cores, nothing saved, no checkpointing of activations, the whole batch generated at
once. `--schedule linear` is its default, by which the learning rate falls to 0.

    .venv-trl/bin/python benchmarks/_llm_trl.py MODEL_FOLDER TASKS.jsonl --steps 12
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback


class Clock(TrainerCallback):
    """Wall and CPU seconds at the end of each step, and TRL's log of it."""

    def __init__(self) -> None:
        self.began = self.now()
        self.steps: list[dict[str, float]] = []
        self.rewards: list[float] = []

    @staticmethod
    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = self.now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wall_s, cpu_s = (now - then for now, then in zip(self.now(), self.began, strict=True))
        self.steps.append({"wall_s": round(wall_s, 2), "cpu_s": round(cpu_s, 2)})

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "reward" in logs:
            self.rewards.append(round(logs["reward"], 4))


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """1 if the last number of a completion is the answer."""
    found = [re.findall(r"\d+", messages[-1]["content"]) for messages in completions]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=12, help="most tokens of an answer")
    parser.add_argument("--rows", type=int, default=16, help="rows of a micro-batch")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schedule", default="constant", choices=["constant", "linear"])
    given = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    lines = [json.loads(line) for line in given.tasks.read_text().splitlines()][: given.steps * given.groups]
    tasks = [{"prompt": [{"role": "user", "content": one["prompt"]}], "answer": one["answer"]} for one in lines]
    batches = given.groups * given.members // given.rows
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=given.rows,
            gradient_accumulation_steps=batches,
            steps_per_generation=batches,
            num_generations=given.members,
            max_completion_length=given.tokens,
            temperature=1.0,
            learning_rate=given.lr,
            lr_scheduler_type=given.schedule,
            max_steps=given.steps,
            logging_steps=1,
            save_strategy="no",
            shuffle_dataset=False,
            seed=given.seed,
            report_to=[],
            disable_tqdm=True,
        )
        trl.GRPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype="float32"),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(tasks),
            processing_class=AutoTokenizer.from_pretrained(given.model),
            callbacks=[clock],
        ).train()
    steps = [step | {"reward": got} for step, got in zip(clock.steps, clock.rewards, strict=True)]
    print(json.dumps({"versions": {"trl": trl.__version__, "torch": torch.__version__}, "steps": steps}))


if __name__ == "__main__":
    main()
