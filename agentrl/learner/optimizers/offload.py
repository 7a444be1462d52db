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
        is_on_gpu = self._device.type == "cuda"
        self._beside = torch.cuda.Stream(self._device) if is_on_gpu else None
        self._rest_back: Any = None  # an event of the device
        for optimizer in models.optimizers.values():
            optimizer.register_step_pre_hook(self._before_an_update)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin to copy what changes in updates alone, of which no more come: weights may still be read."""
        self._follow()
        for device_tensor in self._mine(self._of_optimizers()):
            self._copy_out(device_tensor)

    @torch.no_grad()
    def leave(self) -> None:
        """Copy the rest, and give the device's memory back; nothing if it has left already."""
        if self._away:
            return
        self._follow()
        leaving_tensors = list(self._mine([*self._of_optimizers(), *self._of_models()]))
        for leaving_tensor in leaving_tensors:
            self._copy_out(leaving_tensor)
        if self._beside is not None:
            # Before a tensor is pointed at its copy: the copies are asynchronous, and the device's memory is given
            # away right after.
            self._beside.synchronize()
        for leaving_tensor in leaving_tensors:
            leaving_tensor.data = self._places[id(leaving_tensor)]
        self._away, self._begun = leaving_tensors, set()
        self._places = {id(leaving_tensor): self._places[id(leaving_tensor)] for leaving_tensor in leaving_tensors}
        self.bytes = sum(leaving_tensor.nbytes for leaving_tensor in leaving_tensors)
        if self._beside is not None:
            torch.cuda.empty_cache()

    @torch.no_grad()
    def back(self) -> None:
        """Come back: weights are there at once, for what comes next on the device, and the rest before an update."""
        weight_ids = {id(host_tensor) for host_tensor in (*self._of_models(), *self._models.masters())}
        # Weights first: the forward pass needs them at once, moments not before the first update, by when they have
        # come in the background.
        ordered_tensors = sorted(self._away, key=lambda tensor: id(tensor) not in weight_ids)
        device_tensors = [torch.empty_like(host_tensor, device=self._device) for host_tensor in ordered_tensors]
        self._follow()
        weight_count = sum(id(host_tensor) in weight_ids for host_tensor in ordered_tensors)
        for tensor_slice in (slice(0, weight_count), slice(weight_count, None)):
            with self._on_the_side():
                for host_tensor, device_tensor in zip(
                    ordered_tensors[tensor_slice], device_tensors[tensor_slice], strict=True
                ):
                    device_tensor.copy_(host_tensor, non_blocking=True)
                    host_tensor.data = device_tensor
            self._rest_back = None if self._beside is None else self._beside.record_event()
            if tensor_slice.start == 0:
                self._wait()
        self._away = []
        if self._beside is None:
            self._places = {}

    def _mine(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the tensors on the device that are large enough to move, each once. A tensor that shares its memory
        frees none, and stays."""
        yielded_ids = set[int]()
        for candidate in tensors:
            # Only if the tensor is all of its storage: to move one of two views would free nothing and tear them
            # apart.
            is_worth_moving = candidate.untyped_storage().nbytes() == candidate.nbytes >= self._least
            if is_worth_moving and candidate.device.type == self._device.type and id(candidate) not in yielded_ids:
                yielded_ids.add(id(candidate))
                yield candidate

    def _of_models(self) -> list[Tensor]:
        return [model_tensor for model_tensors in self._models.held() for model_tensor in model_tensors]

    def _of_optimizers(self) -> list[Tensor]:
        parameter_states = [
            parameter_state
            for optimizer in self._models.optimizers.values()
            for parameter_state in optimizer.state.values()
        ]
        moments = [
            state_value
            for parameter_state in parameter_states
            for state_value in parameter_state.values()
            if isinstance(state_value, Tensor)
        ]
        return [*moments, *self._models.masters()]

    def _copy_out(self, tensor: Tensor) -> None:
        if id(tensor) in self._begun:
            return
        host_tensor = self._places.get(id(tensor))
        if host_tensor is None or host_tensor.shape != tensor.shape or host_tensor.dtype != tensor.dtype:
            host_tensor = torch.empty_like(tensor, device="cpu", pin_memory=self._beside is not None)
        with self._on_the_side():
            host_tensor.copy_(tensor, non_blocking=True)
        self._places[id(tensor)] = host_tensor
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
