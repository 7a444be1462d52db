"""The journal of one episode: all its writes to the store, and its turns as the store has them.

    write            when                                          what rests on it
    begin            after the environment's reset                 a replay has to start with the same messages (law 2)
    keep_tokens      while the tokens of a turn arrive             a killed worker loses few of them (laws 1 and 2)
    write_turn       before the environment sees the action        a crash repeats the step, never the sampling (law 1)
    keep_artifacts   before the answer to the same turn            tests judge this turn's work, not later work (law 3)
    write_answer     before the next turn is sampled               a replay compares its answers with these (law 2)
    keep_snapshot    after the answer that it includes             a restart goes on from it, without replay (law 2)
    restart          neither snapshot nor replay worked            no turn follows a state that is lost (law 3)
    finish           last, once                                    the episode is trained once (law 2), or never (law 3)

Every write carries the fence of the claim. If another worker has claimed the episode meanwhile, the store refuses the
write with LeaseLost, so that no two workers write to one episode. `agentrl.rollout.resume_modes` writes before an
episode is played. Knows neither environment nor engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from agentrl.records import Messages, ShownTools, Step, Turn, context_ids
from agentrl.store import Claim, Ending, EnvSnapshot, Partial
from agentrl.store.interfaces import EpisodeStore, Posted


class EpisodeJournal:
    """The turns of a claimed episode, `start` (its first messages), and the writes to both."""

    __slots__ = ("_episode_id", "_fence", "_store", "claim", "partial", "start", "tools", "trial", "turns")

    def __init__(self, claim: Claim, store: EpisodeStore) -> None:
        self.claim, self._store = claim, store
        self._episode_id, self._fence = claim.episode_id, claim.fence
        self.start: Messages = claim.start or ()
        self.tools = claim.tools
        """Tools that the first conversation of the episode offers."""
        self.turns: list[Turn] = list(claim.turns)
        self.trial = claim.trial
        self.partial: Partial | None = claim.partial
        """The tokens of the next turn that are sampled already."""

    # --- reads

    @property
    def awaits_answer(self) -> bool:
        """True if the environment has yet to answer the last turn."""
        return bool(self.turns) and self.turns[-1].step is None

    def last_turn_of(self, role: str) -> Turn | None:
        """The last turn that `role` took."""
        return next((turn for turn in reversed(self.turns) if turn.role == role), None)

    def context_after(self, index: int) -> tuple[int, ...]:
        """All tokens of a conversation up to the last sampled token of the turn `index`."""
        return context_ids(self.turns, index) + self.turns[index].token_ids

    async def snapshot(self) -> EnvSnapshot | None:
        """The newest snapshot of the environment."""
        return await self._store.snapshot(self._episode_id)

    async def why_no_snapshot(self) -> str:
        """The reason why a snapshot could not be kept; empty if that never happened."""
        return await self._store.unsaved(self._episode_id)

    async def reload_partial(self) -> Partial | None:
        """The tokens of an interrupted turn, as the store has them."""
        return (await self._store.reload(self.claim)).partial

    # --- writes

    async def begin(self, start: Messages, tools: ShownTools) -> None:
        """Write the environment's first messages and its tools."""
        self.start, self.tools = start, tools
        await self._store.begin(self._episode_id, self._fence, start, tools)

    def keep_tokens(self, part: Partial) -> Posted:
        """Write tokens of the turn under way, without waiting for the write."""
        return self._store.post_partial(self._episode_id, self._fence, part)

    async def write_turn(self, turn: Turn) -> None:
        """Write a sampled turn, which takes the place of its partial tokens."""
        await self._store.journal_turn(self._episode_id, self._fence, turn)
        self.turns.append(turn)
        self.partial = None

    def answer(self, step: Step) -> None:
        """Set the answer to the last turn, in memory only: `write_answer` follows once it is settled."""
        self.turns[-1] = replace(self.turns[-1], step=step)

    async def write_answer(self, step: Step) -> None:
        """Write the answer to the last turn."""
        self.answer(step)
        await self._store.journal_step(self._episode_id, self._fence, self.turns[-1].index, step)

    async def keep_artifacts(self, files: Mapping[str, bytes]) -> None:
        """Write the files of the agent's work as they stand after the last turn."""
        await self._store.keep_artifacts(self._episode_id, self._fence, self.turns[-1].id, files)

    async def keep_snapshot(self, data: bytes, policy_seconds: float) -> None:
        """Write a snapshot of the environment after its last answer, and the time that the policy has used by then."""
        env_snapshot = EnvSnapshot(turn=self.turns[-1].index, data=data, seconds=policy_seconds)
        await self._store.keep_snapshot(self._episode_id, self._fence, env_snapshot)

    async def note_no_snapshot(self, reason: str) -> None:
        """Write why there is no snapshot of the environment after its last answer."""
        await self._store.note_unsaved(self._episode_id, self._fence, self.turns[-1].index, reason)

    async def restart(self, reason: str) -> None:
        """Start the episode anew, as another trial without any turn."""
        await self._store.restart_episode(self._episode_id, self._fence, reason)
        self.turns, self.partial, self.trial = [], None, self.trial + 1

    async def finish(self, ending: Ending) -> None:
        """Write the episode's end."""
        await self._store.finish(self._episode_id, self._fence, ending)
