"""The kill table: how soon a run on Ray, with its store in PostgreSQL, goes on after each of its parts is killed.

    agentrl bench cluster [--only PART …] [--every-s 5] [--seed 0] [--lease-s 10] [--away-s 20] [--out FILE.json]

Three nodes of Ray's test cluster on this machine; two engines, two workers, a learner of two ranks, the tiny model.
Each fault comes once: SIGKILL of a worker, an engine, a rank, the learner, the supervisor, a node; a crash of
PostgreSQL, which is away for `--away-s`. The clock stops when what died works again. Then the head, the only node
without which Ray does not go on: the run ends, a new head starts, and `agentrl train --resume` goes on there. After
each an auditor that shares no code with the store reads it. Prints the table of cluster.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.testing import faults, store_rows
from agentrl.testing.chaos_run import ChaosRun, Fault, Outcome
from agentrl.testing.faults import WallClock
from agentrl.testing.outside_audit import OutsideAuditor

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
PARTS = ("worker", "engine", "rank", "learner", "supervisor", "node")
AMONG = (*(Fault(kind="kill", part=part) for part in PARTS), Fault(kind="restart", part="database"))
MAIN = (sys.executable, "-c", "from agentrl.cli import main; main()")
NODE = {"num_cpus": 2, "object_store_memory": 100 << 20}
DEADLINE_S = 600.0
RUN = """
model = "agentrl/tiny-coder"
env = {{id = "agentrl/Calculator-v0"}}
rollout = {{group_size = 4, max_running = 16, max_turns = 4, max_tokens_per_turn = 12}}
engine = {{max_batch = 16, kv_cache_mb = 64}}
buffer = {{groups_per_step = 2, skip_without_signal = false}}
train = {{steps = 100000, checkpoint_every = 5}}
eval = {{sets = [], every = 0}}

[cluster]
launcher = "ray"
address = "{address}"
store = "{store}"
lease_s = {lease_s}
engine = {{replicas = 2}}
workers = {{replicas = 2}}
learner = {{ranks = 2}}
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

    def hurt(self) -> list[Outcome]:
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
    """Seconds until a run whose head was killed had ended, with its exit status, and until it took its next step on a
    new one, from the command on."""

    ended_s: float
    status: int
    resumed_s: float
    violations: tuple[str, ...]


def lose_the_head(run: Path, cluster: Any) -> Head:
    """Go on with a run, kill the head of its cluster, and go on with it on another cluster."""
    auditor = OutsideAuditor(store_rows.place(run))
    with resumed(run) as process:
        cluster.remove_node(cluster.head_node, allow_graceful=False)
        began = time.monotonic()
        status = process.wait(DEADLINE_S)
        ended_s = time.monotonic() - began
        found = auditor.look(ended=True)
    cluster.shutdown()
    other = new_cluster()
    try:
        began = time.monotonic()
        with resumed(run, f"cluster.address={other.address}") as process:
            resumed_s = time.monotonic() - began
            process.terminate()
            process.wait(DEADLINE_S)
    finally:
        other.shutdown()
    return Head(ended_s, status, resumed_s, (*found, *auditor.look(ended=True)))


@contextmanager
def resumed(run: Path, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """The run, once it has taken a step more."""
    newest = "SELECT COALESCE(MAX(step), 0) FROM versions WHERE confirmed_s IS NOT NULL AND undone_attempt IS NULL"
    store = store_rows.place(run)
    words = [word for setting in settings for word in ("--set", setting)]
    with (run.parent / f"{run.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [*MAIN, "train", "--resume", str(run), *words], stdout=log, stderr=log, process_group=0
        )
    try:
        before, until = None, time.monotonic() + DEADLINE_S
        while before is None or (store_rows.ask(store, newest) or 0) <= before:
            if before is None and store_rows.ask(store, "SELECT value FROM meta WHERE key = 'phase'") == "train":
                before = store_rows.ask(store, newest)
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the run did not go on: read {run.parent / f'{run.name}.log'}")
            time.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def table(outcomes: list[Outcome], head: Head) -> str:
    lines = ["| killed | works again after | sampled tokens left behind | at stake | audit |", "|---|---|---|---|---|"]
    for one in outcomes:
        what = {"database": "PostgreSQL", "node": f"a node {one.proof}"}.get(one.fault.part, one.fault.part)
        more = f", {one.proof}" if one.fault.part == "database" else ""
        audit = "; ".join(one.violations) or "clean"
        lines.append(f"| {what}{more} | {one.recovery_s:.1f} s | {one.tokens_lost} | {one.at_stake} | {audit} |")
    audit = "; ".join(head.violations) or "clean"
    lines.append(f"| the head: the run ends (exit status {head.status}) | {head.ended_s:.1f} s | | | |")
    lines.append(f"| `agentrl train --resume` on a new head | {head.resumed_s:.1f} s | | | {audit} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[fault.part for fault in AMONG], help="of the parts, these alone")
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
            head = lose_the_head(folder / "run", cluster)
    print(table(outcomes, head))
    if chosen.out:
        found = {"outcomes": [asdict(one) for one in outcomes], "head": asdict(head)}
        chosen.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
