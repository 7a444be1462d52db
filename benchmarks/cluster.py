"""The kill table: how soon a run on Ray, with its store in PostgreSQL, goes on after each of its parts is killed.

    agentrl bench cluster [--only PART …] [--every-s 5] [--seed 0] [--lease-s 10] [--away-s 20] [--out FILE.json]

Three nodes of Ray's test cluster on this machine; two engines, two workers, a learner of two ranks, the tiny model.
Each fault comes once: SIGKILL of a worker, an engine, a rank, the learner, the supervisor, a node; a crash of
PostgreSQL, which is away for `--away-s`. The clock stops when what died works again. Then Ray's head is killed, and
started again at once where it was: one that keeps nothing, so that the run leaves and joins the new cluster, and one
that keeps what it knows on a disk. After each an auditor that shares no code with the store reads it. Prints the table
of cluster.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the parts of the tests

from tests.parts import faults, store_rows
from tests.parts.chaos_run import ChaosRun, Fault, FaultOutcome
from tests.parts.faults import WallClock
from tests.parts.outside_audit import OutsideAuditor

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
PARTS = ("worker", "engine", "rank", "learner", "supervisor", "node")
AMONG = (*(Fault(kind="kill", part=part) for part in PARTS), Fault(kind="restart", part="database"))
MAIN = (sys.executable, "-c", "from agentrl.cli.main import main; main()")
NODE = {"num_cpus": 2, "object_store_memory": 100 << 20}
DEADLINE_S = 600.0
MILESTONES = ("listens", "left", "joined", "turn", "step")
HEADS = ("head", "lasting-head")
NEWEST = "SELECT COALESCE(MAX(step), 0) FROM versions WHERE confirmed_s IS NOT NULL AND undone_attempt IS NULL"
RUN = """
model = "agentrl/tiny-coder"
env = {{id = "agentrl/Calculator-v0"}}
rollout = {{workers = 2, group_size = 4, max_running = 16, max_turns = 4, max_tokens_per_turn = 12}}
engine = {{replicas = 2, max_batch = 16, kv_cache_mb = 64}}
buffer = {{groups_per_step = 2, skip_without_signal = false}}
train = {{steps = 100000, checkpoint_every = 5, parallel = {{ranks = 2}}}}
eval = {{sets = [], every = 0}}

[cluster]
launcher = "ray"
address = "{address}"
store = "{store}"
lease_s = {lease_s}
"""


def new_cluster() -> Any:
    """Three nodes of two CPUs each, which the run fills."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(**NODE)
    return cluster


@dataclass(slots=True)
class OnCluster(ChaosRun):
    """A run on `cluster`, which may lose a node, too; another takes that one's place."""

    cluster: Any = None
    _lost: dict[str, set[int]] = field(default_factory=dict[str, set[int]])  # by part: before a node was lost

    def hurt(self) -> list[FaultOutcome]:
        """Start the run, have it hurt by every fault once, and end it in order."""
        self._auditor, self._clock = OutsideAuditor(store_rows.place(self.folder)), WallClock()
        self._chance = random.Random(self.seed)
        try:
            self._start()
            return self._hurt_it(lambda line: print(line, file=sys.stderr, flush=True), time.monotonic())[0]
        finally:
            self._process.terminate()
            self._process.wait(DEADLINE_S)
            self._clock.close()

    def _inject(self, fault: Fault, pid: int) -> str:
        if fault.part != "node":
            return ChaosRun._inject(self, fault, pid)
        above = {one: parent for one, parent, _ in faults.processes()}
        held = {part: {above[above[one]]: one for one in self._pids(part)} for part in ("learner", "engine", "worker")}
        nodes = {node.all_processes["raylet"][0].process.pid: node for node in self.cluster.worker_nodes}
        raylet = next(one for part in held.values() for one in part if one in nodes)  # the learner's, if that is none
        self._lost = {part: self._pids(part) for part, pids in held.items() if raylet in pids}
        self.cluster.add_node(**NODE)
        self.cluster.remove_node(nodes[raylet], allow_graceful=False)
        return f"with a process of {', '.join(self._lost)}"

    def _recover(self, part: str, old: set[int]) -> None:
        for lost, pids in self._lost.items():
            self._advance(lost, pids, self.recovery_deadline_s)
        if not self._lost:
            ChaosRun._recover(self, part, old)
        self._lost = {}


@dataclass(frozen=True, slots=True)
class Head:
    """Seconds `at` which a killed head listened again, the run had left, it had joined with all its processes, and had
    journaled a turn and made a step; a run that stays has nothing to join."""

    kind: str
    at: dict[str, float]
    tokens_lost: int
    at_stake: int
    violations: tuple[str, ...]


def lose_the_head(run: OnCluster, cluster: Any) -> Head:
    """Kill the head and nothing else; at once another one starts at its address, with room for the run."""
    head, port = cluster.head_node, int(cluster.address.rpartition(":")[2])

    def again() -> None:
        cluster.head_node = None
        cluster.add_node(**NODE | {"num_cpus": 6, "gcs_server_port": port}, include_dashboard=False)

    try:
        return _lose(run, "that keeps nothing", head, port, again, stays=False)
    finally:
        head.kill_all_processes(check_alive=False, allow_graceful=False)


def lose_the_lasting_head(run: OnCluster, folder: Path) -> Head:
    """The same with a head that keeps what it knows in `folder`."""
    os.environ |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder)}
    cluster = new_cluster()
    head, port = cluster.head_node, int(cluster.address.rpartition(":")[2])
    settings = (f"cluster.address={cluster.address}", "cluster.head_away_s=50")
    try:
        return _lose(run, "that keeps what it knows", head, port, head.start_gcs_server, *settings, stays=True)
    finally:
        cluster.shutdown()


def _lose(
    run: OnCluster, kind: str, head: Any, port: int, again: Callable[[], None], *settings: str, stays: bool
) -> Head:
    auditor = OutsideAuditor(store_rows.place(run.folder))
    with resumed(run.folder, *settings) as process, ThreadPoolExecutor(1) as beside:
        auditor.look()
        abandoned, at_stake, old = auditor.abandoned, auditor.at_stake, _pids(run)
        head.kill_gcs_server()
        following = beside.submit(_follow, run, process, old, port, time.monotonic(), stays)
        again()
        at = following.result()
        if stays and not old <= _pids(run):
            raise SystemExit("a process of the run was started anew")
        process.terminate()
        process.wait(DEADLINE_S)
    found = auditor.look(ended=True)
    return Head(kind, at, auditor.abandoned - abandoned, at_stake, tuple(found))


def _follow(
    run: OnCluster, process: subprocess.Popen[bytes], old: set[int], port: int, began: float, stays: bool
) -> dict[str, float]:
    """The milestones, as far as the run passes them, until it has made a turn and a step under the new head."""
    at, work = dict[str, float](), None
    while not {"turn", "step"} <= set(at):
        now, after_s = _pids(run), time.monotonic() - began
        if process.poll() is not None or after_s > DEADLINE_S:
            raise SystemExit(f"the run did not go on: {at}; read {run.folder.parent}")
        if _listens(port):
            at.setdefault("listens", after_s)
        if work is None and (not old & now or (stays and "listens" in at)):
            work = _work(run)
            at |= {} if stays else {"left": after_s}
        if not stays and len(now - old) >= len(old):
            at.setdefault("joined", after_s)
        if work is not None and "listens" in at:
            done = [name for name, was, found in zip(("turn", "step"), work, _work(run), strict=True) if found > was]
            at |= {name: after_s for name in done if name not in at}
        time.sleep(0.1)
    return at


def _pids(run: OnCluster) -> set[int]:
    """The workers, engines and the learner, wherever Ray has them."""
    marks = ("child\0worker", "child\0learner", "engine")
    return {pid for pid, _, words in faults.processes() if run._on_ray(words) and any(mark in words for mark in marks)}


def _work(run: OnCluster) -> list[int]:
    """The newest turn and step."""
    return [run._ask(sql) or 0 for sql in ("SELECT COALESCE(MAX(id), 0) FROM turns", NEWEST)]


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@contextmanager
def resumed(run: Path, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """The run, once it has taken a step more."""
    store = store_rows.place(run)
    words = [word for setting in settings for word in ("--set", setting)]
    with (run.parent / f"{run.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [*MAIN, "train", "--resume", str(run), "--keep-alive", *words], stdout=log, stderr=log, process_group=0
        )
    try:
        before, until = None, time.monotonic() + DEADLINE_S
        while before is None or (store_rows.ask(store, NEWEST) or 0) <= before:
            if before is None and store_rows.ask(store, "SELECT value FROM meta WHERE key = 'phase'") == "train":
                before = store_rows.ask(store, NEWEST)
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the run did not go on: read {run.parent / f'{run.name}.log'}")
            time.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def table(outcomes: list[FaultOutcome], heads: list[Head]) -> str:
    lines = ["| killed | works again after | sampled tokens left behind | at stake | audit |", "|---|---|---|---|---|"]
    for one in outcomes:
        what = {"database": "PostgreSQL", "node": f"a node {one.proof}"}.get(one.fault.part, one.fault.part)
        more = f", {one.proof}" if one.fault.part == "database" else ""
        audit = "; ".join(one.violations) or "clean"
        lines.append(f"| {what}{more} | {one.recovery_s:.1f} s | {one.tokens_lost} | {one.at_stake} | {audit} |")
    lines += ["", "| head | " + " | ".join(MILESTONES) + " | tokens left behind | at stake | audit |", "|---" * 9 + "|"]
    for head in heads:
        times = " | ".join(f"{head.at[name]:.1f} s" if name in head.at else "" for name in MILESTONES)
        audit = "; ".join(head.violations) or "clean"
        lines.append(f"| {head.kind} | {times} | {head.tokens_lost} | {head.at_stake} | {audit} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=[*(fault.part for fault in AMONG), *HEADS], help="of the parts, these alone"
    )
    parser.add_argument("--every-s", type=float, default=5.0, help="mean pause between two faults")
    parser.add_argument("--seed", type=int, default=0, help="the order of the faults")
    parser.add_argument("--lease-s", type=float, default=10.0, help="cluster.lease_s")
    parser.add_argument("--away-s", type=float, default=20.0, help="how long PostgreSQL is away")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    chosen = parser.parse_args()
    among = [fault for fault in AMONG if fault.part in (chosen.only or fault.part)]
    os.environ |= {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}
    sys.path.insert(0, str(TESTS))
    from store.server import running  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory(prefix="agentrl-cluster-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "server").mkdir()
        with running(folder / "server", durable=True) as server:
            cluster = new_cluster()
            file = folder / "run.toml"
            file.write_text(RUN.format(address=cluster.address, store=server.url, lease_s=chosen.lease_s))
            crash = (
                "import time; from pathlib import Path; from store.server import Server;"
                f" s = Server(Path({str(server.folder)!r}), durable=True);"
                f" s.stop('immediate'); time.sleep({chosen.away_s}); s.start()"
            )
            run = OnCluster(
                [str(file)],
                folder / "run",
                faults=len(among),
                seed=chosen.seed,
                every_s=chosen.every_s,
                among=among,
                restart=f"PYTHONPATH={TESTS} {sys.executable} -c {shlex.quote(crash)}",
                cluster=cluster,
            )
            outcomes = run.hurt()
            heads = list[Head]()
            try:
                if "head" in (chosen.only or HEADS):
                    heads.append(lose_the_head(run, cluster))
            finally:
                cluster.shutdown()
            if "lasting-head" in (chosen.only or HEADS):
                heads.append(lose_the_lasting_head(run, folder / "head"))
    print(table(outcomes, heads))
    if chosen.out:
        found = {"outcomes": [asdict(one) for one in outcomes], "heads": [asdict(one) for one in heads]}
        chosen.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
