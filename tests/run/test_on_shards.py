"""A whole run whose store is in three databases; its learner is killed between two of them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from store.server import running

from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.audit.audit import audit
from agentrl.testing.outside_audit import OutsideAuditor

from .test_run import DEADLINE_S, child, command, run_file, started, wait_for_step

pytestmark = [pytest.mark.postgres, pytest.mark.slow]
STEPS = 8


HOLD = """
CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(5); RETURN NULL; END $$;
CREATE TRIGGER held BEFORE INSERT ON lineage FOR EACH STATEMENT EXECUTE FUNCTION held()
"""
LET_GO = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"


def kill_between_databases(run: RunDir, process: subprocess.Popen[str]) -> int:
    """Kill the learner after it has marked a step's members in a database, and before the last one; the step. The last
    database itself takes long to mark them: nothing else waits for it, and no step passes unseen."""
    with RunStore.open(run.store_path) as store, ExitStack() as after:
        *before, last = store.shards
        where = last._db._address  # type: ignore[attr-defined]
        database = psycopg.connect(where.url, autocommit=True, options=f"-c search_path={where.schema}")
        after.callback(database.close)
        database.execute(HOLD)
        after.callback(database.execute, "DROP FUNCTION held CASCADE")
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            sleeping = database.execute("SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep'").fetchall()
            step = max(max(shard.steps_trained(), default=0) for shard in before)
            if sleeping and store.stands_beyond(step - 1) and step > max(last.steps_trained(), default=0):
                os.kill(child(run, "learner", process), signal.SIGKILL)
                database.execute(LET_GO)  # it would finish what it was told
                assert not last.lineage(step)
                return step
            time.sleep(0.02)
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
