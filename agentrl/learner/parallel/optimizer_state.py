"""State of the optimizers of sharded weights, a folder of torch.distributed.checkpoint: each rank writes a file.

Owns the files. Never knows what else a checkpoint has, nor how ranks wait for each other.

    shard-00001-model-00001-of-00001.safetensors     of rank 0: its shards as `OPTIMIZER.PARAMETER.NAME`, and in the
    shard-00002-model-00001-of-00001.safetensors     header where each begins in its tensor

It is the sharded format of torch's HuggingFaceStorageWriter: nothing in it is pickled, and torch's own reader cuts it
anew for any other ranks. Torch's writer would copy all bytes before it writes any, and its ranks would meet in
collectives, which the step beside it needs for itself.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

import json
import math
import os
import struct
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from agentrl.errors import ModelError
from agentrl.learner.parallel.fsdp import is_sharded, local, waits, with_shard

Shards = Mapping[str, tuple[tuple[int, ...], Tensor]]
"""What a rank has of each tensor, and where in the tensor it begins."""

_DTYPES: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
# Left to the end, one sync would block for all of it, without a sign of progress, and the supervisor might take the
# learner for hanging.
_SYNCED: Final = 64 << 20  # bytes that wait in memory for the disk


def divided(
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor] | None]:
    """The states of optimizers without what is sharded; and this by name, not copied, None if their weights are not."""
    states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    apart = {
        f"{name}.{number}.{key}": value
        for name, state in states.items()
        for number, values in state["state"].items()
        for key, value in values.items()
        if is_sharded(value)
    }
    for name, state in states.items():
        moments = {
            number: {key: value for key, value in values.items() if f"{name}.{number}.{key}" not in apart}
            for number, values in state["state"].items()
        }
        states[name] = {**state, "state": moments}
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    cut = any(is_sharded(parameter) for group in groups for parameter in group["params"])
    return states, apart if cut else None


def shards(tensors: Mapping[str, Tensor]) -> Shards:
    """This rank's shards, not copied."""
    return {
        name: (tuple(cast(Any, tensor).__create_chunk_list__()[0].offsets), local(tensor))
        for name, tensor in tensors.items()
        if local(tensor).numel()
    }


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write(folder: Path, rank: int, rank_shards: Shards, progress: Callable[[], object]) -> None:
    """Write the file of a rank and make it durable, one tensor after the other; `progress` is called now and then."""
    starts = {name: {"saved_offsets": start} for name, (start, _) in rank_shards.items()}
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(starts)}
    }
    end = 0
    for name, (_, tensor) in rank_shards.items():
        place = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # `x`: two processes of one rank would be a fault in the start of ranks, and must not write into one file.
    with file_of(folder, rank).open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        waiting = 0
        for _, tensor in rank_shards.values():
            # One tensor at a time in host memory: torch's writer copies all before it writes any.
            data = memoryview(cast(Any, tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
            for first in range(0, len(data), _SYNCED):
                waiting += file.write(data[first : first + _SYNCED])
                if waiting >= _SYNCED:
                    _sync(file)
                    progress()
                    waiting = 0
        _sync(file)
    progress()


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def read(
    folder: Path, names: Collection[str], optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, dict[int, dict[str, Tensor]]]:
    """Read `names` for the parameters of `optimizers`, cut as these are: each rank reads its own shards alone. Raises
    ModelError if the folder has less, or something else."""
    try:
        from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load
    except ImportError as error:
        raise ModelError(f"torch {torch.__version__} cannot read {folder}: pip install --upgrade torch") from error
    reader = HuggingFaceStorageReader(str(folder))
    states: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in optimizers}
    targets: dict[str, Tensor] = {}
    try:
        metadata = cast("dict[str, Any]", reader.read_metadata().state_dict_metadata)
        for name in names:
            optimizer, number, key = name.rsplit(".", 2)
            if optimizer in optimizers:
                parameter = [tensor for group in optimizers[optimizer].param_groups for tensor in group["params"]][
                    int(number)
                ]
                targets[name] = _empty(name, metadata.get(name), parameter, away=waits(optimizers[optimizer]))
                states[optimizer].setdefault(int(number), {})[key] = targets[name]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # each plans by itself
            load(cast("dict[str, Any]", targets), storage_reader=reader, no_dist=True)
    except (OSError, SafetensorError, ValueError, KeyError, IndexError, TypeError, CheckpointException) as error:
        hint = f"give it back its files, or move {folder.parent} away to go on from the checkpoint before it"
        raise ModelError(f"{folder} cannot be read: {hint} ({type(error).__name__}: {error})") from error
    return states


def _empty(name: str, what: Any, parameter: Tensor, *, away: bool) -> Tensor:
    """A tensor to read into, cut as the parameter is; `away`: in host memory."""
    stored = 0 if what is None else sum(math.prod(chunk.sizes) for chunk in what.chunks)
    if what is None or stored != parameter.numel() or what.size != parameter.shape:
        raise ValueError(f"{name} has {stored} numbers, and its parameter {parameter.numel()}")
    tensor = torch.empty_like(parameter.detach(), dtype=what.properties.dtype)
    return with_shard(tensor, torch.empty_like(local(tensor), device="cpu")) if away else tensor
