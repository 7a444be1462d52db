"""How new weights travel from the learner to the engines: what a transport is.

`engine.sync` names a transport of the registry (`agentrl.registry`, entry points `agentrl.weight_transports`), one
module each: `full` in `file_transport`, `delta` in `delta_transport`, `adapter` in `adapters`, `nccl` and `ipc` in
`gpu_transport`. A package adds one without a change here. For each version the publisher calls, in this order:

    offer      make the version ready: write a delta, put it into an object store
    deliver    have engines load it and confirm its number
    retire     remove what no engine needs any more

The publisher owns retries, locks and the canary, so a transport never proves that weights arrived. All other parts of a
run ask for the `form` of a transport, never for its name. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from agentrl.config import EngineSettings, Train
from agentrl.config.weight_sync import Form
from agentrl.engine.client import EngineClient
from agentrl.engine.vllm.plugin import BACKEND
from agentrl.engine.weight_sync.canary import Canary
from agentrl.engine.weight_sync.object_store import ObjectFolder
from agentrl.records import Json


# Protocols, and no imports of the learner's classes: this package must not load torch.
class WeightsInMemory(Protocol):
    """Weights in the learner's memory: `agentrl.learner.weight_export.WeightSnapshot`."""

    @property
    def size_bytes(self) -> int: ...


class WeightChannel(Protocol):
    """Joined engines: `agentrl.learner.gpu_sender.GpuChannel`."""

    def send(self, client: Any, snapshot: Any) -> None: ...
    def leave(self) -> None: ...


class WeightSender(Protocol):
    """Joins engines: `agentrl.learner.gpu_sender.GpuSender`. `world` counts their workers, which reach us at
    `address`."""

    def join(self, client: Any, snapshot: Any, *, world: int, address: str) -> WeightChannel: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A weight version on its way: a weight file, or the folder of an adapter, which has no `sha256`."""

    version: int
    path: Path
    sha256: str = ""
    canary: Canary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParcel:
    """A weight version on its way from memory to memory: no file holds it."""

    version: int
    snapshot: WeightsInMemory
    canary: Canary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """The cost of a push: the longest pause of generation, the whole in wall time (seconds), and the bytes that one
    engine read. A swap's pause is measured in the engine, any other by whoever pauses it: the passes in flight count
    there."""

    pause_s: float
    total_s: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a transport works: in the learner's process, for the engines of one policy."""

    engine: EngineSettings
    store: ObjectFolder | None = None  # at `engine.weights_url`
    sender: WeightSender | None = None  # vLLM's own, made for the transport's `backend`


class WeightTransport(Protocol):
    """Derive from this class. What is not written below stays as the default says."""

    form: ClassVar[Form] = "file"
    backend: ClassVar[str] = BACKEND  # of vLLM's --weight-transfer-config: ours, or one of vLLM's own
    files: ClassVar[int] = 1  # weight files in scratch at once, beside those of the versions that are kept
    serves_role_models: ClassVar[bool] = False  # roles with a model of their own may use it

    def __init__(self, place: Place) -> None: ...

    @classmethod
    def check(cls, engine: EngineSettings, train: Train, *, on_ray: bool) -> None:
        """Raises ConfigError for settings of a run that do not fit this transport."""

    def offer(self, parcel: Any, base: Any) -> AbstractAsyncContextManager[object]:
        """Inside, engines can take the parcel. `base` is the parcel that was sent before, if there is one. It is called
        again with the same parcel if no engine took it. Raises WeightSyncError."""
        return nullcontext()

    async def deliver(self, engines: Sequence[EngineClient], parcel: Any, base: Any) -> PushReport:
        """Have engines serve the parcel. `base` is the parcel that they serve, if that is the one sent before. A file
        or an adapter is delivered to one engine at a time, to several in parallel tasks; memory to all together. Each
        call to an engine has half of
        `engine.liveness_deadline_s`. Raises EngineError if one has not confirmed the version."""
        ...

    def missed(self, *, by_all: bool) -> None:
        """Some engine did not take the parcel, or none did (`by_all`)."""

    async def retire(self, engines: Sequence[EngineClient], keep: Sequence[Any]) -> frozenset[int]:
        """Drop all versions but those of the parcels `keep`, which `engines` have the newest of. Returns the other
        versions that some engine still uses, whose files must stay; only -1 if an engine did not answer."""
        return frozenset()

    def diagnosis(self, parcel: Any) -> dict[str, Json] | None:
        """How an engine finds the file of a parcel, to compare layers after a failed canary; None if it cannot."""
        return None
