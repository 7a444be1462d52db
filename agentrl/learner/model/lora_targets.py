"""Which parts of a model an adapter adapts, and their names in a model folder.

Owns the choice that `train.lora_targets` makes. Never knows ranks, files, nor how a part is adapted.

A part is a linear layer, or a parameter: transformers keeps the experts of a layer as one stack [E, out, in], often
gate and up together; many model folders have one matrix per expert. A target may use either's names.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]
from transformers.core_model_loading import revert_weight_conversion

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of what chooses, or weighs, experts: left alone by default, for a moved choice undoes what experts learned."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The matrix that a model folder calls `name`: rows `start` to `stop` of expert `expert` of a stack."""

    name: str
    expert: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """A linear layer called `name`, or the parameter `parameter` of the module `name`."""

    name: str
    parameter: str = ""
    pieces: tuple[Piece, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The names that a target may use for it, without expert numbers."""
        own = {self.name, f"{self.name}.{self.parameter}"} if self.parameter else {self.name}
        return frozenset(own | set(self.divided))

    @property
    def divided(self) -> tuple[str, ...]:
        """The names of its pieces, without expert numbers."""
        return tuple(dict.fromkeys(re.sub(r"\.\d+(?=\.[^.]+$)", "", piece.name) for piece in self.pieces))

    @property
    def routes(self) -> bool:
        return not _ROUTERS.isdisjoint(self.name.split("."))


def choose(module: Any, targets: Sequence[str]) -> list[LoraTarget]:
    """The parts whose names end with one of `targets`; without targets, all but routers. The embedding and the output
    layer are no parts. Raises ValueError for a target that names no part, or half of one."""
    parts = list(_parts(module))
    if not targets:
        return [part for part in parts if not part.routes]
    if unknown := [target for target in targets if not any(_named(part.names, target) for part in parts)]:
        raise ValueError(f"the model has no layer called {unknown[0]!r}")
    chosen = [part for part in parts if any(_named(part.names, target) for target in targets)]
    for part in chosen:
        whole = part.names - set(part.divided)
        named = [any(_named({name}, target) for target in targets) for name in part.divided]
        if any(named) and not all(named) and not any(_named(whole, target) for target in targets):
            halves = " and ".join(repr(name.rpartition(".")[2]) for name in part.divided)
            raise ValueError(f"{part.name}.{part.parameter} is one tensor: name {halves}, or neither")
    return chosen


def pieces(module: Any, stacks: Mapping[str, torch.Size]) -> dict[str, tuple[Piece, ...]]:
    """The pieces that the model's folder divides parameters of these names and shapes [E, out, in] into; empty if it
    keeps the stack. Transformers divides numbered rows to find them, so no architecture needs to be known here."""
    rows: dict[str, torch.Tensor] = {}
    owner: list[str] = []
    found: dict[str, list[Piece]] = {name: [] for name in stacks}
    with unset_fake_temporarily():  # numbers of rows, also for a model that has none
        for name, (experts, out, _) in stacks.items():
            rows[name] = (len(owner) + torch.arange(experts * out)).view(experts, out, 1).expand(-1, -1, 2)
            owner += [name] * (experts * out)
        for name, numbers in revert_weight_conversion(module, rows).items():
            if numbers.ndim != 2:
                continue
            stack = owner[first := int(numbers[0, 0])]
            expert, start = divmod(first - int(rows[stack][0, 0, 0]), stacks[stack][1])
            found[stack].append(Piece(name.removesuffix(".weight"), expert, start, start + len(numbers)))
    return {name: tuple(sorted(of, key=lambda piece: (piece.expert, piece.start))) for name, of in found.items()}


def _parts(module: Any) -> Iterator[LoraTarget]:
    output = module.get_output_embeddings()
    stacks: dict[tuple[str, str], torch.Size] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            if layer is not output:
                yield LoraTarget(name)
            continue
        for parameter, tensor in layer.named_parameters(recurse=False):
            if tensor.ndim == 3 and not isinstance(layer, _ConvNd):
                stacks[name, parameter] = tensor.shape
            elif tensor.ndim == 2 and LoraTarget(name).routes:
                yield LoraTarget(name, parameter)
    divided = pieces(module, {".".join(key): shape for key, shape in stacks.items()})
    for name, parameter in stacks:
        yield LoraTarget(name, parameter, divided[f"{name}.{parameter}"])


def _named(names: frozenset[str] | set[str], target: str) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)
