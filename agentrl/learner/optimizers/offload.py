"""A learner that leaves its device for host memory between two steps, and comes back: engine and learner take turns on
one GPU (`engine.colocated`).

Owns where the tensors of a learner's models and optimizers are. Every tensor stays the object that it is, so nobody who
holds one notices; a learner that has left can still be saved. Copied in the background: moments and masters
leave while the weights are still in use, and come back while the step computes its passes, up to its first update.
Never knows engines.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from agentrl.learner.model.models import Models

# A copy of a small tensor costs its launch, and its memory would not be missed.
_LEAST = 1 << 16  # bytes; smaller tensors stay: norms and biases


class Parking:
    """Moves one learner between its device and host memory; it computes nothing between `leave` and `back`. `bytes` is
    what left the last time. In host memory each tensor keeps its place from one time to the next, pinned if the device
    is a GPU."""

    def __init__(self, models: Models, *, least: int = _LEAST) -> None:
        self._models, self._least, self.bytes = models, least, 0
        self._device = models.policy.device
        self._places: dict[int, Tensor] = {}  # in host memory, by the id of the tensor
        self._away: list[Tensor] = []
        # Ids of objects that the optimizer and the models hold for as long as they are listed here: none is freed and
        # given to another tensor meanwhile.
        self._begun: set[int] = set()  # ids of tensors whose copies to host memory have begun
        cuda = self._device.type == "cuda"
        self._beside = torch.cuda.Stream(self._device) if cuda else None
        self._rest_back: Any = None  # an event of the device
        for optimizer in models.optimizers.values():
            optimizer.register_step_pre_hook(self._before_an_update)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin to copy what changes in updates alone, of which no more come: weights may still be read."""
        self._follow()
        for tensor in self._mine(self._of_optimizers()):
            self._copy_out(tensor)

    @torch.no_grad()
    def leave(self) -> None:
        """Copy the rest, and give the device's memory back; nothing if it has left already."""
        if self._away:
            return
        self._follow()
        away = list(self._mine([*self._of_optimizers(), *self._of_models()]))
        for tensor in away:
            self._copy_out(tensor)
        if self._beside is not None:
            # Before a tensor is pointed at its copy: the copies are asynchronous, and the device's memory is given
            # away right after.
            self._beside.synchronize()
        for tensor in away:
            tensor.data = self._places[id(tensor)]
        self._away, self._begun = away, set()
        self._places = {id(tensor): self._places[id(tensor)] for tensor in away}
        self.bytes = sum(tensor.nbytes for tensor in away)
        if self._beside is not None:
            torch.cuda.empty_cache()

    @torch.no_grad()
    def back(self) -> None:
        """Come back: weights are there at once, for what comes next on the device, and the rest before an update."""
        weight_ids = {id(tensor) for tensor in (*self._of_models(), *self._models.masters())}
        # Weights first: the forward pass needs them at once, moments not before the first update, by when they have
        # come in the background.
        ordered = sorted(self._away, key=lambda tensor: id(tensor) not in weight_ids)
        here = [torch.empty_like(tensor, device=self._device) for tensor in ordered]
        self._follow()
        weights = sum(id(tensor) in weight_ids for tensor in ordered)
        for part in (slice(0, weights), slice(weights, None)):
            with self._on_the_side():
                for tensor, place in zip(ordered[part], here[part], strict=True):
                    place.copy_(tensor, non_blocking=True)
                    tensor.data = place
            self._rest_back = None if self._beside is None else self._beside.record_event()
            if part.start == 0:
                self._wait()
        self._away = []
        if self._beside is None:
            self._places = {}

    def _mine(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the tensors on the device that are large enough to move, each once. A tensor that shares its memory
        frees none, and stays."""
        seen = set[int]()
        for tensor in tensors:
            # Only if the tensor is all of its storage: to move one of two views would free nothing and tear them
            # apart.
            is_worth_moving = tensor.untyped_storage().nbytes() == tensor.nbytes >= self._least
            if is_worth_moving and tensor.device.type == self._device.type and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor

    def _of_models(self) -> list[Tensor]:
        return [tensor for tensors in self._models.held() for tensor in tensors]

    def _of_optimizers(self) -> list[Tensor]:
        states = [state for optimizer in self._models.optimizers.values() for state in optimizer.state.values()]
        moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return [*moments, *self._models.masters()]

    def _copy_out(self, tensor: Tensor) -> None:
        if id(tensor) in self._begun:
            return
        place = self._places.get(id(tensor))
        if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
            place = torch.empty_like(tensor, device="cpu", pin_memory=self._beside is not None)
        with self._on_the_side():
            place.copy_(tensor, non_blocking=True)
        self._places[id(tensor)] = place
        self._begun.add(id(tensor))

    def _on_the_side(self) -> AbstractContextManager[object]:
        return nullcontext() if self._beside is None else torch.cuda.stream(self._beside)

    def _follow(self) -> None:
        """Make later copies wait for the work already queued on the device."""
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(self._device))

    def _before_an_update(self, *_: object) -> None:
        self._wait()

    def _wait(self) -> None:
        """Make the device's next work wait for the copies that have begun."""
        if self._rest_back is not None:
            torch.cuda.current_stream(self._device).wait_event(self._rest_back)
