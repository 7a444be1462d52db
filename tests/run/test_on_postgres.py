"""A whole run whose store is in PostgreSQL: the server crashes under it, a second learner begins, it is stopped, moved,
and gone on with."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from store.server import running

from agentrl.errors import StoreBusy
from agentrl.records import EngineKey, GroupState
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.audit import audit
from tests.parts.outside_audit import OutsideAuditor

from .test_run import DEADLINE_S, child, command, last_step, run_file, started, wait_for_step, wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow]
NAMES = ("learner", "engine", "worker")


def wait_until_it_waits(run: RunDir, name: str) -> None:
    """Until the log of a child says that it waits for the database."""
    deadline = time.monotonic() + DEADLINE_S
    while "it is waited for" not in (run.logs / f"{name}.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def stopped(run: RunDir) -> int:
    """Stop the learner where it holds nothing that others wait for: neither the store's lock nor an engine's."""
    pid, deadline = child(run, "learner"), time.monotonic() + DEADLINE_S
    with RunStore.open(run.store_path) as store:
        store.hurry(1.0)
        while time.monotonic() < deadline:
            os.kill(pid, signal.SIGSTOP)
            with contextlib.suppress(StoreBusy), contextlib.ExitStack() as held:
                store.set_meta("stopped", str(pid))
                try:
                    for path in run.locks.iterdir():
                        fcntl.flock(held.enter_context(path.open("rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return pid
                except BlockingIOError:
                    pass
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.05)
    raise AssertionError("it always holds a lock")


def two_learners(run: RunDir, process: subprocess.Popen[str], folder: Path) -> None:
    """A learner is stopped, as on a host that is cut off, and another begins; then the first one goes on."""
    fenced, error = "another learner has begun since", folder / "second"
    first, step = stopped(run), last_step(run)
    words = [sys.executable, "-m", "agentrl.run.processes.child", "learner", str(run.path)]
    # The run's keys are in the environments of its own processes alone.
    known = dict(part.split("=", 1) for part in Path(f"/proc/{first}/environ").read_text().split("\0") if "=" in part)
    keys = {name: known[name] for name in (EngineKey.VALUE, EngineKey.SIGNING)}
    env = {**os.environ, **keys, "AGENTRL_ERROR_FILE": str(error)}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as second:
        try:
            wait_for_step(run.path, step + 2, process)
            os.kill(first, signal.SIGCONT)
            wait_until(lambda: fenced in (run.logs / "learner.log").read_text(), process)
            assert second.wait(timeout=DEADLINE_S) and fenced in error.read_text(), "its owner started a third one"
        finally:
            second.kill()
    wait_for_step(run.path, last_step(run) + 1, process)


def test_law_2_a_run_outlasts_a_crash_of_the_server_and_goes_on_from_a_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with tempfile.TemporaryDirectory(prefix="agentrl-pg-") as folder, running(Path(folder)) as server:
        file = run_file(
            tmp_path,
            "agentrl/Calculator-v0",
            cluster={"store": server.url},
            train={"steps": 5000, "checkpoint_every": 1, "liveness_deadline_s": 600.0},
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
            two_learners(run, process, tmp_path)
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
        assert store.groups.counts()[GroupState.TRAINED] >= 2 * steps
    assert OutsideAuditor(run.store_path).look() == []
