"""What each recipe asks of its GPUs, before anything starts: `agentrl plan` of all of them as one table.

    agentrl bench plan [--gpu h100] [--mfu 0.1] [--out FILE.json]

Nothing is downloaded: the shapes of the recipes' models are written here. An episode is as long as the recipe allows
(`rollout.max_context`), and the policy samples 40% of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.config import load
from agentrl.planning import plan

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _gpu_shapes import SHAPES, VOCABULARY

RECIPES = Path(__file__).resolve().parents[1] / "examples" / "recipes"
GPUS = {"gsm8k": 1, "tool_use": 1, "solver_verifier": 1, "coding_agent": 8, "moe_lora": 7}  # as their pages ask for
HEADS = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
DENSE = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **HEADS}
MODELS: dict[str, dict[str, Any]] = {f"Qwen/{name}": {**DENSE, **shape} for name, shape in SHAPES.items()}
MODELS["Qwen/Qwen3-30B-A3B"] = {
    **HEADS,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def planned(recipe: str, gpu: str, mfu: float) -> list[dict[str, Any]]:
    """A row for the split of the GPUs that the recipe has, and one for the quickest that fits, if it is another."""
    n = GPUS[recipe]
    config = load(RECIPES / recipe / "run.toml")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[config.model]))
        here = config.model_copy(update={"model": folder})
        work = plan.Work(row=config.rollout.max_context, sampled=0.4, mfu=mfu, mbu=0.5)
        here, _ = plan.started(here, plan.GPUS[gpu], n)
        found = plan.plan(here, plan.GPUS[gpu], n, work)
    own = next(one for one in found.splits if one.learners == (n > 1))
    return [_row(recipe, n, found, one) for one in dict.fromkeys((own, found.best)) if one is not None]


def _row(recipe: str, n: int, found: plan.Plan, split: plan.GpuSplit) -> dict[str, Any]:
    sizes = ("weights", "gradients", "optimizer", "activations", "temporary")
    return {
        "recipe": recipe,
        "gpus": f"{split.engines} + {split.learners}" if split.engines else "1 for both",
        **{name: getattr(found.held, name) / 1e9 for name in sizes},
        **asdict(split),
        "max_lag": split.max_lag,
        "hours": n * split.step_s * 1000 / 3600,
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    names = ("recipe", "engines + learner", "fits", "weights", "gradients", "optimizer", "activations", "in passing")
    names += ("learner's GPU", "engine's GPU", "episodes at once", "learner s", "engines s", "`max_lag`", "GPU hours")
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows:
        sizes = [row[name] for name in ("weights", "gradients", "optimizer", "activations", "temporary")]
        sizes += [row["learner_bytes"] / 1e9, row["engine_bytes"] / 1e9]
        cells = [row["recipe"], row["gpus"], "yes" if row["fits"] else "no", *(f"{size:.1f}" for size in sizes)]
        times = [f"{row['learner_s']:.3g}", f"{row['engine_s']:.3g}", str(row["max_lag"]), f"{row['hours']:.0f}"]
        lines.append(f"| {' | '.join([*cells, str(row['at_once']), *(times if row['fits'] else ['-'] * 4)])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h100", choices=sorted(plan.GPUS))
    parser.add_argument("--mfu", type=float, default=0.1, help="share of the peak that the learner reaches")
    parser.add_argument("--only", nargs="+", choices=sorted(GPUS), default=list(GPUS))
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    chosen = parser.parse_args()
    rows = [row for recipe in chosen.only for row in planned(recipe, chosen.gpu, chosen.mfu)]
    print("\n".join(table(rows)))
    if chosen.out:
        chosen.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
