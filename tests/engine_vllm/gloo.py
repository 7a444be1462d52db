"""gloo in the place of NCCL, so that vLLM's own `nccl` weight transfer runs on CPUs: both ends of it, packing and all.

Only the communicator and the CUDA streams are stand-ins. The server loads this as a plugin, its trainer as a module.
What vLLM's CPU build forgets after an update (NCCL is not there for CPUs) is mended as our own backend mends it.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path
from typing import Any

_WAIT = datetime.timedelta(seconds=60)


class Stream:
    """A CPU has one, and is always through with it."""

    def synchronize(self) -> None: ...


class Communicator:
    """`PyNcclCommunicator`, as far as weight transfer uses it."""

    pieces = 0  # broadcast in this process

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        from torch.distributed import ProcessGroupGloo, TCPStore

        self._store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=_WAIT)
        self._group: Any = ProcessGroupGloo(self._store, rank, world_size, _WAIT)

    def broadcast(self, tensor: Any, src: int, stream: object = None) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()
        Communicator.pieces += 1

    def destroy(self) -> None:
        self._group = None


def register() -> None:
    """Put it in NCCL's place, in this process."""
    import torch
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    if nccl_common.stateless_init_process_group.__module__ == __name__:
        return  # vLLM loads its plugins again and again

    def join(host: str, port: int, rank: int, world_size: int, device: object) -> Communicator:
        return Communicator(host, port, rank, world_size)

    finish = NCCLWeightTransferEngine.finish_weight_update

    def finish_and_mend(engine: Any) -> None:
        from agentrl.engine.vllm.plugin import cpu_fixes

        finish(engine)
        cpu_fixes.after_update(engine.model)

    nccl_common.stateless_init_process_group = join
    NCCLWeightTransferEngine.finish_weight_update = finish_and_mend
    packed_tensor._get_streams = lambda device, count: (Stream(),) * count
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.stream = lambda stream: contextlib.nullcontext()


def carry(folder: Path, source: Path = Path(__file__)) -> None:
    """Make `folder` something that, on an interpreter's path, gives a stand-in to vLLM as a plugin."""
    name = f"stand_in_{source.stem}"
    (folder / f"{name}.py").write_text(source.read_text())
    facts = folder / f"{name}-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")


def carry_to_learner(folder: Path) -> None:
    """Have a run's learner, where `folder` is on its path, send over gloo from a CPU which it takes for a GPU."""
    (folder / "sitecustomize.py").write_text("""
import sys

if "learner" in sys.orig_argv:
    import stand_in_gloo
    import torch

    from agentrl.learner import build_learner

    stand_in_gloo.register()
    build_learner.device_of = lambda config: torch.device("cpu")
""")
