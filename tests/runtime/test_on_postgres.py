"""A whole run whose store is in PostgreSQL: the server crashes under it, it is stopped, moved, and gone on with."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from store.server import running

from agentrl.records import GroupState
from agentrl.runtime.rundir import RunDir
from agentrl.store import RunStore
from agentrl.store.audit import audit
from agentrl.testing.outside_audit import OutsideAuditor

from .test_run import DEADLINE_S, child, command, last_step, run_file, started, wait_for_step

pytestmark = [pytest.mark.postgres, pytest.mark.slow]
NAMES = ("learner", "engine", "worker")


def wait_until_it_waits(run: RunDir, name: str) -> None:
    """Until the log of a child says that it waits for the database."""
    deadline = time.monotonic() + DEADLINE_S
    while "it is waited for" not in (run.logs / f"{name}.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_law_2_a_run_outlasts_a_crash_of_the_server_and_goes_on_from_a_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with tempfile.TemporaryDirectory(prefix="agentrl-pg-") as folder, running(Path(folder)) as server:
        file = run_file(
            tmp_path,
            "agentrl/Calculator-v0",
            cluster={"store": server.url},
            train={"steps": 5000, "checkpoint_every": 1},
            eval={"sets": [], "every": 0},
        )
        with started("train", file, "--out", run.path) as process:
            wait_for_step(run.path, 1, process)
            outside = OutsideAuditor(run.store_path)
            assert run.store_path.name == "store.address" and outside.look() == [] and outside.tokens
            there = {child(run, name) for name in NAMES}
            server.stop("immediate")
            wait_until_it_waits(run, "learner")
            wait_until_it_waits(run, "worker-0")
            server.start()
            wait_for_step(run.path, last_step(run) + 2, process)
            assert {child(run, name) for name in NAMES} == there, "a process did not outlast it"
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 130, errors + output
            assert "the database does not answer" in errors and "it is waited for, 120 s at most" in errors
        assert outside.look(ended=True) == []
        with RunStore.read(run.store_path) as store:
            assert audit(store, run.checkpoints).violations == []
        moved = command("store", "copy", run.path, "--to", "sqlite")
        subprocess.run(moved, check=True, capture_output=True, timeout=DEADLINE_S)
    steps = last_step(run) + 1
    more = command("train", "--resume", run.path, "--set", f"train.steps={steps}")
    subprocess.run(more, check=True, capture_output=True, timeout=DEADLINE_S)
    with RunStore.read(run.store_path) as store:
        assert audit(store, run.checkpoints).violations == []
        assert store.counts()[GroupState.TRAINED] >= 2 * steps
    assert OutsideAuditor(run.store_path).look() == []
