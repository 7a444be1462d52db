"""What a paused run costs: wake-ups and CPU time of each of its processes while nothing happens.

    agentrl bench idle [--seconds 30] [--set KEY=VALUE ...]

Starts `examples/tiny_coder.toml` under `--keep-alive`, pauses it after its first step, and reads the kernel's counters
of each process of the run twice: how often its threads went to sleep by themselves, which is how often something woke
them, and how long they ran. Prints the table of idle.md. To compare two checkouts, run it in both at the same time:
other work on the machine makes each wake-up dearer, since caches are cold.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
AGENTRL = [sys.executable, "-c", "from agentrl.cli.main import main; main()"]
START_S = 300.0
SETTLE_S = 15.0  # until threads without work have ended, and waits have their longest pauses


class Counters(NamedTuple):
    """What a process has done so far: voluntary context switches by thread, CPU time in seconds."""

    wakes: dict[str, int]
    cpu_s: float

    def wakes_since(self, earlier: Counters) -> int:
        """How often its threads woke; those of a thread that ended in between are lost."""
        return sum(count - earlier.wakes.get(thread, 0) for thread, count in self.wakes.items())


def processes(pid: int) -> Iterator[int]:
    """Yield a process and all processes below it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from processes(int(child))


def part_of(pid: int) -> str:
    """The part of the run that a process is."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if "agentrl.run.processes.child" in words:
        return words[words.index("agentrl.run.processes.child") + 1]
    if "agentrl.engine.embedded" in words:
        return "engine"
    if Path(words[0]).name == "sh":
        return "janitor"
    if "--keep-alive" in words:
        return "keep-alive parent"
    return "supervisor" if "train" in words else Path(words[0]).name


def counters(pid: int) -> Counters:
    """Read what a process has done so far."""
    wakes: dict[str, int] = {}
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        lines = status.read_text().splitlines()
        wakes[status.parent.name] = int(next(line for line in lines if line.startswith("voluntary_ctxt")).split()[1])
    # The kernel's name of another process's clock (see clock_getcpuclockid): in nanoseconds, where /proc has ticks of
    # ten milliseconds.
    return Counters(wakes, time.clock_gettime((~pid << 3) | 2))


def wait_for_step(run: Path, process: subprocess.Popen[bytes]) -> None:
    """Return once a step is trained."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        metrics = run / "metrics.jsonl"
        if metrics.exists() and '"kind": "step"' in metrics.read_text():
            return
        time.sleep(0.5)
    sys.exit(f"no step was trained within {START_S:g} s")


class Part(NamedTuple):
    """What all processes of one part did in a second: wake-ups, and milliseconds of CPU."""

    processes: int = 0
    threads: int = 0
    wakes: float = 0.0
    cpu_ms: float = 0.0


def measure(root: int, seconds: float) -> dict[str, Part]:
    """The parts of a run, the busiest first."""
    before = {pid: counters(pid) for pid in processes(root)}
    began = time.monotonic()
    time.sleep(seconds)
    parts: dict[str, Part] = {}
    for pid, earlier in before.items():
        if not Path(f"/proc/{pid}").exists():  # a child was replaced meanwhile
            continue
        later, part = counters(pid), parts.get(name := part_of(pid), Part())
        passed_s = time.monotonic() - began
        parts[name] = Part(
            part.processes + 1,
            part.threads + len(later.wakes),
            part.wakes + later.wakes_since(earlier) / passed_s,
            part.cpu_ms + 1000 * (later.cpu_s - earlier.cpu_s) / passed_s,
        )
    return dict(sorted(parts.items(), key=lambda item: -item[1].cpu_ms))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = [
            word for setting in ("eval.every=0", "eval.sets=[]", *options.settings) for word in ("--set", setting)
        ]
        command = ["train", str(ROOT / "examples" / "tiny_coder.toml"), "--keep-alive", "--out", str(run), *settings]
        with subprocess.Popen([*AGENTRL, *command], stdout=subprocess.DEVNULL) as process:
            try:
                wait_for_step(run, process)
                subprocess.run([*AGENTRL, "pause", str(run)], check=True, timeout=START_S)
                time.sleep(SETTLE_S)
                parts = measure(process.pid, options.seconds)
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(START_S)
    print("| part | processes | threads | wake-ups a second | CPU, ms a second |\n|---|---|---|---|---|")
    for name, part in parts.items():
        print(f"| {name} | {part.processes} | {part.threads} | {part.wakes:.1f} | {part.cpu_ms:.2f} |")


if __name__ == "__main__":
    main()
