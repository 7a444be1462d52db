"""Rewards that a turn gets by a rule: potential-based shaping, and a punishment of overlong turns. Knows no store and
no settings.

`Shaping` is potential-based: a turn earns what it changes in a potential of the episode.

    F[t] = gamma * phi(s[t + 1]) - phi(s[t])

`s[t]` is the episode before turn t. phi is the user's potential less its value at the start of the episode, and 0 at
the end, however the episode ends. Rewards of this form change no optimal policy (Ng, Harada and Russell 1999, theorem
1) where returns are discounted by the same gamma. With gamma = 1 an episode's rewards add up to 0, and the reward to go
from turn t is -phi(s[t]): a baseline that the turn's action has no part in.

In an episode of several roles, s[t] is what the role's own last turn led to.

`Overlong` is soft overlong punishment: a turn pays for each token that brings it near its limit (DAPO, Yu et al. 2025,
sec. 3.4).

    reward = 0                                 n <= most - margin
             (most - margin - n) / margin      between
             -1                                n >= most

n are the tokens that the policy sampled in the turn. It is a reward of the turn that earned it, and the policy chooses
n: the gradient is that of the return with it, without bias. That is another return: a policy that would do better with
long turns is kept from them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from agentrl.records import Trajectory
from agentrl.rewards.score_cache import ScoreCache


@dataclass(slots=True)
class Shaping:
    """The reward of the last turn of an episode so far; its `stop_reason` says whether the role acts again.
    `potential` is called once for each state of an episode, the start without any turn too."""

    potential: Callable[[Trajectory], Awaitable[float]]
    gamma: float = 1.0
    potentials: ScoreCache[float] = field(default_factory=lambda: ScoreCache[float]())

    async def __call__(self, seen: Trajectory) -> float:
        seen_turns, acting_role = seen.turns, seen.turns[-1].role
        turns_of_role = [turn_index for turn_index, turn in enumerate(seen_turns) if turn.role == acting_role]
        # The potential counts from the start, where it is 0 by definition, so the first turn of a role begins at 0.
        potential_before = await self._phi(seen, turns_of_role[-2] + 1) if len(turns_of_role) > 1 else 0.0
        # At the end it is 0 as well: a potential that was left over would be a reward and could change the best policy.
        potential_after = await self._phi(seen, len(seen_turns)) if seen.stop_reason is None else 0.0
        return self.gamma * potential_after - potential_before

    async def _phi(self, seen: Trajectory, turns: int) -> float:
        """The potential after so many turns, counted from the start."""
        return await self._potential_of(seen, turns) - await self._potential_of(seen, 0)

    async def _potential_of(self, seen: Trajectory, turns: int) -> float:
        """The potential after so many turns, as the user's function gives it: called once for each state."""
        earlier_state = replace(seen, turns=seen.turns[:turns], stop_reason=None)
        potential_value = self.potentials.get(earlier_state)
        if potential_value is None:
            potential_value = await self.potential(earlier_state)
            self.potentials.keep(earlier_state, potential_value)
        return potential_value


@dataclass(frozen=True, slots=True)
class Overlong:
    """The punishment of the last turn of an episode so far, from -1 to 0."""

    most: int
    margin: int

    def __call__(self, seen: Trajectory) -> float:
        excess_tokens = len(seen.turns[-1].token_ids) - (self.most - self.margin)
        return -min(max(excess_tokens / self.margin, 0.0), 1.0)
