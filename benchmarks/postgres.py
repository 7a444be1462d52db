"""Turns a second that a store in PostgreSQL commits, and what a claim costs there, beside SQLite in the same run.

    agentrl bench postgres [--url postgresql://user@host/database] [--writers 1 2 4] [--rounds 3] [--out FILE.json]

Each writer is a process with a store's thread, as a worker has. Its episodes go on side by side, with nothing between
their turns but the journal: a turn of `--tokens` tokens (about 6 KB with its text and answer) is written before its
answer, so it is two writes. CPU per turn is that of the writers, and of the server if it was started here. Then a
worker claims 8 of 10,000 episodes in flight while two writers go on. Stores take turns; figures are medians of the
rounds. Without `--url` a server is started in a temporary folder, with its disk waited for (fsync).
Prints the tables of postgres.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import trio

from agentrl.records import Messages, Step, Task, Turn, VersionSpan
from agentrl.store import Claim, RunStore
from agentrl.store.databases.open_store import ADDRESS, STORE, remove
from agentrl.store.journal_writer import JournalWriter

START: Messages = ({"role": "user", "content": "go"},)
FLIGHT, CLAIMED, CLAIMS = 10_000, 8, 40
_TICK = os.sysconf("SC_CLK_TCK")


class Rate(NamedTuple):
    """Turns a second; CPU of the writers and of the server, in microseconds a turn; the wait of the slowest tenth of
    turns in ms; what the server logs (WAL) of a turn, in bytes."""

    per_second: float
    writers_us: float
    server_us: float
    slow_ms: float
    wal_bytes: float


def turn_of(index: int, tokens: int) -> Turn:
    numbers = random.Random(index)
    return Turn(
        index=index,
        parent=index - 1 if index else None,
        prompt_ids=tuple(numbers.randrange(150_000) for _ in range(tokens // 4)),
        token_ids=tuple(numbers.randrange(150_000) for _ in range(tokens)),
        logprobs=tuple(-numbers.randrange(1 << 23) / (1 << 20) for _ in range(tokens)),  # float32, as engines give
        spans=(VersionSpan(1, 0, tokens),),
        finish="stop",
        text="".join(numbers.choices("abcdefghijklmnop \n", k=3 * tokens)),
    )


ANSWER = Step(observation=({"role": "tool", "content": "".join(random.Random(0).choices("0123456789 ", k=800))},))


async def play(desk: JournalWriter, claim: Claim, turns: Sequence[Turn], waits: list[float]) -> None:
    id, fence = claim.episode_id, claim.fence
    await desk.begin(id, fence, START)
    for turn in turns:
        began = time.perf_counter()
        await desk.journal_turn(id, fence, turn)
        waits.append(time.perf_counter() - began)
        await desk.journal_step(id, fence, turn.index, ANSWER)


def write(path: Path, episodes: int, turns: Sequence[Turn], start: Barrier, done: Any) -> None:
    """One writer: a process of its own."""

    async def main() -> None:
        with RunStore.open(path) as store, RunStore.read(path) as reader:
            store.versions.step_of(1)
            claims, waits = store.leases.claim(f"w{os.getpid()}", episodes, lease_s=1e6), list[float]()
            assert len(claims) == episodes
            async with JournalWriter(store, reader) as desk:
                start.wait(600)
                began, cpu = time.perf_counter(), time.process_time()
                async with trio.open_nursery() as nursery:
                    for claim in claims:
                        nursery.start_soon(play, desk, claim, turns, waits)
                spent = time.process_time() - cpu, time.perf_counter() - began
        done.put((*spent, statistics.quantiles(waits, n=10)[-1]))

    trio.run(main)


def rate(path: Path, url: str | None, server: int | None, *, writers: int, episodes: int, turns: list[Turn]) -> Rate:
    """What `writers` processes commit together in a new store."""
    context = multiprocessing.get_context("spawn")
    start, done = context.Barrier(writers + 1), context.Queue()
    with new(path, url, writers * episodes) as store:
        children = [
            context.Process(target=write, args=(store.path, episodes, turns, start, done)) for _ in range(writers)
        ]
        for child in children:
            child.start()
        start.wait(600)
        before, wal = server_s(server), written(url)
        spent = [done.get(timeout=600) for _ in children]
        of_server, wal = server_s(server) - before, written(url) - wal
        for child in children:
            child.join(600)
    n = writers * episodes * len(turns)
    wall_s = max(wall for _, wall, _ in spent)
    slow = statistics.median(slow for *_, slow in spent)
    return Rate(n / wall_s, 1e6 * sum(cpu for cpu, *_ in spent) / n, 1e6 * of_server / n, 1e3 * slow, wal / n)


def claims(path: Path, url: str | None, *, flight: int, turns: list[Turn], writers: int) -> tuple[float, float]:
    """Median and ninth decile, in ms, of a claim of 8 with `flight` episodes running, while `writers` go on."""
    context = multiprocessing.get_context("spawn")
    start, done = context.Barrier(writers + 1), context.Queue()
    episodes = 64
    with new(path, url, flight + writers * episodes + CLAIMS * CLAIMED) as store:
        children = [
            context.Process(target=write, args=(store.path, episodes, turns, start, done), daemon=True)
            for _ in range(writers)
        ]
        for child in children:
            child.start()
        if writers:
            start.wait(600)
        store.leases.claim("flight", flight, lease_s=1e6)
        took: list[float] = []
        for _ in range(CLAIMS):
            began = time.perf_counter()
            assert len(store.leases.claim("claimer", CLAIMED, lease_s=1e6)) == CLAIMED
            took.append(1e3 * (time.perf_counter() - began))
            time.sleep(0.02)
        assert all(child.is_alive() for child in children), "the writers ended before the claims: give more --turns"
        for child in children:
            child.terminate()
            child.join(60)
    return statistics.median(took), statistics.quantiles(took, n=10)[-1]


@contextmanager
def new(path: Path, url: str | None, episodes: int) -> Iterator[RunStore]:
    """A new store with this many waiting episodes; it is removed at the end."""
    with RunStore.create(path, "{}", url=url) as store:
        store.versions.confirm_version(store.versions.mint_version(0))
        groups = -(-episodes // 64)
        store.groups.add_groups([Task(index=n, env="e", seed=n) for n in range(groups)], size=64, purpose="eval")
        yield store
    remove(path)
    path.unlink()


def written(url: str | None) -> int:
    """Bytes that a server has logged so far."""
    if url is None:
        return 0
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT pg_current_wal_lsn() - '0/0'").fetchone()
    assert row is not None
    return int(row[0])


def server_s(pid: int | None) -> float:
    """CPU seconds of a server and its sessions so far; of those that have ended, too."""
    if pid is None:
        return 0.0
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid or stat.parent.name == str(pid):
            total += int(fields[11]) + int(fields[12])
        if stat.parent.name == str(pid):
            total += int(fields[13]) + int(fields[14])
    return total / _TICK


@contextmanager
def server_at(url: str | None, folder: Path) -> Iterator[tuple[str, int | None]]:
    """The URL of the database to measure, and the process of its server if it is ours."""
    if url is not None:
        yield url, None
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from store.server import running  # pyright: ignore[reportMissingImports]

    (folder / "server").mkdir()
    folder.chmod(0o755)
    with running(folder / "server", durable=True) as server:
        pid = int((folder / "server" / "data" / "postmaster.pid").read_text().split()[0])
        yield server.url, pid


def table(rates: dict[str, list[Rate]], latency: dict[str, list[tuple[float, float]]]) -> str:
    lines = [
        "| journal | turns a second | writers, µs of CPU a turn | server, µs a turn | slowest tenth of turns, ms"
        " | WAL, bytes a turn |",
        "|---|---|---|---|---|---|",
    ]
    for way, found in rates.items():
        one = [statistics.median(column) for column in zip(*found, strict=True)]
        lines.append(f"| {way} | {one[0]:.0f} | {one[1]:.0f} | {one[2]:.0f} | {one[3]:.1f} | {one[4]:.0f} |")
    lines += ["", f"| claim of {CLAIMED} | median, ms | slowest tenth, ms |", "|---|---|---|"]
    for way, pairs in latency.items():
        middle, slow = (statistics.median(column) for column in zip(*pairs, strict=True))
        lines.append(f"| {way} | {middle:.1f} | {slow:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a database to measure; without a password")
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--episodes", type=int, default=64, help="of each writer, side by side")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flight", type=int, default=FLIGHT)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    chosen = parser.parse_args()
    turns = [turn_of(index, chosen.tokens) for index in range(chosen.turns)]
    rates: dict[str, list[Rate]] = defaultdict(list)
    latency: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, server_at(chosen.url, Path(name)) as (url, pid):
        folder = Path(name)
        stores = {"SQLite": (folder / STORE, None, None), "PostgreSQL": (folder / ADDRESS, url, pid)}
        for _ in range(chosen.rounds):
            for writers in chosen.writers:
                for way, (path, at, server) in stores.items():
                    how = {"writers": writers, "episodes": chosen.episodes, "turns": turns}
                    rates[f"{way}, {writers} writing"].append(rate(path, at, server, **how))
                    print(f"{way}, {writers} writing: {rates[f'{way}, {writers} writing'][-1]}", file=sys.stderr)
            for writers in (0, 2) if chosen.flight else ():
                for way, (path, at, _) in stores.items():
                    long = [turn_of(index, chosen.tokens) for index in range(40 * chosen.turns)]
                    found = claims(path, at, flight=chosen.flight, turns=long, writers=writers)
                    latency[f"{way}, {chosen.flight:,} in flight, {writers} writing"].append(found)
    print(table(rates, latency))
    if chosen.out:
        chosen.out.write_text(json.dumps({"rates": rates, "claims": latency}, indent=2) + "\n")


if __name__ == "__main__":
    main()
