"""One rank of a sharded learner on CPUs: takes a snapshot, and enters a stand-in of an engine's communicator with it.

Run as a process of its own: `python -m tests.learner.ranks RANK MODEL_FOLDER SCRATCH`. Ranks meet over gloo and note in
a file store how far they are, so that what must be before what is seen without clocks.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from agentrl.learner import weight_export

WORLD = 2
DEADLINE = timedelta(seconds=120)


def main(rank: int, folder: Path, scratch: Path) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{scratch / 'rendezvous'}"
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD, timeout=DEADLINE)
    notes = distributed.FileStore(str(scratch / "notes"), WORLD)
    notes.set_timeout(DEADLINE)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    watch(rank, notes, tensors=sum(isinstance(tensor, DTensor) for tensor in model.parameters()))
    taken = weight_export.take(model, torch.bfloat16)
    if taken is not None:
        seen = notes.add("gathered", 0)
        notes.set("rank 0 gathered all", "1")
        communicate(taken, notes, scratch, {"seen": seen, "rank": rank})
    else:
        notes.set("rank 1 left", "1")
    loss = model(torch.arange(6)[None]).logits.square().mean()  # the next step: collectives again, on both
    loss.backward()
    print(float(loss.detach()))
    distributed.destroy_process_group()


def watch(rank: int, notes: distributed.Store, tensors: int) -> None:
    """Count every tensor gathered on either rank. Rank 1 is held in its last gather until rank 0 is through with all of
    its own, so that rank 0 is ahead by one whenever it does not wait for rank 1."""
    gather, barrier = DTensor.full_tensor, distributed.barrier
    mine = 0

    def gathering(tensor: DTensor) -> torch.Tensor:
        nonlocal mine
        whole = gather(tensor)
        mine += 1
        if rank == 1 and mine == tensors:
            notes.wait(["rank 0 gathered all"])
        notes.add("gathered", 1)
        return whole

    def waiting() -> None:
        notes.set("rank 0 gathered all", "1") if rank == 0 else None
        barrier()

    DTensor.full_tensor, distributed.barrier = gathering, waiting  # pyright: ignore


def communicate(
    taken: weight_export.WeightSnapshot, notes: distributed.Store, scratch: Path, facts: dict[str, int]
) -> None:
    """A send that takes as long as it must for rank 1 to be on its way into the next step, where it waits for us."""
    tensors = iter(taken)
    sent = dict([next(tensors)])
    notes.wait(["rank 1 left"])
    sent.update(tensors)
    torch.save({"sent": sent, "described": [(d.name, d.dtype, d.shape) for d in taken.metadata()]}, scratch / "sent.pt")
    (scratch / "facts.json").write_text(json.dumps({**facts, "tensors": len(sent), "size": taken.size_bytes}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
