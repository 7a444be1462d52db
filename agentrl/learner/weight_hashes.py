"""A hash of each trained tensor: equal bits, and only these, give equal hashes (but for one chance in 2^32 a tensor).

Computed where the tensor lies, in one reading of it, with integers alone: the order of a sum does not matter, so that a
GPU and any number of threads find the same. It is no defence against somebody who wants two tensors to look alike.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from agentrl.config.train import Train

_ROW = 1 << 17  # values that are summed together: they fit a cache
_ROWS = {"cpu": 1}  # at once; elsewhere 128, which keep a GPU busy
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_ODD = 0x9E3779B1  # about 2^32 over the golden ratio
_MASK = (1 << 32) - 1


@torch.no_grad()
def hash_of(tensor: Tensor) -> str:
    """Eight hexadecimal digits. Every value is multiplied by an odd number of its place, so that one changed bit always
    shows, and so do two values that changed places."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS[flat.element_size()])
    factors = _factors(flat.device)
    whole = len(words) - len(words) % _ROW
    slabs = [*words[:whole].view(-1, _ROW).split(_ROWS.get(flat.device.type, 128)), words[whole:][None]]
    sums = [(slab.int() * factors[: slab.shape[1]]).sum(1, dtype=torch.int64) for slab in slabs]
    found = len(words)
    for part in torch.cat(sums).tolist():
        found = (found * _ODD + part) & _MASK
    return f"{found:08x}"


@cache
def _factors(device: torch.device) -> Tensor:
    places = torch.arange(_ROW, dtype=torch.int64, device=device)
    return ((places * _ODD) & 0x7FFFFFFF | 1).int()


def circumstances(train: Train) -> dict[str, str | int | bool]:
    """On what the bits of a step depend besides its data and settings: another order of a sum rounds differently."""
    device = torch.device(train.device)
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "dtype": train.dtype,
        "threads": train.threads,
        "ranks": train.parallel.ranks,
        "compile": train.compile,
        "gradient_checkpointing": train.gradient_checkpointing,
        "logits_mb": train.logits_mb,
    }
