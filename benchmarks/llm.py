"""A real language model learns sums, beside TRL: seconds a step, and seconds to a reward, from the command to the step.

Both sides train agentrl/smollm2-135m (134.5 M parameters, float32) on the tasks of `examples/laptop_llm.py`: 8 groups
of 8 answers a step, up to twelve tokens, the reward 1 where the last number is the sum, AdamW at 1e-5. Ours is
`examples/laptop_llm.toml` as it is; TRL's `GRPOTrainer` has its own defaults and a learning rate that does not fall.
The sides take turns, so that a slow minute meets all. `--bfloat16` plays both once more with products in bfloat16,
`--variant` ours once more with other settings.

    agentrl bench llm [--rounds 3] [--steps 24] [--trl-steps 12] [--bfloat16] [--out FILE.json]
        [--variant "lag 0: buffer.max_lag=0"]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loop import ROOT, run

from agentrl.models.resolve import model_dir

sys.path.insert(0, str(ROOT / "examples"))
from laptop_llm import HELD_OUT, PAIRS  # pyright: ignore[reportMissingImports]

MODEL = "agentrl/smollm2-135m"
AT = (1, 4, 8, 12, 16, 20, 24)
WINDOW = 3  # steps whose mean reward has to reach the goal: one step's has a standard error of 0.06


def measure_agentrl(folder: Path, steps: int, seed: int, settings: list[str]) -> dict[str, Any]:
    overrides = [f"train.steps={steps}", f"seed={seed}", "eval.every=0", "eval.sets=[]", *settings]
    chosen = [word for setting in overrides for word in ("--set", setting)]
    began = time.time()
    run(
        [
            str(Path(sys.executable).with_name("agentrl")),
            "train",
            "examples/laptop_llm.toml",
            "--out",
            str(folder),
            *chosen,
        ]
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    taken = [line for line in lines if line["kind"] == "step"]
    summary = json.loads((folder / "summary.json").read_text())
    curve = [
        {"ended": one["time"], "reward": one["outcome_mean"], "tokens": one["tokens_scored"] / one["episodes"]}
        for one in taken
    ]
    extra = {name: summary[name] for name in ("trainer_idle_share", "max_lag_seen")}
    return figures(began, curve) | extra


def measure_trl(folder: Path, model: Path, steps: int, seed: int, *flags: str) -> dict[str, Any]:
    pairs = [pair for pair in PAIRS if pair not in HELD_OUT]
    tasks = folder / "tasks.json"
    tasks.write_text(json.dumps([[f"What is {a} + {b}?", str(a + b)] for a, b in pairs]))
    began = time.time()
    command = [".venv-peers/bin/python", "benchmarks/_llm_trl.py", str(model), str(tasks)]
    done = json.loads(run([*command, "--steps", str(steps), "--seed", str(seed), *flags]).splitlines()[-1])
    return figures(began, done.pop("steps")) | done


def figures(began: float, curve: list[dict[str, float]]) -> dict[str, Any]:
    """What a side did: seconds between steps' ends, the reward by step, and seconds from the command to each end."""
    ends = [one["ended"] for one in curve]
    return {
        "step_s": [round(later - sooner, 2) for sooner, later in itertools.pairwise(ends)],
        "reward": [round(one["reward"], 4) for one in curve],
        "ended_s": [round(end - began, 1) for end in ends],
        "tokens": round(statistics.fmean(one["tokens"] for one in curve), 2),
    }


def reached(side: dict[str, Any], goal: float) -> tuple[int, float] | None:
    """The step whose last WINDOW rewards have this mean, and the seconds from the command to its end."""
    for at in range(WINDOW, len(side["reward"]) + 1):
        if statistics.fmean(side["reward"][at - WINDOW : at]) >= goal:
            return at, side["ended_s"][at - 1]
    return None


def table(rounds: list[dict[str, dict[str, Any]]], goal: float) -> list[str]:
    """A row a side: medians over rounds of seconds a step, of steps and seconds to the goal, and the curve's means."""
    shown = [at for at in AT if any(at <= len(side["reward"]) for one in rounds for side in one.values())]
    lines = [
        "| side | a step, s | steps to "
        + f"{goal} | seconds to {goal} | "
        + " | ".join(f"step {at}" for at in shown)
        + " |",
        "|" + "---|" * (4 + len(shown)),
    ]
    for name in rounds[0]:
        sides = [one[name] for one in rounds]
        step_s = statistics.median(itertools.chain.from_iterable(side["step_s"] for side in sides))
        ends = [found for side in sides if (found := reached(side, goal))]
        cells = ["—", "—"]
        if len(ends) == len(sides):
            cells = [f"{statistics.median(at for at, _ in ends):g}", f"{statistics.median(s for _, s in ends):.0f}"]
        curve = [[side["reward"][at - 1] for side in sides if at <= len(side["reward"])] for at in shown]
        cells += [f"{statistics.fmean(one):.2f}" if one else "" for one in curve]
        lines.append(f"| {name} | {step_s:.1f} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="each with a seed of its own")
    parser.add_argument("--steps", type=int, default=24, help="of ours in a round")
    parser.add_argument("--trl-steps", type=int, default=12, help="of TRL's in a round; 0 leaves it out")
    parser.add_argument("--goal", type=float, default=0.6, help=f"mean reward of {WINDOW} steps")
    parser.add_argument("--bfloat16", action="store_true", help="both sides in bfloat16 as well")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME: SETTING SETTING", help="also ours, so")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    arguments = parser.parse_args()
    variants = {"agentrl": ["engine.dtype=float32", "train.dtype=float32"]}
    peers: dict[str, list[str]] = {"TRL": []} if arguments.trl_steps else {}
    if arguments.bfloat16:
        variants["agentrl, bfloat16"] = ["engine.dtype=bfloat16", "train.dtype=bfloat16"]
        peers |= {"TRL, bfloat16": ["--bf16"]} if peers else {}
    for text in arguments.variant:
        name, _, settings = text.partition(":")
        variants[name] = [*variants["agentrl"], *settings.split()]
    if peers:
        run(["make", "peers"])
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as scratch:
        for number in range(1, arguments.rounds + 1):
            sides: dict[str, dict[str, Any]] = {}
            rounds.append(sides)
            for name, settings in variants.items():
                folder = Path(scratch) / f"run-{number}-{len(sides)}"
                sides[name] = measure_agentrl(folder, arguments.steps, number, settings)
            for name, flags in peers.items():
                sides[name] = measure_trl(Path(scratch), model_dir(MODEL), arguments.trl_steps, number, *flags)
            for name, side in sides.items():
                print(f"round {number}: {name}: {statistics.median(side['step_s']):.1f} s a step", file=sys.stderr)
            if arguments.out:
                arguments.out.write_text(json.dumps(rounds, indent=1) + "\n")
    print("\n".join(table(rounds, arguments.goal)))


if __name__ == "__main__":
    main()
