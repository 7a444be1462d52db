"""`python -m view.live_writer RUN`: a process that holds a run and writes to its store what it is told."""

from __future__ import annotations

import sys
from pathlib import Path

from agentrl.run import live_settings
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore


def main(run: RunDir) -> None:
    """Answer each line of `step N` and `take up N` once it is written."""
    with run.lock(), RunStore.open(run.store_path) as store:
        print("under way", flush=True)
        for line in sys.stdin:
            step = int(line.split()[-1])
            if line.startswith("take up"):
                live_settings.take_up(run, store, step)
            else:
                alarms = [f"kl: <b>{step}</b> > 1"]
                store.metrics.record("step", step, {"outcome_mean": 0.875, "loss": 0.25, "alarms": alarms})
            print("written", flush=True)


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1])))
