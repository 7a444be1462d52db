"""Turns a second that a run's store takes in one PostgreSQL database, and in three, side by side.

    agentrl bench databases [--writers 1 2 4] [--rounds 3]

Writers and turns are those of `agentrl bench postgres`. One database, three on the same server, and three on a server
each take turns; figures are medians of the rounds. Each server waits for its disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import trio

from agentrl.records import Task, Turn
from agentrl.store import RunStore
from agentrl.store.asynchronous.writers import desk_of
from agentrl.store.databases.open_store import ADDRESS, parts, remove

sys.path.insert(0, str(Path(__file__).resolve().parent))
from postgres import play, server_at, turn_of


def write(path: Path, episodes: int, turns: list[Turn], start: Barrier, done: Any) -> None:
    """One writer: a process of its own."""

    async def main() -> None:
        with RunStore.open(path) as store, RunStore.read(path) as reader:
            claims = store.claim(f"w{os.getpid()}", episodes, lease_s=1e6)
            async with desk_of(store, reader) as desk:
                start.wait(600)
                began, cpu = time.perf_counter(), time.process_time()
                async with trio.open_nursery() as nursery:
                    for claim in claims:
                        nursery.start_soon(play, desk, claim, turns, [])
                done.put((time.perf_counter() - began, time.process_time() - cpu))

    trio.run(main)


def rate(path: Path, urls: list[str], writers: int, episodes: int, turns: list[Turn]) -> tuple[float, float]:
    """Turns a second, and the writers' CPU a turn in µs."""
    context = multiprocessing.get_context("spawn")
    start, done = context.Barrier(writers + 1), context.Queue()
    with RunStore.create(path, "{}", url=urls) as store:
        store.confirm_version(store.mint_version(0))
        for at in range(writers * episodes // 8):  # purposes spread over the databases
            store.add_groups([Task(index=at, env="e", seed=at)], size=8, purpose=f"eval:{at}")
        children = [context.Process(target=write, args=(path, episodes, turns, start, done)) for _ in range(writers)]
        for child in children:
            child.start()
        start.wait(600)
        spent = [done.get(timeout=600) for _ in children]
        for child in children:
            child.join(600)
    addresses = parts(path)
    remove(path)
    for address in addresses:
        address.unlink()
    n = writers * episodes * len(turns)
    return n / max(wall for wall, _ in spent), 1e6 * sum(cpu for _, cpu in spent) / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    turns = [turn_of(index, 600) for index in range(20)]
    found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(3)]
        urls = [stack.enter_context(server_at(None, folder))[0] for folder in folders]
        ways = {"one database": urls[:1], "three, one server": urls[:1] * 3, "three servers": urls}
        for _ in range(chosen.rounds):
            for writers in chosen.writers:
                for way, at in ways.items():
                    found[writers, way].append(rate(folders[0] / ADDRESS, at, writers, 64, turns))
                    print(writers, way, *found[writers, way][-1], file=sys.stderr)
    print("| writers | databases | turns a second | writers, µs of CPU a turn |\n|---|---|---|---|")
    for (writers, way), pairs in found.items():
        per_s, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"| {writers} | {way} | {per_s:,.0f} | {cpu:.0f} |")


if __name__ == "__main__":
    main()
