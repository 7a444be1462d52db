"""The peer of the learner's benchmark: steps of TRL's GRPOTrainer on rows that are given, none of them generated.

Run by `.venv-peers/bin/python` (`make peers` makes it); knows nothing of agentrl. Micro-batches, loss,
clipping and AdamW are TRL's own; rows are padded to the longest of the step, as TRL pads what it generates. Its loss is
`dapo`, the sum over tokens by their number, so that its gradient is that of the other ways. For each line on standard
input it makes one step and prints a line of JSON.

    .venv-peers/bin/python benchmarks/_learner_trl.py MODEL_FOLDER ROWS.json BATCH_ROWS
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import trl
from _memory import peak_mb, reset, resident_mb
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

torch.set_num_threads(1)
OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer
BEFORE = resident_mb()


class Recorded(trl.GRPOTrainer):
    rows: list[dict[str, Any]]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        del inputs
        rows = self.rows
        asked = [row["ids"][: row["scored"][0]] for row in rows]
        said = [row["ids"][row["scored"][0] :] for row in rows]
        wide, long = max(map(len, asked)), max(map(len, said))
        batch = {
            "prompt_ids": torch.tensor([[0] * (wide - len(one)) + one for one in asked]),
            "prompt_mask": torch.tensor([[0] * (wide - len(one)) + [1] * len(one) for one in asked]),
            "completion_ids": torch.tensor([one + [0] * (long - len(one)) for one in said]),
            "completion_mask": torch.tensor([[1] * len(one) + [0] * (long - len(one)) for one in said]),
            "advantages": torch.tensor([row["advantage"] for row in rows]),
            "num_items_in_batch": torch.tensor(float(sum(len(row["scored"]) for row in rows))),
        }
        tools = torch.zeros(len(rows), long, dtype=torch.long)
        for at, row in enumerate(rows):
            tools[at, torch.tensor(row["scored"]) - row["scored"][0]] = 1
        return {**batch, "tool_mask": tools}


class OnDemand(TrainerCallback):
    """Waits for a line before each step, and answers after it."""

    def __init__(self) -> None:
        self.norm = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        reset()
        self.began = (time.perf_counter(), time.process_time())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.norm = float(torch.stack([grad.norm() for grad in grads]).norm())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wall, cpu = (
            now - then for now, then in zip((time.perf_counter(), time.process_time()), self.began, strict=True)
        )
        answer = {"wall": wall, "cpu": cpu, "norm": self.norm, "peak_mb": peak_mb() - BEFORE, "trl": trl.__version__}
        print(json.dumps(answer), file=OUT, flush=True)


def main() -> None:
    model, rows, size = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3])
    batches = len(rows) // size
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")))
    tokenizer.pad_token = tokenizer.eos_token = "a"
    with tempfile.TemporaryDirectory() as folder:
        trainer = Recorded(
            model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=trl.GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=batches,
                num_generations=2,
                loss_type="dapo",
                learning_rate=1e-9,
                max_grad_norm=1e9,
                max_steps=1000,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a"] * len(rows)}),
            processing_class=tokenizer,
            callbacks=[OnDemand()],
        )
        trainer.rows = rows
        trainer.train()


if __name__ == "__main__":
    main()
