"""A run on Ray: its processes on nodes of a cluster, which are killed under it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl import config as configuration
from agentrl.errors import UsageError
from agentrl.runtime.rundir import RunDir
from agentrl.runtime.scaling import Size
from agentrl.store import RunStore
from agentrl.store.audit import audit

from .test_run import DEADLINE_S, assert_nothing_remains, child, command, run_file, started, wait_for_step

pytestmark = pytest.mark.ray


def test_ray_reserves_a_place_for_every_child() -> None:
    from agentrl.runtime.ray_launcher import bundles

    cluster = {"launcher": "ray", "engine": {"replicas": 2}, "workers": {"replicas": 2, "cpus": 3}}
    cluster["learner"] = {"ranks": 2, "gpus": 1}
    config = configuration.parse({"model": "m", "env": {"id": "test/none"}, "cluster": cluster})
    found = bundles(config, Size.of(config))
    assert found == {
        "engine-0": {"CPU": 1.0},
        "engine-1": {"CPU": 1.0},
        "worker-0": {"CPU": 3.0},
        "worker-1": {"CPU": 3.0},
        "learner": {"CPU": 2.0, "GPU": 2.0},
    }


def test_a_remote_client_of_ray_is_refused() -> None:
    from agentrl.runtime.ray_launcher import _connect

    with pytest.raises(UsageError, match="start agentrl on a node of the cluster"):
        _connect("ray://10.0.0.1:10001")


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes on this machine, of which neither has room for a whole run."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_worker_niceness", "0")
    patch.setenv("RAY_AUTH_MODE", "disabled")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.room = lambda: cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
    cluster.second = cluster.room()
    try:
        yield cluster
    finally:
        cluster.shutdown()
        patch.undo()


NAMES = ("learner", "engine", "worker")


def last_step(run: RunDir) -> int:
    return max(row.get("step", 0) for row in map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines()))


@pytest.mark.slow
def test_law_2_a_run_on_ray_survives_a_killed_child_and_a_lost_node(tmp_path: Path, cluster: Any) -> None:
    run = RunDir(tmp_path / "run")
    sections = {"launcher": "ray", "address": cluster.address, "lease_s": 20.0}
    file = run_file(
        tmp_path,
        "agentrl/Calculator-v0",
        cluster=sections,
        train={"steps": 5000, "checkpoint_every": 5},
        eval={"sets": [], "every": 0},
    )
    with started("train", file, "--out", run.path) as process:
        wait_for_step(run.path, 1, process)
        os.kill(child(run, "worker"), signal.SIGKILL)
        cluster.room()
        wait_for_step(run.path, last_step(run) + 8, process)  # more than are possible without a worker
        there = {child(run, name) for name in NAMES}
        cluster.remove_node(cluster.second, allow_graceful=False)
        wait_for_step(run.path, last_step(run) + 12, process)
        assert {child(run, name) for name in NAMES} != there, "the lost node held none of them"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130, errors + output
    with RunStore.read(run.store_path) as store:
        assert audit(store, run.checkpoints).violations == []
        assert not re.search(r"127\.0\.0\.1", store.meta("engine_urls") or ""), "engines serve at their node's address"
    assert_nothing_remains(run)


def test_law_4_a_head_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, and nobody ever answers
        cluster = {"launcher": "ray", "address": f"127.0.0.1:{silent.getsockname()[1]}", "place_deadline_s": 1.0}
        file = run_file(tmp_path, "agentrl/Calculator-v0", cluster=cluster)
        done = subprocess.run(command("train", file, "--out", tmp_path / "run"), capture_output=True, timeout=120)
    assert done.returncode == 2 and b"the head does not answer within 1 s" in done.stderr, done


def test_without_a_cluster_the_message_says_how_to_start_one(tmp_path: Path) -> None:
    code = (
        "from agentrl.runtime.ray_launcher import _connect\nfrom agentrl.errors import UsageError\n"
        "try:\n    _connect('auto')\nexcept UsageError as error:\n    print(error)"
    )

    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "start one (ray start --head)" in done.stdout, done.stdout + done.stderr
