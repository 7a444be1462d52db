"""Thousands of short episodes with boxes from the warm pool: what is left of them, and what they cost in memory.

    agentrl bench episodes [--n 10000] [--backend bubblewrap] [--image IMAGE] [--concurrency 8] [--out FILE.json]

An episode is a whole one: reset, a turn that writes and runs a program in the box and leaves a process behind, a turn
that submits its answer, close. What this process holds (processes below it, zombies, descriptors, threads, folders of
boxes; containers for docker) is counted before the pool opens and after it closed, and must be equal; memory is read
twenty times on the way. The exit code is 1 if anything is left or an episode failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio

from agentrl.env import EpisodeLimits, ToolEnv, tool
from agentrl.protocols import Limits, Sandbox, SandboxSpec
from agentrl.sandbox import backend
from agentrl.sandbox.backend_pool import Pool

SPEC = SandboxSpec(limits=Limits(wall_s=120.0))  # a busy machine is not what is measured
MARKS = 20
PATIENCE_S = 10.0  # for what ends by itself after its owner
PROGRAM = "print(6 * 7)"


class Boxed(ToolEnv):
    """An episode in a box: run a program, submit what it printed."""

    blocking = False
    limits = EpisodeLimits(turns=4)
    tool_timeout_s = 120.0

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        super().__init__()

    async def setup(self, task: Mapping[str, Any]) -> None:
        self._box: Sandbox = await self._pool.take(SPEC)
        self._right = False

    def prompt(self, task: Mapping[str, Any]) -> str:
        return "What does it print?"

    @tool
    async def run(self, program: str) -> str:
        """Run a Python program.

        Args:
            program: its text
        """
        await self._box.write("work/program.py", program.encode())
        await self._box.exec(["sh", "-c", "sleep 600 & echo left behind"])
        return (await self._box.exec(["python3", "-I", "-S", "work/program.py"])).stdout.decode().strip()

    @tool
    def submit(self, answer: str) -> None:
        """Give the answer.

        Args:
            answer: what was printed
        """
        self._right = answer == "42"
        self.finish()

    def grade(self) -> bool:
        return self._right

    async def teardown(self) -> None:
        await self._box.close()


async def play(pool: Pool, seed: int) -> float:
    """One episode by the script; its outcome."""
    async with Boxed(pool) as env:
        await env.areset(seed=seed)
        messages, *_ = await env.astep(env.call("run", program=PROGRAM))
        *_, info = await env.astep(env.call("submit", answer=messages[0]["content"]))
        return float(info["outcome"])


async def measure(name: str, options: dict[str, Any], n: int, concurrency: int) -> dict[str, Any]:
    """Play `n` episodes, `concurrency` at a time; what is held before and after, and memory on the way."""
    before = held(name)
    memory: list[tuple[int, int]] = []
    begun = played = right = 0

    async with Pool(backend(name, **options), ready=concurrency, creating=concurrency, per_second=1000) as pool:

        async def work() -> None:
            nonlocal begun, played, right
            while begun < n:
                begun += 1
                outcome = await play(pool, begun)
                played, right = played + 1, right + int(outcome == 1.0)
                if played % max(1, n // MARKS) == 0:
                    memory.append((played, memory_kib()))

        started = time.monotonic()
        async with trio.open_nursery() as nursery:
            for _ in range(concurrency):
                nursery.start_soon(work)
        seconds = time.monotonic() - started
        counts = pool.counts
    after = held(name)
    patient = trio.current_time() + PATIENCE_S
    while after != before and trio.current_time() < patient:
        await trio.sleep(0.1)
        after = held(name)
    return {
        "backend": name,
        "episodes": played,
        "right": right,
        "seconds": round(seconds, 1),
        "per_second": round(played / seconds, 1),
        "warm": counts.warm,
        "before": before,
        "after": after,
        "left": {what: after[what] - before[what] for what in before if after[what] != before[what]},
        "memory_kib": memory,
        "memory_growth_kib": growth(memory),
    }


def held(name: str) -> dict[str, int]:
    """What this process holds now, counted."""
    states = list(below(os.getpid()))
    found = {
        "processes": len(states),
        "zombies": states.count("Z"),
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": threading.active_count() - sum(1 for t in threading.enumerate() if t.name.startswith("Trio thread")),
        "folders": sum(1 for root in ("/dev/shm", "/tmp") for _ in Path(root).glob(f"agentrl-boxes-*/{os.getpid()}.*")),
    }
    if name == "docker":
        found["containers"] = sum(owner.startswith(f"{os.getpid()}.") for owner in _owners())
    return found


def below(pid: int) -> list[str]:
    """The states of all processes below `pid`, zombies among them."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            children.setdefault(int(parent), []).append((int(entry.name), state))
    found: list[str] = []
    left = [pid]
    while left:
        for child, state in children.get(left.pop(), []):
            found.append(state)
            left.append(child)
    return found


def memory_kib() -> int:
    """Resident memory of this process."""
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("VmRSS:") + 1])


def growth(memory: list[tuple[int, int]]) -> int:
    """By how much the mean of the last quarter of the readings lies above that of the second (the first is warm-up)."""
    quarter = len(memory) // 4
    if not quarter:
        return 0
    second, last = memory[quarter : 2 * quarter], memory[-quarter:]
    return round(sum(kib for _, kib in last) / quarter - sum(kib for _, kib in second) / quarter)


def _owners() -> list[str]:
    """The owner of every container of ours that the engine knows; it begins with a process id."""
    argv = ["docker", "ps", "--all", "--filter", "label=agentrl.owner", "--format", '{{.Label "agentrl.owner"}}']
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--backend", default="bubblewrap")
    parser.add_argument("--image", help="for docker: an image that the engine has")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    options = {"image": chosen.image} if chosen.image else {}
    found = trio.run(measure, chosen.backend, options, chosen.n, chosen.concurrency)
    text = json.dumps(found)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n")
    return int(bool(found["left"]) or found["right"] < found["episodes"])


if __name__ == "__main__":
    sys.exit(main())
