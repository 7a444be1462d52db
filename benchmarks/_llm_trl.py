"""The peer of the benchmark of a real language model: TRL's GRPO on the same sums, in an environment of its own.

Run by `.venv-peers/bin/python` (`make peers` makes it); knows nothing of agentrl. What is not TRL's
default is what the other side has as well (batch, length, learning rate, the dtype of products), or in TRL's favour:
gradient checkpointing is off, the learning rate does not fall, nothing is saved, a step is one micro-batch.

    .venv-peers/bin/python benchmarks/_llm_trl.py MODEL_FOLDER TASKS.json --steps 12
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


class Curve(transformers.TrainerCallback):
    """When each step ended (seconds since 1970), and its mean reward."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "reward" in logs:
            self.steps.append(
                {"ended": time.time(), "reward": logs["reward"], "tokens": logs["completions/mean_length"]}
            )


def right(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """1 where the last number of a completion is the answer."""
    numbers = [re.findall(r"\d+", messages[-1]["content"]) for messages in completions]
    return [float(bool(found) and found[-1] == wanted) for found, wanted in zip(numbers, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "tasks", type=Path, help="a list of [prompt, answer], in the order in which they are trained on"
    )
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=12, help="the longest completion")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="products in bfloat16, as by TRL's own default")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    tasks = json.loads(arguments.tasks.read_text())
    prompts = [[{"role": "user", "content": prompt}] for prompt, _ in tasks]
    curve = Curve()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32"),
            reward_funcs=right,
            args=trl.GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=arguments.bf16,
                gradient_checkpointing=False,
                per_device_train_batch_size=arguments.groups * arguments.members,
                num_generations=arguments.members,
                max_completion_length=arguments.tokens,
                temperature=1.0,
                learning_rate=arguments.lr,
                lr_scheduler_type="constant",
                max_steps=arguments.steps,
                seed=arguments.seed,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts, "answer": [answer for _, answer in tasks]}),
            processing_class=transformers.AutoTokenizer.from_pretrained(arguments.model),
            callbacks=[curve],
        )
        trainer.train()
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions, "threads": torch.get_num_threads(), "steps": curve.steps}))


if __name__ == "__main__":
    main()
