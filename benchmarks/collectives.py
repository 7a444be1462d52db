"""What 64 or 512 ranks send each other in a pass: the shapes and bytes of every collective, counted without them.

    agentrl bench collectives
    agentrl bench collectives --shape Qwen3-0.6B --tokens 8192 --ranks 8 --tensor 2 --context 2
    agentrl bench collectives --shape Qwen3-30B-A3B --tokens 16384 --context 1 --tensor 1 --expert 8 --lora-rank 16

One process runs the learner's own code on tensors without numbers (`agentrl.learner.parallel.collective_trace`): a
model of a known shape, gradient checkpointing, one row of so many tokens, of which the second half is scored. An
adapter is over attention. Of experts that are apart each rank gets as many tokens. Prints a table for each number of
ranks. Collectives of equal shape in several layers are one line; the last column is what a rank sends in all of them,
in a ring.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from agentrl.algos.grpo import GRPO
from agentrl.config import EnvSource, Rollout, RunConfig, Train
from agentrl.learner.data.rows import Row
from agentrl.learner.parallel.collective_trace import Collective, traffic

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _gpu_shapes import SHAPES, VOCABULARY

MIB = 2**20


MIXTURES: dict[str, dict[str, int | bool]] = {
    "Qwen3-30B-A3B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def described(shape: str) -> Qwen3Config | Qwen3MoeConfig:
    if shape in MIXTURES:
        return Qwen3MoeConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **MIXTURES[shape])
    heads = {"num_key_value_heads": 8, "head_dim": 128}
    return Qwen3Config(vocab_size=VOCABULARY, tie_word_embeddings=True, **heads, **SHAPES[shape])


def counted(shape: str, tokens: int, plan: dict[str, int], lora_rank: int) -> list[Collective]:
    """In a process of its own."""
    adapter = {"lora_rank": lora_rank, "lora_targets": ATTENTION} if lora_rank else {}
    train = {"parallel": plan, "gradient_checkpointing": True, "dtype": "bfloat16", "tokens_per_batch": tokens}
    config = RunConfig(
        model=shape,
        env=EnvSource(id="none"),
        algo=GRPO(),
        rollout=Rollout(max_context=tokens),
        train=Train.model_validate({**train, **adapter}),
    )
    place_S = torch.arange(tokens // 2, tokens)
    row = Row(group_id=0, episode_id=0, algo=GRPO(), token_ids=(0,) * tokens, place_S=place_S, columns={})
    with tempfile.TemporaryDirectory() as folder:
        described(shape).save_pretrained(folder)
        return traffic(config.learner, Path(folder), [row])


def table(found: list[Collective]) -> list[str]:
    lines = ["| collective | kind | ranks | whole tensor | times | MiB each | MiB sent |", f"|{'---|' * 7}"]
    times: Counter[tuple[str, str, int, str, float, float]] = Counter()
    for one in found:
        name = re.sub(r"(?<=layers\.)\d+|(?<=layer )\d+", "*", one.name)
        what = f"{'x'.join(map(str, one.shape))} {str(one.dtype).removeprefix('torch.')}"
        times[name, one.kind, one.size, what, one.nbytes / MIB, one.sent / MIB] += 1
    for (name, kind, size, what, each, sent), count in times.items():
        lines.append(f"| {name} | {kind} | {size} | {what} | {count} | {each:.2f} | {sent * count:.1f} |")
    return [*lines, f"| all | | | | {len(found)} | | {sum(one.sent for one in found) / MIB:.0f} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="Qwen3-4B", choices=[*SHAPES, *MIXTURES])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--context", type=int, default=4)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--expert", type=int, default=1)
    parser.add_argument("--lora-rank", type=int, default=0)
    chosen = parser.parse_args()
    for ranks in chosen.ranks:
        plan = {"ranks": ranks, "context": chosen.context, "tensor": chosen.tensor, "expert": chosen.expert}
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found = pool.submit(counted, chosen.shape, chosen.tokens, plan, chosen.lora_rank).result()
        settings = [f"{name} = {number}" for name, number in {**plan, "lora_rank": chosen.lora_rank}.items() if number]
        print(f"\n{chosen.shape}, {chosen.tokens} tokens, {', '.join(settings)}\n")
        print(*table(found), sep="\n", flush=True)


if __name__ == "__main__":
    main()
