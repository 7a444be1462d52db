"""New weights as files into running engines. No torch: it passes a file's path.

Owns the deadline over all calls to an engine and the confirmation; the calls and their order are the dialect's. An
engine whose update failed half-way stays paused: waiting is better than sampling from half-loaded weights, and pushing
again repairs it (every call may be repeated).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import trio

from agentrl.engine.client import EngineClient
from agentrl.engine.dialect import WeightUpdate
from agentrl.engine.weight_sync import object_store, weight_file
from agentrl.engine.weight_sync.object_store import Outbox, StoredVersion
from agentrl.engine.weight_sync.transport import Parcel, Place, PushReport, WeightTransport
from agentrl.errors import EngineError, FilesUnseen, WeightSyncError
from agentrl.records import Json


async def push(
    engines: Sequence[str | EngineClient],
    path: Path | str | Sequence[Path | str],
    version: int,
    *,
    sha256: str | None = None,
    base_sha256: str | None = None,
    keep_base: bool | None = None,
    stage: bool = False,
    second: bool = True,
    deadline_s: float = 30.0,
    clear_cache: bool = False,
    asleep: bool = False,
) -> PushReport:
    """Have every engine load the safetensors file at `path`, or several that hold the weights together, and serve it
    as `version`; all at once. In the place of a path, the URL of an entry in an object store (`objects`) will do for
    engines that do not see our files.

    Requests go on over the swap. `clear_cache` recomputes their keys and values under the new weights; otherwise they
    keep those they have. `sha256` is that of the one file, computed here if None. `stage` has an engine that can (vLLM
    with our plugin) read and check it while it generates, and with `second` also make a second copy of its weights of
    it where there is room, so that the pause is a swap. With `base_sha256` the file is a delta (see `weight_file`)
    against the weights of that digest, which the engines must have kept: `keep_base` makes them keep it, from the push
    of the base on. With `asleep` engines take the weights in their sleep, which they are put to if they are awake, and
    wake with them: weights first, then room for keys and values.

    Raises WeightSyncError naming the engines that did not confirm within `deadline_s`; the others have the new
    weights, and the call may be repeated."""
    update_infos: list[dict[str, Json]] = []
    total_bytes = 0
    for weight_part in [path] if isinstance(path, Path | str) else path:
        full_path, part_bytes, part_digest = await trio.to_thread.run_sync(_locate, weight_part, sha256, deadline_s)
        total_bytes += part_bytes
        update_infos.append(update_info(full_path, part_digest, base_sha256, version=version, deadline_s=deadline_s))
    started_at = trio.current_time()
    pauses_s: list[float] = []
    failures, unseen_by_engine = list[str](), list[bool]()

    weight_update = WeightUpdate(
        version=version,
        files=update_infos,
        stage=stage,
        second=second,
        clear_cache=clear_cache,
        asleep=asleep,
        keep_base=keep_base,
    )

    async def update_one(client: EngineClient) -> float:
        paused_s = await client.dialect.take_weights(client, weight_update, deadline_s=deadline_s)
        # An answer of 200 to `finish` is the server's word. The version comes from another call, and catches a server
        # that restarted in between and answers for the weights it began with.
        served_version = await client.served_version(deadline_s=deadline_s)
        if served_version != version:
            raise WeightSyncError(f"it serves version {served_version} after the update")
        client.version = version
        return paused_s

    async def push_to(engine: str | EngineClient) -> None:
        engine_client = EngineClient(engine) if isinstance(engine, str) else engine
        try:
            with trio.fail_after(deadline_s):
                pauses_s.append(await update_one(engine_client))
        # The calls under way are abandoned, and the engine may yet finish the update. Whoever asks next sees its
        # version: pushing again is safe, and so is finding it there already.
        except trio.TooSlowError:
            unseen_by_engine.append(False)
            failures.append(f"{engine_client.url} did not take version {version} within {deadline_s:g} s")
        except EngineError as error:
            hint = _NO_SHARED_DISK if _is_unseen(error, update_infos) else ""
            unseen_by_engine.append(bool(hint))
            failures.append(f"{engine_client.url} did not take version {version}: {error}{hint}")
        finally:
            if isinstance(engine, str):
                with trio.CancelScope(shield=True):  # closes sockets, waits for nothing
                    await engine_client.aclose()

    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(push_to, engine)
    if failures:
        # Only if all engines fail for this reason is it the run's set-up: that is worth ending a run for at its
        # start, with the setting to change.
        raise (FilesUnseen if all(unseen_by_engine) else WeightSyncError)("; ".join(sorted(failures)))
    total_s = trio.current_time() - started_at
    return PushReport(pause_s=max(pauses_s, default=0.0), total_s=total_s, bytes=total_bytes)


def _locate(path: Path | str, sha256: str | None, deadline_s: float) -> tuple[Path | str, int, str]:
    """A file's place, as any process can name it, the bytes that an engine reads, and the digest of the weights. Raises
    WeightSyncError."""
    if isinstance(path, str):
        folder_url, _, entry_name = path.rpartition("/")
        store_entry = object_store.ObjectFolder(folder_url, deadline_s=deadline_s).entry(entry_name)
        return path, store_entry.object_bytes, sha256 or store_entry.sha256
    try:
        resolved_path, file_bytes = path.resolve(), path.stat().st_size
    except OSError as error:
        raise WeightSyncError(f"cannot read {str(path)!r}: {error.strerror}") from error
    return resolved_path, file_bytes, sha256 or weight_file.digest(weight_file.open_bytes(resolved_path))


def _is_unseen(error: EngineError, infos: Sequence[dict[str, Json]]) -> bool:
    """Whether an engine says that it cannot read a file which is there. The words are those of our server and of our
    plugin in vLLM, whose answers have no other field for it."""
    sent_paths = [str(file_info["path"]) for file_info in infos if not object_store.is_url(file_info["path"])]
    return "cannot read" in error.reason and any(sent_path in error.reason for sent_path in sent_paths)


_NO_SHARED_DISK: Final = (
    "; the file is there, so this engine was not started with its folder (--weights-from FOLDER), or it shares no "
    "disk with the learner: set engine.weights_url to a folder that both reach "
    '(engine.weights_url = "s3://bucket/weights"), or scratch_dir to a folder that both mount'
)


def update_info(
    path: Path | str,
    sha256: str | None = None,
    base_sha256: str | None = None,
    *,
    version: int | None = None,
    deadline_s: float | None = None,
) -> dict[str, Json]:
    """How a weight file is named to an engine, with the version that it belongs to; `deadline_s` is that of each object
    of a store."""
    file_info: dict[str, Json] = {"path": str(path)}
    if object_store.is_url(path) and deadline_s is not None:
        file_info["deadline_s"] = deadline_s
    optional_fields = (("sha256", sha256), ("base_sha256", base_sha256), ("version", version))
    return file_info | {key: value for key, value in optional_fields if value is not None}


class FileTransport(WeightTransport):
    """`full`: a file of all weights, or an object of a store if `engine.weights_url` names one."""

    serves_role_models = True
    deltas = False  # whether the store gets what changed

    def __init__(self, place: Place) -> None:
        self._settings = place.engine
        self._outbox = None if place.store is None else Outbox(place.store, deltas=self.deltas)
        self._stored: tuple[int, StoredVersion] | None = None  # the version that was put into the store last

    @asynccontextmanager
    async def offer(self, parcel: Parcel, base: Parcel | None) -> AsyncGenerator[None]:
        # Again with the same parcel if no engine took it: the object is in the store already then, and uploading it
        # again would take as long as the first time.
        if self._outbox is not None and (self._stored is None or self._stored[0] != parcel.version):
            stored_version = await trio.to_thread.run_sync(self._outbox.put, parcel.version, parcel.path, parcel.sha256)
            self._stored = (parcel.version, stored_version)
        yield

    async def deliver(self, engines: Sequence[EngineClient], parcel: Parcel, base: Parcel | None) -> PushReport:
        return await self._push(engines, parcel)

    async def _push(
        self, engines: Sequence[EngineClient], parcel: Parcel, delta: Path | None = None, base: Parcel | None = None
    ) -> PushReport:
        """Push the object in the store, else `delta` against `base`, else the file."""
        settings = self._settings
        usable_delta = delta if self._stored is None else None
        return await push(
            engines,
            self._stored[1].url if self._stored is not None else usable_delta or parcel.path,
            parcel.version,
            sha256=parcel.sha256,
            base_sha256=base.sha256 if usable_delta is not None and base is not None else None,
            keep_base=True if self.deltas else None,
            stage=settings.kind == "vllm",
            second=True,
            deadline_s=settings.admin_deadline_s,
            clear_cache=settings.at_update == "recompute",
            asleep=settings.colocated,
        )

    def missed(self, *, by_all: bool) -> None:
        if self._outbox is not None:
            # An engine that missed a version has no base for the next delta. It could follow the deltas back, but
            # only while all objects are there and it can read them, which is exactly what failed.
            self._outbox.whole_next()
            self._stored = None if by_all else self._stored

    async def retire(self, engines: Sequence[EngineClient], keep: Sequence[Parcel]) -> frozenset[int]:
        if self._outbox is not None:
            with suppress(WeightSyncError):  # a store that is away now is tidied with the next version
                await trio.to_thread.run_sync(self._outbox.tidy, [parcel.version for parcel in keep])
        return frozenset()

    def diagnosis(self, parcel: Parcel) -> dict[str, Json] | None:
        return update_info(self._stored[1].url if self._stored is not None else parcel.path, parcel.sha256)
