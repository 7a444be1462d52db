"""Messages and bytes of a run's store at the size of a large cluster, from what single calls cost here.

    agentrl bench scale [--gpus 1024] [--episodes 100000] [--tokens-s 1000] [--turns 8] [--out FILE.json]

First it measures. A PostgreSQL server is started in a temporary folder with its disk waited for, and a relay between it
and the store counts what passes: bytes each way, and round trips (how often somebody waits for an answer). Each call of
a run's life is made `--rounds` times, with 64 episodes as one worker has them.

Then it multiplies, with the sizes of the arguments: nothing of that size was run. `--tokens-s` is what an engine GPU
samples a second, `--tokens` the length of a turn. A database is full when calls that hold its lock alone take all of
its time, `--trip-ms` for each round trip.
Prints the tables of scale.md.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import statistics
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.records import StopReason, Task, VersionSpan
from agentrl.store import AdmissionBounds, RunStore
from agentrl.store.databases.open_store import ADDRESS, remove
from agentrl.store.episodes.endings import Ending

sys.path.insert(0, str(Path(__file__).resolve().parent))
from postgres import ANSWER, START, server_at, turn_of, written

EPISODES, GROUP = 64, 8
ENDING = Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)


class Cost(NamedTuple):
    """Of one call: round trips to databases, bytes to and from them, and bytes that they log (WAL)."""

    trips: float
    sent: float
    got: float
    wal: float


class Relay:
    """Passes what comes on a socket of its own to a server's, and counts it."""

    def __init__(self, folder: Path, server: Path) -> None:
        self.sent = self.got = self.trips = 0
        self._server = str(server / ".s.PGSQL.5432")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / ".s.PGSQL.5432"))
        self._listener.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server)
            threading.Thread(target=self._pass, args=(client, server), daemon=True).start()

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        asked = False
        while True:
            for one in select.select([client, server], [], [])[0]:
                data = one.recv(1 << 20)
                if not data:
                    client.close()
                    server.close()
                    return
                if one is client:
                    self.sent += len(data)
                    asked = True
                    server.sendall(data)
                else:
                    self.got += len(data)
                    self.trips += asked
                    asked = False
                    client.sendall(data)

    def close(self) -> None:
        self._listener.close()


def measure(path: Path, url: str, relay: Relay, rounds: int, tokens: int) -> dict[str, Cost]:
    """The cost of each call of a run's life, for what it is counted by (see `PER`)."""
    found: dict[str, list[Cost]] = defaultdict(list)

    def count(name: str, call: Callable[[], Any], n: int = 1) -> Any:
        before, log = (relay.trips, relay.sent, relay.got), written(url)
        result = call()
        after = (relay.trips, relay.sent, relay.got)
        passed = [(new - old) / n for new, old in zip(after, before, strict=True)]
        found[name].append(Cost(*passed, (written(url) - log) / n))
        return result

    turn = turn_of(0, tokens)
    through = url.replace(str(relay_of(url)), str(relay_of(url).parent / "relay"))
    bounds = AdmissionBounds(group_size=GROUP, groups_per_step=8, max_lag=4, max_running=10**6, steps_total=10**6)
    with RunStore.create(path, "{}", url=through) as store:
        store.versions.confirm_version(store.versions.mint_version(0))

        def round_of(step: int) -> None:
            now = replace(turn, spans=(VersionSpan(store.versions.current_version().version, 0, tokens),))
            first = store.groups.tasks_started()
            tasks = [Task(index=first + n, env="e", seed=n) for n in range(EPISODES // GROUP)]
            started = count(
                "admit a group",
                lambda: store.groups.admit(tasks, first=first, bounds=bounds, limit=len(tasks)),
                len(tasks),
            )
            assert started == len(tasks)
            claims = count("claim an episode, of 8", lambda: store.leases.claim("w", 8, lease_s=1e6), 8)
            claims += store.leases.claim("w", 99, lease_s=1e6)
            assert len(claims) == EPISODES
            for name, call in (
                ("begin an episode", lambda own, one: partial(own.begin, one.episode_id, one.fence, START)),
                ("journal a turn", lambda own, one: own.turn_entry(one.episode_id, one.fence, now)),
                ("journal its answer", lambda own, one: own.step_entry(one.episode_id, one.fence, 0, ANSWER)),
            ):

                def together(call: Any = call) -> None:
                    assert not any(r.error for r in store.together([call(store, one) for one in claims], shared=True))

                count(name, together, len(claims))
            count("renew a worker's lease", lambda: store.leases.renew("w", lease_s=1e6))

            def finish() -> None:
                ends = [store.journal.end_entry(one.episode_id, one.fence, ENDING) for one in claims]
                assert not any(result.error for result in store.together(ends))

            count("end an episode", finish, len(claims))
            taken = count("take an episode", lambda: store.buffer.take(step, 8, max_lag=4), EPISODES)
            assert taken is not None and len(taken) == 8
            version = count("mint, confirm a version", lambda: _publish(store, step))
            count("checkpoint", lambda: store.lineage.checkpoint(step, version, f"/{step}"))

        for step in range(1, rounds + 1):
            round_of(step)
    remove(path)
    path.unlink()
    return {name: Cost(*map(statistics.median, zip(*costs[1:], strict=True))) for name, costs in found.items()}


def _publish(store: RunStore, step: int) -> int:
    version = store.versions.mint_version(step)
    store.versions.confirm_version(version)
    return version.version


def relay_of(url: str) -> Path:
    return Path(url.rpartition("host=")[2])


def per_second(chosen: argparse.Namespace) -> dict[str, float]:
    """How often a second each call is made at the size of the arguments."""
    turns = chosen.gpus * chosen.tokens_s / chosen.tokens
    episodes = turns / chosen.turns
    steps = episodes / (chosen.groups * GROUP)
    return {
        "admit a group": episodes / GROUP,
        "claim an episode, of 8": episodes,
        "begin an episode": episodes,
        "journal a turn": turns,
        "journal its answer": turns,
        "renew a worker's lease": chosen.episodes / chosen.at_once / (chosen.lease_s / 3),
        "end an episode": episodes,
        "take an episode": episodes,
        "mint, confirm a version": steps,
        "checkpoint": steps / 10,
    }


ALONE = ("admit a group", "claim an episode, of 8", "end an episode", "take an episode")
"""Calls that hold the lock of a database alone."""

SHOWN = (("trips", 2), ("sent", 0), ("got", 0), ("wal", 0))


def tables(cost: dict[str, Cost], often: dict[str, float], chosen: argparse.Namespace) -> str:
    lines = [
        "| call | a second | round trips | bytes sent | bytes back | WAL bytes |",
        "|---|---|---|---|---|---|",
    ]
    for name, n in often.items():
        each = (f"{getattr(cost[name], field):,.{digits}f}" for field, digits in SHOWN)
        lines.append(f"| {name} | {n:,.2f} | {' | '.join(each)} |")
    sums = (f"{sum(n * getattr(cost[name], field) for name, n in often.items()):,.0f}" for field, _ in SHOWN)
    lines += [
        f"| **all, a second** | | {' | '.join(sums)} |",
        "",
        "| round trips a second in calls that hold the lock alone | lock held | journal, cores | WAL, MB/s"
        " | full at, turns a second |",
        "|---|---|---|---|---|",
    ]
    turns = often["journal a turn"]
    trips = sum(often[name] * cost[name].trips for name in ALONE)
    held, cores = trips * chosen.trip_ms / 1e3, turns * chosen.turn_us / 1e6
    wal = sum(often[name] * cost[name].wal for name in often) / 1e6
    lines.append(f"| {trips:,.0f} | {held:.0%} | {cores:.2f} | {wal:.1f} | {turns / held:,.0f} |")
    step_s = chosen.groups * GROUP * chosen.turns / often["journal a turn"]
    weights = chosen.params * 2
    lines += [
        "",
        "| weights to the engines, a step | GB in all | GB/s in all | GB/s out of the learner |",
        "|---|---|---|---|",
    ]
    for name, size, out in (
        ("each engine reads all", weights, chosen.gpus),
        ("broadcast in a ring or tree (NCCL)", weights, 1),
        (f"a delta of {chosen.delta:.0%}, each engine from an object store", weights * chosen.delta, 1),
        (f"an adapter of {chosen.adapter / 1e6:.0f} MB", chosen.adapter, chosen.gpus),
    ):
        all_gb = size * chosen.gpus / 1e9
        lines.append(f"| {name} | {all_gb:,.1f} | {all_gb / step_s:,.2f} | {size * out / 1e9 / step_s:,.3f} |")
    lines.append(f"\nA step of {chosen.groups} groups of {GROUP} takes {step_s:.0f} s at this rate.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1024, help="engine GPUs, each an engine")
    parser.add_argument("--episodes", type=int, default=100_000, help="running at once")
    parser.add_argument("--at-once", type=int, default=1000, help="episodes of one worker")
    parser.add_argument("--tokens-s", type=float, default=1000.0, help="sampled by an engine GPU, a second")
    parser.add_argument("--tokens", type=int, default=600, help="of a turn")
    parser.add_argument("--turns", type=int, default=8, help="of an episode")
    parser.add_argument("--groups", type=int, default=1024, help="of a step")
    parser.add_argument("--lease-s", type=float, default=120.0)
    parser.add_argument("--params", type=float, default=8e9, help="of the model, in bfloat16 to the engines")
    parser.add_argument("--delta", type=float, default=0.1, help="share of the weights' bytes that a delta has")
    parser.add_argument("--adapter", type=float, default=100e6, help="bytes of an adapter")
    parser.add_argument(
        "--trip-ms", type=float, default=0.6, help="of a round trip with its work: a claim in postgres.md"
    )
    parser.add_argument("--turn-us", type=float, default=106.0, help="CPU of the server for a turn: postgres.md")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    chosen = parser.parse_args()
    often = per_second(chosen)
    with tempfile.TemporaryDirectory() as name, server_at(None, Path(name)) as (url, _):
        (relay_of(url).parent / "relay").mkdir()
        relay = Relay(relay_of(url).parent / "relay", relay_of(url))
        cost = measure(Path(name) / ADDRESS, url, relay, chosen.rounds, chosen.tokens)
        relay.close()
    print(tables(cost, often, chosen))
    if chosen.out:
        found = {name: one._asdict() for name, one in cost.items()}
        chosen.out.write_text(json.dumps({"costs": found, "often": often}, indent=2) + "\n")


if __name__ == "__main__":
    main()
