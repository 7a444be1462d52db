"""`shm`: a weight-transfer backend of vLLM that loads one safetensors file, from shared memory or any other folder.

    update_info = {"path": "/dev/shm/…/7.safetensors", "sha256": "…"}
    update_info = {"path": "…/7.delta", "sha256": "… of the whole result", "base_sha256": "… of the last file loaded"}
    update_info = {"path": "s3://…/7.json", "sha256": "… of the whole result"}
                                              an entry of `agentrl.engine.weight_sync.object_store`

The file is checked before any weight is touched. `Stage` does that (and applies a delta) on a thread while the engine
goes on generating, and makes a second copy of the layers' weights of it where there is room, so that the pause holds
only the swap. Runs inside vLLM's worker on any platform.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from agentrl.engine.vllm.plugin import BACKEND, cpu_fixes, read_weights
from agentrl.engine.weight_sync import object_store, weight_file
from agentrl.errors import WeightSyncError

# Below vLLM's own logger, so that its level and its handlers hold for these lines too.
logger = logging.getLogger("vllm.agentrl")

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
    """A trainer's message: which file to load, and what it must hold. `deadline_s` is that of each object of a
    store; `version` is what the trainer signs the content as (`agentrl.engine.auth`)."""

    path: str
    sha256: str
    base_sha256: str | None = None
    deadline_s: float = 30.0
    version: int | None = None

    def bytes(self, base: Base) -> weight_file.Bytes:
        """The checked bytes of the weight file this update stands for."""
        if object_store.is_url(self.path):
            base_file = None if base.sha256 is None or base.data is None else (base.sha256, base.data)
            return read_weights.sources().fetch(self.path, self.sha256, base_file, self.deadline_s)
        if self.base_sha256 is None:
            return read_weights.sources().read(self.path, self.sha256)
        if base.sha256 != self.base_sha256 or base.data is None:
            raise WeightSyncError(
                f"a delta against {self.base_sha256[:12]}… came, but the last weights kept here are "
                f"{(base.sha256 or 'none')[:12]}: send a full file first (init_info keep_base = true keeps it)"
            )
        return read_weights.sources().read(self.path, self.sha256, base.data)

    def bytes_again(self, base: Base) -> weight_file.Bytes:
        """Return the checked bytes once they have been loaded: a delta's result is then the base of the next one."""
        return base.data if self.sha256 == base.sha256 and base.data is not None else self.bytes(base)


@dataclass(slots=True)
class Base:
    """The bytes of the last weights loaded, kept for the next delta if the trainer requests it."""

    keep: bool = False
    sha256: str | None = None
    data: weight_file.Bytes | None = None

    def copy(self, update: Update, data: weight_file.Bytes) -> weight_file.Bytes | None:
        """Make the bytes that `now` will keep; None if none are to be kept. A mapped file is copied: its owner may
        remove it."""
        if not self.keep:
            return None
        import numpy as np

        # In host memory, the size of the weights once more: the price of deltas, which only a trainer that sends them
        # asks for.
        return np.array(data) if isinstance(data, np.memmap) else data

    def now(self, update: Update, kept: weight_file.Bytes | None) -> None:
        """The weights of `update` are now loaded, and `kept` is their copy."""
        if kept is not None:
            self.sha256, self.data = update.sha256, kept


@dataclass(slots=True, kw_only=True)
class Staged:
    """An update made ready: its checked bytes, what the next delta needs of them, and the second copy of the layers'
    weights (see `staging`), or why there is none."""

    data: weight_file.Bytes
    kept: weight_file.Bytes | None = None
    second: Any = None
    why: str | None = None


class Superseded(Exception):
    """Another update was begun: nobody waits for this one any more."""


@dataclass(slots=True)
class Stage:
    """One update made ready on a thread. At most one: a request for another drops it, and so do `keep_s` seconds in
    which nobody takes it. `build` makes the second copy from bytes, and says why if it makes none; its other argument
    raises Superseded once nobody waits."""

    base: Base
    build: Callable[[weight_file.Bytes, Callable[[], None]], tuple[Any, str | None]]
    _update: Update | None = None
    _staged: Staged | None = None
    _error: str | None = None
    _done: threading.Event = field(default_factory=threading.Event)
    _gone: threading.Event = field(default_factory=threading.Event)  # taken, or dropped
    _thread: threading.Thread | None = None

    def begin(self, update: Update, *, second: bool = False, keep_s: float = 600.0) -> None:
        """Start making `update` ready; returns at once. Asking again for the same one changes nothing."""
        # A pusher repeats the call after a lost answer; to begin anew would throw away seconds of reading.
        if self._update == update and self._error is None:
            return
        self.drop()
        self._update, self._done, self._gone = update, threading.Event(), threading.Event()
        arguments = (update, second, keep_s, self._done, self._gone, self._thread)
        # A thread of the worker, since torch's and the disk's work let the interpreter go: generation goes on beside
        # it. Daemonic, since a store that hangs must not hold a worker that ends.
        self._thread = threading.Thread(target=self._prepare, args=arguments, name="stage-weights", daemon=True)
        self._thread.start()

    def state(self) -> dict[str, Any]:
        """`ready` or `error` (a line) of what was begun last; `second` says that it has a second copy of the layers'
        weights, `why` that it has none. JSON-safe."""
        staged = self._staged
        return {
            "ready": self._done.is_set() and self._error is None,
            "error": self._error,
            "second": staged is not None and staged.second is not None,
            "why": None if staged is None else staged.why,
        }

    def has_second(self, update: Update) -> bool:
        """Whether `update` needs no more than a swap."""
        return self._update == update and self.state()["second"]

    def take(self, update: Update) -> Staged:
        """`update` as it was made ready if it was begun, else its bytes, made ready now."""
        if self._update == update:
            # Without a deadline of its own: this runs inside the trainer's call, which has one, and
            # `Update.deadline_s` bounds each read.
            self._done.wait()
            staged_update, stage_error = self._staged, self._error
            self.drop()
            if stage_error is not None:
                raise WeightSyncError(stage_error)
            if staged_update is not None:  # else nobody took it in time
                return staged_update
        weight_bytes = update.bytes(self.base)
        return Staged(data=weight_bytes, kept=self.base.copy(update, weight_bytes))

    def drop(self) -> None:
        """Forget what was begun. The memory is freed on the thread that took it."""
        self._gone.set()
        self._update = self._staged = self._error = None

    def _prepare(
        self,
        update: Update,
        second: bool,
        keep_s: float,
        done: threading.Event,
        gone: threading.Event,
        former: threading.Thread | None,
    ) -> None:
        def waited_for() -> None:
            if gone.is_set():
                raise Superseded

        staged_update, error_text = None, None
        try:
            if former is not None:
                former.join()  # else there would be a third copy
            waited_for()
            weight_bytes = update.bytes(self.base)
            staged_update = Staged(data=weight_bytes, kept=self.base.copy(update, weight_bytes))
            if second:
                staged_update.second, staged_update.why = self.build(weight_bytes, waited_for)
        except Superseded:
            staged_update = None
        except WeightSyncError as failure:
            staged_update, error_text = None, str(failure)
        # Only the latest thread may write its result: `begin` replaces the events, and an older thread that is late
        # compares unequal here. So no lock is needed.
        if self._done is done:
            self._staged, self._error = staged_update, error_text
        done.set()
        # Else this frame would hold the second copy for `keep_s` after a swap has taken it: twice the weights, for
        # nothing.
        del staged_update
        if not gone.wait(keep_s) and self._gone is gone:
            logger.warning("agentrl: staged weights were dropped: nobody took them within %g s", keep_s)
            self.drop()


def tensors(data: weight_file.Bytes) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of a weight file, in the order of its bytes; the tensors are views of `data`."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a mapped file is read-only, and nobody writes to it
        flat_bytes = torch.from_numpy(data)
    for place in weight_file.places(data):
        if place.dtype not in _DTYPES:
            raise WeightSyncError(f"weight {place.name} has dtype {place.dtype}, which this backend does not load")
        dtype = getattr(torch, _DTYPES[place.dtype])
        piece = flat_bytes[place.start : place.end]
        if place.start % dtype.itemsize:
            # A view of another dtype needs an aligned start, and safetensors does not promise one.
            piece = piece.clone()
        yield place.name, piece.view(dtype).reshape(place.shape)


def load(model: Any, data: weight_file.Bytes, waited_for: Callable[[], None] = lambda: None) -> None:
    """Load a whole file into the model between `start` and `finish` of an update. `waited_for` may end it with an
    exception between two tensors."""

    def each() -> Iterator[tuple[str, Any]]:
        for named_tensor in tensors(data):
            waited_for()
            yield named_tensor

    cpu_fixes.ready_for_update(model)
    model.load_weights(each())
