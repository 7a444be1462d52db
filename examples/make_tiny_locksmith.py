"""Makes the tiny locksmith: its tokenizer, and a warm start on the dials of an apprentice.

    python examples/make_tiny_locksmith.py --out tiny_locksmith

The apprentice of `agentrl/Combination-v0` adds well where a sum has one digit, and mostly wrong where it has two; the
model learns to write as he does. Reinforcement then has to find out which digits are right. Half a minute on a laptop.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl_environments.combination import answer, apprentice, opening, shown
from agentrl_environments.models.tokenizer import build_tokenizer

VOCABULARY, DIALS = 320, 5
STEPS, EPISODES = 600, 32
Conversation = Callable[[random.Random], list[dict[str, str]]]
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for model and tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    train(model, tokenizer, arguments.steps, random.Random(arguments.seed))
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    path = arguments.out / "config.json"  # `rope_theta` once more, where readers of older configurations look for it
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 10_000.0}, indent=2) + "\n")
    right, carried = skill_of(model, tokenizer)
    print(f"right with probability {right:.2f} on sums of one digit, {carried:.2f} on sums of two")


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """What the environment says and the apprentice writes."""
    sums = [(rng.randrange(10), rng.randrange(10)) for _ in range(DIALS)]
    says = [opening(sums), *map(shown, sums[1:])]
    messages: list[dict[str, str]] = []
    for told, pair in zip(says, sums, strict=True):
        messages += [{"role": "user", "content": told}, {"role": "assistant", "content": apprentice(pair, rng)}]
    return messages


def make_tokenizer(conversation: Conversation = conversation, size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Learn the vocabulary from conversations."""
    render, rng = build_tokenizer([], size), random.Random(0)
    texts = [str(render.apply_chat_template(conversation(rng), tokenize=False)) for _ in range(200)]
    return build_tokenizer(texts, size)


def encode(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[bool]]:
    """The tokens of an episode as a rollout would have them, and which of them the apprentice wrote."""
    ids: list[int] = []
    written: list[bool] = []

    def add(text: str, own: bool) -> None:
        found = tokenizer.backend_tokenizer.encode(text).ids
        ids.extend(found)
        written.extend([own] * len(found))

    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            add(message["content"] + "<|im_end|>", True)
        else:
            before = "\n" if at else ""
            add(
                f"{before}<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n<|im_start|>assistant\n", False
            )
    return ids, written


def make_model(tokenizer: Any, size: int = VOCABULARY) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=size,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=True,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


def batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, conversation: Conversation
) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids [B, T], padded on the right, and what was written [B, T], for ever."""
    while True:
        rows = [encode(conversation(rng), tokenizer) for _ in range(EPISODES)]
        length = max(len(ids) for ids, _ in rows)
        yield (
            torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows]),
            torch.tensor([written + [False] * (length - len(written)) for _, written in rows]),
        )


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    rng: random.Random,
    conversation: Conversation = conversation,
) -> None:
    """Muon on the matrices, AdamW on the rest; the rates fall to zero over the second half."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01, momentum=0.95, adjust_lr_fn="original")
    adam = torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    for step, (ids_BT, written_BT) in zip(range(steps), batches(tokenizer, rng, conversation), strict=False):
        rate = min(1.0, (step + 1) / 50, 2 * (1 - step / steps))
        for optimizer, base in ((muon, MATRIX_RATE), (adam, OTHER_RATE)):
            optimizer.param_groups[0]["lr"] = base * rate
        logits_BTV = model(ids_BT[:, :-1]).logits
        loss = functional.cross_entropy(logits_BTV[written_BT[:, 1:]], ids_BT[:, 1:][written_BT[:, 1:]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def skill_of(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> tuple[float, float]:
    """The mean probability of the right first dial, for sums of one digit and of two."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for a in range(10):
        for b in range(10):
            first = {"role": "user", "content": opening([(a, b)] * DIALS)}
            logits_TV = model(torch.tensor([encode([first], tokenizer)[0]])).logits[0]
            (right,) = tokenizer.backend_tokenizer.encode(answer((a, b))).ids
            found[a + b >= 10].append(float(logits_TV[-1].softmax(-1)[right]))
    return sum(found[False]) / len(found[False]), sum(found[True]) / len(found[True])


if __name__ == "__main__":
    main()
