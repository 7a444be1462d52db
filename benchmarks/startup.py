"""Where the seconds go between `agentrl train` and its first step: to the first sampled turn, and to the first step.

The command trains one step, without evaluations; the times are those that the run itself keeps. CPU is that of the
command and of all its processes until it ended.

    agentrl bench startup [--rounds 3] [--file examples/tiny_coder.toml --file examples/laptop_llm.toml]
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path

from loop import run

COLUMNS = ("first turn sampled, s", "first step, s", "command ended, s", "CPU, s")


def measure(file: str, folder: Path) -> tuple[float, ...]:
    """Seconds from the command to each event, and CPU seconds."""
    given = ("train.steps=1", "eval.every=0", "eval.sets=[]")
    chosen = [word for setting in given for word in ("--set", setting)]
    cpu_s = sum(os.times()[2:4])
    began = time.time()
    run([str(Path(sys.executable).with_name("agentrl")), "train", file, "--out", str(folder), *chosen])
    ended_s = time.time() - began
    cpu_s = sum(os.times()[2:4]) - cpu_s
    store = sqlite3.connect(f"file:{folder / 'store.sqlite'}?mode=ro", uri=True)
    (sampled,) = store.execute("SELECT min(ended_s) FROM turns").fetchone()
    store.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (stepped,) = [line["time"] for line in lines if line["kind"] == "step"]
    return sampled - began, stepped - began, ended_s, cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--file", action="append", help="run files; default: the tiny coder and SmolLM2's sums")
    arguments = parser.parse_args()
    files = arguments.file or ["examples/tiny_coder.toml", "examples/laptop_llm.toml"]
    rows: dict[str, list[tuple[float, ...]]] = {file: [] for file in files}
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as scratch:
        for number in range(arguments.rounds):
            for at, file in enumerate(files):
                rows[file].append(measure(file, Path(scratch) / f"{at}-{number}"))
    print("| run file | " + " | ".join(COLUMNS) + " |")
    print("|---|" + "---|" * len(COLUMNS))
    for file, measured in rows.items():
        medians = [statistics.median(column) for column in zip(*measured, strict=True)]
        print(f"| {Path(file).name} | " + " | ".join(f"{median:.1f}" for median in medians) + " |")


if __name__ == "__main__":
    main()
