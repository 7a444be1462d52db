"""Does it learn, and with what? The tiny coder's run with each algorithm, bound on staleness and ablation, over seeds.

    agentrl bench learning                                    what is not in learning.json yet, seed after seed
    agentrl bench learning --only grpo "ppo, turn" --seeds 1 2 --most-minutes 60
    agentrl bench learning --most-minutes 0                   no run: only write page and plot anew

A run is examples/tiny_coder.toml by `agentrl train` with everything in it: sandboxed tests, engine, worker, learner. It
is made cheap by what does not make it easier: 4 groups a step instead of 16, and one held-out set. Success is the share
of held-out tasks solved within the episode's turns, sampled as in training (temperature 1).

Each finished run adds a row to learning.json. A run that is there with the same settings is not made again, so a table
may grow over days; a run that fails is told and left out. Writes the table of learning.md and docs/learning.svg.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import registry

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RUN_FILE = ROOT / "examples" / "tiny_coder.toml"
PAGE, PLOT = HERE / "learning.md", ROOT / "docs" / "learning.svg"
BEGIN, END = "<!-- the table, by `agentrl bench learning` -->", "<!-- the end of the table -->"
RUN_DEADLINE_S = 3600
TASKS, WINDOW, LEVEL = 128, 5, 0.8
CHEAP = (
    "buffer.groups_per_step=4",
    "train.steps=80",
    "eval.every=0",
    f'eval.sets=[{{name="held_out",kwargs={{split="held_out"}},n={TASKS}}}]',
)
LAG_8 = ("buffer.max_lag=8", "rollout.max_running=288", "engine.max_batch=288")
"""As many episodes at once as the bound admits: with fewer, tokens never grow so old."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is changed in the run, and over how many seeds."""

    name: str
    settings: tuple[str, ...] = ()
    seeds: int = 3


FIRST = (
    Configuration("grpo", seeds=5),
    Configuration("ppo", ("algo.kind=ppo",), seeds=5),
    Configuration("ppo, turn", ("algo.kind=ppo", "algo.level=turn"), seeds=5),
    Configuration("ppo, lag 8", ("algo.kind=ppo", *LAG_8), seeds=5),
    Configuration("ppo, lag 0", ("algo.kind=ppo", "buffer.max_lag=0"), seeds=5),
    Configuration("grpo, lag 8", LAG_8, seeds=5),
)
LAST = (
    Configuration("grpo, lag 0", ("buffer.max_lag=0",)),
    Configuration("grpo, outcome alone", ("algo.process_weight=0",)),
    Configuration("grpo, no importance", ("algo.importance=none",)),
)


def configurations() -> list[Configuration]:
    """In order of value; every registered algorithm is among them, `rloo` as `grpo`, whose defaults it has, but for
    `distil`: no teacher knows this task."""
    others = sorted(set(registry.ids("algorithms")) - {"grpo", "ppo", "rloo", "distil"})
    return [*FIRST, *(Configuration(kind, (f"algo.kind={kind}",)) for kind in others), *LAST]


def jobs(chosen: Sequence[Configuration], seeds: Sequence[int] | None) -> list[tuple[Configuration, int]]:
    """The runs, seed after seed, so that what is finished is a fair table; ablations after all others."""
    every = seeds or range(1, max(one.seeds for one in chosen) + 1)
    rounds = [(one, seed) for seed in every for one in chosen if seeds or seed <= one.seeds]
    return sorted(rounds, key=lambda job: job[0] in LAST)


def found(rows: Sequence[Row], configuration: Configuration) -> list[Row]:
    """The rows of a configuration as it is now, by seed: those of other settings are kept, and not compared."""
    settings = [*CHEAP, *configuration.settings]
    return sorted((row for row in rows if row["settings"] == settings), key=lambda row: row["seed"])


def run(configuration: Configuration, seed: int, folder: Path) -> Row:
    """One whole run; its row of the table. Raises CalledProcessError with the run's own message if it fails."""
    settings = [*CHEAP, *configuration.settings]
    words = [word for setting in (f"seed={seed}", *settings) for word in ("--set", setting)]
    program = str(Path(sys.executable).with_name("agentrl"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [program, "train", str(RUN_FILE), "--out", str(folder), *words],
        capture_output=True,
        text=True,
        timeout=RUN_DEADLINE_S,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    held_out = summary["eval"]["sets"]["held_out"]
    return {
        "configuration": configuration.name,
        "seed": seed,
        "settings": settings,
        "code": code(),
        **{when: round(held_out[when]["success"], 4) for when in ("before", "after")},
        **{key: summary[key] for key in ("steps", "episodes", "tokens_trained")},
        "lag_mean": round(statistics.fmean(step["lag_mean"] for step in steps), 2),
        "lag_max": summary["max_lag_seen"],
        "wall_s": round(summary["wall_s"]),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
        "success": [round(step["success_mean"], 3) for step in steps],  # of the episodes of each step
    }


def code() -> str:
    """The last commit of this checkout that touched what a run is made of."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "agentrl", "environments", "tools", "examples"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def smoothed(rates: Sequence[float]) -> list[float]:
    """The mean of the last `WINDOW` rates at each step; fewer at the start."""
    return [statistics.fmean(rates[max(0, at + 1 - WINDOW) : at + 1]) for at in range(len(rates))]


def steps_to(rates: Sequence[float], level: float = LEVEL) -> int | None:
    """After how many steps the smoothed rate is at `level` for the first time; None if it never is."""
    means = smoothed(rates)
    return next((at + 1 for at in range(WINDOW - 1, len(means)) if means[at] >= level), None)


def table(rows: Sequence[Row], chosen: Sequence[Configuration]) -> Iterator[str]:
    """Markdown: a row a configuration, then what was not run."""
    columns = ("configuration", "seeds", "before", "after: median (range)", "steps to 0.8: median (range)")
    columns = (*columns, "lag: mean, most", "wall s", "CPU s")
    yield "| " + " | ".join(columns) + " |"
    yield "|---" * len(columns) + "|"
    missing: list[str] = []
    for one in chosen:
        own = found(rows, one)
        if lacking := sorted(set(range(1, one.seeds + 1)) - {row["seed"] for row in own}):
            which = (
                f"all {one.seeds} seeds"
                if not own
                else f"seed{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))}"
            )
            missing.append(f"{one.name} ({which})")
        if not own:
            continue
        needed = [steps_to(row["success"]) or len(row["success"]) + 1 for row in own]
        steps = [f">{len(own[0]['success'])}" if n > len(own[0]["success"]) else f"{n:g}" for n in spread(needed)]
        after = [f"{share:.3f}" for share in spread([row["after"] for row in own])]
        medians = {key: statistics.median(row[key] for row in own) for key in ("before", "lag_mean", "wall_s", "cpu_s")}
        cells = [
            one.name,
            f"{len(own)} of {one.seeds}",
            f"{medians['before']:.3f}",
            f"{after[1]} ({after[0]} to {after[2]})",
            f"{steps[1]} ({steps[0]} to {steps[2]})",
            f"{medians['lag_mean']:.1f}, {max(row['lag_max'] for row in own)}",
            *(f"{medians[key]:.0f}" for key in ("wall_s", "cpu_s")),
        ]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield f"**Not run:** {', '.join(missing) or 'nothing'}."
    versions = sorted({row["code"] for one in chosen for row in found(rows, one)})
    yield f"Versions of the code: {', '.join(versions) or 'none'}."


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Least, median, most."""
    return min(values), statistics.median(values), max(values)


def plot(rows: Sequence[Row], chosen: Sequence[Configuration], path: Path) -> None:
    """The success of the episodes of each step: the median over the seeds of a configuration, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "agentrl"  # the same file for the same rows
    drawn = [(one, own) for one in chosen if (own := found(rows, one))]
    columns = 3
    height = -(-max(len(drawn), 1) // columns)
    figure, grid = pyplot.subplots(
        height, columns, figsize=(9, 2.2 * height), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(drawn) :]:
        axes.set_visible(False)
    for axes, (one, own) in zip(grid.flat, drawn, strict=False):
        by_step = list(zip(*(smoothed(row["success"]) for row in own), strict=True))
        low, middle, high = zip(*map(spread, by_step), strict=True)
        steps = range(1, len(middle) + 1)
        axes.fill_between(steps, low, high, color="#9bb8d3", alpha=0.5, linewidth=0)
        axes.plot(steps, middle, color="#1f4e79", linewidth=1.5)
        axes.axhline(LEVEL, color="#7f8c8d", linewidth=0.5)
        axes.set_title(f"{one.name} ({len(own)} seed{'s' * (len(own) > 1)})", fontsize=9)
        axes.set_ylim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("optimizer step", fontsize=9)
    figure.supylabel(f"training success, mean of {WINDOW} steps", fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def publish(rows: Sequence[Row], page: Path = PAGE, picture: Path = PLOT) -> None:
    """Write the table into the page, between its marks, and the plot."""
    every = configurations()
    before, rest = page.read_text().split(BEGIN)
    lines = "\n".join(table(rows, every))
    page.write_text(f"{before}{BEGIN}\n\n{lines}\n\n{END}{rest.split(END)[1]}")
    plot(rows, every, picture)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="agentrl bench learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [one.name for one in configurations()]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CONFIGURATION")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 1 to 5, or to 3")
    parser.add_argument("--most-minutes", type=float, default=float("inf"), help="begin no run that may end later")
    parser.add_argument("--out", type=Path, default=HERE / "learning.json")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    began, longest_s, failed = time.monotonic(), 0.0, 0
    for one, seed in jobs([one for one in configurations() if one.name in arguments.only], arguments.seeds):
        if seed in {row["seed"] for row in found(rows, one)}:
            continue
        begins = time.monotonic()
        if begins - began + longest_s >= 60 * arguments.most_minutes:
            break
        with tempfile.TemporaryDirectory(prefix="agentrl-learning-") as scratch:
            try:
                rows.append(run(one, seed, Path(scratch) / "run"))
            except subprocess.CalledProcessError as error:
                failed += 1
                print(f"{one.name}, seed {seed} failed:\n{error.stderr[-2000:]}", file=sys.stderr, flush=True)
                continue
        longest_s = max(longest_s, time.monotonic() - begins)
        lines = ",\n".join(json.dumps(row) for row in rows)
        arguments.out.write_text(f"[\n{lines}\n]\n")
        print(
            json.dumps({key: value for key, value in rows[-1].items() if key not in ("settings", "success")}),
            flush=True,
        )
    publish(rows)
    sys.exit(f"{failed} runs failed" if failed else 0)


if __name__ == "__main__":
    main()
