"""First command in a box from the warm pool, beside a bare loop of the same program, in the same run.

    agentrl bench sandbox [--backend bubblewrap] [--image IMAGE] [--rounds 200] [--out FILE.json]

The bare loop is `bwrap --unshare-all --ro-bind / /` (bubblewrap) or the engine's own `docker exec` in one running
container (docker): the peer without limits, files, output bounds or clean-up. Beside them stand test runs that only
compute: in a fresh box with a fresh interpreter each, and as forks of a warm one (`agentrl.sandbox.warm_python`),
some at once. The sides take turns, so that a busy machine slows both; read the ratio. What thousands of episodes leave
behind is `agentrl bench episodes`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from agentrl.protocols import SandboxSpec
from agentrl.sandbox import backend
from agentrl.sandbox.backend_pool import Pool
from agentrl.sandbox.warm_python import WarmPython

PROGRAM = ["python3", "-I", "-S", "-c", "pass"]
SPEC = SandboxSpec()
BEFORE = "import posix, sys\ncode = sys.stdin.buffer.read().decode()\n"
AFTER = "exec(code)\nposix.write(1, b'done')\nposix._exit(0)\n"
MODULE = b"def double(n):\n    return 2 * n\nassert double(4) == 8\n"
AT_ONCE = 4


class BarePeer:
    """The same program without us: one process of the container tool a command."""

    def __init__(self, name: str, image: str | None) -> None:
        self._container = ""
        if name == "docker":
            started = subprocess.run(
                ["docker", "run", "--detach", "--network", "none", str(image), "sleep", "3600"],
                check=True,
                capture_output=True,
                text=True,
            )
            self._container = started.stdout.strip()
            self._command = ["docker", "exec", self._container, *PROGRAM]
        else:
            self._command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--", *self._host_program()]

    @staticmethod
    def _host_program() -> list[str]:
        """By its full path: the machine's own PATH may put a slow shim before it."""
        return [shutil.which(PROGRAM[0], path="/usr/local/bin:/usr/bin:/bin") or PROGRAM[0], *PROGRAM[1:]]

    def run(self) -> float:
        """Seconds of one command."""
        began = time.perf_counter()
        subprocess.run(self._command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
        return time.perf_counter() - began

    def close(self) -> None:
        if self._container:
            subprocess.run(["docker", "rm", "-f", self._container], check=False, capture_output=True)


async def latency(name: str, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Seconds from the pool to the end of a first command, beside the bare loop."""
    peer = BarePeer(name, options.get("image"))
    take: list[float] = []
    first: list[float] = []
    second: list[float] = []
    bare: list[float] = []
    try:
        async with Pool(backend(name, **options), ready=4) as pool:
            for _ in range(rounds):
                await pool.fill(SPEC)
                began = time.perf_counter()
                box = await pool.take(SPEC)
                took = time.perf_counter()
                result = await box.exec(PROGRAM)
                done = time.perf_counter()
                await box.exec(PROGRAM)
                second.append(time.perf_counter() - done)
                assert result.exit_code == 0, result
                await box.close()
                take.append(took - began)
                first.append(done - took)
                bare.append(await trio.to_thread.run_sync(peer.run))
            warm = pool.counts.warm
    finally:
        peer.close()
    columns = {"bare": bare, "take": take, "first exec": first, "second exec": second}
    measured = {column: summary(seconds) for column, seconds in columns.items()}
    ratio = measured["first exec"]["p50_ms"] / measured["bare"]["p50_ms"]
    return {"backend": name, "rounds": rounds, "warm": warm, "ms": measured, "first_over_bare_p50": round(ratio, 2)}


async def test_runs(name: str, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Seconds a test run, `AT_ONCE` at a time, and how many times faster a fork is, as the median of the rounds."""
    boxes = backend(name, **options)
    warm = WarmPython(boxes, SPEC, before=BEFORE, after=AFTER, deadline_s=60.0)

    async def in_a_box() -> None:
        box = await boxes.create(SPEC)
        result = await box.exec(["python3", "-I", "-S", "-c", BEFORE + AFTER], stdin=MODULE)
        await box.close()
        assert result.stdout == b"done", result

    async def in_a_fork() -> None:
        assert await warm.run(MODULE) == b"done"

    async def timed(run: Callable[[], Awaitable[None]]) -> float:
        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(run)
        return (time.perf_counter() - began) / AT_ONCE

    try:
        await timed(in_a_fork)  # starts the interpreters
        box, fork = zip(*[(await timed(in_a_box), await timed(in_a_fork)) for _ in range(rounds)], strict=True)
    finally:
        await boxes.aclose()
    ratio = statistics.median(slow / fast for slow, fast in zip(box, fork, strict=True))
    return {"ms": {"box": summary(box), "fork": summary(fork)}, "box_over_fork_p50": round(ratio, 1)}


def summary(seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=20)
    return {"p50_ms": round(1e3 * statistics.median(seconds), 2), "p95_ms": round(1e3 * cuts[-1], 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="bubblewrap")
    parser.add_argument("--image", help="for docker: an image that the engine has")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    options = {"image": chosen.image} if chosen.image else {}
    said = trio.run(latency, chosen.backend, options, chosen.rounds)
    said["test_run"] = trio.run(test_runs, chosen.backend, options, chosen.rounds)
    text = json.dumps(said, indent=2)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
