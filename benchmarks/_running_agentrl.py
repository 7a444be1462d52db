"""The episodes of `agentrl bench running --beside`, played by a worker of agentrl with its journal.

python _running_agentrl.py URL EPISODES STORE WORKERS    is one of the workers; prints a line of JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import trio
from _running_shape import TOKENS, TURNS, Lines, memory_kib, settings

from agentrl.engine.client import EngineClient
from agentrl.engine.rendering.renderer import Renderer
from agentrl.host.gc_pauses import collect_after_growth, spare_old_objects
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.worker import Worker
from agentrl.store import RunStore
from agentrl.store.journal_writer import JournalWriter


async def main(url: str, n: int, path: Path, workers: int) -> None:
    config = settings(n, workers)
    with RunStore.open(path) as writer, RunStore.read(path) as store:  # as a worker's process has them
        desk = JournalWriter(writer, store)
        context = RolloutContext(
            engine=EngineClient(url, version=1, connect_s=60.0),
            renderer=Renderer(path.parent / "model"),
            store=desk,
            settings=config.rollout,
            make_env=lambda _: Lines(),
        )
        name = f"worker-{time.time_ns()}"
        worker = Worker(name, desk, context, config.buffer.groups_ahead)
        before, peak = memory_kib(), 0
        began, cpu = time.perf_counter(), time.process_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            nursery.start_soon(collect_after_growth)
            while sum(store.metrics.endings().values()) < n:
                await trio.sleep(0.25)
                peak = max(peak, memory_kib())
            spent, seconds = time.process_time() - cpu, time.perf_counter() - began
            nursery.cancel_scope.cancel()
        await context.engine.aclose()
        await desk.aclose()
        whole = sum(one.tokens == TURNS * TOKENS for one in store.reads.episodes("train", limit=n))
        assert whole == n, f"{whole} of {n} episodes are whole"
    found = {"cpu_s": spent, "kib": peak - before, "seconds": seconds}
    print(json.dumps(found))


if __name__ == "__main__":
    spare_old_objects()  # this and the next as a worker's process does
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    trio.run(main, sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
