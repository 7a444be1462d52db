"""What a page costs the run that it shows: CPU of a turn, turns and steps a second, with and without viewers.

    agentrl bench page_cost [--rounds 5] [--window 12] [--beside TREE] [--out FILE.json]

A real run of the tiny coder goes on, and beside it, as processes of their own, `agentrl view` and its viewers: each
follows the news and asks as the page does. Time is cut into windows. In each round every number of viewers has one
window, in an order that changes from round to round, and so has "nobody" a second time: what these two differ by is
noise. A round's figures are divided by those of its first window without a viewer. On a busy machine the CPU of a turn
says more than the turns a second. With `--beside` the server of another checkout takes turns with this one's, at the
same run. Prints the table of page_cost.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from view import cpu_s, page, viewers

from agentrl.errors import UsageError
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore

ARMS = {"nobody": 0, "nobody, once more": 0, "1 viewer": 1, "10 viewers": 10}
BESIDE = ("1 viewer", "10 viewers")  # those that another checkout's server has, too
SETTINGS = (
    *("rollout.group_size=4", "rollout.max_running=16", "rollout.max_turns=4", "rollout.max_tokens_per_turn=12"),
    *("engine.max_batch=16", "buffer.groups_per_step=2", "buffer.skip_without_signal=false"),
    *("train.steps=100000", "train.lr=1e-9", "train.checkpoint_every=100000"),
)
_BEGINS_S = 300.0


@contextmanager
def running(folder: Path) -> Generator[tuple[RunDir, int]]:
    """A run that goes on, after its second step, and the process that holds it."""
    run = RunDir(folder / "shown")
    file = folder / "run.toml"
    file.write_text('model = "agentrl/tiny-coder"\n[env]\nid = "agentrl/Calculator-v0"\n')
    words = [str(Path(sys.executable).with_name("agentrl")), "train", str(file), "--out", str(run.path)]
    words += [word for setting in SETTINGS for word in ("--set", setting)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + _BEGINS_S
            while not _begun(run):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the run has not begun within {_BEGINS_S:.0f} s")
                time.sleep(1.0)
            yield run, process.pid
        finally:
            process.terminate()


def _begun(run: RunDir) -> bool:
    try:
        return run.store_path.exists() and _counts(run)[1] >= 2
    except UsageError:  # its store is being made
        return False


def _counts(run: RunDir) -> tuple[int, int]:
    """The turns and the optimizer steps so far."""
    with RunStore.read(run.store_path) as store:
        return store.metrics.progress()[0], max((row.step for row in store.metrics.values("step")), default=0)


def _tree(pid: int) -> list[int]:
    """A process and all below it."""
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        below.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += below.get(one, [])
    return found


def watch(run: RunDir, pid: int, address: str, server: int, n: int, window_s: float) -> dict[str, float]:
    """The figures of one window with so many viewers."""
    with viewers(address, n, run.path.name):
        processes = _tree(pid)
        began, (turns, steps) = time.perf_counter(), _counts(run)
        spent, served = sum(map(cpu_s, processes)), cpu_s(server)
        time.sleep(window_s)
        took, (more_turns, more_steps) = time.perf_counter() - began, _counts(run)
        spent, served = sum(map(cpu_s, processes)) - spent, cpu_s(server) - served
    turns = max(1, more_turns - turns)
    return {
        "CPU of a turn": spent / turns,
        "turns a second": turns / took,
        "steps a second": (more_steps - steps) / took,
        "CPU of the page": served / spent,
        "of a core": served / took,
    }


def table(rounds: Sequence[dict[str, dict[str, float]]]) -> str:
    """A row for each number of viewers: medians over the rounds, with the quartiles of what is compared."""
    lines = ["| | CPU of a turn | turns a second | steps a second | the page, of the run's CPU | of a core |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for arm in rounds[0]:
        cells = [arm]
        for figure in ("CPU of a turn", "turns a second", "steps a second"):
            ratios = [one[arm][figure] / one["nobody"][figure] for one in rounds if one["nobody"][figure]]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            cells.append("1" if arm == "nobody" else f"{middle:.3f} ({low:.3f} to {high:.3f})")
        for figure in ("CPU of the page", "of a core"):
            cells.append(f"{100 * statistics.median(one[arm][figure] for one in rounds):.2f}%")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run, watch by turns, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="2 at least")
    parser.add_argument("--window", type=float, default=12.0, help="seconds")
    parser.add_argument("--beside", type=Path, metavar="TREE", help="the folder of another checkout of agentrl")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rounds: list[dict[str, dict[str, float]]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run, pid = stack.enter_context(running(folder))
        ours = stack.enter_context(page(folder))
        arms = [(arm, *ours, n) for arm, n in ARMS.items()]
        if given.beside is not None:
            other = stack.enter_context(page(folder, given.beside))
            arms += [(f"{arm}, of {given.beside.name}", *other, ARMS[arm]) for arm in BESIDE]
        for _, address, server, n in arms:
            watch(run, pid, address, server, n, 2.0)  # what is read once, at the beginning
        for k in range(max(2, given.rounds)):
            turned = arms[k % len(arms) :] + arms[: k % len(arms)]
            found = {arm: watch(run, pid, address, server, n, given.window) for arm, address, server, n in turned}
            rounds.append({arm: found[arm] for arm, *_ in arms})
            print(
                f"round {k + 1}, load {os.getloadavg()[0]:.1f}: {json.dumps(rounds[-1])}", file=sys.stderr, flush=True
            )
    print(table(rounds))
    if given.out is not None:
        given.out.write_text(json.dumps(rounds, indent=1) + "\n")


if __name__ == "__main__":
    main()
