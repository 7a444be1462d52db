"""What the journal costs a worker's loop, and what waiting for work costs: today's ways beside the plain ones.

    agentrl bench journal [--episodes 64] [--turns 20] [--tokens 200] [--rounds 5]

Episodes go on side by side in one trio loop; each turn is a journaled action and its answer, with nothing between. "in
the loop" makes each write a transaction of its own in the loop's thread; "by a thread" is how a worker does it. CPU is
that of the loop's thread, and of the process, per turn; the delay is how late a task that only sleeps was at most.
The second table has the CPU of a second in which nothing happens: of asking the store every 5 ms (learner) and 20 ms
(worker, which asked for room to admit, too), and of waiting for work. Medians of the rounds, the ways taking turns.
Prints the tables of journal.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import trio

from agentrl.records import Messages, Step, StopReason, Task, Turn, VersionSpan
from agentrl.store import AdmissionBounds, Claim, Ending, RunStore
from agentrl.store.async_calls import Waiting
from agentrl.store.databases.change_signal import Role
from agentrl.store.journal_writer import JournalWriter

START: Messages = ({"role": "user", "content": "go"},)
BOUNDS = AdmissionBounds(group_size=8, groups_per_step=8, max_lag=4, max_running=0, steps_total=100)
BEAT_S = 0.002
IDLE_S = 2.0


class Cost(NamedTuple):
    """Microseconds a turn of CPU in the loop's thread and in the process, turns a second, the longest delay in ms."""

    loop_us: float
    process_us: float
    per_second: float
    delay_ms: float


async def journal(folder: Path, episodes: int, turns: int, tokens: int, inline: bool) -> Cost:
    """Play episodes with nothing but their journal."""
    with RunStore.create(folder / "store.sqlite", "{}") as store, RunStore.read(store.path) as reader:
        store.versions.confirm_version(store.versions.mint_version(0))
        store.groups.add_groups([Task(index=0, env="e", seed=0)], size=episodes, purpose="eval")
        claims = store.leases.claim("w", episodes, lease_s=1e6)
        late, sampled = list[float](), [turn_of(index, tokens) for index in range(turns)]
        async with JournalWriter(store, reader, inline=inline) as desk, trio.open_nursery() as beat:
            beat.start_soon(watch, late)
            began = time.thread_time(), time.process_time(), time.perf_counter()
            async with trio.open_nursery() as nursery:
                for claim in claims:
                    nursery.start_soon(play, desk, claim, sampled)
            ended = time.thread_time(), time.process_time(), time.perf_counter()
            beat.cancel_scope.cancel()
    n = episodes * turns
    loop_s, process_s, wall_s = (end - start for start, end in zip(began, ended, strict=True))
    return Cost(1e6 * loop_s / n, 1e6 * process_s / n, n / wall_s, 1e3 * max(late, default=0.0))


async def watch(late: list[float]) -> None:
    while True:
        due = time.perf_counter() + BEAT_S
        await trio.sleep(BEAT_S)
        late.append(time.perf_counter() - due)


def turn_of(index: int, tokens: int) -> Turn:
    numbers = random.Random(index)
    return Turn(
        index=index,
        parent=index - 1 if index else None,
        prompt_ids=tuple(numbers.randrange(150_000) for _ in range(50)),
        token_ids=tuple(numbers.randrange(150_000) for _ in range(tokens)),
        logprobs=tuple(-numbers.random() for _ in range(tokens)),
        spans=(VersionSpan(1, 0, tokens),),
        finish="stop",
        text="x" * 4 * tokens,
    )


async def play(desk: JournalWriter, claim: Claim, turns: list[Turn]) -> None:
    id, fence = claim.episode_id, claim.fence
    await desk.begin(id, fence, START)
    for turn in turns:
        await desk.journal_turn(id, fence, turn)
        await desk.journal_step(id, fence, turn.index, Step(observation=({"role": "tool", "content": "y" * 800},)))
    await desk.finish(id, fence, Ending(stop_reason=StopReason.TURN_LIMIT, outcome=1.0, success=True))


def ask_as_learner(store: RunStore) -> None:
    """A learner that asks every 5 ms."""
    until = time.monotonic() + IDLE_S
    while time.monotonic() < until:
        store.meta("phase")
        store.buffer.take(1, 8, max_lag=4)
        time.sleep(0.005)


async def ask_as_worker(store: RunStore) -> None:
    """A worker that asks every 20 ms."""
    with trio.move_on_after(IDLE_S):
        while True:
            store.meta("phase")
            store.groups.admissible(BOUNDS, limit=8)
            store.leases.claim("w", 8, lease_s=60.0, ahead=40)
            with trio.move_on_after(0.02):
                await trio.Event().wait()


def wait(store: RunStore, role: Role) -> None:
    """As a learner or a worker waits today, in a loop of its own."""
    if role == "learner":
        store.wait_for_work(role, IDLE_S)
    else:
        trio.run(Waiting(store), role, IDLE_S)


def idle(call: Callable[[RunStore], None]) -> float:
    """CPU in ms of a second in which nothing happens."""
    with tempfile.TemporaryDirectory() as folder, RunStore.create(Path(folder) / "store.sqlite", "{}") as store:
        store.versions.confirm_version(store.versions.mint_version(0))
        for role in ("learner", "rollout"):
            store.signal(role).changed()
        started = time.process_time()
        call(store)
        return 1e3 * (time.process_time() - started) / IDLE_S


def main() -> None:
    parser = argparse.ArgumentParser(prog="agentrl bench journal", description=__doc__)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    found: dict[str, list[Cost]] = defaultdict(list)
    for _ in range(chosen.rounds):
        for way, inline in (("in the loop", True), ("by a thread", False)):
            with tempfile.TemporaryDirectory() as folder:
                run = journal, Path(folder), chosen.episodes, chosen.turns, chosen.tokens, inline
                found[way].append(trio.run(*run))
    print("| journal | loop, µs a turn | process, µs a turn | turns a second | longest delay, ms |")
    print("|---|---|---|---|---|")
    for way, costs in found.items():
        numbers = [statistics.median(column) for column in zip(*costs, strict=True)]
        print(f"| {way} | {numbers[0]:.0f} | {numbers[1]:.0f} | {numbers[2]:.0f} | {numbers[3]:.1f} |")
    ways: dict[str, Callable[[RunStore], None]] = {
        "learner asks every 5 ms": ask_as_learner,
        "learner waits": lambda store: wait(store, "learner"),
        "worker asks every 20 ms": lambda store: trio.run(ask_as_worker, store),
        "worker waits": lambda store: wait(store, "rollout"),
    }
    print("\n| idle | CPU, ms a second |\n|---|---|")
    for way, call in ways.items():
        print(f"| {way} | {statistics.median(idle(call) for _ in range(chosen.rounds)):.1f} |", flush=True)


if __name__ == "__main__":
    main()
