"""What a checkpoint of a box costs: milliseconds and bytes, in small and large work folders.

    agentrl bench snapshots [--backend bubblewrap] [--image IMAGE] [--rounds 20]

A *pack* is what an episode pays at a turn's end; *unpack into a new box* is paid once, by the worker that goes on for a
dead one. Beside them stand the peers: `docker commit` (docker) and `cp -a` of the work folder (bubblewrap). Of a commit
it is also told how much of the work folder it holds. Folders: `small` has 20 files of 4 KB of text, `source 50 MB` has
5,000 of 10 KB, and `random 50 MB` has 50 files of 1 MB that no compression makes smaller. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable

import trio

from agentrl.protocols import Limits, PackableSandbox, Sandbox, SandboxSpec
from agentrl.sandbox import backend

SPEC = SandboxSpec(limits=Limits(wall_s=120.0, cpu_s=120.0))
MOST = 128 << 20
FOLDERS = {
    "small": "text(20, 4)",
    "source 50 MB": "text(5000, 10)",
    "random 50 MB": "noise(50, 1024)",
}
MAKE = """
import os, random
words = [''.join(random.choices('abcdefghij', k=random.randint(2, 9))) for _ in range(3000)]
def text(n, kb):
    for i in range(n):
        os.makedirs(f'd{i % 50}', exist_ok=True)
        open(f'd{i % 50}/{i}.py', 'w').write(' '.join(random.choices(words, k=kb * 180))[:kb * 1024])
def noise(n, kb):
    for i in range(n):
        open(f'{i}.bin', 'wb').write(os.urandom(kb * 1024))
"""


async def milliseconds(rounds: int, do: Callable[[], Awaitable[object]]) -> dict[str, float]:
    times: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        await do()
        times.append(1000 * (time.perf_counter() - began))
    return {"p50_ms": round(statistics.median(times), 1), "worst_ms": round(max(times), 1)}


async def measured(name: str, image: str | None, folder: str, rounds: int) -> dict[str, object]:
    boxes = backend(name)
    spec = SandboxSpec(image=image, limits=SPEC.limits)
    try:
        box = await boxes.create(spec)
        made = await box.exec(["python3", "-c", MAKE + FOLDERS[folder]])
        assert made.exit_code == 0 and isinstance(box, PackableSandbox), made.stderr
        data = await box.pack(MOST)

        async def pack() -> None:
            await box.pack(MOST)

        async def into_new() -> None:
            other: Sandbox = await boxes.create(spec)
            assert isinstance(other, PackableSandbox)
            await other.unpack(data)
            await other.close()

        async def new() -> None:
            await (await boxes.create(spec)).close()

        found: dict[str, object] = {
            "folder": folder,
            "bytes": len(data),
            "pack": await milliseconds(rounds, pack),
            "unpack into a new box": await milliseconds(max(rounds // 4, 3), into_new),
            "a new box alone": await milliseconds(max(rounds // 4, 3), new),
        }
        if name == "docker":
            found["docker commit"] = await milliseconds(3, lambda: commit(box.name))  # type: ignore[attr-defined]
            inside = await trio.run_process(
                ["docker", "run", "--rm", "--network=none", "bench-commit", "sh", "-c", "ls /workspace | wc -l"],
                capture_stdout=True,
            )
            found["entries of the work folder in the commit"] = int(inside.stdout)
        else:
            work = box._place.work  # type: ignore[attr-defined]
            found["cp -a"] = await milliseconds(3, lambda: copy(str(work)))
        await box.close()
        return found
    finally:
        await boxes.aclose()


async def commit(container: str) -> None:
    await trio.run_process(["docker", "commit", container, "bench-commit"], stdout=subprocess.DEVNULL)


async def copy(work: str) -> None:
    await trio.run_process(["sh", "-c", 'to=$(mktemp -d) && cp -a "$1" "$to" && rm -rf "$to"', "sh", work])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="bubblewrap", choices=["bubblewrap", "docker"])
    parser.add_argument("--image")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    rows = [trio.run(measured, given.backend, given.image, folder, given.rounds) for folder in FOLDERS]
    print(json.dumps({"backend": given.backend, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
