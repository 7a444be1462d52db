"""The same from Python: `python examples/recipes/gsm8k/trainer.py`. Writes runs/gsm8k.toml, and runs it."""

from __future__ import annotations

import json
from pathlib import Path

import agentrl


def short(prompt, completion: str, row) -> float:
    """Up to 1 for an answer of few words."""
    return max(0.0, 1.0 - len(completion.split()) / 100)


if __name__ == "__main__":
    here = Path(__file__).parent
    rows = [json.loads(line) for line in (here / "train.jsonl").read_text().splitlines()]
    agentrl.Trainer(
        model="Qwen/Qwen3-0.6B",
        dataset=rows,  # or datasets.load_dataset("openai/gsm8k", "main", split="train")
        reward_funcs=[f"{here}/rewards.py:correct", short],
        config={
            "env": {"kwargs": {"prompt": "{question}\nEnd with #### and the number.", "weights": [1.0, 0.05]}},
            "rollout": {"max_tokens_per_turn": 512, "max_context": 1024},
            "engine": {"kind": "vllm"},
        },
        out="runs/gsm8k",
    ).train()
