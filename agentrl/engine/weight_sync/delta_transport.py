"""`delta`: the bytes that changed since the version before, for engines that have it; all weights for the others.

Owns the delta file, which lies beside the weight file while a version is delivered. Through an object store the outbox
makes the deltas.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from agentrl.config import EngineSettings, Train
from agentrl.engine.client import EngineClient
from agentrl.engine.weight_sync import weight_file
from agentrl.engine.weight_sync.file_transport import FileTransport
from agentrl.engine.weight_sync.transport import Parcel, Place, PushReport
from agentrl.errors import ConfigError


class DeltaTransport(FileTransport):
    # The delta lies beside the new weight file. The run counts both when it checks that scratch has the room.
    files = 2
    serves_role_models = False
    deltas = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._delta: Path | None = None

    @classmethod
    def check(cls, engine: EngineSettings, train: Train, *, on_ray: bool) -> None:
        if engine.kind == "embedded" and engine.weights_url is None:
            raise ConfigError("engine.sync", "delta", "the embedded engine takes whole files: give 'auto'")
        if engine.kind == "sglang":
            raise ConfigError("engine.sync", "delta", "SGLang takes whole weights or adapters here: give 'auto'")

    @asynccontextmanager
    async def offer(self, parcel: Parcel, base: Parcel | None) -> AsyncGenerator[None]:
        async with super().offer(parcel, base):
            if self._stored is not None or base is None:
                yield
                return
            delta_path = parcel.path.with_suffix(".delta")
            await trio.to_thread.run_sync(_write, base.path, parcel.path, delta_path)
            self._delta = delta_path
            try:
                yield
            finally:
                self._delta = None
                # After the delivery, and not with the version: an engine that missed it gets the whole file, since
                # the digest of its own weights is not the delta's base.
                delta_path.unlink(missing_ok=True)

    async def deliver(self, engines: Sequence[EngineClient], parcel: Parcel, base: Parcel | None) -> PushReport:
        return await self._push(engines, parcel, self._delta if base is not None else None, base)


def _write(base: Path, new: Path, path: Path) -> None:
    base_bytes, new_bytes = weight_file.open_bytes(base), weight_file.open_bytes(new)
    weight_file.write_delta(base_bytes, new_bytes, path, width=weight_file.width(new_bytes))
