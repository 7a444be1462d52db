"""A whole run whose store is in three databases; its learner is killed between two of them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from store.server import running

from agentrl.runtime.rundir import RunDir
from agentrl.store import RunStore
from agentrl.store.audit import audit
from agentrl.testing.outside_audit import OutsideAuditor

from .test_run import DEADLINE_S, child, command, run_file, started, wait_for_step

pytestmark = [pytest.mark.postgres, pytest.mark.slow]
_HELD_S = 3.0
STEPS = 8


def kill_between_databases(run: RunDir, process: subprocess.Popen[str]) -> int:
    """Kill the learner after it has marked a step's members in a database, and before the last one; the step."""
    with RunStore.open(run.store_path) as store:
        *before, last = store.shards
        db = last._db  # pyright: ignore[reportPrivateUsage]

        def marked() -> int:
            return max((max(shard.steps_trained(), default=0) for shard in before), default=0)

        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            with db.write():  # so that the learner waits for this database
                known, until = marked(), time.monotonic() + _HELD_S
                while marked() == known and time.monotonic() < until:
                    db.rows("SELECT 1")  # a silent session is ended
                    time.sleep(0.02)
                if (step := marked()) > known:
                    assert store.stands_beyond(step - 1) and not last.lineage(step)
                    os.kill(child(run, "learner", process), signal.SIGKILL)
                    return step
            time.sleep(0.2)  # in which others write to it
        raise AssertionError("no step took members of the first databases")


def retrained(run: RunDir, step: int) -> None:
    """The step is trained again, from all databases."""
    again = subprocess.run(
        command("retrain", run.path, "--step", step), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert again.returncode == 0 and "are bit-equal to those of the run" in again.stdout, again.stdout + again.stderr


def test_law_2_killed_between_two_databases_it_trains_the_same_bits_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with tempfile.TemporaryDirectory(prefix="agentrl-pg-") as folder, running(Path(folder)) as server:
        file = run_file(
            tmp_path,
            "agentrl/Calculator-v0",
            cluster={"store": [server.url] * 3},
            buffer={"groups_per_step": 3},
            train={"steps": STEPS, "checkpoint_every": 2},
            eval={"sets": [], "every": 0},
        )
        with started("train", file, "--out", run.path) as process:
            wait_for_step(run.path, 1, process)
            step = kill_between_databases(run, process)
            _, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, errors
        with RunStore.read(run.store_path) as store:
            assert audit(store, run.checkpoints).violations == []
            assert all(shard.episodes_trained() for shard in store.shards) and store.lineage(step)
        assert OutsideAuditor(run.store_path).look(ended=True) == []
        retrained(run, step)
        for arguments in (("audit", run.path), ("store", "copy", run.path, "--to", "sqlite")):
            subprocess.run(command(*arguments), check=True, capture_output=True, timeout=DEADLINE_S)
    with RunStore.read(run.store_path) as store:
        assert audit(store, run.checkpoints).violations == []
        assert sorted(store.steps_trained()) == list(range(1, STEPS + 1))
    assert OutsideAuditor(run.store_path).look(ended=True) == []
