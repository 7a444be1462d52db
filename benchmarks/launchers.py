"""The same run file on one machine without Ray and with it: does it learn the same, and what does the cluster cost?

    agentrl bench launchers [--seeds 1 2 3] [--apart] [--set SECTION.KEY=VALUE] [--out FILE.json]

A run is that of `agentrl bench learning`, the tiny coder with everything in it. Locally its store is SQLite; on Ray it
is PostgreSQL, which waits for its disk, and each process is an actor's on the only node of a test cluster. The runs
take turns, each seed in the other order, so that a slow minute of the machine hits both. Wall time is that of the
whole command; "between steps" is from the first step's end to the last's, without starts and evaluations. `--apart`
runs each launcher with each store, which says what either costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from learning import CHEAP, PROGRAM, RUN_FILE
from loop import run

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
ARMS = ("local, SQLite", "Ray, PostgreSQL", "local, PostgreSQL", "Ray, SQLite")


@contextmanager
def ray_cluster() -> Iterator[list[str]]:
    """The settings of a run on a new cluster of one node."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    try:
        yield ["cluster.launcher=ray", f"cluster.address={made.address}"]
    finally:
        made.shutdown()


@contextmanager
def postgresql() -> Iterator[list[str]]:
    """The settings of a run with its store in a new server."""
    sys.path.insert(0, str(TESTS))
    from store.server import running  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory(prefix="agentrl-launchers-") as name:
        folder = Path(name) / "server"
        folder.parent.chmod(0o755)
        folder.mkdir()
        with running(folder, durable=True) as server:
            yield [f"cluster.store={server.url}"]


PARTS = {"Ray": ray_cluster, "PostgreSQL": postgresql}


def measure(folder: Path, settings: Sequence[str]) -> dict[str, Any]:
    """One run to its end: held-out success before and after, seconds whole and between its first and last step."""
    words = [word for setting in (*CHEAP, *settings) for word in ("--set", setting)]
    run([*PROGRAM, "train", str(RUN_FILE), "--out", str(folder), *words], PYTHONPATH=str(HERE))
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ends = [line["time"] for line in lines if line["kind"] == "step"]
    held_out = summary["eval"]["sets"]["held_out"]
    return {
        **{when: held_out[when]["success"] for when in ("before", "after")},
        "steps": summary["steps"],
        "wall_s": summary["wall_s"],
        "steps_s": ends[-1] - ends[0],
    }


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| seed | launcher and store | held-out before | after | wall s | between steps s |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        numbers = f"{row['before']:.3f} | {row['after']:.3f} | {row['wall_s']:.0f} | {row['steps_s']:.0f}"
        yield f"| {row['seed']} | {row['arm']} | {numbers} |"
    yield ""
    for arm in sorted({row["arm"] for row in rows}, key=ARMS.index):
        held_out = statistics.fmean(row["after"] for row in rows if row["arm"] == arm)
        wall, steps = (statistics.median(ratios(rows, arm, key)) for key in ("wall_s", "steps_s"))
        over = f"over {ARMS[0]}, median of the pairs: wall {wall:.2f}, between steps {steps:.2f}"
        yield f"- {arm}: held-out success {held_out:.3f} in the mean; {over}."


def ratios(rows: Sequence[dict[str, Any]], arm: str, key: str) -> list[float]:
    """Of each seed: what the arm's run took over what the plain one took."""
    by = {(row["seed"], row["arm"]): row[key] for row in rows}
    return [by[seed, arm] / by[seed, ARMS[0]] for seed in sorted({row["seed"] for row in rows})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--apart", action="store_true", help="each launcher with each store")
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs: section.key=value")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    chosen = parser.parse_args()
    os.environ |= {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}
    arms = ARMS if chosen.apart else ARMS[:2]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="agentrl-launchers-") as name:
        for at, seed in enumerate(chosen.seeds):
            for arm in arms if at % 2 == 0 else arms[::-1]:
                with ExitStack() as stack:
                    parts = [stack.enter_context(part()) for what, part in PARTS.items() if what in arm]
                    settings = [f"seed={seed}", *chain(*parts), *chosen.set]
                    found = measure(Path(name) / f"{seed}-{ARMS.index(arm)}", settings)
                rows.append({"seed": seed, "arm": arm, **found})
                print(rows[-1], file=sys.stderr, flush=True)
    print("\n".join(table(rows)))
    if chosen.out:
        chosen.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
