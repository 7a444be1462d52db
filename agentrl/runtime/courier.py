"""How a weight version reaches the engines, and the proof that it is there.

It owns the way that `RunConfig.sync` names (all weights, what changed in them, an adapter alone, or from memory to
memory), the retries while an engine is being restarted, the canary, and the files that lie in scratch for engines to
read. What it sends and what the canary expects comes from the learner: no torch here. A version counts as sent when
every engine confirmed it and every engine's log-probs of the probe are the learner's.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from agentrl.config import RunConfig
from agentrl.engine import adapters, canary, weightfile
from agentrl.engine.adapters import AdapterClient
from agentrl.engine.canary import Canary
from agentrl.engine.client import EngineClient
from agentrl.engine.direct import Sender, Snapshot, Transfer
from agentrl.engine.weights import PushReport, push, update_info
from agentrl.errors import CanaryMismatch, EngineError, RunFailed

_RETRY_S = 0.5
KEPT = 2  # weight files: one for an engine that is started again while the next is on its way


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
    snapshot: Snapshot
    canary: Canary | None = None


class Courier:
    """Delivers one parcel after the other. Those with files lie in one folder, which is nobody else's; those without
    go through `sender`."""

    def __init__(self, config: RunConfig, sender: Sender | None = None) -> None:
        self._sync, self._settings = config.sync, config.engine
        self._transfer = Transfer(sender) if sender is not None else None
        self._sent: list[Parcel] = []  # whose files are still there, oldest first

    async def deliver(self, urls: Sequence[str], parcel: Parcel | MemoryParcel) -> dict[str, float]:
        """Have every engine serve the parcel and prove it; what that cost, as metrics. An engine that is being started
        again is waited for.

        Raises WeightSyncError where one does not take it, RunFailed where one says it did and samples otherwise."""
        started, pause_s, behind = trio.current_time(), 0.0, urls
        while True:
            engines = [self._client(url, parcel.version) for url in urls]
            try:
                late = [engine for engine in engines if engine.url in behind]
                if isinstance(parcel, Parcel):
                    report = await self._send(late, parcel, again=behind is not urls)
                else:  # all together, or none
                    report = await self._hand_over(engines if late else [], parcel)
                pause_s = max(pause_s, report.pause_s)
                sync = {"pause_s": pause_s, "sync_s": trio.current_time() - started, "sync_bytes": report.bytes}
                proof = await self._prove(engines, parcel)
            except CanaryMismatch as error:
                raise RunFailed(str(error)) from error
            except EngineError:
                if trio.current_time() - started > self._settings.start_deadline_s:
                    raise
                await trio.sleep(_RETRY_S)
                behind = [engine.url for engine in engines if not await _serves(engine, parcel.version)]
            else:
                if isinstance(parcel, Parcel):
                    self._sent.append(parcel)
                    if parcel.canary is not None:
                        parcel.canary.write(canary.beside(parcel.path))
                return {**sync, **proof}
            finally:
                await _close(engines)

    async def behind(self, urls: Sequence[str], version: int) -> bool:
        """Whether some engine that answers serves another version: it was started again, from weights of before."""
        engines = self._plain(urls)
        try:
            for engine in engines:
                with suppress(EngineError):
                    if await engine.served_version() != version:
                        return True
            return False
        finally:
            await _close(engines)

    async def tidy(self, urls: Sequence[str]) -> None:
        """Have the engines drop what no turn needs any more, and remove all other files beside those of the newest
        versions, also those of a learner before this one. Never while another parcel is being written."""
        if not self._sent:
            return  # nothing went through files
        needed = self._sent[-KEPT:]
        if self._sync == "adapter":
            in_use = await self._retire(urls, [parcel.version for parcel in needed])
            older = [parcel for parcel in self._sent[:-KEPT] if parcel.version in in_use]
            if len(older) < len(in_use):
                return  # somebody uses one whose folder is not known here: nothing goes for now
            needed = older + needed
        self._sent = needed
        paths = {kept for parcel in needed for kept in (parcel.path, canary.beside(parcel.path))}
        for path in self._sent[-1].path.parent.iterdir():
            if path not in paths:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    # --- one delivery

    def _client(self, url: str, version: int) -> EngineClient:
        if self._sync == "adapter":
            return AdapterClient(url, current=lambda: version, api_key=self._settings.api_key())
        return EngineClient(url, api_key=self._settings.api_key())

    def _plain(self, urls: Sequence[str]) -> list[EngineClient]:
        return [EngineClient(url, api_key=self._settings.api_key()) for url in urls]

    async def _send(self, engines: Sequence[EngineClient], parcel: Parcel, *, again: bool) -> PushReport:
        settings = self._settings
        if self._sync == "adapter":
            return await adapters.load(engines, parcel.path, parcel.version, deadline_s=settings.admin_deadline_s)
        path, base = parcel.path, None
        if self._sync == "delta" and self._sent and not again:  # an engine that was started again has no base
            base, path = self._sent[-1], parcel.path.with_suffix(".delta")
            await trio.to_thread.run_sync(_write_delta, base.path, parcel.path, path)
        try:
            return await push(
                engines,
                path,
                parcel.version,
                sha256=parcel.sha256,
                base_sha256=base.sha256 if base else None,
                keep_base=True if self._sync == "delta" else None,
                stage=settings.kind == "vllm",
                deadline_s=settings.admin_deadline_s,
                clear_cache=settings.recompute_kv,
            )
        finally:
            if base is not None:
                path.unlink(missing_ok=True)

    async def _hand_over(self, engines: Sequence[EngineClient], parcel: MemoryParcel) -> PushReport:
        if not engines:
            return PushReport(pause_s=0.0, total_s=0.0, bytes=parcel.snapshot.size_bytes)
        assert self._transfer is not None
        return await self._transfer.push(
            engines,
            parcel.snapshot,
            parcel.version,
            deadline_s=self._settings.admin_deadline_s,
            clear_cache=self._settings.recompute_kv,
        )

    async def _prove(self, engines: Sequence[EngineClient], parcel: Parcel | MemoryParcel) -> dict[str, float]:
        if parcel.canary is None:
            return {}
        started = trio.current_time()
        info = None
        if isinstance(parcel, Parcel) and self._sync != "adapter":
            info = update_info(parcel.path, parcel.sha256)
        deadline_s = self._settings.admin_deadline_s
        error = await canary.check(engines, parcel.canary, update_info=info, deadline_s=deadline_s)
        return {"canary_error": error, "canary_s": trio.current_time() - started}

    async def _retire(self, urls: Sequence[str], keep: Sequence[int]) -> frozenset[int]:
        """The versions besides `keep` that some engine still uses; -1 for those of an engine that is not there."""
        engines = self._plain(urls)
        try:
            return await adapters.retire(engines, keep=keep, deadline_s=self._settings.admin_deadline_s)
        except EngineError:
            return frozenset({-1})
        finally:
            await _close(engines)


def _write_delta(base: Path, new: Path, path: Path) -> None:
    old, fresh = weightfile.open_bytes(base), weightfile.open_bytes(new)
    weightfile.write_delta(old, fresh, path, width=weightfile.width(fresh))


async def _serves(engine: EngineClient, version: int) -> bool:
    try:
        return await engine.served_version() == version
    except EngineError:
        return False


async def _close(engines: Sequence[EngineClient]) -> None:
    with trio.CancelScope(shield=True):  # closes sockets, waits for nothing
        for engine in engines:
            await engine.aclose()
