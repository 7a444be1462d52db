"""What the episodes of `agentrl bench running` are: a tool conversation that any driver can play, and its tokenizer.

A turn is 64 sampled tokens (one a byte); the prompt has about 200 bytes, and the answer to each turn is a tool's line.
The environment computes nothing, so that a driver's own work is what is measured.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import agentrl
from agentrl.config import RunConfig
from agentrl.records import Message, Task
from agentrl.store import RunStore

SIZE, TURNS, TOKENS = 8, 8, 64  # episodes of a group, turns of an episode, tokens of a turn
PROMPT = "Mend the function so that its tests pass. Say what you do, then call a tool. " * 2
ANSWER = "3 passed, 1 failed: expected 12 but the function returned 11 in line 40"
TEXT = "I read the failing test first and then change the comparison.\n"  # 62 bytes, then two tokens that end the turn
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Lines(agentrl.Env):
    """Answers each of `TURNS` actions with the same line; the outcome is 1."""

    blocking = False
    replayable = True

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._turn = 0
        return (Message(role="user", content=PROMPT),), {}

    def step(self, action: str) -> Any:
        self._turn += 1
        over = self._turn == TURNS
        return (Message(role="tool", content=ANSWER),), 0.0, over, False, {"outcome": 1.0} if over else {}


def write_tokenizer(folder: Path) -> Path:
    """A folder with a tokenizer of bytes and a chat template, without a model."""
    special = ["<|im_start|>", "<|im_end|>"]
    vocabulary = {token: at for at, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def settings(running: int, workers: int = 1) -> RunConfig:
    """A run of which `running` episodes run at once."""
    rollout = {"max_running": running, "workers": workers, "max_context": 4096, "group_size": SIZE}
    sections = {"rollout": {**rollout, "turn_deadline_s": 600.0}, "buffer": {"groups_per_step": 1 << 20}}
    return RunConfig.model_validate({"model": "none", "env": {"id": "bench:Lines"}, **sections})


def write_store(path: Path, groups: int) -> None:
    """A new store with so many groups to play."""
    with RunStore.create(path, "{}") as store:
        store.versions.confirm_version(store.versions.mint_version(0))
        store.groups.add_groups(
            [Task(index=k, env="bench:Lines", seed=k) for k in range(groups)], size=SIZE, purpose="train"
        )


class Waits(random.Random):
    """Lognormal waits: sigma 0.5 around a mean."""

    def __init__(self, seed: int, mean_s: float) -> None:
        super().__init__(seed)
        self._mean_s = mean_s

    def draw(self) -> float:
        return self._mean_s * self.lognormvariate(-0.125, 0.5)


def memory_kib() -> int:
    """Resident memory of this process."""
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("VmRSS:") + 1])
