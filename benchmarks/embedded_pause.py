"""How long the embedded engine stands still for new weights: `agentrl bench embedded_pause [--rounds 7]`.

agentrl/smollm2-135m, whole files of float32 as a run sends them, to an engine in float32 and one in bfloat16. `pause`
is how long it computed nothing, `total` is all of it, from the request to the version confirmed. The first update of
each engine is not counted.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Literal

import trio

from agentrl.config import EngineSettings
from agentrl.engine.client import EngineClient
from agentrl.engine.embedded_process import launch_embedded
from agentrl.engine.weight_sync.file_transport import push
from agentrl.engine.weight_sync.transport import PushReport
from agentrl.models.resolve import model_dir

DEADLINE_S = 300.0


async def measure(dtype: Literal["float32", "bfloat16"], rounds: int) -> list[PushReport]:
    folder = model_dir("agentrl/smollm2-135m")
    settings = EngineSettings(kind="embedded", dtype=dtype, max_batch=8, kv_cache_mb=256)
    async with launch_embedded(folder, settings, max_context=256) as engine:
        client = EngineClient(engine.url)
        file = folder / "model.safetensors"
        reports = [await push([client], file, version, deadline_s=DEADLINE_S) for version in range(1, rounds + 2)]
        await client.aclose()
    return reports[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds: int = parser.parse_args().rounds
    print("| dtype | pause ms | longest | total ms |\n|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        reports = trio.run(measure, dtype, rounds)
        pauses, totals = ([1e3 * getattr(one, name) for one in reports] for name in ("pause_s", "total_s"))
        median = statistics.median
        print(f"| {dtype} | {median(pauses):.0f} | {max(pauses):.0f} | {median(totals):.0f} |")


if __name__ == "__main__":
    main()
