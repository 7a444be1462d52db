"""The peer of the loop benchmark: TRL's synchronous GRPO with `environment_factory`, in an environment of its own.

Run by `.venv-peers/bin/python` (`make peers` makes it); knows nothing of agentrl. What is set in TRL's
favour: the tokenizer's parser returns a tool call for any text without looking at it, gradient checkpointing is off,
float32 is used (what a CPU does best), nothing is saved, the micro-batch is the fastest of those tried (`--rows`), and
`torch_compile` is off (`--compile`), with which it is slower.

    .venv-peers/bin/python benchmarks/_loop_trl.py MODEL_FOLDER [--steps 6] [--rows 16] [--threads 2] [--compile]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
import trl
from _loop_shape import ANSWER, GROUPS, MEMBERS, PROMPT_TOKENS, TURN_TOKENS, TURNS, score, task_text
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback

WARM_UP_STEPS = 1


class LoopForTRL:
    """`reset` and one public method, which TRL offers to the model as a tool."""

    def reset(self, **_: object) -> None:
        return None

    def look(self) -> str:
        """Look."""
        return ANSWER


class AlwaysCalls(PreTrainedTokenizerFast):
    """A tokenizer in whose reading every completion calls the environment's tool: the model's weights are random."""

    def parse_response(self, response: list[int], *_: Any, **__: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "look", "arguments": {}}}
        return {"role": "assistant", "content": self.decode(response), "tool_calls": [call]}


class Clock(TrainerCallback):
    """When each step ended, and what TRL logged of it."""

    def __init__(self) -> None:
        self.ended_s = [time.perf_counter()]
        self.logs: list[dict[str, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended_s.append(time.perf_counter())

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.logs.append(logs)

    def step_s(self) -> list[float]:
        """Seconds of each step after the warm-up."""
        between = [end - start for start, end in itertools.pairwise(self.ended_s)]
        return between[WARM_UP_STEPS:]


def reward(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    return [score(messages[-1]["content"]) for messages in completions]


def prompts(tokenizer: AlwaysCalls, n: int) -> list[list[dict[str, str]]]:
    """`n` prompts of exactly PROMPT_TOKENS tokens, the tool's schema included."""

    def rendered(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        tools = [LoopForTRL().look]
        ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        return len(ids)

    length = PROMPT_TOKENS - rendered("")
    texts = [task_text(seed, length) for seed in range(n)]
    assert all(rendered(text) == PROMPT_TOKENS for text in texts)
    return [[{"role": "user", "content": text}] for text in texts]


def settings(folder: str, steps: int, rows: int, compiled: bool) -> trl.GRPOConfig:
    batches = GROUPS * MEMBERS // rows
    return trl.GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        torch_compile=compiled,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=batches,
        steps_per_generation=batches,
        num_generations=MEMBERS,
        max_completion_length=TURNS * TURN_TOKENS + 256,
        max_tool_calling_iterations=TURNS - 1,
        generation_kwargs={"max_new_tokens": TURN_TOKENS, "min_new_tokens": TURN_TOKENS},
        temperature=1.0,
        learning_rate=1e-6,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def measure(model: Path, steps: int, rows: int, compiled: bool) -> dict[str, Any]:
    """Train `steps` steps after the warm-up; what they took."""
    tokenizer = AlwaysCalls.from_pretrained(model)
    tokenizer.response_template = {}  # tells TRL that the tokenizer parses for itself
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
            reward_funcs=reward,
            args=settings(folder, steps + WARM_UP_STEPS, rows, compiled),
            train_dataset=Dataset.from_dict({"prompt": prompts(tokenizer, GROUPS * (steps + WARM_UP_STEPS))}),
            processing_class=tokenizer,
            environment_factory=LoopForTRL,
            callbacks=[clock],
        )
        trainer.train()
    lengths = [log["completions/mean_length"] for log in clock.logs if "completions/mean_length" in log]
    step_s = clock.step_s()
    return {
        "side": "trl",
        "versions": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "rows": rows,
        "threads": torch.get_num_threads(),
        "step_s": [round(seconds, 3) for seconds in step_s],
        "episodes_per_s": GROUPS * MEMBERS * len(step_s) / sum(step_s),
        "sampled_tokens_per_episode": statistics.fmean(lengths),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=6, help="steps measured, after one of warm-up")
    parser.add_argument("--rows", type=int, default=16, help="rows of a micro-batch")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(json.dumps(measure(arguments.model, arguments.steps, arguments.rows, arguments.compile)))


if __name__ == "__main__":
    main()
