"""`agentrl chaos`: injects faults into a run, reports their cost, compares the result with that of a quiet run.

So that the run's disk can be full, the command starts itself once more in a mount namespace of its own (bubblewrap), in
which a small tmpfs lies over the run's folder; what the run wrote is copied out at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.errors import RunFailed, UsageError
from agentrl.testing.chaos_run import EVERY, LEFT_OUT, ChaosReport, ChaosRun, Fault

_DISK = "AGENTRL_CHAOS_DISK"  # a descriptor of the folder that lies under the small disk
_MAIN = (sys.executable, "-c", "from agentrl.cli import main; main()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurts:
    """What `agentrl chaos` was asked for. `only` names faults, as `kill:worker`; without any, all are tried."""

    file: Path
    out: Path
    faults: int
    seed: int
    every_s: float
    only: tuple[str, ...]
    settings: tuple[str, ...]
    compare: bool

    @property
    def among(self) -> list[Fault]:
        """The faults that `only` names. Raises UsageError for one that does not exist."""
        known = {str(fault): fault for fault in EVERY}
        for name in self.only:
            if name not in known:
                raise UsageError(f"--only {name}: there is no such fault; known: {', '.join(known)}")
        return [known[name] for name in self.only]

    @property
    def words(self) -> list[str]:
        """The arguments of `agentrl train`."""
        return [str(self.file), *(word for setting in self.settings for word in ("--set", setting))]


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
        with closing(sqlite3.connect(f"file:{run / 'store.sqlite'}?mode=ro", uri=True)) as db:
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
    _check_free(what.out)
    what.out.mkdir(parents=True)
    below = os.open(what.out, os.O_DIRECTORY)
    try:
        disk = ["--dev-bind", "/", "/", "--size", str(disk_mb << 20), "--tmpfs", str(what.out.resolve())]
        command = [bwrap, *disk, "--die-with-parent", "--", *_MAIN, *sys.argv[1:]]
        return subprocess.run(command, pass_fds=[below], env={**os.environ, _DISK: str(below)}, check=False).returncode
    finally:
        os.close(below)


def hurt(what: Hurts, console: Console) -> bool:
    """Run it under faults and print the results. Returns whether the run ended well and every audit was clean. To
    compare, the same run is repeated without faults at `OUT-quiet`."""
    below = os.environ.pop(_DISK, None)
    if below is None:
        _check_free(what.out)
    chaos = ChaosRun(what.words, what.out, faults=what.faults, seed=what.seed, every_s=what.every_s, among=what.among)
    try:
        report = chaos.run(lambda line: console.print(line, markup=False, highlight=False))
    finally:
        if below is not None:
            shutil.copytree(what.out, f"/proc/self/fd/{below}", dirs_exist_ok=True)
    console.print(_table(report))
    for what_not, why in LEFT_OUT.items():
        console.print(f"left out: {what_not}: {why}", markup=False, highlight=False)
    for line in (*report.violations, *(f"left behind: {one}" for one in report.left)):
        console.print(line, style="bold red", markup=False, highlight=False)
    console.print(f"exit status {report.status} after {report.wall_s:.0f} s", highlight=False)
    quiet = what.out.with_name(f"{what.out.name}-quiet") if what.compare else None
    if quiet is not None:
        run = [*_MAIN, "train", *what.words, "--out", str(quiet)]
        if subprocess.run(run, stdout=subprocess.DEVNULL, check=False).returncode:
            raise RunFailed(f"the undisturbed run failed; read {quiet / 'logs'}")
    if report.status == 0:
        for line in cost(report, what.out, quiet):
            console.print(line, markup=False, highlight=False)
    return report.ok


def cost(report: ChaosReport, run: Path, quiet: Path | None) -> list[str]:
    """What the faults cost, one line each: held-out success, training time that was useful, tokens.

    Useful is the time that the same steps take undisturbed: in the quiet run, else at this run's own median pace."""
    pace, n = Pace.of(run), max(1, len(report.outcomes))
    calm = pace if quiet is None else Pace.of(quiet)
    step_s = pace.step_s if quiet is None else calm.train_s / calm.steps
    useful_s = min(pace.train_s, pace.steps * step_s)
    lost_s = (pace.train_s - useful_s) / n
    whose = "its own median step" if quiet is None else "the undisturbed run"
    kills = [one for one in report.outcomes if one.fault.kind in ("kill", "stop")]
    lines = [f"held-out success: {_success(run)}"]
    if quiet is not None:
        lines.append(f"held-out success, undisturbed: {_success(quiet)}")
    lines.append(
        f"effective training time: {useful_s / pace.train_s:.2f} ({useful_s:.0f} useful of {pace.train_s:.0f} s, by"
        f" {whose}); {lost_s:.1f} s lost a fault, so {max(0.0, 1 - lost_s / 60):.2f} at one fault a minute"
    )
    if kills:
        left, stake = [one.tokens_lost for one in kills], fmean(one.at_stake for one in kills)
        lines.append(
            f"tokens left behind by a kill or a hang: {fmean(left):.1f} in the mean, {max(left)} at most; a restart of"
            f" the unfinished groups would have left {stake:.0f}"
        )
    return lines


def _check_free(out: Path) -> None:
    if out.exists():
        raise UsageError(f"{out} is there already: give another --out, or remove it")


def _table(report: ChaosReport) -> Table:
    table = Table("at", "fault", "part", "advanced after", "tokens left behind", "at stake", "audit", "proof")
    for one in report.outcomes:
        table.add_row(
            f"{one.at_s:.0f} s",
            one.fault.kind,
            one.fault.part,
            f"{one.recovery_s:.1f} s",
            str(one.tokens_lost),
            str(one.at_stake),
            escape("; ".join(one.violations)) or "clean",
            one.proof,
        )
    return table


def _success(run: Path) -> str:
    """The success on each held-out set after the last step."""
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    sets: dict[str, Any] = summary["eval"]["sets"]
    after = {name: result["after"] for name, result in sets.items()}
    return ", ".join(f"{name} {result['success']:.3f}" for name, result in after.items() if result) or "not measured"
