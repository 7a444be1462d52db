"""Protocols of the store for an episode, a worker and a reward source: awaited calls, plain data in and out.

    EpisodeStore   an episode: its journal; `agentrl.rollout.memory_store` has one without a database
    RolloutStore   a worker: claims episodes, journals them, gives them back
    RewardStore    a reward source: which turns wait, and the scores

A run's store answers them through `agentrl.store.journal_writer.JournalWriter`. What other processes need of a store,
the learner and the supervisor for example, are the parts of `RunStore` themselves: they have one implementation.
Nothing here says how a store keeps its rows, and no call takes a function: a store may be on another host. Errors are
those of `agentrl.errors`: LeaseLost, DiskFull, StoreBusy, StoreError. Each call is described where the part has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from agentrl.records import NO_TOOLS, Messages, ShownTools, Step, Trajectory, Turn, WeightVersion
from agentrl.tokens.columns import NONE, Columns

if TYPE_CHECKING:
    from agentrl.records import Json
    from agentrl.store.databases.calls_together import Result
    from agentrl.store.databases.change_signal import Role
    from agentrl.store.episodes.endings import Ending
    from agentrl.store.episodes.journal import EnvSnapshot
    from agentrl.store.episodes.leases import Claim
    from agentrl.store.episodes.partial_turns import Partial


class Posted(Protocol):
    """A write that nobody waits for; `result` is None until it is committed or has failed."""

    @property
    def result(self) -> Result | None: ...


class EpisodeStore(Protocol):
    """Journals claimed episodes. All that `agentrl.rollout.episode.play` needs."""

    async def reload(self, claim: Claim) -> Claim: ...
    async def begin(self, episode_id: int, fence: int, start: Messages, tools: ShownTools = NO_TOOLS) -> None: ...
    async def journal_turn(self, episode_id: int, fence: int, turn: Turn) -> None: ...
    def post_partial(self, episode_id: int, fence: int, part: Partial) -> Posted: ...
    async def journal_step(self, episode_id: int, fence: int, turn_index: int, step: Step) -> None: ...
    async def restart_episode(self, episode_id: int, fence: int, reason: str) -> None: ...
    async def discard_turn(self, episode_id: int, fence: int) -> None: ...
    async def restart_group(self, episode_id: int, fence: int, max_replays: int) -> bool: ...
    async def finish(self, episode_id: int, fence: int, ending: Ending) -> None: ...
    async def keep_snapshot(self, episode_id: int, fence: int, snapshot: EnvSnapshot) -> None: ...
    async def snapshot(self, episode_id: int) -> EnvSnapshot | None: ...
    async def note_unsaved(self, episode_id: int, fence: int, turn: int, reason: str) -> None: ...
    async def unsaved(self, episode_id: int) -> str: ...
    async def keep_artifacts(self, episode_id: int, fence: int, turn: str, files: Mapping[str, bytes]) -> None: ...
    async def meta(self, key: str) -> str | None: ...


class RolloutStore(EpisodeStore, Protocol):
    """Claims episodes, and journals them. Calls of a process take effect in the order in which they were made. A call
    that is cancelled may have taken effect, or may still, before any later one."""

    async def claim(
        self,
        worker: str,
        limit: int,
        *,
        lease_s: float,
        now: float | None = None,
        ahead: int | None = None,
        evaluation: bool | None = None,
    ) -> list[Claim]: ...
    async def renew(self, worker: str, *, lease_s: float, now: float | None = None) -> frozenset[int]: ...
    async def hand_back(self, worker: str) -> int: ...
    async def current_version(self) -> WeightVersion: ...
    async def record(self, kind: str, step: int, values: Mapping[str, Json]) -> None: ...
    async def wait_for_work(self, role: Role, timeout_s: float) -> None: ...


class RewardStore(Protocol):
    """Says which turns a source has yet to score, and takes the scores."""

    async def awaiting(
        self, source: str, limit: int, *, skip: Iterable[str] = (), settled: bool = False
    ) -> list[str]: ...
    async def trajectory(self, episode_id: int) -> Trajectory: ...
    async def artifacts(self, turn: str) -> dict[str, bytes] | None: ...
    async def score(
        self,
        turn: str,
        source: str,
        value: float,
        *,
        version: int | None = None,
        took_s: float = 0.0,
        cost: float = 0.0,
        columns: Columns = NONE,
        reason: str = "",
    ) -> bool: ...
    async def meta(self, key: str) -> str | None: ...
    async def record(self, kind: str, step: int, values: Mapping[str, Json]) -> None: ...
    async def wait_for_work(self, role: Role, timeout_s: float) -> None: ...
