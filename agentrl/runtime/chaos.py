"""`agentrl chaos`: injects faults into a run, reports their cost, compares the result with that of a quiet run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.errors import RunFailed, UsageError
from agentrl.testing.chaos_run import LEFT_OUT, ChaosReport, ChaosRun


def hurt(
    file: Path, out: Path, faults: int, seed: int, every_s: float, settings: list[str], compare: bool, console: Console
) -> bool:
    """Run `file` at `out` under this many faults and print the results. Returns whether the run ended well and every
    audit was clean. With `compare` the same run is repeated without faults at `OUT-quiet`."""
    if out.exists():
        raise UsageError(f"{out} is there already: give another --out, or remove it")
    words = [str(file), *(word for setting in settings for word in ("--set", setting))]
    report = ChaosRun(words, out, faults=faults, seed=seed, every_s=every_s).run(
        lambda line: console.print(line, markup=False, highlight=False)
    )
    console.print(_table(report))
    for what, why in LEFT_OUT.items():
        console.print(f"left out: {what}: {why}", markup=False, highlight=False)
    for line in (*report.violations, *(f"left behind: {one}" for one in report.left)):
        console.print(line, style="bold red", markup=False, highlight=False)
    console.print(f"exit status {report.status} after {report.wall_s:.0f} s", highlight=False)
    if report.status == 0:
        console.print(f"success: {_success(out)}", markup=False, highlight=False)
    if compare:
        quiet = out.with_name(f"{out.name}-quiet")
        main = [sys.executable, "-c", "from agentrl.cli import main; main()", "train", *words, "--out", str(quiet)]
        if subprocess.run(main, stdout=subprocess.DEVNULL, check=False).returncode:
            raise RunFailed(f"the undisturbed run failed; read {quiet / 'logs'}")
        console.print(f"success, undisturbed: {_success(quiet)}", markup=False, highlight=False)
    return report.ok


def _table(report: ChaosReport) -> Table:
    table = Table("at", "fault", "part", "advanced after", "tokens left behind", "audit")
    for one in report.outcomes:
        table.add_row(
            f"{one.at_s:.0f} s",
            one.fault.kind,
            one.fault.part,
            f"{one.recovery_s:.1f} s",
            str(one.tokens_lost),
            escape("; ".join(one.violations)) or "clean",
        )
    return table


def _success(run: Path) -> str:
    """The success on each held-out set after the last step."""
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    sets: dict[str, Any] = summary["eval"]["sets"]
    after = {name: result["after"] for name, result in sets.items()}
    return ", ".join(f"{name} {result['success']:.3f}" for name, result in after.items() if result) or "not measured"
