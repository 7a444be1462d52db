"""The whole training loop beside TRL's synchronous one: episodes a second on one shape, one machine, one run.

Both sides train the same 0.8M-parameter Qwen3 from the same random weights on 16 x 8 episodes a step, each of three
turns of 32 sampled tokens after a prompt of 362, with a tool that only answers. Agentrl goes through all of it: run
store, HTTP engine, worker, learner, weights. The sides take turns, so that a slow minute of the machine hits both; the
figure of a side is the median of its rounds, and a round's figure is its episodes over its seconds after a warm-up.

    agentrl bench loop [--rounds 3] [--steps 20] [--trl-steps 5] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _loop_shape import GROUPS, MEMBERS, TURN_TOKENS, TURNS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WARM_UP_STEPS = 6  # more than max_lag: the buffer that filled while the learner started is used up
ROUND_DEADLINE_S = 1800


def run(command: list[str], **environment: str) -> str:
    """Run a command of this checkout; its standard output. Raises with its errors shown if it fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ROUND_DEADLINE_S,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def measure_trl(model: Path, steps: int, rows: int) -> dict[str, Any]:
    script = str(HERE / "_loop_trl.py")
    out = run([".venv-peers/bin/python", script, str(model), "--steps", str(steps), "--rows", str(rows)])
    return json.loads(out.splitlines()[-1])


def measure_agentrl(model: Path, folder: Path, steps: int, settings: list[str]) -> dict[str, Any]:
    overrides = [f"model={model}", f"train.steps={steps + WARM_UP_STEPS}", *settings]
    chosen = [word for setting in overrides for word in ("--set", setting)]
    program = str(Path(sys.executable).with_name("agentrl"))
    command = [program, "train", str(HERE / "_loop.toml"), "--out", str(folder), *chosen]
    run(command, PYTHONPATH=str(HERE))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    taken = [line for line in lines if line["kind"] == "step"][WARM_UP_STEPS - 1 :]
    step_s = [end["time"] - start["time"] for start, end in itertools.pairwise(taken)]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "side": "agentrl",
        "versions": summary["versions"],
        "step_s": [round(seconds, 3) for seconds in step_s],
        "episodes_per_s": GROUPS * MEMBERS * len(step_s) / sum(step_s),
        "sampled_tokens_per_episode": statistics.fmean(one["tokens_scored"] / one["episodes"] for one in taken),
        "trainer_idle_share": summary["trainer_idle_share"],
        "max_lag_seen": summary["max_lag_seen"],
    }


def report(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of either side and their ratio. Refuses rounds in which the sides did not play the same episodes."""
    wanted = TURNS * TURN_TOKENS
    for one in rounds:
        if abs(one["sampled_tokens_per_episode"] - wanted) > 0.01 * wanted:
            sys.exit(f"{one['side']} sampled {one['sampled_tokens_per_episode']:.1f} tokens an episode, not {wanted}")
    median = {
        side: statistics.median(one["episodes_per_s"] for one in rounds if one["side"] == side)
        for side in ("agentrl", "trl")
    }
    return {"episodes_per_s": median, "ratio": median["agentrl"] / median["trl"], "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="agentrl's steps measured in a round, after the warm-up")
    parser.add_argument("--trl-steps", type=int, default=5, help="TRL's steps measured in a round, after its warm-up")
    parser.add_argument("--trl-rows", type=int, default=16, help="rows of TRL's micro-batch")
    parser.add_argument("--set", action="append", default=[], help="a setting of agentrl's side: section.key=value")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    run(["make", "peers"])
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as scratch:
        model = Path(scratch) / "model"
        run([sys.executable, str(HERE / "_loop_model.py"), str(model)])
        for number in range(arguments.rounds):
            rounds.append(measure_agentrl(model, Path(scratch) / f"run-{number}", arguments.steps, arguments.set))
            rounds.append(measure_trl(model, arguments.trl_steps, arguments.trl_rows))
            for one in rounds[-2:]:
                print(f"round {number}: {one['side']:8} {one['episodes_per_s']:7.2f} episodes/s", file=sys.stderr)
    text = json.dumps(report(rounds), indent=2)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
