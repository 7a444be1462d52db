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
    whole_states = {optimizer_name: optimizer.state_dict() for optimizer_name, optimizer in optimizers.items()}
    sharded_values = {
        f"{optimizer_name}.{parameter_index}.{value_name}": state_value
        for optimizer_name, optimizer_state in whole_states.items()
        for parameter_index, parameter_state in optimizer_state["state"].items()
        for value_name, state_value in parameter_state.items()
        if is_sharded(state_value)
    }
    for optimizer_name, optimizer_state in whole_states.items():
        whole_moments = {
            parameter_index: {
                value_name: state_value
                for value_name, state_value in parameter_state.items()
                if f"{optimizer_name}.{parameter_index}.{value_name}" not in sharded_values
            }
            for parameter_index, parameter_state in optimizer_state["state"].items()
        }
        whole_states[optimizer_name] = {**optimizer_state, "state": whole_moments}
    parameter_groups = [
        parameter_group for optimizer in optimizers.values() for parameter_group in optimizer.param_groups
    ]
    has_shards = any(
        is_sharded(parameter) for parameter_group in parameter_groups for parameter in parameter_group["params"]
    )
    return whole_states, sharded_values if has_shards else None


def shards(tensors: Mapping[str, Tensor]) -> Shards:
    """This rank's shards, not copied."""
    return {
        tensor_name: (tuple(cast(Any, sharded_tensor).__create_chunk_list__()[0].offsets), local(sharded_tensor))
        for tensor_name, sharded_tensor in tensors.items()
        if local(sharded_tensor).numel()
    }


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write(folder: Path, rank: int, rank_shards: Shards, progress: Callable[[], object]) -> None:
    """Write the file of a rank and make it durable, one tensor after the other; `progress` is called now and then."""
    saved_offsets = {
        tensor_name: {"saved_offsets": shard_offsets} for tensor_name, (shard_offsets, _) in rank_shards.items()
    }
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(saved_offsets)}
    }
    stop_byte = 0
    for tensor_name, (_, shard_tensor) in rank_shards.items():
        byte_range = [stop_byte, stop_byte := stop_byte + shard_tensor.nbytes]
        header[tensor_name] = {
            "dtype": _DTYPES[shard_tensor.dtype],
            "shape": list(shard_tensor.shape),
            "data_offsets": byte_range,
        }
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    # `x`: two processes of one rank would be a fault in the start of ranks, and must not write into one file.
    with file_of(folder, rank).open("xb") as shard_file:
        shard_file.write(struct.pack("<Q", len(header_bytes)) + header_bytes)
        unsynced_bytes = 0
        for _, shard_tensor in rank_shards.values():
            # One tensor at a time in host memory: torch's writer copies all before it writes any.
            shard_bytes = memoryview(
                cast(Any, shard_tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
            )
            for first_byte in range(0, len(shard_bytes), _SYNCED):
                unsynced_bytes += shard_file.write(shard_bytes[first_byte : first_byte + _SYNCED])
                if unsynced_bytes >= _SYNCED:
                    _sync(shard_file)
                    progress()
                    unsynced_bytes = 0
        _sync(shard_file)
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
    except ImportError as read_error:
        raise ModelError(f"torch {torch.__version__} cannot read {folder}: pip install --upgrade torch") from read_error
    storage_reader = HuggingFaceStorageReader(str(folder))
    optimizer_states: dict[str, dict[int, dict[str, Tensor]]] = {tensor_name: {} for tensor_name in optimizers}
    target_tensors: dict[str, Tensor] = {}
    try:
        metadata = cast("dict[str, Any]", storage_reader.read_metadata().state_dict_metadata)
        for tensor_name in names:
            optimizer, parameter_index, value_name = tensor_name.rsplit(".", 2)
            if optimizer in optimizers:
                parameter = [
                    own_parameter
                    for parameter_group in optimizers[optimizer].param_groups
                    for own_parameter in parameter_group["params"]
                ][int(parameter_index)]
                target_tensors[tensor_name] = _empty(
                    tensor_name, metadata.get(tensor_name), parameter, away=waits(optimizers[optimizer])
                )
                parameter_state = optimizer_states[optimizer].setdefault(int(parameter_index), {})
                parameter_state[value_name] = target_tensors[tensor_name]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # each plans by itself
            load(cast("dict[str, Any]", target_tensors), storage_reader=storage_reader, no_dist=True)
    except (OSError, SafetensorError, ValueError, KeyError, IndexError, TypeError, CheckpointException) as read_error:
        correction = f"give it back its files, or move {folder.parent} away to go on from the checkpoint before it"
        raise ModelError(
            f"{folder} cannot be read: {correction} ({type(read_error).__name__}: {read_error})"
        ) from read_error
    return optimizer_states


def _empty(name: str, what: Any, parameter: Tensor, *, away: bool) -> Tensor:
    """A tensor to read into, cut as the parameter is; `away`: in host memory."""
    stored_count = 0 if what is None else sum(math.prod(chunk.sizes) for chunk in what.chunks)
    if what is None or stored_count != parameter.numel() or what.size != parameter.shape:
        raise ValueError(f"{name} has {stored_count} numbers, and its parameter {parameter.numel()}")
    empty_tensor = torch.empty_like(parameter.detach(), dtype=what.properties.dtype)
    return with_shard(empty_tensor, torch.empty_like(local(empty_tensor), device="cpu")) if away else empty_tensor
