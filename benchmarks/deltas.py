"""How large a delta of weights is after real optimizer steps: `python benchmarks/deltas.py [--steps N] [--lr LR …]`.

Each model has float32 masters, trained with AdamW (gradients of the next-token loss on random tokens, clipped at 1),
and goes out in bfloat16. A row is the change from one step to the next as `engine.weights_url` sends it, the median
of the last half of the steps: the first steps of Adam move every weight by the whole learning rate, and are the
largest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.engine.weight_sync import weight_file
from agentrl.learner.weight_export import export_weights
from agentrl.models.resolve import model_dir

LRS = [1e-6, 3e-6, 1e-5, 3e-5]
TOKENS = (2, 128)


def models() -> dict[str, Any]:
    """The tiny coder as it comes, and a random Qwen3 of 100M."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 64}
    layers = {"vocab_size": 32_768, "hidden_size": 640, "num_hidden_layers": 14, "intermediate_size": 2048}
    random = Qwen3ForCausalLM(Qwen3Config(**layers, **heads, tie_word_embeddings=True, dtype=torch.float32))
    return {
        "tiny coder": AutoModelForCausalLM.from_pretrained(model_dir("agentrl/tiny-coder"), dtype=torch.float32),
        "random Qwen3": random.float(),
    }


def measure(model: Any, lr: float, steps: int, folder: Path) -> dict[str, float]:
    """The share of bytes of a delta and of changed elements, and the seconds to make and apply one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    torch.manual_seed(1)
    files = [export_weights(model, folder / "0.safetensors", dtype=torch.bfloat16)]
    rows: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        tokens = torch.randint(model.config.vocab_size, TOKENS)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        files.append(export_weights(model, folder / f"{step}.safetensors", dtype=torch.bfloat16))
        old, new = (weight_file.open_bytes(file.path) for file in files[-2:])
        started = time.perf_counter()
        size = weight_file.write_delta(old, new, folder / "delta", width=weight_file.width(new))
        made = time.perf_counter()
        with (folder / "delta").open("rb") as delta:
            result = weight_file.patched(old, delta, "delta")
        assert weight_file.digest(result) == files[-1].sha256
        applied = time.perf_counter()
        pairs = len(new) // 2 * 2
        changed = float((old[:pairs].view("uint16") != new[:pairs].view("uint16")).mean())
        rows.append({"share": size / len(new), "changed": changed, "make_s": made - started, "apply_s": applied - made})
        files[-2].path.unlink()
    late = rows[steps // 2 :]
    first = {"first": rows[0]["share"], "bytes": float(files[-1].size_bytes)}
    return {name: statistics.median(row[name] for row in late) for name in late[0]} | first


def main() -> None:
    """Print a row for each model and learning rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, nargs="*", default=LRS)
    asked = parser.parse_args()
    print(
        "| model | parameters | lr | bytes of the file | changed elements | delta | of the first step "
        "| make s | apply s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in models():
        for lr in asked.lr:
            model = models()[name]
            parameters = sum(parameter.numel() for parameter in model.parameters())
            with tempfile.TemporaryDirectory() as folder:
                row = measure(model, lr, asked.steps, Path(folder))
            shares = " | ".join(f"{row[name]:.2%}" for name in ("changed", "share", "first"))
            times = f"{row['make_s']:.2f} | {row['apply_s']:.2f}"
            print(f"| {name} | {parameters:,} | {lr:g} | {row['bytes']:,.0f} | {shares} | {times} |", flush=True)


if __name__ == "__main__":
    main()
