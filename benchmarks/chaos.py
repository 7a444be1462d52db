"""Chaos: hurts a run from outside by a seed, audits it, reports what the faults cost.

    agentrl bench chaos RUN.toml [--faults 10] [--seed 0] [--every-s 60] [--only kill:worker ...] [--compare]

`--compare` repeats the run without faults, `--restart-groups` hurts it once more with interrupted groups started anew.
So that the run's disk can be full, the script starts itself once more in a mount namespace of its own (bubblewrap), in
which a small tmpfs lies over the run's folder; what the run wrote is copied out at the end. Exit status 1 if a law does
not hold.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the parts of the tests

from agentrl.config import RunConfig, load
from agentrl.errors import RunFailed, UsageError
from tests.parts import store_rows
from tests.parts.chaos_run import EVERY, LEFT_OUT, ChaosReport, ChaosRun, Fault, lacks

_DISK = "AGENTRL_CHAOS_DISK"  # a descriptor of the folder that lies under the small disk
_MAIN = (sys.executable, "-c", "from agentrl.cli.main import main; main()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurts:
    """The command line. `only` names faults, as `kill:worker`; without any, all are tried."""

    file: Path
    out: Path
    faults: int
    seed: int
    every_s: float
    only: tuple[str, ...]
    settings: tuple[str, ...]
    compare: bool
    restart_groups: bool = False
    restart_database: str = ""

    @property
    def among(self) -> list[Fault]:
        """The faults that `only` names. Raises UsageError for one that does not exist."""
        known = {str(fault): fault for fault in EVERY}
        for name in self.only:
            if name not in known:
                raise UsageError(f"--only {name}: there is no such fault; known: {', '.join(known)}")
        return [known[name] for name in self.only]

    def check(self, config: RunConfig, disk_mb: int) -> None:
        """Raises UsageError for a fault that a run with this configuration cannot have, and says what it lacks."""
        document, small = config.model_dump(mode="json"), bool(disk_mb) and shutil.which("bwrap") is not None
        for fault in self.among:
            if lack := lacks(fault, document, small=small, restarts=bool(self.restart_database)):
                raise UsageError(f"--only {fault}: {lack}")
        restart = Fault(kind="restart", part="database")
        if self.restart_database and (lack := lacks(restart, document, small=small, restarts=True)):
            raise UsageError(f"--restart-database: {lack}, or leave it out")

    @property
    def runs(self) -> dict[str, TrainingRun]:
        """The runs to hurt, by what an interrupted episode goes on from."""
        groups = TrainingRun(self, self.out, "group")
        if not self.restart_groups:
            return {"as configured": TrainingRun(self, self.out)}
        if not self.compare:
            return {"from its group's start": groups}
        beside = self.out.with_name(f"{self.out.name}-groups")
        return {
            "from its tokens": TrainingRun(self, self.out, "tokens"),
            "from its group's start": TrainingRun(self, beside, "group"),
        }

    @property
    def quiet(self) -> TrainingRun | None:
        """The undisturbed run, to compare with."""
        return TrainingRun(self, self.out.with_name(f"{self.out.name}-quiet")) if self.compare else None


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One run of what was asked for, in its folder `out`."""

    what: Hurts
    out: Path
    resume: str = ""

    @property
    def words(self) -> list[str]:
        """The arguments of `agentrl train`."""
        settings = (*self.what.settings, *([f"rollout.resume={self.resume}"] if self.resume else ()))
        return [str(self.what.file), *(word for setting in settings for word in ("--set", setting))]


@dataclass(frozen=True, slots=True)
class Pace:
    """How a run trained: `steps` in `train_s` seconds from its first process to its last step, with `step_s` seconds
    between two steps in the median."""

    steps: int
    train_s: float
    step_s: float

    @classmethod
    def of(cls, run: Path) -> Pace:
        """Read it from a store."""
        with closing(store_rows.opened(store_rows.place(run))) as db:
            rows = "SELECT time_s FROM metrics WHERE kind = 'step' AND undone_attempt IS NULL ORDER BY step"
            ends = [at for (at,) in db.execute(rows)]
            meta: dict[str, str] = dict(db.execute("SELECT key, value FROM meta WHERE key LIKE 'train_%_s'"))
        train_s = float(meta["train_ended_s"]) - float(meta["train_started_s"])
        gaps = [after - before for before, after in pairwise(ends)]
        return cls(len(ends), train_s, median(gaps) if gaps else train_s)


def on_a_small_disk(what: Hurts, disk_mb: int) -> int | None:
    """Start this command once more with the run's folder on a disk of its own. Returns its exit status, None if that is
    not wanted, or if this is that command."""
    wanted = disk_mb and (not what.only or "full:disk" in what.only) and _DISK not in os.environ
    bwrap = shutil.which("bwrap")
    if not wanted or bwrap is None:
        return None
    outs = [run.out for run in what.runs.values()]
    below: list[int] = []
    try:
        for out in outs:
            _check_free(out)
            out.mkdir(parents=True)
            below.append(os.open(out, os.O_DIRECTORY))
        disks = [word for out in outs for word in ("--size", str(disk_mb << 20), "--tmpfs", str(out.resolve()))]
        again = [sys.executable, __file__, *sys.argv[1:]]
        command = [bwrap, "--dev-bind", "/", "/", *disks, "--die-with-parent", "--", *again]
        env = {**os.environ, _DISK: " ".join(map(str, below))}
        return subprocess.run(command, pass_fds=below, env=env, check=False).returncode
    finally:
        for folder in below:
            os.close(folder)


def hurt(what: Hurts, console: Console) -> bool:
    """Run it under faults and print the results. Returns whether each run ended well and every audit was clean. To
    compare, the same run is repeated without faults at `OUT-quiet`."""
    below = os.environ.pop(_DISK, "").split()
    runs, quiet = what.runs, what.quiet
    for run in () if below else runs.values():
        _check_free(run.out)
    reports = dict[str, ChaosReport]()
    for at, (how, run) in enumerate(runs.items()):
        if len(runs) > 1:
            console.print(f"an interrupted episode goes on {how}", highlight=False)
        reports[how] = _hurt_one(run, Path(f"/proc/self/fd/{below[at]}") if below else None, console)
    if quiet is not None:
        argv = [*_MAIN, "train", *quiet.words, "--out", str(quiet.out)]
        if subprocess.run(argv, stdout=subprocess.DEVNULL, check=False).returncode:
            raise RunFailed(f"the undisturbed run failed; read {quiet.out / 'logs'}")
    ended = {how: report for how, report in reports.items() if report.status == 0}
    costs = [Cost.of(how, report, runs[how].out, quiet and quiet.out) for how, report in ended.items()]
    for cost in costs:
        for line in cost.lines(titled=len(runs) > 1):
            console.print(line, markup=False, highlight=False)
    if quiet is not None:
        console.print(compared(costs, quiet.out))
    return all(report.ok for report in reports.values())


def _hurt_one(run: TrainingRun, below: Path | None, console: Console) -> ChaosReport:
    """Hurt one run, and bring what it wrote out of its small disk into `below`."""
    what = run.what
    chaos = ChaosRun(run.words, run.out, faults=what.faults, seed=what.seed, every_s=what.every_s, among=what.among)
    chaos.restart = what.restart_database
    try:
        report = chaos.run(lambda line: console.print(line, markup=False, highlight=False))
    finally:
        if below is not None:
            shutil.copytree(run.out, below, dirs_exist_ok=True)
    console.print(_table(report))
    for what_not, why in LEFT_OUT.items():
        console.print(f"left out: {what_not}: {why}", markup=False, highlight=False)
    for line in (*report.violations, *(f"left behind: {leftover}" for leftover in report.left)):
        console.print(line, style="bold red", markup=False, highlight=False)
    console.print(f"exit status {report.status} after {report.wall_s:.0f} s", highlight=False)
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the faults cost a run whose interrupted episodes go on `how`: held-out success, training time that was
    useful, tokens left behind (`abandoned` of `tokens` in all).

    Useful is the time that the same steps take undisturbed: in the quiet run, else at this run's own median pace
    (`whose`). `left` and `stake` are tokens at each kill or hang."""

    how: str
    success: str
    train_s: float
    useful_s: float
    whose: str
    faults: int
    left: tuple[int, ...]
    stake: tuple[int, ...]
    tokens: int
    abandoned: int

    @classmethod
    def of(cls, how: str, report: ChaosReport, run: Path, quiet: Path | None) -> Cost:
        """Measure it from the stores."""
        pace = Pace.of(run)
        calm = pace if quiet is None else Pace.of(quiet)
        step_s = pace.step_s if quiet is None else calm.train_s / calm.steps
        kills = [outcome for outcome in report.outcomes if outcome.fault.kind in ("kill", "stop")]
        return cls(
            how=how,
            success=_success(run),
            train_s=pace.train_s,
            useful_s=min(pace.train_s, pace.steps * step_s),
            whose="its own median step" if quiet is None else "the undisturbed run",
            faults=len(report.outcomes),
            left=tuple(kill.tokens_lost for kill in kills),
            stake=tuple(kill.at_stake for kill in kills),
            tokens=report.tokens,
            abandoned=report.abandoned,
        )

    @property
    def share(self) -> float:
        """Effective training time: the useful part."""
        return self.useful_s / self.train_s

    @property
    def lost_s(self) -> float:
        """Seconds a fault."""
        return (self.train_s - self.useful_s) / max(1, self.faults)

    @property
    def a_minute(self) -> float:
        """The effective training time at one such fault a minute."""
        return max(0.0, 1 - self.lost_s / 60)

    def lines(self, *, titled: bool) -> list[str]:
        """One line each."""
        lines = [f"an interrupted episode went on {self.how}:"] if titled else []
        lines += [
            f"held-out success: {self.success}",
            f"effective training time: {self.share:.2f} ({self.useful_s:.0f} useful of {self.train_s:.0f} s, by"
            f" {self.whose}); {self.lost_s:.1f} s lost a fault, so {self.a_minute:.2f} at one fault a minute",
        ]
        if self.left:
            lines.append(
                f"tokens left behind by a kill or a hang: {fmean(self.left):.1f} in the mean, {max(self.left)} at most;"
                f" {fmean(self.stake):.0f} were at stake in unfinished groups"
            )
        return lines


def compared(costs: Sequence[Cost], quiet: Path) -> Table:
    """The hurt runs beside the undisturbed one."""
    table = Table("an interrupted episode goes on", "held-out success", "effective time", "lost a fault", "tokens lost")
    table.add_row("(no faults)", _success(quiet), "1.00", "", "")
    for cost in costs:
        lost = f"{cost.abandoned} of {cost.tokens}"
        table.add_row(cost.how, cost.success, f"{cost.share:.2f}", f"{cost.lost_s:.1f} s", lost)
    return table


def _check_free(out: Path) -> None:
    if out.exists():
        raise UsageError(f"{out} is there already: give another --out, or remove it")


def _table(report: ChaosReport) -> Table:
    table = Table("at", "fault", "part", "advanced after", "tokens left behind", "at stake", "audit", "proof")
    for outcome in report.outcomes:
        table.add_row(
            f"{outcome.at_s:.0f} s",
            outcome.fault.kind,
            outcome.fault.part,
            f"{outcome.recovery_s:.1f} s",
            str(outcome.tokens_lost),
            str(outcome.at_stake),
            escape("; ".join(outcome.violations)) or "clean",
            outcome.proof,
        )
    return table


def _success(run: Path) -> str:
    """The success on each held-out set after the last step."""
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    sets: dict[str, Any] = summary["eval"]["sets"]
    after = {name: result["after"] for name, result in sets.items()}
    return ", ".join(f"{name} {result['success']:.3f}" for name, result in after.items() if result) or "not measured"


def main(words: Sequence[str] | None = None) -> int:
    """Hurt the run that the command line names. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="agentrl bench chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the run file (TOML)")
    parser.add_argument("--faults", type=int, default=10, help="how often the run is hurt")
    parser.add_argument("--seed", type=int, default=0, help="decides the faults and their times")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="the run's folder")
    parser.add_argument("--every-s", type=float, default=60.0, help="mean seconds between two faults")
    parser.add_argument("--only", action="append", default=[], help="only this fault, as kill:worker; may be repeated")
    parser.add_argument("--disk-mb", type=int, default=512, help="size of the disk that is filled; 0: none is")
    parser.add_argument("--compare", action="store_true", help="run it undisturbed as well, and show both")
    parser.add_argument("--restart-groups", action="store_true", help="interrupted groups start anew")
    parser.add_argument("--restart-database", default="", help="the command that restarts the run's PostgreSQL server")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="override a setting")
    chosen = vars(parser.parse_args(words))
    disk_mb: int = chosen.pop("disk_mb")
    hurts = Hurts(**{**chosen, "only": tuple(chosen["only"]), "settings": tuple(chosen["settings"])})
    config = load(hurts.file, hurts.settings)  # before anything is made: a mistyped setting leaves no folder behind
    if not 0 < hurts.every_s < math.inf:
        raise UsageError(f"--every-s {hurts.every_s:g}: must be a number of seconds above 0, such as 60")
    hurts.check(config, disk_mb)
    status = on_a_small_disk(hurts, disk_mb)
    if status is None:
        status = 0 if hurt(hurts, Console()) else 1
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RunFailed, UsageError) as error:
        sys.exit(f"chaos: {error}")
