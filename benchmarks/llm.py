"""A real language model beside TRL's synchronous GRPO: seconds a step, CPU a step, and how fast the reward climbs.

Every side trains SmolLM2-135M on the sums of `examples/laptop_llm.toml`: 8 groups of 8 answers a step, 12 tokens, a
constant rate of 1e-5, float32. The sides take turns, so that a slow minute of the machine hits all of them.

    agentrl bench llm [--steps 12] [--seeds 1 2] [--sides agentrl sync trl] [--out FILE.json]

    agentrl    the run file as it is: lag 2, in-flight weights        no_warmup  the same with train.warmup_steps = 0
    sync       lag 0: every step waits for episodes of its weights    trl        GRPOTrainer, both cores, batch at once

A side's CPU is that of all its processes, less that of a run of one step. Its reward is that of the episodes of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from loop import ROOT, run

from agentrl.models.smollm2 import smollm2_135m

RUN_FILE = ROOT / "examples" / "laptop_llm.toml"
SIDES: dict[str, list[str]] = {
    "agentrl": [],
    "sync": ["buffer.max_lag=0"],
    "no_warmup": ["train.warmup_steps=0"],
    "no_warmup_sync": ["train.warmup_steps=0", "buffer.max_lag=0"],
    "no_warmup_std": ["train.warmup_steps=0", "algo.scale=std"],
}
GROUPS = 8
REACHED = 0.6


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_agentrl(folder: Path, steps: int, seed: int, settings: list[str]) -> list[dict[str, float]]:
    """Wall seconds since the start of training, and the reward, of each step; CPU only of the whole."""
    overrides = [f"train.steps={steps}", f"seed={seed}", "eval.sets=[]", "eval.every=0", *settings]
    chosen = [word for setting in overrides for word in ("--set", setting)]
    run([str(Path(sys.executable).with_name("agentrl")), "train", str(RUN_FILE), "--out", str(folder), *chosen])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    taken = [line for line in lines if line["kind"] == "step"]
    began = taken[0]["time"] - taken[0]["busy_s"] - taken[0]["idle_s"]
    return [{"wall_s": round(line["time"] - began, 2), "reward": line["outcome_mean"]} for line in taken]


def measure_trl(model: Path, scratch: Path, steps: int, seed: int) -> list[dict[str, float]]:
    script, tasks = str(Path(__file__).with_name("_llm_trl.py")), scratch / f"tasks-{seed}.jsonl"
    tasks.write_text("".join(f"{json.dumps(task)}\n" for task in drawn(steps * GROUPS, seed)))
    out = run([".venv-trl/bin/python", script, str(model), str(tasks), "--steps", str(steps), "--seed", str(seed)])
    return json.loads(out.splitlines()[-1])["steps"]


def drawn(n: int, seed: int) -> list[dict[str, str]]:
    """Tasks as the environment draws them."""
    sys.path.insert(0, str(ROOT / "examples"))
    from laptop_llm import Sums

    env, tasks = Sums(), list[dict[str, str]]()
    for at in range(n):
        (message,), _ = env.reset(seed=1_000_000 * seed + at)
        tasks.append({"prompt": message["content"], "answer": str(env.sum)})
    return tasks


def measured(side: str, model: Path, scratch: Path, steps: int, seed: int) -> dict[str, Any]:
    """One run of a side, with the CPU of all its processes."""
    used = children_cpu_s()
    if side == "trl":
        taken = measure_trl(model, scratch, steps, seed)
    else:
        taken = measure_agentrl(scratch / f"{side}-{seed}-{steps}", steps, seed, SIDES[side])
    return {"side": side, "seed": seed, "steps": taken, "cpu_s": round(children_cpu_s() - used, 1)}


def reached_at(steps: list[dict[str, float]]) -> tuple[int, float] | None:
    """The first step, and its wall seconds, at which the mean reward of three steps is high enough."""
    for at in range(2, len(steps)):
        if statistics.fmean(step["reward"] for step in steps[at - 2 : at + 1]) >= REACHED:
            return at + 1, steps[at]["wall_s"]
    return None


def row(one: dict[str, Any], start_cpu_s: float) -> dict[str, Any]:
    """What a run gives; `start_cpu_s` is the CPU of a run of one step."""
    steps: list[dict[str, float]] = one["steps"]
    reached = reached_at(steps)
    return {
        "side": one["side"],
        "seed": one["seed"],
        "s_per_step": round((steps[-1]["wall_s"] - steps[0]["wall_s"]) / (len(steps) - 1), 2),
        "cpu_s_per_step": round((one["cpu_s"] - start_cpu_s) / (len(steps) - 1), 2),
        "reward": [round(step["reward"], 2) for step in steps],
        "reached_step": reached and reached[0],
        "reached_s": reached and round(reached[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sides", nargs="+", default=["agentrl", "sync", "trl"], choices=[*SIDES, "trl"])
    parser.add_argument("--out", type=Path, help="write the rows here too, as they come")
    given = parser.parse_args()
    if "trl" in given.sides:
        run(["make", ".venv-trl/.ready"])
    rows: list[dict[str, Any]] = []
    model = smollm2_135m()
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-", dir=os.environ.get("TMPDIR")) as scratch:
        start_cpu_s = {side: measured(side, model, Path(scratch), 1, 0)["cpu_s"] for side in given.sides}
        for seed in given.seeds:
            for side in given.sides:
                rows.append(row(measured(side, model, Path(scratch), given.steps, seed), start_cpu_s[side]))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                if given.out:
                    given.out.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
