"""The policies that play the roles of one episode: the one that learns, frozen ones, past versions.

Knows neither turns nor environment.
"""

from __future__ import annotations

from agentrl.protocols import Engine
from agentrl.records import SamplingParams
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.journal import EpisodeJournal
from agentrl.store import TRAIN, Claim
from agentrl.store.episodes.groups import DURING


class Players:
    """Answers, for each role of the claimed episode, who samples its turns and whether they are trained."""

    __slots__ = ("_context", "_engine", "_fixed_roles", "sampling", "trains")

    def __init__(self, claim: Claim, context: RolloutContext) -> None:
        settings = context.settings
        self._context = context
        pinned_engine = context.pinned if DURING in claim.purpose else None
        self._engine = context.engine if pinned_engine is None else pinned_engine
        self._fixed_roles = {*context.frozen, *context.opponents.roles(claim)}
        self.trains = claim.purpose == TRAIN
        """True if the episode is played to be trained, and not only to measure the policy."""
        self.sampling: SamplingParams = settings.sampling if self.trains else context.eval_sampling or settings.sampling

    def learns(self, role: str) -> bool:
        """Whether the policy that learns plays `role`."""
        return role not in self._fixed_roles

    def engine(self, role: str) -> Engine:
        """The engine that samples the turns of `role`."""
        return self._context.frozen.get(role, self._engine)

    def adapter(self, role: str) -> str | None:
        """The adapter with which the turns of `role` are sampled, by its role's name; None without one."""
        return role if role in self._context.adapted else None

    async def version(self, role: str, journal: EpisodeJournal) -> int | None:
        """The weight version that plays `role` if a past version of the policy does, else None."""
        context = self._context
        return await context.opponents.version(context.store, journal.claim, role, journal.turns, journal.partial)
