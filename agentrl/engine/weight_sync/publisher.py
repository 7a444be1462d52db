"""Sends a weight version to the engines, and proves that it arrived.

It owns the retries while all engines restart, the lock of an engine, the canary, and which files stay in scratch for
engines to read (`agentrl.run.weights.room_check` checks that they fit). How a version
travels is its transport's (`agentrl.engine.weight_sync.transport`). The weights and the
canary's expected values come from the learner: no torch here. A version counts as sent when an engine
confirmed it and its log-probs of the probe are the learner's. Engines that did not take it are left behind:
`agentrl.run.children.engine_health` sends it when they answer again; if no file holds the weights, the learner does.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import trio

from agentrl.config import EngineSettings
from agentrl.config.weight_sync import transport_of
from agentrl.engine.client import EngineClient
from agentrl.engine.weight_sync import canary
from agentrl.engine.weight_sync.adapters import AdapterClient, always
from agentrl.engine.weight_sync.object_store import ObjectFolder
from agentrl.engine.weight_sync.transport import MemoryParcel, Parcel, Place, PushReport, WeightSender, WeightTransport
from agentrl.engine.weight_sync.weight_lock import WeightLock, exclusive, name_of
from agentrl.errors import CanaryMismatch, EngineError, RunFailed, WeightSyncError

_RETRY_S = 0.5
_PATIENCE_S = 10.0  # before it reports that no engine takes the weights: a restart is shorter
_ASK_S = 5.0  # deadline to ask an engine that was left behind: shorter than that of a push that it will not take
KEPT = 2  # weight files: an engine may restart from the older one while the newer is sent


class NotDelivered(RunFailed):
    """No engine took new weights within the time that engines may be away."""


@dataclass(slots=True)
class _Delivery:
    """By URL: the cost of sending the parcel to an engine, or why the engine did not take it."""

    rows: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    failures: dict[str, str] = field(default_factory=dict[str, str])
    held: WeightLock | None = None


class WeightPublisher:
    """Delivers one parcel after the other by the transport `sync`. Parcels with files lie in one folder of their own;
    parcels without files go through `sender`. With `store`, engines read whole weights from there, and no file. `locks`
    is the folder of locks that let only one process at a time send weights to an engine."""

    def __init__(
        self,
        engine: EngineSettings,
        sync: str = "full",
        sender: WeightSender | None = None,
        *,
        locks: Path | None = None,
        store: ObjectFolder | None = None,
    ) -> None:
        self._settings, self._locks = engine, locks
        transport_class = cast("type[WeightTransport]", transport_of(sync))
        self._transport = transport_class(Place(engine=engine, store=store, sender=sender))
        self._seen: dict[str, canary.CanaryResult] = {}  # the engines' answers to canaries, by URL
        self._sent: list[Parcel] = []  # parcels whose files still exist, oldest first
        self._took: dict[str, int] = {}  # the last version that each engine took

    async def deliver(
        self,
        urls: Sequence[str] | Callable[[], Sequence[str]],
        parcel: Parcel | MemoryParcel,
        held: WeightLock | None = None,
    ) -> dict[str, float]:
        """Have the engines serve the parcel, and prove it. Returns the cost as metrics. Engines that do not take it are
        left behind if another engine takes it; if none does, all are restarting, and the publisher waits and retries:
        `urls` may be a call that says where they are by then. `held` is the lock of engines that sleep, if the caller
        has it: it is let go with the first attempt, so that whoever fixes an engine can have it before the next.

        Raises NotDelivered if none takes it within `engine.mending_deadline_s`, RunFailed if one confirms it but
        samples from other weights."""
        started_at, warning = trio.current_time(), ""
        while True:
            # At each attempt anew: the engines that died may come back at other addresses.
            current_urls = await trio.to_thread.run_sync(urls) if callable(urls) else urls
            engines = [self._client(url, parcel.version) for url in current_urls]
            delivery = _Delivery(held=held)
            try:
                if isinstance(parcel, Parcel):
                    await self._give_files(engines, parcel, delivery)
                else:
                    await self._give_memory(engines, parcel, delivery)
            except CanaryMismatch as error:
                raise RunFailed(str(error)) from error
            except WeightSyncError as error:  # the store: no engine can have them
                delivery.failures["store"] = str(error)
            finally:
                await _close(engines)
            if delivery.failures:
                self._transport.missed(by_all=not delivery.rows)
            if delivery.rows:
                break
            waited_s = trio.current_time() - started_at
            within = f"within {self._settings.mending_deadline_s:g} s"
            failure_summary = "; ".join(sorted(set(delivery.failures.values())))
            if waited_s > self._settings.mending_deadline_s:
                raise NotDelivered(f"no engine took version {parcel.version} {within}: {failure_summary}")
            if waited_s > _PATIENCE_S and not warning:
                warning = f"no engine takes version {parcel.version}: {failure_summary}; it is tried again, {within}"
                print(f"agentrl learner: {warning}", file=sys.stderr, flush=True)
            await trio.sleep(_RETRY_S)
        self._took |= dict.fromkeys(delivery.rows, parcel.version)
        if isinstance(parcel, Parcel):
            self._sent.append(parcel)
            if parcel.canary is not None:
                # After the proof: whoever fits an engine with this file later asks it the same questions, with
                # numbers that were right once.
                parcel.canary.write(canary.beside(parcel.path))
        cost_rows = delivery.rows.values()
        # The worst engine's, since the fleet is as fast as its slowest and as right as its worst.
        worst_costs = {name: max(row[name] for row in cost_rows) for name in next(iter(cost_rows))}
        return {"sync_s": trio.current_time() - started_at, "engines_behind": len(delivery.failures), **worst_costs}

    async def behind(self, urls: Sequence[str], version: int) -> bool:
        """Whether some engine that answers serves another version: it restarted from older weights, or has those of an
        earlier learner."""
        engines = [self._client(engine_url, version) for engine_url in urls]
        try:
            served_versions, _ = await _ask(engines)
            return set(served_versions.values()) - {version} != set()
        finally:
            await _close(engines)

    async def tidy(self, urls: Sequence[str]) -> None:
        """Have the engines drop versions that no turn needs any more, and remove all files but those of the newest or
        still used versions, an earlier learner's too. Never call it while another parcel is being written."""
        if not self._sent:
            return  # no parcel with files was sent
        needed_parcels = self._sent[-KEPT:]
        if self._transport.form == "adapter":
            loaded_urls = [url for url in urls if self._took.get(url) == needed_parcels[-1].version]
            versions_in_use = await self._retire(loaded_urls, needed_parcels)
            older_parcels = [parcel for parcel in self._sent[:-KEPT] if parcel.version in versions_in_use]
            # -1 stands for an engine that did not answer, and a version from before this process for a folder that it
            # has no parcel of.
            if len(older_parcels) < len(versions_in_use):
                return  # a version in use has a folder that is not known here: remove nothing for now
            needed_parcels = older_parcels + needed_parcels
        else:
            await self._retire([], needed_parcels)
        self._sent = needed_parcels
        needed_paths = {path for parcel in needed_parcels for path in (parcel.path, canary.beside(parcel.path))}
        for path in self._sent[-1].path.parent.iterdir():
            if path not in needed_paths:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    # --- one delivery

    def _client(self, url: str, version: int) -> EngineClient:
        if self._transport.form == "adapter":
            return AdapterClient(
                url, current=always(version), api_key=self._settings.key_of(url), kind=self._settings.kind
            )
        return EngineClient(url, api_key=self._settings.key_of(url), kind=self._settings.kind)

    def _plain(self, urls: Sequence[str]) -> list[EngineClient]:
        return [EngineClient(url, api_key=self._settings.key_of(url), kind=self._settings.kind) for url in urls]

    def _alone_with(self, engine: EngineClient, held: WeightLock | None) -> AbstractAsyncContextManager[None]:
        if held is not None and held.held:
            return held.last()
        if self._locks is None:
            return nullcontext()
        lock_name = name_of(engine.url, colocated=self._settings.colocated)
        return exclusive(self._locks, lock_name, deadline_s=self._settings.admin_deadline_s)

    async def _give_files(self, engines: Sequence[EngineClient], parcel: Parcel, delivery: _Delivery) -> None:
        """Send to all engines at once, each independent of the others. Raises CanaryMismatch."""
        base_parcel = self._sent[-1] if self._sent else None
        mismatches: list[CanaryMismatch] = []

        async def one(engine: EngineClient) -> None:
            has_base = base_parcel is not None and self._took.get(engine.url) == base_parcel.version
            try:
                async with self._alone_with(engine, delivery.held):
                    # An engine that missed the version before is perhaps dead. A short question first spares the
                    # whole deadline of a push, for which all others would wait.
                    if base_parcel is not None and not has_base:
                        await engine.served_version(deadline_s=_ASK_S)
                    push_report = await self._transport.deliver([engine], parcel, base_parcel if has_base else None)
                    delivery.rows[engine.url] = _row(push_report) | await self._prove(engine, parcel)
            except CanaryMismatch as error:
                mismatches.append(error)
            except EngineError as error:
                delivery.failures[engine.url] = str(error)
                self._took.pop(engine.url, None)  # a delta would have no base

        async with self._transport.offer(parcel, base_parcel), trio.open_nursery() as nursery:
            for engine in engines:
                nursery.start_soon(one, engine)
        # After all deliveries have ended: to cancel the others in the midst would leave engines paused.
        if mismatches:
            raise mismatches[0]

    async def _give_memory(self, engines: Sequence[EngineClient], parcel: MemoryParcel, delivery: _Delivery) -> None:
        """Send to all engines that answer, together: all take it or none does. Raises CanaryMismatch."""
        served_versions, delivery.failures = await _ask(engines)
        answering = [engine for engine in engines if engine.url in served_versions]
        push_report = PushReport(pause_s=0.0, total_s=0.0, bytes=parcel.snapshot.size_bytes)
        try:
            # A retry may come after the bytes arrived and only the canary's answer was lost: then nothing is sent
            # again.
            if set(served_versions.values()) - {parcel.version}:
                async with self._transport.offer(parcel, None):
                    push_report = await self._transport.deliver(answering, parcel, None)
            cost_rows = {engine.url: _row(push_report) | await self._prove(engine, parcel) for engine in answering}
        except CanaryMismatch:
            raise
        except EngineError as error:
            delivery.failures |= {engine.url: str(error) for engine in answering}
        else:
            delivery.rows = cost_rows

    async def _prove(self, engine: EngineClient, parcel: Parcel | MemoryParcel) -> dict[str, float]:
        if parcel.canary is None:
            return {}
        started_at = trio.current_time()
        canary_error = await canary.check(
            [engine],
            parcel.canary,
            update_info=self._transport.diagnosis(parcel),
            seen=self._seen,
            tolerance=canary.allowed(parcel.canary.dtype, self._settings),
            deadline_s=self._settings.admin_deadline_s,
        )
        return {"canary_error": canary_error, "canary_s": trio.current_time() - started_at}

    async def _retire(self, urls: Sequence[str], keep: Sequence[Parcel]) -> frozenset[int]:
        """The versions besides `keep` that some engine still uses: see `WeightTransport.retire`."""
        engines = self._plain(urls)
        try:
            return await self._transport.retire(engines, keep)
        finally:
            await _close(engines)


def _row(report: PushReport) -> dict[str, float]:
    return {"pause_s": report.pause_s, "sync_bytes": report.bytes}


async def _ask(engines: Sequence[EngineClient]) -> tuple[dict[str, int], dict[str, str]]:
    """The versions that engines serve, by URL, and the errors of those that did not answer."""
    served_versions: dict[str, int] = {}
    failures: dict[str, str] = {}

    async def one(engine: EngineClient) -> None:
        try:
            served_versions[engine.url] = await engine.served_version(deadline_s=_ASK_S)
        except EngineError as error:
            failures[engine.url] = str(error)

    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(one, engine)
    return served_versions, failures


async def _close(engines: Sequence[EngineClient]) -> None:
    with trio.CancelScope(shield=True):  # closes sockets, waits for nothing
        for engine in engines:
            await engine.aclose()
