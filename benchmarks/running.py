"""A worker's loop with 100 to 10,000 running episodes: its longest delay, CPU a turn with the journal, memory.

    agentrl bench running [--episodes 100 1000 4000 10000] [--per-second 300] [--seconds 20] [--out FILE.json]

One worker plays against an engine in its own process that samples nothing and takes a lognormal time, so long that all
episodes together make `--per-second` turns a second. Each number of episodes has a process of its own. A task of the
loop asks for 5 ms of sleep again and again. Its delay is measured twice: the seconds by which it was late, which a busy
machine adds to, and the CPU time that the loop's thread used meanwhile. `start_…` are of the time until all episodes
run, the others of the `--seconds` after one more mean turn. Prints the table of episodes.md.

`--beside` plays against a server over HTTP instead, beside verifiers, a loop over raw sockets and aiohttp; the last two
do the same requests and nothing else. It prints each side's medians, and how many times ours they are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the parts of the tests

from _running_shape import SIZE, TEXT, TOKENS, TURNS, Lines, Waits, memory_kib, settings, write_store, write_tokenizer

from agentrl.engine.http_client import _Door  # pyright: ignore[reportPrivateUsage]
from agentrl.engine.rendering.renderer import Renderer
from agentrl.host.gc_pauses import collect_after_growth, spare_old_objects
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.worker import Worker
from agentrl.store import FULL, RunStore
from agentrl.store.journal_writer import JournalWriter
from tests.parts.fake_engine import FakeEngine

SLEEP_S = 0.005
HERE = Path(__file__).resolve().parent


class Slow(FakeEngine):
    """Each turn takes a drawn time, in chunks."""

    def __init__(self, renderer: Renderer, waits: Waits) -> None:
        tokens = [*renderer.conversations.encode(TEXT)]
        tokens += [tokens[0]] * (TOKENS - len(tokens))
        super().__init__(lambda request: tokens, version=1, chunk_tokens=TOKENS // 4)
        self._waits, self._door = waits, _Door()

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self._chunk_s = self._waits.draw() / 4
        self.requests.clear()
        async for chunk in super().stream(request):
            await self._door.through()  # as the client's readers do
            yield chunk


class Delays:
    """The worst delays of the loop since the last `reset`, in seconds: late, and CPU of the thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.late_s = self.cpu_s = 0.0

    async def watch(self) -> None:
        while True:
            began, cpu = time.perf_counter(), time.thread_time()
            await trio.sleep(SLEEP_S)
            self.late_s = max(self.late_s, time.perf_counter() - began - SLEEP_S)
            self.cpu_s = max(self.cpu_s, time.thread_time() - cpu)


async def play(store: RunStore, folder: Path, n: int, per_second: float, seconds: float) -> dict[str, Any]:
    """Play with `n` running episodes for some seconds after all have begun."""
    renderer = Renderer(write_tokenizer(folder / "model"))
    config = settings(n)
    writer, reader = RunStore.open(store.path), RunStore.read(store.path)  # as a worker's process has them
    desk = JournalWriter(writer, reader)
    engine = Slow(renderer, Waits(n, n / per_second))
    context = RolloutContext(
        engine=engine, renderer=renderer, store=desk, settings=config.rollout, make_env=lambda _: Lines()
    )
    worker = Worker("worker", desk, context, config.buffer.groups_ahead)
    delays, found = Delays(), dict[str, Any]()
    began_kib, began, cpu = memory_kib(), time.perf_counter(), time.process_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        nursery.start_soon(collect_after_growth)
        nursery.start_soon(delays.watch)
        while len(worker._running) < n:  # noqa: ASYNC110  # pyright: ignore[reportPrivateUsage]
            await trio.sleep(0.01)
        found |= {"start_s": time.perf_counter() - began, "start_late_s": delays.late_s, "start_cpu_s": delays.cpu_s}
        found["start_cpu_ms_an_episode"] = 1000 * (time.process_time() - cpu) / n
        await trio.sleep(1.5 * n / per_second)  # until turns no longer end together
        delays.reset()
        turns, cpu = store.metrics.progress()[0], time.process_time()
        looks: list[float] = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            await trio.sleep(0.5)
            look = time.thread_time()
            store.buffer.expire(time.time(), 3600.0, close_policy=FULL)
            looks.append(time.thread_time() - look)
        spent, turns = time.process_time() - cpu, store.metrics.progress()[0] - turns
        found |= {"late_s": delays.late_s, "cpu_s": delays.cpu_s, "turns_s": turns / seconds}
        found |= {"cpu_ms_a_turn": 1000 * spent / max(turns, 1), "expire_ms": 1000 * max(looks)}
        found["kib_an_episode"] = (memory_kib() - began_kib) / n
        nursery.cancel_scope.cancel()
    await desk.aclose()
    writer.close()
    reader.close()
    return {"episodes": n, **{key: round(value, 3) for key, value in found.items()}}


def one(n: int, per_second: float, seconds: float) -> dict[str, Any]:
    """The figures of one number of episodes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_store(folder / "store.sqlite", n // SIZE + int(per_second * 4 * seconds) // SIZE + 1)
        with RunStore.open(folder / "store.sqlite") as store:
            spare_old_objects()  # as a worker's process does
            return trio.run(play, store, folder, n, per_second, seconds)


def tokens_of(folder: Path) -> list[int]:
    """The ids of a turn, none of which ends it."""
    tokens = [*Renderer(write_tokenizer(folder / "model")).start(({"role": "user", "content": TEXT},))]
    return (3 * [token for token in tokens if token > 1])[:TOKENS]


def ours(url: str, n: int, workers: int, folder: Path) -> dict[str, float]:
    """Play `n` episodes with so many worker processes; CPU of all of them."""
    store = folder / f"{time.time_ns()}.sqlite"
    write_store(store, n // SIZE)
    command = [sys.executable, str(HERE / "_running_agentrl.py"), url, str(n), str(store), str(workers)]
    played = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(workers)]
    found = [json.loads(one.communicate()[0]) for one in played]
    turns, seconds = n * TURNS, max(one["seconds"] for one in found)
    return {
        "cpu_ms_a_turn": 1000 * sum(one["cpu_s"] for one in found) / turns,
        "kib_an_episode": sum(one["kib"] for one in found) / n,
        "turns_s": turns / seconds,
    }


def theirs(side: str, url: str, n: int) -> dict[str, float]:
    """The same with verifiers, or with a client alone. Verifiers sets programs up with `uv`, which lies beside this
    Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = ["_running_verifiers.py"] if side == "verifiers" else ["_running_clients.py", side]
    command = [sys.executable, str(HERE / script[0]), *script[1:], url, str(n)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"PATH": path})
    return json.loads(done.stdout.splitlines()[-1])


def beside(n: int, workers: list[int], rounds: int, turn_s: float) -> list[dict[str, Any]]:
    """All sides in turn against one server, the figures of every round."""
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = ",".join(map(str, tokens_of(folder)))
        server = [sys.executable, str(HERE / "_running_server.py"), str(turn_s), tokens]
        with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            for _ in range(rounds):
                for count in workers:
                    figures.append({"side": f"agentrl, {count} workers", **ours(url, n, count, folder)})
                    print(figures[-1], file=sys.stderr)
                for side in ("raw", "aiohttp", "verifiers"):
                    figures.append({"side": side, **theirs(side, url, n)})
                    print(figures[-1], file=sys.stderr)
            process.kill()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, nargs="+", default=[100, 1000, 4000, 10_000])
    parser.add_argument("--per-second", type=float, default=300.0, help="turns a second of all episodes together")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--beside",
        action="store_true",
        help="beside verifiers and bare clients, over HTTP: the first number of episodes",
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn-s", type=float, default=2.0, help="what the server takes for a turn")
    parser.add_argument("--one", action="store_true", help="only the first number, in this process")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    chosen = parser.parse_args()
    if chosen.beside and (rest := chosen.episodes[0] % SIZE):
        parser.error(
            f"--episodes {chosen.episodes[0]}: with --beside give whole groups: {chosen.episodes[0] - rest + SIZE}"
        )
    if chosen.one:
        print(json.dumps(one(chosen.episodes[0], chosen.per_second, chosen.seconds)))
        return
    if chosen.beside:
        rounds = beside(chosen.episodes[0], chosen.workers, chosen.rounds, chosen.turn_s)
        first = None
        for side in dict.fromkeys(one["side"] for one in rounds):
            mine = [one for one in rounds if one["side"] == side]
            medians = {key: statistics.median(one[key] for one in mine) for key in mine[0] if key != "side"}
            first = first or medians["cpu_ms_a_turn"]
            shown = {key: round(value, 2) for key, value in medians.items()}
            print(side, shown, f"{medians['cpu_ms_a_turn'] / first:.2f} times the first")
        return
    figures: list[dict[str, Any]] = []
    rest = ["--one", "--per-second", str(chosen.per_second), "--seconds", str(chosen.seconds)]
    for n in chosen.episodes:
        command = [sys.executable, __file__, "--episodes", str(n), *rest]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        figures.append(json.loads(done.stdout))
    names = [name for name in figures[0] if name != "episodes"]
    heads = [f"{one['episodes']:,}" for one in figures]
    print(f"| | {' | '.join(heads)} |\n|---|{'---|' * len(figures)}")
    for name in names:
        print(f"| {name} | {' | '.join(str(one[name]) for one in figures)} |")
    if chosen.out:
        chosen.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
