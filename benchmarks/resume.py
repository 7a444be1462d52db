"""What SIGKILL costs: the tiny coder's run, killed whole at random moments and resumed each time.

    agentrl bench resume [--kills 3] [--seed 1]

Every kill takes the whole process group, supervisor included, at a random instant of training. Afterwards the store's
own audit is asked whether a finished group was lost or trained twice, and the system whether anything of the run is
left: processes, scratch folders, sockets. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl.run.run_folder import RunDir

HERE = Path(__file__).resolve().parent
RUN_FILE = HERE.parent / "examples" / "tiny_coder.toml"
DEADLINE_S = 1800
POLL_S = 0.02


def steps_done(run: RunDir) -> int:
    """The highest step in the metrics file."""
    if not run.metrics.exists():
        return 0
    whole, _, _ = run.metrics.read_text().rpartition("\n")  # a line that is being written may be seen in part
    return max((json.loads(line)["step"] for line in whole.splitlines()), default=0)


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    program = str(Path(sys.executable).with_name("agentrl"))
    return subprocess.Popen([program, "train", *arguments], stdout=subprocess.DEVNULL, process_group=0)


def kill_at(process: subprocess.Popen[bytes], run: RunDir, step: int, delay_s: float) -> int:
    """Kill the whole group `delay_s` after `step` was reached; the step it died at."""
    deadline = time.monotonic() + DEADLINE_S
    while steps_done(run) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the run ended (status {process.poll()}) or stood still before step {step}")
        time.sleep(POLL_S)
    time.sleep(delay_s)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(DEADLINE_S)
    return steps_done(run)


def left_over(run: RunDir) -> list[str]:
    """Processes that name the run or its scratch space, and the scratch space itself."""
    found = [str(run.scratch)] if run.scratch.exists() else []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(run.path) in words or str(run.scratch) in words:
                found.append(words.replace("\0", " "))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=80)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    at = sorted(rng.sample(range(2, arguments.steps - 5), arguments.kills))
    with tempfile.TemporaryDirectory(prefix="agentrl-resume-") as scratch:
        run = RunDir(Path(scratch) / "run")
        chosen = (f"seed={arguments.seed}", f"train.steps={arguments.steps}", "buffer.skip_without_signal=false")
        settings = [word for setting in chosen for word in ("--set", setting)]
        process = start([str(RUN_FILE), "--out", str(run.path), *settings])
        killed: list[int] = []
        for step in at:
            killed.append(kill_at(process, run, step, rng.random()))
            process = start(["--resume", str(run.path)])
        status = process.wait(DEADLINE_S)
        if status:
            sys.exit(f"the last resume ended with status {status}")
        program = str(Path(sys.executable).with_name("agentrl"))
        audit = subprocess.run(
            [program, "audit", str(run.path), "--json"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        checked: dict[str, Any] = json.loads(audit.stdout)
        summary = json.loads(run.summary.read_text())
        report = {
            "killed_at_steps": killed,
            "audit_ok": audit.returncode == 0,
            "violations": checked.get("violations", []),
            "groups": checked["groups"]["train"],
            "drops": checked["drops"],
            "success_before": summary["eval"]["before"]["success"],
            "success_after": summary["eval"]["after"]["success"],
            "left_over": left_over(run),
        }
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
