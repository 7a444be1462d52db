"""Does it learn, and with what? The tiny coder's run with each algorithm, bound on staleness and ablation, over seeds.

    agentrl bench learning                                    what is not in learning.json yet, seed after seed
    agentrl bench learning --only grpo "ppo, turn" --seeds 1 2 --most-minutes 60
    agentrl bench learning --jobs 8 --most-minutes 9          eight at once, each on its cores, over after nine minutes
    agentrl bench learning --most-minutes 0                   no run: only write page and plot anew

A run is examples/tiny_coder.toml by `agentrl train` with everything in it: sandboxed tests, engine, worker, learner. It
is made cheap by what does not make it easier: 4 groups a step instead of 16, and one held-out set. Success is the share
of held-out tasks solved within the episode's turns, sampled as in training (temperature 1).

Each finished run adds a row to learning.json. A run that is there with the same settings is not made again, so a table
may grow over days; a run that fails is told and left out. Writes the table of learning.md and docs/images/learning.svg.
With `--set train.device=cuda`, and others that belong to a machine and not to what is learned, the row says so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _page import write_between

from agentrl import registry

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RUN_FILE = ROOT / "examples" / "tiny_coder.toml"
PAGE, PLOT = HERE / "learning.md", ROOT / "docs" / "images" / "learning.svg"
BEGIN, END = "<!-- the table, by `agentrl bench learning` -->", "<!-- the end of the table -->"
RUN_DEADLINE_S = 3600
END_S = 30  # for a run that is ended to end its processes
LOOK_S = 0.1  # between two looks at the runs
TASKS, WINDOW, LEVEL = 128, 5, 0.8
CHEAP = (
    "buffer.groups_per_step=4",
    "train.steps=80",
    "eval.every=0",
    "buffer.skip_without_signal=false",
    f'eval.sets=[{{name="held_out",kwargs={{split="held_out"}},n={TASKS}}}]',
)
LAG_8 = ("buffer.max_lag=8", "rollout.max_running=288", "engine.max_batch=288")
"""As many episodes at once as the bound admits: with fewer, tokens never grow so old."""

SICK_BELOW = 0.35
"""The untrained policy solves about 0.49 of 128 tasks, with a deviation of 0.044. If it solves less than this, the
machine was too busy for the tests of the others: these then run into their deadline."""
OF_THE_MACHINE = ("train.device", "train.threads", "engine.threads", "env.kwargs.sandbox")
"""Settings that `--set` may change: a policy learns the same with them."""

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
    Configuration("grpo, dynamic sampling", ("buffer.skip_without_signal=true",), seeds=5),
)
LAST = (
    Configuration("grpo, lag 8, clip from proximal", ("algo.clip_from=proximal", *LAG_8)),
    Configuration("ppo, lag 8, clip from proximal", ("algo.kind=ppo", "algo.clip_from=proximal", *LAG_8)),
    Configuration("grpo, lag 0", ("buffer.max_lag=0",)),
    Configuration("grpo, outcome alone", ("algo.process_weight=0",)),
    Configuration("grpo, no importance", ("algo.importance=none",)),
    Configuration("grpo, 2 ranks", ("train.parallel.ranks=2",), seeds=2),
    Configuration("grpo, context 2", ("train.parallel.ranks=2", "train.parallel.context=2"), seeds=1),
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


@dataclass(slots=True)
class Run:
    """One whole run in a process of its own: `agentrl train`, writing into `folder`."""

    configuration: Configuration
    seed: int
    on: dict[str, Any]  # the machine, as it stands in the row
    folder: Path
    process: subprocess.Popen[bytes]
    began: float
    cores: Sequence[int]  # that it shares with no other run; none: all
    cpu_s: float = 0.0

    @classmethod
    def start(
        cls, configuration: Configuration, seed: int, on: dict[str, Any], folder: Path, cores: Sequence[int]
    ) -> Run:
        settings = [f"seed={seed}", *CHEAP, *configuration.settings, *on["settings"]]
        words = [word for setting in settings for word in ("--set", setting)]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [*PROGRAM, "train", str(RUN_FILE), "--out", str(folder / "run"), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # Ctrl-C is for this process, which ends its runs
            )
        if cores:
            os.sched_setaffinity(process.pid, cores)  # before it has children or threads
        return cls(configuration, seed, on, folder, process, time.monotonic(), cores)

    def ended(self) -> bool:
        """Whether it is over; it is ended here if it is too long."""
        if time.monotonic() - self.began > RUN_DEADLINE_S:
            self.process.kill()
        pid, status, used = os.wait4(self.process.pid, os.WNOHANG)
        if pid:
            self.process.returncode = os.waitstatus_to_exitcode(status)
            self.cpu_s = used.ru_utime + used.ru_stime  # of all processes that it waited for, too
        return bool(pid)

    def row(self) -> Row:
        """Its row of the table. Raises RuntimeError with the run's own last words if it failed."""
        if self.process.returncode:
            raise RuntimeError((self.folder / "output").read_text(errors="replace")[-2000:])
        summary = json.loads((self.folder / "run" / "summary.json").read_text())
        lines = [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if line["kind"] == "step"]
        held_out = summary["eval"]["sets"]["held_out"]
        if (before := held_out["before"]["success"]) < SICK_BELOW:
            raise RuntimeError(f"the untrained policy solved only {before:.2f}: this machine is too busy for --jobs")
        return {
            "configuration": self.configuration.name,
            "seed": self.seed,
            "settings": [*CHEAP, *self.configuration.settings],
            "on": self.on,
            "code": code(),
            **{when: round(held_out[when]["success"], 4) for when in ("before", "after")},
            **{key: summary[key] for key in ("steps", "episodes", "tokens_trained")},
            "lag_mean": round(statistics.fmean(step["lag_mean"] for step in steps), 2),
            "lag_max": summary["max_lag_seen"],
            "wall_s": round(summary["wall_s"]),
            "cpu_s": round(self.cpu_s),
            **{key: sum(step[key] for step in steps) for key in ("groups_skipped", "groups_without_signal")},
            "success": [round(step["success_mean"], 3) for step in steps],  # of the episodes of each step
        }


PROGRAM = (sys.executable, "-c", "from agentrl_command import main; main()")


def play(
    chosen: Sequence[tuple[Configuration, int]],
    on: dict[str, Any],
    most_s: float,
    ended: Callable[[Run], None],
) -> None:
    """Make the runs, `on["jobs"]` at once; `ended` gets each that is over. After `most_s` seconds those that go on are
    ended, and none begins that would be if it takes as long as the longest. However this returns, no run is left."""
    began, longest_s = time.monotonic(), 0.0
    waiting, running = list(chosen), list[Run]()
    free = shares(sorted(os.sched_getaffinity(0)), on["jobs"])
    with tempfile.TemporaryDirectory(prefix="agentrl-learning-", ignore_cleanup_errors=True) as scratch:
        try:
            while waiting or running:
                now = time.monotonic() - began
                if now + longest_s >= most_s:
                    waiting.clear()
                if now >= most_s:
                    return
                while waiting and free:
                    folder = Path(tempfile.mkdtemp(dir=scratch))
                    running.append(Run.start(*waiting.pop(0), on, folder, free.pop()))
                for one in [one for one in running if one.ended()]:
                    running.remove(one)
                    free.append(one.cores)
                    longest_s = max(longest_s, time.monotonic() - one.began)
                    ended(one)
                time.sleep(LOOK_S)
        finally:
            end(running)


def shares(cores: Sequence[int], jobs: int) -> list[Sequence[int]]:
    """The cores of each of several runs at once, none of which then slows another; no cores where there are fewer than
    runs, or a single run, which may have all."""
    each = len(cores) // jobs if jobs > 1 else 0
    return [cores[at * each : (at + 1) * each] for at in range(jobs)]


def end(running: Sequence[Run]) -> None:
    """End these runs, which end their own processes."""
    for one in running:
        one.process.terminate()
    until = time.monotonic() + END_S
    for one in running:
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.0, until - time.monotonic()))
        one.process.kill()
        one.process.wait()


def code() -> str:
    """The last commit of this checkout that touched what a run is made of; "unknown" for a copy without its history."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "agentrl", "environments", "tools", "examples"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return "unknown"


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
    shown = [row for one in chosen for row in found(rows, one)]
    yield f"Versions of the code: {', '.join(sorted({row['code'] for row in shown})) or 'none'}."
    machines = Counter(machine(row) for row in shown)
    yield f"Machines: {'; '.join(f'{name} ({count} runs)' for name, count in machines.items()) or 'none'}."


def machine(row: Row) -> str:
    """Where a run was made, in words."""
    on = row.get("on") or {"cores": 2, "jobs": 1, "settings": []}
    return ", ".join([f"{on['cores']} cores, {on['jobs']} at once", *on["settings"]])


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
    write_between(page, BEGIN, END, table(rows, every))
    plot(rows, every, picture)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="agentrl bench learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [one.name for one in configurations()]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CONFIGURATION")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 1 to 5, or to 3")
    parser.add_argument("--most-minutes", type=float, default=float("inf"), help="then end; begin none that may not")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once: a run keeps about two cores busy")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=", ".join(OF_THE_MACHINE))
    parser.add_argument("--out", type=Path, default=HERE / "learning.json")
    parser.add_argument("--code", help="the commit, for a copy of the checkout without its history")
    arguments = parser.parse_args()
    if others := [one for one in arguments.set if one.partition("=")[0] not in OF_THE_MACHINE]:
        parser.error(f"--set {others[0]}: a row would be of another run; known: {', '.join(OF_THE_MACHINE)}")
    rows: list[Row] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    on = {"cores": len(os.sched_getaffinity(0)), "jobs": arguments.jobs, "settings": arguments.set}
    failed: list[Run] = []

    def ended(one: Run) -> None:
        try:
            rows.append(one.row() | ({"code": arguments.code} if arguments.code else {}))
        except RuntimeError as error:
            failed.append(one)
            print(f"{one.configuration.name}, seed {one.seed} failed:\n{error}", file=sys.stderr, flush=True)
            return
        lines = ",\n".join(json.dumps(row) for row in rows)
        arguments.out.write_text(f"[\n{lines}\n]\n")
        said = {key: value for key, value in rows[-1].items() if key not in ("settings", "success")}
        print(json.dumps(said), flush=True)

    chosen = jobs([one for one in configurations() if one.name in arguments.only], arguments.seeds)
    missing = [(one, seed) for one, seed in chosen if seed not in {row["seed"] for row in found(rows, one)}]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    play(missing, on, 60 * arguments.most_minutes, ended)
    publish(rows)
    sys.exit(f"{len(failed)} runs failed" if failed else 0)


if __name__ == "__main__":
    main()
