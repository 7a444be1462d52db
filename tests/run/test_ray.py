"""A run on Ray: its processes on nodes of a cluster, which are killed under it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from attacks.sockets import listening
from store.server import running

from agentrl import config as configuration
from agentrl.errors import UsageError
from agentrl.run.cluster.scaling import Size
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.audit import audit
from tests.parts.faults import processes
from tests.parts.outside_audit import OutsideAuditor

from .test_run import (
    DEADLINE_S,
    assert_nothing_remains,
    children,
    command,
    command_line,
    last_step,
    run_file,
    started,
    wait_for_step,
    wait_until,
)

pytestmark = pytest.mark.ray


def test_ray_reserves_a_place_for_every_child() -> None:
    from agentrl.run.cluster.ray_launcher import bundles

    cluster = {"launcher": "ray", "workers": {"cpus": 3}, "learner": {"gpus": 1}}
    counts = {"engine": {"replicas": 2}, "rollout": {"workers": 2}, "train": {"parallel": {"ranks": 2}}}
    config = configuration.parse({"model": "m", "env": {"id": "test/none"}, "cluster": cluster, **counts})
    found = bundles(config, Size.of(config), config.train.parallel.ranks)
    assert found == {
        "engine-0": {"CPU": 1.0},
        "engine-1": {"CPU": 1.0},
        "worker-0": {"CPU": 3.0},
        "worker-1": {"CPU": 3.0},
        "learner": {"CPU": 2.0, "GPU": 2.0},
    }


def test_a_remote_client_of_ray_is_refused() -> None:
    from agentrl.run.cluster.ray_head import connect

    with pytest.raises(UsageError, match="start agentrl on a node of the cluster"):
        connect("ray://10.0.0.1:10001")


QUIET = {
    "include_dashboard": False,
    "_system_config": {"prestart_worker_first_driver": False, "enable_worker_prestart": False},
}


@pytest.fixture
def ray_here() -> Iterator[None]:
    """Ray on this machine alone, whose processes are as nice as others."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_worker_niceness", "0")
    patch.setenv("RAY_AUTH_MODE", "disabled")
    yield
    patch.undo()


@pytest.fixture
def one_node(ray_here: None) -> Iterator[Any]:
    """A cluster of one node, which has the head and room for a small run. `room` adds another such node."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 4, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, **QUIET})
    first = cluster.head_node
    cluster.room = lambda: cluster.add_node(**node)
    try:
        yield cluster
    finally:
        first.kill_all_processes(check_alive=False, allow_graceful=False)
        cluster.shutdown()


@pytest.fixture
def cluster(ray_here: None) -> Iterator[Any]:
    """Three nodes on this machine, which a run of two engines, two workers and two ranks fills. `room` adds one."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, **QUIET})
    cluster.room = lambda: cluster.add_node(**node)
    cluster.others = [cluster.room(), cluster.room()]
    first, port = cluster.head_node, int(cluster.address.rpartition(":")[2])

    def another() -> None:
        """The head dies, and no other process; a new one, with room for a run, listens where it did."""
        head = first.all_processes["gcs_server"][0].process
        head.kill()
        head.wait()
        cluster.head_node = None
        cluster.add_node(**node | {"num_cpus": 6, "gcs_server_port": port}, **QUIET)

    cluster.another_head = another
    try:
        yield cluster
    finally:
        first.kill_all_processes(check_alive=False, allow_graceful=False)
        cluster.shutdown()


def lives(run: RunDir) -> dict[str, int]:
    """The process ids of the run's children, and of the ranks besides the learner itself."""
    found: dict[str, int] = {}
    for pid in children(run):
        words = command_line(pid).split("\0")
        for name in ("engine-0", "engine-1", "learner"):
            if any(f"{name}.ready" in word for word in words) or words[3:4] == [name]:
                found[name] = pid
        if words[3:4] == ["worker"]:
            found[f"worker-{words[5]}"] = pid
    learner = found.get("learner")
    ranks = [pid for pid, parent, words in processes() if parent == learner and "parallel.rank_process" in words]
    return found | dict(zip(["rank"], ranks, strict=False))


def above(pid: int) -> int:
    """The parent of a process: Ray's actor of a child, the node (its raylet) of an actor."""
    return next(parent for one, parent, _ in processes() if one == pid)


def raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


def wait_for_others(run: RunDir, before: dict[str, int], names: Collection[str]) -> None:
    """Until each of these has another process than `before`."""
    deadline, left = time.monotonic() + DEADLINE_S, set(names)
    while left:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
        left -= {name for name, pid in lives(run).items() if pid != before.get(name)}


@pytest.mark.slow
@pytest.mark.postgres
def test_law_2_a_run_on_ray_with_its_store_in_postgresql_survives_what_dies_there(tmp_path: Path, cluster: Any) -> None:
    """At once the database crashes, an actor and a rank of the learner are killed, a node is lost with its children.
    Then the head is, while the learner stands still, and the run goes on in the cluster of the next one."""
    run = RunDir(tmp_path / "run")
    with tempfile.TemporaryDirectory(prefix="agentrl-pg-") as folder, running(Path(folder)) as server:
        sections = {"launcher": "ray", "address": cluster.address, "lease_s": 10.0, "store": server.url}
        file = run_file(
            tmp_path,
            "agentrl/Calculator-v0",
            cluster=sections,
            engine={"replicas": 2},
            rollout={"workers": 2},
            train={"steps": 5000, "checkpoint_every": 1, "parallel": {"ranks": 2}},
            eval={"sets": [], "every": 0},
        )
        with started("train", file, "--out", run.path, "--keep-alive") as process:
            wait_for_step(run.path, 1, process)
            wait_until(lambda: len(lives(run)) == 6, process)  # one may still be starting
            outside, there = OutsideAuditor(run.store_path), lives(run)
            assert outside.look() == [] and len(there) == 6, there
            nodes = {name: above(above(pid)) for name, pid in there.items() if name != "rank"}
            node = next(one for one in cluster.others if raylet(one) != nodes["learner"])
            lost = {name for name in nodes if nodes[name] == raylet(node)}
            actor = next(name for name in nodes if name != "learner" and name not in lost)
            server.stop("immediate")
            os.kill(above(there[actor]), signal.SIGKILL)
            os.kill(there["rank"], signal.SIGKILL)
            cluster.remove_node(node, allow_graceful=False)
            cluster.room()
            server.start()
            hurt = {*lost, actor, "learner", "rank"}
            wait_for_others(run, there, hurt)
            wait_for_step(run.path, last_step(run) + 1, process)
            there = lives(run)
            os.kill(there["learner"], signal.SIGSTOP)  # it cannot end by itself: its seat ends it
            cluster.another_head()
            wait_for_others(run, there, there)
            wait_for_step(run.path, last_step(run) + 1, process)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 130, errors + output
            assert "and its cluster is gone with it. Once there is a new one, go on with" in errors
            assert "the supervisor lost its cluster; it is started again" in errors
        assert outside.look(ended=True) == []
        with RunStore.read(run.store_path) as store:
            assert audit(store, run.checkpoints).violations == []
            urls = store.meta("engine_urls") or ""
            assert not re.search(r"127\.0\.0\.1", urls), "engines serve at their node's address"
    assert_nothing_remains(run)


@pytest.mark.slow
@pytest.mark.long
def test_law_2_a_run_whose_own_node_is_lost_goes_on_when_it_is_there_again_and_stops(
    tmp_path: Path, one_node: Any
) -> None:
    """The raylet of the supervisor's node is killed, and the head lives: Ray ends the run's job. The parent starts the
    supervisor again, which waits for the node; `agentrl stop` ends both for good."""
    run = RunDir(tmp_path / "run")
    file = run_file(
        tmp_path,
        "agentrl/Calculator-v0",
        cluster={"launcher": "ray", "address": one_node.address, "lease_s": 10.0},
        train={"steps": 5000, "checkpoint_every": 1},
        eval={"sets": [], "every": 0},
    )
    with started("train", file, "--out", run.path, "--keep-alive") as process:
        wait_for_step(run.path, 1, process)
        wait_until(lambda: len(lives(run)) == 3, process)
        there = lives(run)
        assert {above(above(pid)) for pid in there.values()} == {raylet(one_node.head_node)}
        os.kill(raylet(one_node.head_node), signal.SIGKILL)
        wait_until(lambda: not there.items() & lives(run).items(), process)  # nobody trains on, unseen
        one_node.room()
        wait_for_others(run, there, there)
        wait_for_step(run.path, last_step(run) + 1, process)
        words = command("stop", run.path, "--deadline-s", DEADLINE_S)
        stopped = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S + 60)
        assert stopped.returncode == 0, stopped
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, errors + output
    assert errors.count("it is started again") == 1, errors
    assert "Ray lost the node of this machine (its raylet ended)" in errors
    assert f"stopped by SIGTERM; go on with agentrl train --resume {run.path}" in errors
    with RunStore.read(run.store_path) as store:
        assert audit(store, run.checkpoints).violations == []
        trained = [episode for step in range(1, last_step(run) + 1) for episode in store.lineage.episodes_of(step)]
        assert trained and len(trained) == len(set(trained)), "once each, in both lives"
    assert_nothing_remains(run)


@pytest.mark.slow
def test_an_engine_at_a_nodes_address_answers_nobody_without_the_runs_key(tmp_path: Path, cluster: Any) -> None:
    """The run itself asks it with the key, and sends weights that are signed."""
    run = RunDir(tmp_path / "run")
    file = run_file(
        tmp_path,
        "agentrl/Combination-v0",
        cluster={"launcher": "ray", "address": cluster.address},
        train={"steps": 5000, "checkpoint_every": 100},
        eval={"sets": [], "every": 0},
    )
    with started("train", file, "--out", run.path) as process:
        wait_for_step(run.path, 2, process)
        with RunStore.read(run.store_path) as store:
            (url,) = json.loads(store.meta("engine_urls") or "[]")
        assert url.startswith("http://") and "127.0.0.1" not in url
        for method, path in (("GET", "/health"), ("GET", "/metrics"), ("POST", "/sleep"), ("POST", "/update_weights")):
            assert httpx.request(method, url + path, timeout=60).status_code == 401, path
        doors = [one for one in listening(lives(run).values()) if one.kind == "tcp"]
        assert [f"http://{one.host}:{one.port}" for one in doors] == [url], "Ray's own ports are its nodes'"
        lines = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in lives(run).values())
        variables = b"".join(Path(f"/proc/{pid}/environ").read_bytes() for pid in lives(run).values()).split(b"\0")
        values = {one.partition(b"=")[2] for one in variables if one.startswith(b"AGENTRL_ENGINE_KEY=")} - {b""}
        assert len(values) == 1 and values.pop() not in lines
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
    assert_nothing_remains(run)


@pytest.mark.medium
def test_law_4_a_head_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, and nobody ever answers
        cluster = {"launcher": "ray", "address": f"127.0.0.1:{silent.getsockname()[1]}", "place_deadline_s": 1.0}
        file = run_file(tmp_path, "agentrl/Calculator-v0", cluster=cluster)
        train = command("train", file, "--out", tmp_path / "run")
        done = subprocess.run(train, capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 2 and b"the head does not answer within 1 s" in done.stderr, done


def test_without_a_cluster_the_message_says_how_to_start_one(tmp_path: Path) -> None:
    code = (
        "from ray._private import services\nservices.find_gcs_addresses = set\n"  # that of another test
        "from agentrl.run.cluster.ray_head import connect\nfrom agentrl.errors import UsageError\n"
        "try:\n    connect('auto')\nexcept UsageError as error:\n    print(error)"
    )

    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": ""}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert "start one (ray start --head)" in done.stdout, done.stdout + done.stderr
