"""The run store's calls with 1,000 to 1,000,000 ended episodes behind them: CPU of this process, journal included.

    agentrl bench store [--episodes 1000 100000 1000000] [--running 4000] [--rounds 5] [--folder DIR] [--out FILE.json]

Each store gets its history by SQL (see `_store_rows`), then `--running` episodes that are claimed and under way, and a
few steps' worth of groups that wait for the learner. Each call is made `--rounds` times; its figure is the median CPU
time; waiting for the disk is not in it. The million takes 3 GB of disk and a minute.
Prints the table of store.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _store_run import CHUNK, Run

from agentrl.store import RunStore


def measure(sizes: list[int], *, running: int, rounds: int, folder: Path) -> dict[int, dict[str, float]]:
    """Median CPU milliseconds of each call, by ended episodes. The stores take turns, so that a slow minute of the
    machine hits all of them."""
    with ExitStack() as stack:
        stores = {size: stack.enter_context(RunStore.create(folder / f"{size}.sqlite", "{}")) for size in sizes}
        waiting = (rounds + 1) * CHUNK + 1000
        calls = {size: Run(store, size, running=running, waiting=waiting).calls() for size, store in stores.items()}
        found: dict[int, dict[str, float]] = {size: {} for size in sizes}
        for name in calls[sizes[0]]:
            spent: dict[int, list[float]] = {size: [] for size in sizes}
            for size in rounds * sizes:
                began = time.process_time()
                calls[size][name]()
                spent[size].append(1000 * (time.process_time() - began))
            for size in sizes:
                found[size][name] = statistics.median(spent[size])
    return found


def table(figures: dict[int, dict[str, float]]) -> str:
    """Calls by row, stores by column, and the ratio of the largest to the smallest store."""
    sizes = sorted(figures)
    lines = [
        f"| ms of CPU | {' | '.join(f'{size:,}' for size in sizes)} | ratio |",
        "|---|" + "---|" * (len(sizes) + 1),
    ]
    for name in figures[sizes[0]]:
        values = [figures[size][name] for size in sizes]
        shown = " | ".join(f"{value:.2f}" for value in values)
        lines.append(f"| {name} | {shown} | {values[-1] / max(values[0], 1e-9):.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--running", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to make the stores; they are removed at the end")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        figures = measure(chosen.episodes, running=chosen.running, rounds=chosen.rounds, folder=Path(folder))
    print(table(figures))
    if chosen.out:
        found: dict[str, Any] = {"running": chosen.running, "ms": figures}
        chosen.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
