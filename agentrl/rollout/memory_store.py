"""The journal of episodes in memory: `play` works without a database.

For episodes that nobody goes on with once this process is gone: evaluation at an endpoint, demonstrations, notebooks.
It answers the calls of `agentrl.store.interfaces.EpisodeStore` as a run's store does, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agentrl.errors import LeaseLost
from agentrl.records import NO_TOOLS, Messages, ShownTools, Step, Task, Trajectory, Turn
from agentrl.store import TRAIN, Claim, Ending, EnvSnapshot, Partial
from agentrl.store.databases.calls_together import Result


class _Written:
    """A write that is made already."""

    @property
    def result(self) -> Result:
        return Result()


@dataclass(slots=True)
class _Entry:
    claim: Claim
    turns: list[Turn] = field(default_factory=list[Turn])
    start: Messages | None = None
    tools: ShownTools = NO_TOOLS
    trial: int = 0
    snapshot: EnvSnapshot | None = None
    unsaved: str = ""
    ended: Trajectory | None = None
    detail: str = ""


class MemoryStore:
    """An `EpisodeStore`. `claim` starts an episode, `take` gives it back once it has ended, and forgets it."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._episodes = 0

    def claim(self, task: Task, *, group_id: int = 1, member: int = 0, size: int = 1, purpose: str = TRAIN) -> Claim:
        """A new episode of a task, to be played."""
        self._episodes += 1
        new_claim = Claim(
            episode_id=self._episodes,
            group_id=group_id,
            member=member,
            size=size,
            task=task,
            purpose=purpose,
            fence=1,
            trial=0,
            start=None,
            turns=(),
        )
        self._entries[new_claim.episode_id] = _Entry(new_claim)
        return new_claim

    def take(self, episode_id: int) -> tuple[Trajectory, str]:
        """An episode that has ended, and the cause of its failure in a line, if it failed; it is forgotten here. Raises
        LeaseLost for one that was taken, LookupError for one that has not ended."""
        episode_entry = self._held(episode_id)
        if episode_entry.ended is None:
            raise LookupError(f"episode {episode_id} has not ended")
        del self._entries[episode_id]
        return episode_entry.ended, episode_entry.detail

    def forget(self, episode_id: int) -> None:
        """Drop an episode, whether or not it has ended."""
        self._entries.pop(episode_id, None)

    # --- an EpisodeStore ----------------------------------------------------------------------------------------

    async def reload(self, claim: Claim) -> Claim:
        episode_entry = self._held(claim.episode_id)
        return replace(
            claim, trial=episode_entry.trial, start=episode_entry.start, turns=tuple(episode_entry.turns), resumed=True
        )

    async def begin(self, episode_id: int, fence: int, start: Messages, tools: ShownTools = NO_TOOLS) -> None:
        episode_entry = self._held(episode_id)
        episode_entry.start, episode_entry.tools = start, tools

    async def journal_turn(self, episode_id: int, fence: int, turn: Turn) -> None:
        self._held(episode_id).turns.append(turn)

    def post_partial(self, episode_id: int, fence: int, part: Partial) -> _Written:
        return _Written()  # nobody goes on with it

    async def journal_step(self, episode_id: int, fence: int, turn_index: int, step: Step) -> None:
        journaled_turns = self._held(episode_id).turns
        journaled_turns[turn_index] = replace(journaled_turns[turn_index], step=step)

    async def restart_episode(self, episode_id: int, fence: int, reason: str) -> None:
        episode_entry = self._held(episode_id)
        episode_entry.trial, episode_entry.start, episode_entry.snapshot = episode_entry.trial + 1, None, None
        episode_entry.turns.clear()

    async def discard_turn(self, episode_id: int, fence: int) -> None:
        """Nothing of a turn under way is here."""

    async def restart_group(self, episode_id: int, fence: int, max_replays: int) -> bool:
        return False

    async def finish(self, episode_id: int, fence: int, ending: Ending) -> None:
        episode_entry = self._held(episode_id)
        claim, episode_entry.detail, episode_entry.snapshot = episode_entry.claim, ending.detail, None
        episode_entry.ended = Trajectory(
            episode_id=episode_id,
            group_id=claim.group_id,
            member=claim.member,
            task=claim.task,
            start=episode_entry.start or (),
            tools=episode_entry.tools,
            turns=tuple(episode_entry.turns),
            stop_reason=ending.stop_reason,
            outcome=ending.outcome,
            success=ending.success,
            outcomes=dict(ending.outcomes),
        )

    async def keep_snapshot(self, episode_id: int, fence: int, snapshot: EnvSnapshot) -> None:
        self._held(episode_id).snapshot = snapshot

    async def snapshot(self, episode_id: int) -> EnvSnapshot | None:
        return self._held(episode_id).snapshot

    async def note_unsaved(self, episode_id: int, fence: int, turn: int, reason: str) -> None:
        self._held(episode_id).unsaved = f"no snapshot of turn {turn}: {reason}"

    async def unsaved(self, episode_id: int) -> str:
        return self._held(episode_id).unsaved

    async def keep_artifacts(self, episode_id: int, fence: int, turn: str, files: Mapping[str, bytes]) -> None:
        """Reward sources that test files read a run's store."""

    async def meta(self, key: str) -> str | None:
        return None

    def _held(self, episode_id: int) -> _Entry:
        episode_entry = self._entries.get(episode_id)
        if episode_entry is None:
            # The error of a store whose episode another worker has: `play` knows what to do with it, and needs no case
            # for this store. `tests/rollout/test_memory_store.py` plays the same episode on both.
            raise LeaseLost(f"episode {episode_id} is not held here: it was dropped")
        return episode_entry
