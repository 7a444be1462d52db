"""Does it learn, and by what? The tiny coder's run over several seeds, and the same run with a part taken out.

    agentrl bench learning [--seeds 1 2 3] [--ablations no-process-reward synchronous no-importance-correction]

Every row is a whole run of examples/tiny_coder.toml with everything in it: sandboxed tests, engine, workers, learner.
Success is the share of held-out tasks solved within the episode's turns, sampled as in training (temperature 1); the
shuffled set shows each task the visible tests of another one, so a policy that reads the tests must fail there.
Writes learning.json beside this file and prints the table of learning.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RUN_FILE = HERE.parent / "examples" / "tiny_coder.toml"
RUN_DEADLINE_S = 3600
ABLATIONS = {
    "no-process-reward": ["algo.process_weight=0"],
    "synchronous": ["buffer.max_lag=0"],
    "no-importance-correction": ["algo.importance=none"],
}


def run(name: str, seed: int, settings: list[str], scratch: Path) -> dict[str, Any]:
    """One whole run; its row of the table. Exits with the run's own message if it fails."""
    out = scratch / f"{name}-{seed}"
    chosen = [word for setting in [f"seed={seed}", *settings] for word in ("--set", setting)]
    program = str(Path(sys.executable).with_name("agentrl"))
    command = [program, "train", str(RUN_FILE), "--out", str(out), *chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_DEADLINE_S, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    summary = json.loads((out / "summary.json").read_text())
    sets = {
        label: {when: round(results[when]["success"], 4) for when in ("before", "after")}
        for label, results in summary["eval"]["sets"].items()
    }
    kept = ("steps", "episodes", "tokens_trained", "train_s", "wall_s", "trainer_idle_share", "max_lag_seen")
    return {"run": name, "seed": seed, "success": sets, **{key: summary[key] for key in kept}}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row a run, then what three seeds say together."""
    names = list(rows[0]["success"])
    head = ["run", "seed", *(f"{name} before → after" for name in names), "train s", "idle share", "max lag"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [f"{row['success'][name]['before']:.3f} → {row['success'][name]['after']:.3f}" for name in names]
        tail = [f"{row['train_s']:.0f}", f"{row['trainer_idle_share']:.0%}", str(row["max_lag_seen"])]
        lines.append("| " + " | ".join([row["run"], str(row["seed"]), *cells, *tail]) + " |")
    full = [row for row in rows if row["run"] == "full"]
    if full:
        gains = [row["success"][names[0]]["after"] - row["success"][names[0]]["before"] for row in full]
        after = statistics.median(row["success"][names[0]]["after"] for row in full)
        seeds = f"Full run over {len(full)} seeds, {names[0]}"
        lines += ["", f"{seeds}: smallest gain {min(gains):.3f}, median success after {after:.3f}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--ablations", nargs="*", default=list(ABLATIONS), choices=list(ABLATIONS))
    parser.add_argument("--ablation-seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="a setting for every run: section.key=value")
    parser.add_argument("--out", type=Path, default=HERE / "learning.json")
    arguments = parser.parse_args()
    jobs = [("full", seed, list[str]()) for seed in arguments.seeds]
    jobs += [(name, arguments.ablation_seed, ABLATIONS[name]) for name in arguments.ablations]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="agentrl-learning-") as scratch:
        for name, seed, settings in jobs:
            rows.append(run(name, seed, [*arguments.set, *settings], Path(scratch)))
            arguments.out.write_text(json.dumps(rows, indent=2) + "\n")
            print(json.dumps(rows[-1]), file=sys.stderr)
    print(table(rows))


if __name__ == "__main__":
    main()
