"""Makes the tiny coder: its tokenizer and its warm start.

    python examples/make_tiny_coder.py --out tiny_coder

Phase 1 shows right edits only: what a pre-trained model would know. Phase 2 shows the noisy expert (right edit about
one time in three, otherwise another mutation of the function that fails), so that the model knows the format and both
turns but is mostly wrong: what reinforcement has to sharpen. Tasks are of the split `train` alone.

Seeded, but not to the bit: the sums of a forward pass depend on the machine and its threads. The weights in the
package went through the same two phases, with rates that were set by hand on the way, and their phase 1 saw the
trained templates of the level `medium` too.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.records import Message
from agentrl_environments.code_repair import CodeRepair, make_task
from agentrl_environments.code_repair.demonstrations import Demonstration, demonstrate
from agentrl_environments.models.tokenizer import build_tokenizer

VOCABULARY = 544
TOKENIZER_TASKS = 3000
Row = tuple[list[int], list[bool]]
"""Token ids, and which of them the expert wrote."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of the training: which demonstrations, how many tokens a step, and the highest learning rate as a share
    of `MATRIX_RATE` and `OTHER_RATE`. The rate falls to zero over the last `fall` of the phase."""

    name: str
    skill: float
    turns: int
    first_seed: int
    tasks: int
    epochs: float
    tokens_per_step: int
    rate: float
    fall: float


MATRIX_RATE, OTHER_RATE = 0.02, 3e-3
PHASES = (
    Phase("right edits", 1.0, 1, 10_000_000, tasks=60_000, epochs=4, tokens_per_step=4096, rate=1.0, fall=0.5),
    Phase("noisy expert", 0.36, 2, 50_000_000, tasks=16_000, epochs=2, tokens_per_step=6144, rate=0.12, fall=0.7),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for model and tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--share", type=float, default=1.0, help="share of the tasks of each phase, for a short try")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    check_forward(model)
    for phase in PHASES:
        rows = make_rows(phase, tokenizer, int(phase.tasks * arguments.share), arguments.threads)
        train(model, phase, rows, random.Random(f"{arguments.seed}/{phase.name}"))
        mode, right = skill_of(model, tokenizer)
        print(f"after {phase.name!r}: the right edit is the likeliest in {mode:.3f}, its probability {right:.3f}")
    save(model, tokenizer, arguments.out)


# --- text and tokens ------------------------------------------------------------------------------------------------


def tools() -> list[Any]:
    return list(CodeRepair(sandbox="bubblewrap").tool_schemas())


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Learn the vocabulary from demonstrations of training tasks."""
    render = build_tokenizer([], 320)  # any vocabulary will do to render the chat template
    schemas = tools()

    def texts() -> Iterator[str]:
        for seed in range(TOKENIZER_TASKS):
            demonstration = demonstrate(make_task(seed, "train"), random.Random(seed), skill=0.36)
            messages: list[Message] = list(demonstration.opening)
            for says, answers in demonstration.turns:
                messages += [{"role": "assistant", "content": says}, *answers]
            yield str(render.apply_chat_template(messages, tools=schemas, tokenize=False))

    return build_tokenizer(texts(), VOCABULARY)


def encode(demonstration: Demonstration, tokenizer: PreTrainedTokenizerFast, schemas: list[Any]) -> Row:
    """The tokens of an episode as a rollout would have them: prompt, what was written, what was answered."""

    def ids_of(messages: Sequence[Message], schemas: list[Any] | None, before: str = "") -> list[int]:
        text = tokenizer.apply_chat_template(list(messages), tools=schemas, add_generation_prompt=True, tokenize=False)
        return tokenizer.backend_tokenizer.encode(before + str(text)).ids

    ids = ids_of(demonstration.opening, schemas)
    written = [False] * len(ids)
    for at, (says, answers) in enumerate(demonstration.turns):
        said = [*tokenizer.backend_tokenizer.encode(says).ids, tokenizer.eos_token_id]
        last = at == len(demonstration.turns) - 1
        answered = [] if last else ids_of(answers, None, before="\n")
        ids += said + answered
        written += [True] * len(said) + [False] * len(answered)
    return ids, written


def make_rows(phase: Phase, tokenizer: PreTrainedTokenizerFast, tasks: int, processes: int) -> list[Row]:
    """The demonstrations of a phase, made by several processes."""
    started, block = time.monotonic(), 500
    seeds = range(phase.first_seed, phase.first_seed + tasks + 1, min(block, tasks))
    with ProcessPoolExecutor(processes) as pool:
        blocks = list(pool.map(_rows, *zip(*((phase, tokenizer, a, b) for a, b in pairwise(seeds)), strict=True)))
    rows = [row for block in blocks for row in block]
    tokens = sum(len(ids) for ids, _ in rows)
    print(f"{phase.name}: {len(rows)} demonstrations, {tokens} tokens, made in {time.monotonic() - started:.0f} s")
    return rows


def _rows(phase: Phase, tokenizer: PreTrainedTokenizerFast, start: int, stop: int) -> list[Row]:
    schemas = tools()
    rows: list[Row] = []
    for seed in range(start, stop):
        task = make_task(seed, "train")
        rows.append(
            encode(demonstrate(task, random.Random(seed), skill=phase.skill, turns=phase.turns), tokenizer, schemas)
        )
    return rows


def batches(rows: list[Row], tokens: int, rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of similar length together, padded on the right: ids [B, T] and what was written [B, T], for ever."""
    while True:
        shuffled = rng.sample(rows, len(rows))
        made: list[list[Row]] = []
        for at in range(0, len(shuffled), 1500):
            batch: list[Row] = []
            for row in sorted(shuffled[at : at + 1500], key=lambda row: len(row[0])):
                if batch and (len(batch) + 1) * len(row[0]) > tokens:
                    made.append(batch)
                    batch = []
                batch.append(row)
            made.append(batch)
        rng.shuffle(made)
        for batch in made:
            yield collate(batch)


def collate(batch: Sequence[Row]) -> tuple[Tensor, Tensor]:
    length = max(len(ids) for ids, _ in batch)
    ids_BT = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in batch])
    written_BT = torch.tensor([written + [False] * (length - len(written)) for _, written in batch])
    return ids_BT, written_BT


# --- model ----------------------------------------------------------------------------------------------------------


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def logits(model: Any, ids_BT: Tensor, keep_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits [K, V] at the kept places of rows padded on the right. Qwen3's forward pass with its attention written
    out: for short rows on a CPU that is faster than the fused kernels' backward pass."""
    config, (b, t) = model.config, ids_BT.shape
    heads, kv, d, eps = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps
    angles = torch.outer(torch.arange(t), 10_000.0 ** (-torch.arange(0, d, 2) / d))
    cos, sin = (f(torch.cat((angles, angles), -1)).to(dtype) for f in (torch.cos, torch.sin))
    future = torch.full((t, t), float("-inf"), dtype=dtype).triu(1)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight.to(dtype), eps)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def linear(x: Tensor, *weights: Tensor) -> Tensor:
        return functional.linear(x, torch.cat(weights).to(dtype))

    x = functional.embedding(ids_BT, model.model.embed_tokens.weight).to(dtype)
    for layer in model.model.layers:
        at, mlp = layer.self_attn, layer.mlp
        h = linear(norm(x, layer.input_layernorm.weight), at.q_proj.weight, at.k_proj.weight, at.v_proj.weight)
        q, k, v = h.view(b, t, heads + 2 * kv, d).transpose(1, 2).split((heads, kv, kv), 1)
        q = rotate(norm(q, at.q_norm.weight)).reshape(b, kv, -1, d)
        k = rotate(norm(k, at.k_norm.weight))
        scores = (q @ k.transpose(-1, -2)).view(b, kv, -1, t, t) * d**-0.5 + future
        mixed = (scores.softmax(-1).view(b, kv, -1, t) @ v).view(b, heads, t, d).transpose(1, 2)
        x = x + linear(mixed.reshape(b, t, -1), at.o_proj.weight)
        gate, up = linear(
            norm(x, layer.post_attention_layernorm.weight), mlp.gate_proj.weight, mlp.up_proj.weight
        ).chunk(2, -1)
        x = x + linear(functional.silu(gate) * up, mlp.down_proj.weight)
    return linear(norm(x[keep_BT], model.model.norm.weight), model.model.embed_tokens.weight).float()


@torch.no_grad()
def check_forward(model: Qwen3ForCausalLM) -> None:
    """The forward pass above is that of transformers."""
    ids = torch.randint(0, VOCABULARY, (2, 24))
    ours = logits(model, ids, torch.ones_like(ids, dtype=torch.bool), torch.float32)
    torch.testing.assert_close(ours, model(ids).logits.flatten(0, 1), atol=1e-4, rtol=1e-4)


def train(model: Qwen3ForCausalLM, phase: Phase, rows: list[Row], rng: random.Random) -> None:
    """Muon on the matrices, AdamW on the rest."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01, momentum=0.95, adjust_lr_fn="original")
    adam = torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    total, done, step, losses, started = phase.epochs * sum(len(ids) for ids, _ in rows), 0, 0, [0.0], time.monotonic()
    for ids_BT, written_BT in batches(rows, phase.tokens_per_step, rng):
        rate = phase.rate * min(1.0, (step + 1) / 50, (1 - done / total) / phase.fall)
        for optimizer, base in ((muon, MATRIX_RATE), (adam, OTHER_RATE)):
            optimizer.param_groups[0]["lr"] = base * rate
        predicted = functional.pad(written_BT[:, 1:], (0, 1))  # a token is predicted at the place before it
        loss = functional.cross_entropy(logits(model, ids_BT, predicted, torch.bfloat16), ids_BT[written_BT])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
        losses, step, done = [*losses[-49:], loss.item()], step + 1, done + ids_BT.numel()
        if step % 200 == 0:
            mean, seconds = sum(losses) / len(losses), time.monotonic() - started
            print(f"{phase.name}: {done / total:.0%}, loss {mean:.4f}, {done / seconds:.0f} tokens/s", flush=True)
        if done >= total:
            return


@torch.no_grad()
def skill_of(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, n: int = 256) -> tuple[float, float]:
    """On held-out tasks: how often the right first edit is the greedy one, and its mean probability."""
    likeliest, probability, schemas = 0.0, 0.0, tools()
    for seed in range(n):
        demonstration = demonstrate(make_task(seed, "held_out"), random.Random(seed), skill=1.0, turns=1)
        ids_BT, written_BT = collate([encode(demonstration, tokenizer, schemas)])
        found_KV = logits(model, ids_BT, functional.pad(written_BT[:, 1:], (0, 1)), torch.float32).log_softmax(-1)
        target_K = ids_BT[written_BT]
        likeliest += float((found_KV.argmax(-1) == target_K).all())
        probability += float(found_KV.gather(1, target_K[:, None]).sum().exp())
    return likeliest / n, probability / n


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the folder; `rope_theta` once more at the top, where readers of older configurations look for it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 10_000.0}, indent=2) + "\n")


if __name__ == "__main__":
    main()
