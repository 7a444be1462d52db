"""New weights and adapters of a running engine: they are read while it samples with the old ones.

Owns what was read and is not in the model yet. Knows neither HTTP nor when the engine may change its weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes

from agentrl.engine.embedded.architecture import Architecture
from agentrl.engine.embedded.batching import Batcher
from agentrl.engine.embedded.lora import Adapter, read
from agentrl.engine.embedded.model import PackedWeights
from agentrl.engine.embedded.requests import BadRequest
from agentrl.engine.weight_sync import object_store, uploads, weight_file
from agentrl.engine.weight_sync.weight_sources import Sources
from agentrl.errors import ModelError, WeightSyncError
from agentrl.host import free_memory


class WeightUpdates:
    """Updates of the model's weights from files of `sources`.

    `start`, `stage` once for each file, `finish`; or `take_folder`, which is all of it. Files are read and packed in
    another thread, so that only the swap stands between two passes."""

    def __init__(self, batcher: Batcher, sources: Sources) -> None:
        self._batcher, self._sources = batcher, sources
        self._updating = False
        self._staged: dict[str, torch.Tensor] = {}
        self._packed: PackedWeights | None = None  # what is staged, once all of it is there
        self._base: tuple[str, weight_file.Bytes] | None = None  # of the last weights from a store: deltas change it

    def start(self) -> None:
        """Begin an update; one that was not finished is dropped."""
        self._updating, self._staged, self._packed = True, {}, None

    async def stage(self, path: str, sha256: str, deadline_s: float) -> None:
        """Read a file. Raises BadRequest if it may not, or cannot, be read."""
        self._check_started()
        # Held under a name of its own: reading takes seconds, and a pusher that gave up may have begun another update
        # by then. Its file must not be mixed with what this one reads.
        staged_tensors = self._staged  # of this update: a later start drops it
        try:
            if object_store.is_url(path):
                weight_bytes = await asyncio.to_thread(self._sources.fetch, path, sha256, self._base, deadline_s)
                self._base = (sha256, weight_bytes)
            else:
                weight_bytes = await asyncio.to_thread(self._sources.read, path, sha256)
            staged_tensors |= await asyncio.to_thread(_tensors, weight_bytes, f"update_info.path: {path!r}")
            # Packing reads and writes all weights, so it happens before the pause
            # (`test_new_weights_are_packed_before_the_pause_which_only_swaps_them`).
            packed_weights = await asyncio.to_thread(self._pack, staged_tensors)
            if staged_tensors is self._staged:
                self._packed = packed_weights
        except WeightSyncError as error:
            raise BadRequest(f"update_info.path: {error}") from None

    def finish(self, version: int) -> None:
        """Swap the weights. Raises BadRequest if no update was started, ModelError if weights are missing or wrong."""
        self._check_started()
        if self._packed is None:
            self._batcher.load(self._staged, version)
        else:
            self._batcher.take(self._packed, version)
        self._updating, self._staged, self._packed = False, {}, None
        give_back_memory()

    async def take_folder(self, path: str, version: int) -> None:
        """Read all files of a folder, then swap. Raises WeightSyncError, ModelError, BadRequest or OSError."""
        packed_weights = await asyncio.to_thread(self._read_folder, path)
        self._batcher.take(packed_weights, version)
        give_back_memory()

    def _check_started(self) -> None:
        if not self._updating:
            raise BadRequest("no update has been started: call /start_weight_update first")

    def _pack(self, staged: dict[str, torch.Tensor]) -> PackedWeights | None:
        """Pack weights, or return None as long as some are missing or wrong, which `finish` reports."""
        with suppress(ModelError):
            return self._batcher.model.pack(staged)
        return None

    def _read_folder(self, path: str) -> PackedWeights:
        file_names = sorted(weight_part.name for weight_part in Path(path).glob("*.safetensors"))
        if not file_names:
            raise BadRequest(f"model_path: {path!r} has no safetensors files")
        weights: dict[str, torch.Tensor] = {}
        for file_name in file_names:
            with self._sources.open(f"{path}/{file_name}") as weight_part:
                # No digest here: SGLang's call has no field for one. The folder is one that the engine was started
                # with, and the canary judges what was read.
                weights |= _tensors(weight_file.mapped(weight_part), f"model_path: {path!r}")
        return self._batcher.model.pack(weights)


class Adapters:
    """The LoRA adapters that an engine serves beside its own model, by name."""

    def __init__(
        self, architecture: Architecture, sources: Sources, *, model: str, missing: Callable[[str], BadRequest]
    ) -> None:
        """`model` is the name of the engine's own model; `missing` makes the error for any other name without one."""
        self._architecture, self._sources, self._model, self._missing = architecture, sources, model, missing
        self.inbox = uploads.Inbox(uploads.new_place())  # adapters that came over HTTP, and were not loaded yet
        self._by_name: dict[str, Adapter] = {}
        self._reads = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def of(self, name: str | None) -> Adapter | None:
        """The adapter of a request for `name`, or None for the model itself. Raises BadRequest for an unknown name."""
        if name is None or name == self._model:
            return None
        if (adapter := self._by_name.get(name)) is None:
            raise self._missing(name)
        return adapter

    def load(self, name: str, path: str) -> None:
        """Load the adapter in the folder at `path`. Raises BadRequest or ModelError."""
        if name in self._by_name:
            raise BadRequest(f"The lora adapter '{name}' has already been loaded.")
        self._reads += 1
        is_uploaded = self.inbox.holds(path)

        def file(name: str) -> bytes:
            if not is_uploaded:
                return self._sources.adapter(path, name)
            with self.inbox.open(path, name) as adapter_file:
                return adapter_file.read()

        try:
            # Keys of adapters count down from -1 and versions up from 0, so that no cached prefix of one is ever
            # taken for one of the other. A name that is loaded again gets a new key.
            self._by_name[name] = read(Path(path), self._architecture, name=name, key=-self._reads, file=file)
        except WeightSyncError as error:
            raise BadRequest(str(error)) from None
        finally:
            if is_uploaded:
                self.inbox.remove(path)  # it came for this, and nobody reads it again

    def unload(self, name: str) -> None:
        """Forget an adapter. Raises BadRequest if there is none of this name."""
        if self._by_name.pop(name, None) is None:
            raise BadRequest(f"The lora adapter '{name}' cannot be found.")


def give_back_memory() -> None:
    """Let the system have the memory of weights that are gone, beside whatever comes next."""
    # The allocator keeps what was freed, and a second copy of the weights stays in the process for good without this
    # (`test_weights_that_were_replaced_leave_the_process`). On a thread, since it walks the whole heap.
    asyncio.get_running_loop().run_in_executor(None, free_memory.give_back)


def _tensors(data: weight_file.Bytes, place: str) -> dict[str, torch.Tensor]:
    try:
        return {name: tensor.float() for name, tensor in load_bytes(data.tobytes()).items()}
    except SafetensorError as error:
        raise BadRequest(f"{place} is not a safetensors file: {error}") from None
