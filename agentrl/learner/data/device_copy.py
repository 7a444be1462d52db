"""Records of tensors on their way between host and device.

Owns how they get there: side by side in one copy, in place of one for each tensor. Never knows what a record is for.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

# The largest alignment that a view of another dtype or a kernel's vector load asks for.
_ALIGNED = 16  # bytes


def moved(value: Any, device: torch.device | str) -> Any:
    """A record of tensors, or of records of them, with every tensor on `device`: in one copy, for which a device's
    queue is not waited for. What comes from there is waited for."""
    target_device, tensors_away = torch.device(device), dict[int, Tensor]()

    def ask(tensor: Tensor) -> Tensor:
        # "cuda" names the current device: a tensor on cuda:1 is where it should be then.
        any_will_do = target_device.type == "cpu" or target_device == torch.device(target_device.type)
        if tensor.device.type != target_device.type or (tensor.device != target_device and not any_will_do):
            tensors_away.setdefault(id(tensor), tensor)
        return tensor

    each_tensor(value, ask)
    if not tensors_away:
        return value
    copy_by_id = dict(zip(tensors_away, _copied(list(tensors_away.values()), target_device), strict=True))
    return each_tensor(value, lambda tensor: copy_by_id.get(id(tensor), tensor))


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A record of tensors, or of records of them, with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        changed_fields = {
            field.name: each_tensor(getattr(value, field.name), change) for field in fields(value) if field.init
        }
        return replace(value, **changed_fields)
    if isinstance(value, Mapping):
        return {
            item_name: each_tensor(inner_value, change)
            for item_name, inner_value in cast("Mapping[str, Any]", value).items()
        }
    if isinstance(value, tuple | list):
        return type(value)(each_tensor(inner_value, change) for inner_value in cast("list[Any]", value))
    return value


def _copied(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of one device on another one, side by side in one piece of memory."""
    byte_tensors = [tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in tensors]
    first_bytes = [0, *accumulate(len(tensor_bytes) + -len(tensor_bytes) % _ALIGNED for tensor_bytes in byte_tensors)]
    # One copy for a whole record. A pass has some thirty small tensors, and each copy of its own costs a launch and,
    # from pageable memory, a wait for the device.
    joint_bytes = byte_tensors[0].new_empty(first_bytes[-1], pin_memory=device.type == "cuda")
    for first_byte, tensor_bytes in zip(first_bytes, byte_tensors, strict=False):
        joint_bytes[first_byte : first_byte + len(tensor_bytes)] = tensor_bytes
    on_device = joint_bytes.to(device, non_blocking=device.type == "cuda")  # pinned memory is kept until it was read
    return [
        on_device[first_byte : first_byte + len(tensor_bytes)].view(tensor.dtype).view(tensor.shape)
        for first_byte, tensor_bytes, tensor in zip(first_bytes, byte_tensors, tensors, strict=False)
    ]
