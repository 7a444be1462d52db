"""How a weight version reaches the engines, and the proof that it is there.

It owns the way that `RunConfig.sync` names (all weights, what changed in them, an adapter alone, or from memory to
memory), the retries while all engines are being restarted, the canary, and the files that lie in scratch for engines to
read. What it sends and what the canary expects comes from the learner: no torch here. A version counts as sent when
an engine confirmed it and its log-probs of the probe are the learner's. Engines that did not take it are left behind:
`agentrl.runtime.watch` fits them when they answer again, the learner does where no file holds the weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import trio

from agentrl.config import RunConfig
from agentrl.engine import adapters, canary, weightfile
from agentrl.engine.adapters import AdapterClient
from agentrl.engine.canary import Canary
from agentrl.engine.client import EngineClient
from agentrl.engine.exclusive import exclusive
from agentrl.engine.memory_transfer import Sender, Snapshot, Transfer
from agentrl.engine.weights import PushReport, push, update_info
from agentrl.errors import CanaryMismatch, EngineError, RunFailed

_RETRY_S = 0.5
_ASK_S = 5.0  # for an engine that was left behind: less than a push that it will not take
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


class NotDelivered(RunFailed):
    """No engine took new weights for as long as engines may be away."""


@dataclass(slots=True)
class _Delivery:
    """By URL: what giving the parcel to an engine cost, or why it did not take it."""

    rows: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    failures: dict[str, str] = field(default_factory=dict[str, str])


class WeightPublisher:
    """Delivers one parcel after the other. Those with files lie in one folder, which is nobody else's; those without
    go through `sender`. `locks` is where those who give weights to engines keep out of each other's way."""

    def __init__(self, config: RunConfig, sender: Sender | None = None, *, locks: Path | None = None) -> None:
        self._sync, self._settings, self._locks = config.sync, config.engine, locks
        self._transfer = Transfer(sender) if sender is not None else None
        self._seen: dict[str, canary.Seen] = {}  # what engines answered to canaries, by URL
        self._sent: list[Parcel] = []  # whose files are still there, oldest first
        self._took: dict[str, int] = {}  # the version that each engine took last

    async def deliver(self, urls: Sequence[str], parcel: Parcel | MemoryParcel) -> dict[str, float]:
        """Have the engines serve the parcel and prove it; what that cost, as metrics. Those that do not take it are
        left behind, as long as another does; if none does, they are being started again, and are waited for.

        Raises NotDelivered where none takes it within `engine.mending_deadline_s`, RunFailed where one says it did and
        samples otherwise."""
        started = trio.current_time()
        while True:
            engines = [self._client(url, parcel.version) for url in urls]
            delivery = _Delivery()
            try:
                if isinstance(parcel, Parcel):
                    await self._give_files(engines, parcel, delivery)
                else:
                    await self._give_memory(engines, parcel, delivery)
            except CanaryMismatch as error:
                raise RunFailed(str(error)) from error
            finally:
                await _close(engines)
            if delivery.rows:
                break
            if trio.current_time() - started > self._settings.mending_deadline_s:
                why = "; ".join(sorted(set(delivery.failures.values())))
                within = f"within {self._settings.mending_deadline_s:g} s"
                raise NotDelivered(f"no engine took version {parcel.version} {within}: {why}")
            await trio.sleep(_RETRY_S)
        self._took |= dict.fromkeys(delivery.rows, parcel.version)
        if isinstance(parcel, Parcel):
            self._sent.append(parcel)
            if parcel.canary is not None:
                parcel.canary.write(canary.beside(parcel.path))
        costs = delivery.rows.values()
        worst = {name: max(row[name] for row in costs) for name in next(iter(costs))}
        return {"sync_s": trio.current_time() - started, "engines_behind": len(delivery.failures), **worst}

    async def behind(self, urls: Sequence[str], version: int) -> bool:
        """Whether some engine that answers serves another version: it was started again, from weights of before, or
        has those of a learner before this one."""
        engines = [self._client(url, version) for url in urls]
        try:
            served, _ = await _ask(engines)
            return set(served.values()) - {version} != set()
        finally:
            await _close(engines)

    async def tidy(self, urls: Sequence[str]) -> None:
        """Have the engines drop what no turn needs any more, and remove all other files beside those of the newest
        versions, also those of a learner before this one. Never while another parcel is being written."""
        if not self._sent:
            return  # nothing went through files
        needed = self._sent[-KEPT:]
        if self._sync == "adapter":
            there = [url for url in urls if self._took.get(url) == needed[-1].version]
            in_use = await self._retire(there, [parcel.version for parcel in needed])
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

    def _alone_with(self, engine: EngineClient) -> AbstractAsyncContextManager[None]:
        if self._locks is None:
            return nullcontext()
        return exclusive(self._locks, engine.url, deadline_s=self._settings.admin_deadline_s)

    async def _give_files(self, engines: Sequence[EngineClient], parcel: Parcel, delivery: _Delivery) -> None:
        """Each engine by itself, all at once. Raises CanaryMismatch."""
        delta = await self._delta(parcel)
        mismatches: list[CanaryMismatch] = []

        async def one(engine: EngineClient) -> None:
            followed = bool(self._sent) and self._took.get(engine.url) == self._sent[-1].version
            try:
                if self._sent and not followed:
                    await engine.served_version(deadline_s=_ASK_S)
                async with self._alone_with(engine):
                    report = await self._send(engine, parcel, delta if followed else None)
                    delivery.rows[engine.url] = _row(report) | await self._prove(engine, parcel)
            except CanaryMismatch as error:
                mismatches.append(error)
            except EngineError as error:
                delivery.failures[engine.url] = str(error)
                self._took.pop(engine.url, None)  # a delta would have no base

        try:
            async with trio.open_nursery() as nursery:
                for engine in engines:
                    nursery.start_soon(one, engine)
        finally:
            if delta is not None:
                delta.unlink(missing_ok=True)
        if mismatches:
            raise mismatches[0]

    async def _delta(self, parcel: Parcel) -> Path | None:
        """What changed since the last parcel, for the engines that have it."""
        if self._sync != "delta" or not self._sent:
            return None
        path = parcel.path.with_suffix(".delta")
        await trio.to_thread.run_sync(_write_delta, self._sent[-1].path, parcel.path, path)
        return path

    async def _send(self, engine: EngineClient, parcel: Parcel, delta: Path | None) -> PushReport:
        settings = self._settings
        if self._sync == "adapter":
            return await adapters.load([engine], parcel.path, parcel.version, deadline_s=settings.admin_deadline_s)
        return await push(
            [engine],
            delta or parcel.path,
            parcel.version,
            sha256=parcel.sha256,
            base_sha256=self._sent[-1].sha256 if delta else None,
            keep_base=True if self._sync == "delta" else None,
            stage=settings.kind == "vllm",
            deadline_s=settings.admin_deadline_s,
            clear_cache=settings.recompute_kv,
        )

    async def _give_memory(self, engines: Sequence[EngineClient], parcel: MemoryParcel, delivery: _Delivery) -> None:
        """All engines that answer together, or none. Raises CanaryMismatch."""
        assert self._transfer is not None
        served, delivery.failures = await _ask(engines)
        there = [engine for engine in engines if engine.url in served]
        report = PushReport(pause_s=0.0, total_s=0.0, bytes=parcel.snapshot.size_bytes)
        try:
            if set(served.values()) - {parcel.version}:
                report = await self._transfer.push(
                    there,
                    parcel.snapshot,
                    parcel.version,
                    deadline_s=self._settings.admin_deadline_s,
                    clear_cache=self._settings.recompute_kv,
                )
            rows = {engine.url: _row(report) | await self._prove(engine, parcel) for engine in there}
        except CanaryMismatch:
            raise
        except EngineError as error:
            delivery.failures |= {engine.url: str(error) for engine in there}
        else:
            delivery.rows = rows

    async def _prove(self, engine: EngineClient, parcel: Parcel | MemoryParcel) -> dict[str, float]:
        if parcel.canary is None:
            return {}
        started = trio.current_time()
        info = None
        if isinstance(parcel, Parcel) and self._sync != "adapter":
            info = update_info(parcel.path, parcel.sha256)
        deadline_s = self._settings.admin_deadline_s
        error = await canary.check([engine], parcel.canary, update_info=info, seen=self._seen, deadline_s=deadline_s)
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


def _row(report: PushReport) -> dict[str, float]:
    return {"pause_s": report.pause_s, "sync_bytes": report.bytes}


async def _ask(engines: Sequence[EngineClient]) -> tuple[dict[str, int], dict[str, str]]:
    """The versions that engines serve, by URL, and why the others do not say."""
    served: dict[str, int] = {}
    failures: dict[str, str] = {}

    async def one(engine: EngineClient) -> None:
        try:
            served[engine.url] = await engine.served_version(deadline_s=_ASK_S)
        except EngineError as error:
            failures[engine.url] = str(error)

    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(one, engine)
    return served, failures


async def _close(engines: Sequence[EngineClient]) -> None:
    with trio.CancelScope(shield=True):  # closes sockets, waits for nothing
        for engine in engines:
            await engine.aclose()
