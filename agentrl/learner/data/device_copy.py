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
    target, away = torch.device(device), dict[int, Tensor]()

    def ask(tensor: Tensor) -> Tensor:
        # "cuda" names the current device: a tensor on cuda:1 is where it should be then.
        any_will_do = target.type == "cpu" or target == torch.device(target.type)
        if tensor.device.type != target.type or (tensor.device != target and not any_will_do):
            away.setdefault(id(tensor), tensor)
        return tensor

    each_tensor(value, ask)
    if not away:
        return value
    copies = dict(zip(away, _copied(list(away.values()), target), strict=True))
    return each_tensor(value, lambda tensor: copies.get(id(tensor), tensor))


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A record of tensors, or of records of them, with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: each_tensor(getattr(value, field.name), change) for field in fields(value) if field.init}
        return replace(value, **changed)
    if isinstance(value, Mapping):
        return {name: each_tensor(item, change) for name, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, tuple | list):
        return type(value)(each_tensor(item, change) for item in cast("list[Any]", value))
    return value


def _copied(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of one device on another one, side by side in one piece of memory."""
    parts = [tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in tensors]
    starts = [0, *accumulate(len(part) + -len(part) % _ALIGNED for part in parts)]
    # One copy for a whole record. A pass has some thirty small tensors, and each copy of its own costs a launch and,
    # from pageable memory, a wait for the device.
    piece = parts[0].new_empty(starts[-1], pin_memory=device.type == "cuda")
    for start, part in zip(starts, parts, strict=False):
        piece[start : start + len(part)] = part
    on_device = piece.to(device, non_blocking=device.type == "cuda")  # pinned memory is kept until it was read
    return [
        on_device[start : start + len(part)].view(tensor.dtype).view(tensor.shape)
        for start, part, tensor in zip(starts, parts, tensors, strict=False)
    ]
