"""What a step of the learner launches on a GPU, counted on a CPU.

    agentrl bench launches [--out FILE.json]

A whole step of GRPO in bfloat16 over recorded groups, of a Qwen3 of the widths of 0.6B with 2 and with 4 layers, whose
difference is a layer: kernels, the bytes that they read and write, and the calls for which the host waits for the
device, by part. Lengths, passes and the blocks of the head are scaled down alike, to 1/100 and 1/50, whose difference
scales the bytes up again: the step is that of 28 layers and four passes of 7,600 tokens. Its vocabulary is a sixteenth
of 151,936: so are the bytes of the head and of what is done to the embedding.

What a count on a CPU cannot tell: a second of anything. Which kernels wait for the host, how far a cache helps, what a
launch costs and what runs beside something else are only seen on a GPU. Where the code goes another way on CUDA, that
way is counted: FlexAttention (one kernel forward, two backward), optimizer and clip over all
tensors at once, larger blocks of log-probs. A matrix product counts as one kernel, and a gradient that is summed into
an index too: cuBLAS and sorting may launch more.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import _gpu_shapes
from _gpu_shapes import config_of, save_random, shared_prompt
from _launch_count import DEVICE, Counter

from agentrl.algos.grpo import GRPO
from agentrl.config import Train
from agentrl.learner.learner import Learner
from agentrl.learner.model import attention, logprobs

LAYERS = 28
TRACED = (2, 4)  # layers
SCALES = (0.01, 0.02)  # of lengths
SHARE = 16  # of the vocabulary
BLOCK_BYTES = (64 << 20) // SHARE  # of the head's blocks on a GPU


def counted(layers: int, scale: float, *, vocab: int, sizes: Mapping[str, Any]) -> Counter:
    """A step of such a model, the second: the optimizer has its moments."""
    prompt, sampled = round(1200 * scale), round(800 * scale)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        with patch.dict(_gpu_shapes.TINY, {**sizes, "num_hidden_layers": layers}):
            save_random(folder, "tiny", vocab=vocab)
        budget = prompt + 8 * sampled
        train = Train(dtype="bfloat16", tokens_per_batch=budget, device="cpu", warmup_steps=0, attention="sdpa")
        config = config_of(folder, algo=GRPO(), train=train, max_tokens_per_turn=sampled, max_context=budget)
        learner = Learner(config.learner, folder, DEVICE)
    learner.model.layout = attention.Subtrees  # as on CUDA
    groups = shared_prompt(4, prompt=prompt, sampled=sampled, vocab=vocab)
    with patch.object(logprobs, "_BLOCK_BYTES_ELSEWHERE", round(BLOCK_BYTES * scale)):
        for _ in range(2):
            counter = Counter()
            with counter.over(learner):
                learner.step(groups, step_of=lambda _: learner.step_index)
    return counter


def measure(*, vocab: int, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The step of all layers and tokens, from four smaller ones."""
    found = {(n, scale): counted(n, scale, vocab=vocab, sizes=sizes) for n in TRACED for scale in SCALES}

    def of(name: str, key: tuple[str, str], layers: int, scale: float) -> float:
        return getattr(found[layers, scale].counts[key], name)

    def deep(name: str, key: tuple[str, str], scale: float) -> float:
        low, high = (of(name, key, n, scale) for n in TRACED)
        return low + (high - low) * (LAYERS - TRACED[0]) / (TRACED[1] - TRACED[0])

    def whole(key: tuple[str, str]) -> dict[str, float]:
        low, high = (deep("bytes", key, scale) for scale in SCALES)
        size = low + (high - low) * (1 - SCALES[0]) / (SCALES[1] - SCALES[0])
        waits = deep("syncs", key, SCALES[0]) + deep("copies", key, SCALES[0])
        return {"kernels": deep("kernels", key, SCALES[0]), "GB": size / 1e9, "waits": waits}

    keys = sorted({key for one in found.values() for key in one.counts if not key[0].startswith("-")})
    first = found[TRACED[0], SCALES[0]]
    where = {f"{part}: {call}": n for (part, call), n in sorted(first.where.items())}
    return {"passes": first.passes, "parts": {" ".join(key): whole(key) for key in keys}, "where": where}


def table(found: Mapping[str, Any]) -> str:
    """By part, forward and backward."""
    parts: Mapping[str, Mapping[str, float]] = found["parts"]
    names = list(dict.fromkeys(name.rpartition(" ")[0] for name in parts))
    lines = ["| part | kernels forward | backward | GB forward | backward | waits |", "|---|---|---|---|---|---|"]

    def row(label: str, of: Sequence[str]) -> str:
        got = [
            [sum(parts.get(f"{name} {phase}", {}).get(what, 0.0) for name in of) for phase in ("forward", "backward")]
            for what in ("kernels", "GB", "waits")
        ]
        (kernels, again), (size, more), waits = got
        return f"| {label} | {kernels:,.0f} | {again:,.0f} | {size:,.1f} | {more:,.1f} | {sum(waits):,.0f} |"

    lines += [row(name, [name]) for name in names]
    return "\n".join([*lines, row("all", names)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    given = parser.parse_args(argv)
    widths = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    found = measure(vocab=_gpu_shapes.VOCABULARY // SHARE, sizes={**widths, "head_dim": 128})
    print(f"A step of {LAYERS} layers and {found['passes']} passes:\n\n{table(found)}\n")
    for call, count in found["where"].items():
        print(f"waits  {call}  {count}")
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
