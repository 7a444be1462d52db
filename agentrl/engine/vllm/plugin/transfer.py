"""`shm`: a weight-transfer backend of vLLM that loads one safetensors file, from shared memory or any other folder.

    update_info = {"path": "/dev/shm/…/7.safetensors", "sha256": "…"}
    update_info = {"path": "…/7.delta", "sha256": "… of the whole result", "base_sha256": "… of the last file loaded"}

The file is checked before any weight is touched. `stage` does that (and applies a delta) on a thread while the engine
goes on generating, so that the pause holds only the copy into the model. Runs inside vLLM's worker on any platform.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.engine import weightfile
from agentrl.engine.vllm.plugin import BACKEND, mending
from agentrl.errors import WeightSyncError

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
}


def register() -> None:
    """Offer the backend to vLLM under the name `shm`. Safe to call again."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, f"{__name__}_engine", "FileTransferEngine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A trainer's message: which file to load, and what it must hold."""

    path: str
    sha256: str
    base_sha256: str | None = None

    def bytes(self, base: Base) -> weightfile.Bytes:
        """The checked bytes of the weight file this update stands for."""
        if self.base_sha256 is None:
            return weightfile.verified(Path(self.path), self.sha256)
        if base.sha256 != self.base_sha256 or base.data is None:
            raise WeightSyncError(
                f"a delta against {self.base_sha256[:12]}… came, but the last weights kept here are "
                f"{(base.sha256 or 'none')[:12]}: send a full file first (init_info keep_base = true keeps it)"
            )
        return weightfile.apply_delta(base.data, Path(self.path), self.sha256)

    def bytes_again(self, base: Base) -> weightfile.Bytes:
        """The same once it has been loaded: a delta's result is then the base of the next one."""
        return base.data if self.sha256 == base.sha256 and base.data is not None else self.bytes(base)


@dataclass(slots=True)
class Base:
    """The bytes of the last weights loaded, kept for the next delta where the trainer asked for it."""

    keep: bool = False
    sha256: str | None = None
    data: weightfile.Bytes | None = None

    def now(self, update: Update, data: weightfile.Bytes) -> None:
        """`data` are now loaded. A mapped file is copied: its owner may remove it."""
        if self.keep:
            import numpy as np

            self.sha256 = update.sha256
            self.data = np.array(data) if update.base_sha256 is None else data


@dataclass(slots=True)
class Stage:
    """One update made ready on a thread. At most one; asking for another drops the former."""

    base: Base
    _update: Update | None = None
    _data: weightfile.Bytes | None = None
    _error: str | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def begin(self, update: Update) -> None:
        """Start making `update` ready; returns at once. Asking again for the same one changes nothing."""
        if self._update == update and self._error is None:
            return
        self._update, self._data, self._error, self._done = update, None, None, threading.Event()
        threading.Thread(target=self._prepare, args=(update, self._done), name="stage-weights", daemon=True).start()

    def state(self) -> dict[str, Any]:
        """`ready` or `error` (a line) of what was begun last; JSON-safe."""
        return {"ready": self._done.is_set() and self._error is None, "error": self._error}

    def take(self, update: Update) -> weightfile.Bytes:
        """The bytes of `update`: those made ready if it was begun, else made ready now."""
        if self._update != update:
            return update.bytes(self.base)
        self._done.wait()
        data, error = self._data, self._error
        self._update = self._data = None
        if data is None:
            raise WeightSyncError(error or "staging failed")
        return data

    def _prepare(self, update: Update, done: threading.Event) -> None:
        data, error = None, None
        try:
            data = update.bytes(self.base)
        except WeightSyncError as failure:
            error = str(failure)
        if self._done is done:
            self._data, self._error = data, error
        done.set()


def tensors(data: weightfile.Bytes) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of a weight file, in the order of its bytes; the tensors are views of `data`."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a mapped file is read-only, and nobody writes to it
        whole = torch.from_numpy(data)
    for place in weightfile.places(data):
        if place.dtype not in _DTYPES:
            raise WeightSyncError(f"weight {place.name} has dtype {place.dtype}, which this backend does not load")
        dtype = getattr(torch, _DTYPES[place.dtype])
        piece = whole[place.start : place.end]
        if place.start % dtype.itemsize:
            piece = piece.clone()
        yield place.name, piece.view(dtype).reshape(place.shape)


def load(model: Any, data: weightfile.Bytes) -> None:
    """Load a whole file into the model between `start` and `finish` of an update."""
    mending.ready_for_update(model)
    model.load_weights(tensors(data))
