"""A whole run whose store is in PostgreSQL: played, stopped, moved to a file and gone on with."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from store.server import running

from agentrl.records import GroupState
from agentrl.runtime.rundir import RunDir
from agentrl.store import RunStore
from agentrl.store.audit import audit
from agentrl.testing.outside_audit import OutsideAuditor

from .test_run import DEADLINE_S, command, run_file

pytestmark = [pytest.mark.postgres, pytest.mark.slow]


def test_a_run_trains_from_the_server_and_goes_on_from_a_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with tempfile.TemporaryDirectory(prefix="agentrl-pg-") as folder, running(Path(folder)) as server:
        file = run_file(tmp_path, "agentrl/Calculator-v0", cluster={"store": server.url}, eval={"sets": []})
        arguments = ["train", file, "--out", run.path, "--set", "train.steps=2"]
        subprocess.run(command(*arguments), check=True, capture_output=True, timeout=DEADLINE_S)
        assert run.store_path.name == "store.address"
        with RunStore.read(run.store_path) as store:
            assert audit(store, run.checkpoints).violations == []
            assert store.counts()[GroupState.TRAINED] >= 4
        moved = command("store", "copy", run.path, "--to", "sqlite")
        subprocess.run(moved, check=True, capture_output=True, timeout=DEADLINE_S)
    more = command("train", "--resume", run.path, "--set", "train.steps=3")
    subprocess.run(more, check=True, capture_output=True, timeout=DEADLINE_S)
    with RunStore.read(run.store_path) as store:
        assert audit(store, run.checkpoints).violations == []
        assert store.counts()[GroupState.TRAINED] >= 6
    assert OutsideAuditor(run.store_path).look() == []
