"""Two runs at one shared fleet: does each learn as it does alone?

    agentrl bench sharing [--seeds 1 2] [--set SECTION.KEY=VALUE] [--out FILE.json]

A real fleet (`agentrl fleet`) of one embedded engine, two tenants of the same weight. A run is that of `agentrl bench
learning` with an adapter in the place of all weights: the tiny coder with sandboxes, worker, store and learner of its
own. First each run alone at the fleet, then both at once.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launchers import measure
from learning import PROGRAM

from agentrl.host.ports import free_port

START_S = 300.0
ADAPTER = ("train.lora_rank=8", "train.lr=3e-3")
FLEET = """
model = "agentrl/tiny-coder"
port = {port}
max_context = 384
lora_rank = 8
engine = {{kind = "embedded", replicas = 1, max_batch = 128}}
tenants = [{{name = "first", open = true}}, {{name = "second", open = true}}]
"""


@contextmanager
def fleet(folder: Path) -> Iterator[list[str]]:
    """The engine's address for each tenant, of a fleet that serves."""
    file = folder / "fleet.toml"
    file.write_text(FLEET.format(port=free_port()))
    process = subprocess.Popen([*PROGRAM, "fleet", str(file)], stdout=subprocess.PIPE, text=True)
    late = threading.Timer(START_S, process.kill)
    try:
        late.start()
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(2)]
        late.cancel()
        yield [re.findall(r'"(http://[^"]+)"', line)[0] for line in said]
    finally:
        late.cancel()
        process.terminate()
        process.wait(START_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=[1, 2], help="of the first run and of the second")
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs: section.key=value")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-sharing-") as name, fleet(Path(name)) as urls:

        def train(at: int, how: str) -> dict[str, Any]:
            settings = [f"seed={chosen.seeds[at]}", *ADAPTER, "engine.shared=true", f'engine.urls=["{urls[at]}"]']
            found = measure(Path(name) / f"{at}-{how}", [*settings, *chosen.set])
            row = {"run": at + 1, "seed": chosen.seeds[at], "how": how, **found}
            print(row, file=sys.stderr, flush=True)
            return row

        rows = [train(at, "alone") for at in range(2)]
        with ThreadPoolExecutor(2) as both:
            rows += both.map(lambda at: train(at, "beside the other"), range(2))
    print("\n".join(table(rows)))
    if chosen.out:
        chosen.out.write_text(json.dumps(rows, indent=2) + "\n")


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| run | seed | at the fleet | held-out before | after | wall s | between steps s |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        numbers = f"{row['before']:.3f} | {row['after']:.3f} | {row['wall_s']:.0f} | {row['steps_s']:.0f}"
        yield f"| {row['run']} | {row['seed']} | {row['how']} | {numbers} |"


if __name__ == "__main__":
    main()
