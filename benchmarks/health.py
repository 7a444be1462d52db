"""Which advice `agentrl health` gives on runs with one injected fault, and on healthy ones.

    agentrl bench health                  made runs: each fault, and 24 healthy seeds; the recorded run
    agentrl bench health runs/a runs/b    and these healthy runs, which were trained

The result is printed as the tables of benchmarks/health.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _health_runs import FAULTS, Fault, MadeRun, broken, healthy

from agentrl.run.health.advice import Advice
from agentrl.run.health.examine import examine
from agentrl.run.health.run_facts import RECENT, facts_of
from agentrl.run.run_folder import RunDir
from agentrl.view.recorded_run import recorded_run

_SEED, _HEALTHY, _LATER = 11, 24, 8


def table_of_faults(folder: Path) -> list[str]:
    """A line for each fault: after how many steps its advice came, what else was said until then, and the figures."""
    rows = [
        "| fault | what is done | advice | after steps | said before | figures |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    before, right = healthy(folder / "before", _SEED), 0
    for at, fault in enumerate(FAULTS):
        after, others, named = _course(before, folder / str(at), fault)
        right += named is not None
        figures, said = "" if named is None else named.evidence, ", ".join(others) or "-"
        rows.append(f"| {fault.name} | {fault.what} | `{fault.named}` | {after or '-'} | {said} | {figures} |")
    before.close()
    return [
        f"{right} of {len(FAULTS)} faults are named within {RECENT} steps, each by its own advice alone.",
        "",
        *rows,
    ]


def _course(before: MadeRun, folder: Path, fault: Fault) -> tuple[int, list[str], Advice | None]:
    with broken(before, folder, fault) as made:
        said: list[Sequence[Advice]] = []
        for _ in range(RECENT):
            made.step()
            said.append(made.advice())
    names = [[one.name for one in advice] for advice in said]
    after = next((k for k, found in enumerate(names, 1) if found == [fault.named]), 0)
    others = sorted({f"`{name}`" for found in names for name in found} - {f"`{fault.named}`"})
    return after, others, said[-1][0] if names[-1] == [fault.named] else None


def table_of_healthy(folder: Path, trained: Sequence[Path]) -> list[str]:
    """A line for each kind of healthy run: how many there are, how often they were judged, what was said."""
    rows = ["| healthy runs | runs | times judged | advice |", "| --- | --- | --- | --- |"]
    said: list[str] = []
    for seed in range(_HEALTHY):
        made = healthy(folder / f"healthy-{seed}", seed)
        for _ in range(_LATER):
            made.step()
            said += [f"{advice.name} (seed {seed}, step {made.at})" for advice in made.advice()]
        made.close()
    rows.append(f"| made, one seed each | {_HEALTHY} | {_HEALTHY * _LATER} | {', '.join(said) or 'none'} |")
    with recorded_run() as recorded:
        for name, paths in (("recorded: the tiny coder", [recorded]), ("trained", trained)):
            heard = [
                f"{advice.name} ({path.name})" for path in paths for advice in examine(facts_of(RunDir.open(path)))
            ]
            if paths:
                rows.append(f"| {name} | {len(paths)} | {len(paths)} | {', '.join(heard) or 'none'} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="agentrl bench health", description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path, help="healthy runs that were trained")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = [*table_of_faults(Path(folder)), "", *table_of_healthy(Path(folder), arguments.runs)]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
