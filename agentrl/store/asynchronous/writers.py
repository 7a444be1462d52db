"""The awaited writes of a store: by one thread, or by one for each of its databases.

Writes of an episode go to the thread of its database, in order; those of different databases are committed beside each
other. Calls that several databases answer are made in a thread of their own: none is part of another's transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol, Self, TypeVar

import trio

from agentrl.records import Json, Messages, Step, StopReason, Trajectory, Turn, WeightVersion
from agentrl.store import Claim, Partial, RunStore, Snapshot
from agentrl.store.asynchronous.store import AsyncStore, Write
from agentrl.store.asynchronous.wait_for_work import Waiting
from agentrl.store.databases.change_signal import Role
from agentrl.store.episodes.scores import read_turn_id
from agentrl.store.interfaces import RewardStore, RolloutStore
from agentrl.store.sharded.placement import home
from agentrl.tokens.columns import NONE, Columns

_T = TypeVar("_T")


class Desk(RolloutStore, RewardStore, Protocol):
    """What a worker and a reward source hold."""

    async def aclose(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...


def desk_of(store: RunStore, reader: RunStore | None = None, *, inline: bool = False, disk_wait_s: float = 0.0) -> Desk:
    """The desk of a store, which may have several databases; see `AsyncStore`."""
    reader = reader or store
    own = [
        AsyncStore(one, read, inline=inline, disk_wait_s=disk_wait_s)
        for one, read in zip(store.shards, reader.shards, strict=True)
    ]
    return own[0] if len(own) == 1 else _Desks(store, own, inline)


class _Desks:
    """The desks of several databases as one."""

    def __init__(self, store: RunStore, desks: Sequence[AsyncStore], inline: bool) -> None:
        self._store, self._desks, self._inline = store, desks, inline
        self._one, self._waiting = trio.CapacityLimiter(1), Waiting(store)

    def _of(self, episode_id: int) -> AsyncStore:
        return self._desks[home(episode_id, len(self._desks))]

    def _of_turn(self, turn: str) -> AsyncStore:
        return self._of(read_turn_id(turn)[0])

    async def _apart(self, call: Callable[[], _T]) -> _T:
        if self._inline:
            return call()
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._one)

    # --- what a worker does

    async def claim(
        self, worker: str, limit: int, *, lease_s: float, now: float | None = None, ahead: int | None = None
    ) -> list[Claim]:
        return await self._apart(partial(self._store.claim, worker, limit, lease_s=lease_s, now=now, ahead=ahead))

    async def reload(self, claim: Claim) -> Claim:
        return await self._of(claim.episode_id).reload(claim)

    async def renew(self, worker: str, *, lease_s: float, now: float | None = None) -> frozenset[int]:
        return frozenset(chain(*[await desk.renew(worker, lease_s=lease_s, now=now) for desk in self._desks]))

    async def hand_back(self, worker: str) -> int:
        return sum([await desk.hand_back(worker) for desk in self._desks])

    async def begin(self, episode_id: int, fence: int, start: Messages) -> None:
        await self._of(episode_id).begin(episode_id, fence, start)

    async def journal_turn(self, episode_id: int, fence: int, turn: Turn) -> None:
        await self._of(episode_id).journal_turn(episode_id, fence, turn)

    def post_partial(self, episode_id: int, fence: int, part: Partial) -> Write:
        return self._of(episode_id).post_partial(episode_id, fence, part)

    async def journal_step(self, episode_id: int, fence: int, turn_index: int, step: Step) -> None:
        await self._of(episode_id).journal_step(episode_id, fence, turn_index, step)

    async def restart_episode(self, episode_id: int, fence: int, reason: str) -> None:
        await self._of(episode_id).restart_episode(episode_id, fence, reason)

    async def discard_turn(self, episode_id: int, fence: int) -> None:
        await self._of(episode_id).discard_turn(episode_id, fence)

    async def restart_group(self, episode_id: int, fence: int, max_replays: int) -> bool:
        return await self._apart(partial(self._store.restart_group, episode_id, fence, max_replays))

    async def finish(
        self,
        episode_id: int,
        fence: int,
        *,
        stop_reason: StopReason,
        outcome: float | None,
        success: bool | None,
        outcomes: Mapping[str, float] | None = None,
        detail: str = "",
    ) -> None:
        said: dict[str, Any] = {"outcome": outcome, "success": success, "outcomes": outcomes, "detail": detail}
        await self._of(episode_id).finish(episode_id, fence, stop_reason=stop_reason, **said)

    async def keep_snapshot(self, episode_id: int, fence: int, snapshot: Snapshot) -> None:
        await self._of(episode_id).keep_snapshot(episode_id, fence, snapshot)

    async def snapshot(self, episode_id: int) -> Snapshot | None:
        return await self._of(episode_id).snapshot(episode_id)

    async def note_unsaved(self, episode_id: int, fence: int, turn: int, reason: str) -> None:
        await self._of(episode_id).note_unsaved(episode_id, fence, turn, reason)

    async def unsaved(self, episode_id: int) -> str:
        return await self._of(episode_id).unsaved(episode_id)

    async def keep_artifacts(self, episode_id: int, fence: int, turn: str, files: Mapping[str, bytes]) -> None:
        await self._of(episode_id).keep_artifacts(episode_id, fence, turn, files)

    async def meta(self, key: str) -> str | None:
        return await self._desks[0].meta(key)

    async def current_version(self) -> WeightVersion:
        return await self._desks[0].current_version()

    async def record(self, kind: str, step: int, values: Mapping[str, Json]) -> None:
        await self._desks[0].record(kind, step, values)

    async def wait_for_work(self, role: Role, timeout_s: float) -> None:
        await self._waiting(role, timeout_s)

    # --- what a reward source does

    async def awaiting(self, source: str, limit: int, *, skip: Iterable[str] = (), settled: bool = False) -> list[str]:
        return await self._apart(partial(self._store.awaiting, source, limit, skip=list(skip), settled=settled))

    async def trajectory(self, episode_id: int) -> Trajectory:
        return await self._of(episode_id).trajectory(episode_id)

    async def artifacts(self, turn: str) -> dict[str, bytes] | None:
        return await self._of_turn(turn).artifacts(turn)

    async def score(
        self,
        turn: str,
        source: str,
        value: float,
        *,
        version: int | None = None,
        took_s: float,
        cost: float,
        columns: Columns = NONE,
    ) -> bool:
        said: dict[str, Any] = {"version": version, "took_s": took_s, "cost": cost, "columns": columns}
        return await self._of_turn(turn).score(turn, source, value, **said)

    async def aclose(self) -> None:
        """Make the writes that are queued, and end the threads."""
        async with trio.open_nursery() as nursery:
            for desk in self._desks:
                nursery.start_soon(desk.aclose)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
