"""Whole runs that grow and shrink while they train, on this machine and on a Ray cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.run.reporting import status
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.audit import audit

from .test_ray import cluster as cluster
from .test_ray import ray_here as ray_here
from .test_run import DEADLINE_S, assert_nothing_remains, last_step, run_file, started, wait_for_step
from .test_status import typed

pytestmark = pytest.mark.slow
LONG: dict[str, Any] = {"train": {"steps": 5000, "checkpoint_every": 5}, "eval": {"sets": [], "every": 0}}


def until(run: RunDir, process: Any, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The size of the run, once it is as wanted."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition(found := status.status(run)["size"]):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def has(engines: int, workers: int) -> Callable[[dict[str, Any]], bool]:
    size = {"engines": engines, "workers": workers}
    return lambda found: found.get("present") == size and not found.get("coming") and not found.get("going")


def rows(run: RunDir, query: str) -> list[Any]:
    with sqlite3.connect(f"file:{run.store_path}?mode=ro", uri=True) as db:
        return [value for (value,) in db.execute(query)]


def until_row(run: RunDir, query: str, process: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not rows(run, query):
        assert process.poll() is None and time.monotonic() < deadline, query
        time.sleep(0.1)


def assert_nothing_was_lost(run: RunDir) -> None:
    """No episode began anew, none was suspected of a death, and each was trained once."""
    assert rows(run, "SELECT episode_id FROM restarts") == []
    assert rows(run, "SELECT id FROM episodes WHERE deaths > 0") == []
    with RunStore.read(run.store_path) as store:
        assert audit(store, run.checkpoints).violations == []


def test_law_1_a_run_grows_and_shrinks_and_its_resume_keeps_what_was_asked_for(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with started("train", run_file(tmp_path, "agentrl/Calculator-v0", **LONG), "--out", run.path) as process:
        wait_for_step(run.path, 1, process)
        assert "shall have 2 engines and 2 workers" in typed("scale", run.path, "--engines", 2, "--workers", 2).output
        until(run, process, has(2, 2))
        until_row(run, "SELECT worker FROM leases WHERE worker LIKE 'worker-1.%'", process)  # it plays
        os.kill(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)
    with started("train", "--resume", run.path) as process:
        until(run, process, has(2, 2))
        typed("scale", run.path, "--engines", 1, "--workers", 1)
        until(run, process, has(1, 1))
        wait_for_step(run.path, last_step(run) + 2, process)
        assert len(json.loads(rows(run, "SELECT value FROM meta WHERE key = 'engine_urls'")[0])) == 1
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130, errors + output
    assert_nothing_was_lost(run)
    assert_nothing_remains(run)


@pytest.mark.ray
@pytest.mark.long
def test_on_ray_what_has_no_room_waits_for_a_node_and_a_smaller_run_gives_its_nodes_back(
    tmp_path: Path, cluster: Any
) -> None:
    import ray

    run = RunDir(tmp_path / "run")
    sections = {"launcher": "ray", "address": cluster.address, "lease_s": 20.0, "place_deadline_s": 15.0}
    sections["workers"] = {"cpus": 2}
    file = run_file(tmp_path, "agentrl/Calculator-v0", cluster=sections, **LONG)
    with started("train", file, "--out", run.path) as process:
        wait_for_step(run.path, 1, process)
        typed("scale", run.path, "--engines", 2, "--workers", 2)  # 7 CPUs, and there are 6
        found = until(run, process, lambda found: bool(found.get("trouble")))
        ((name, why),) = found["trouble"].items()
        assert re.match(rf"{name}: Ray found no place for [12] CPUs? within 15 s.*free now: ", why)
        wait_for_step(run.path, last_step(run) + 1, process)
        cluster.room()
        until(run, process, has(2, 2))
        typed("scale", run.path, "--engines", 1, "--workers", 1)
        until(run, process, has(1, 1))
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            assert ray.available_resources()["CPU"] == 4.0, "of 8"
        finally:
            ray.shutdown()
        wait_for_step(run.path, last_step(run) + 2, process)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130, errors + output
    assert_nothing_was_lost(run)
    assert_nothing_remains(run)
