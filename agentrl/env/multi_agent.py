"""Several roles in one episode: self-play, solver and verifier, a table of players.

`RolesEnv` says in `info["role"]` who acts next; the observation is for that role, and holds what is new to it since
its own last turn. Rewards and outcomes go by role. `OneRole` binds all roles but one to fixed policies, so that a
driver which knows nothing of roles can train the one; the rollout itself plays all roles. It knows neither models nor
weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from gymnasium.error import ResetNeeded

from agentrl.env import sync_async
from agentrl.env.core import Env, Info, ResetResult, StepResult
from agentrl.env.tools.tools import clean_text
from agentrl.errors import PolicyFault, UsageError
from agentrl.records import Json, Message, Messages, StopReason

Policy = Callable[[Messages, np.random.Generator], str | Awaitable[str]]
"""A role's fixed policy: maps its conversation so far and a seeded generator to its next text."""


@dataclass(slots=True)
class _Game:
    """Where the episode stands. `busy` stays set if a step was cancelled."""

    role: str = ""
    turns: int = 0
    faults: int = 0
    busy: bool = False
    over: bool = False
    rewards: dict[str, float] = field(default_factory=dict[str, float])


class RolesEnv(Env):
    """An environment whose roles take turns. Write `start`, `see`, `play` and `outcomes`; each may be async.

    A step's reward is the acting role's process reward; the others' rewards are in `info["rewards"]` by role. At
    the end `info["outcomes"]` holds every role's outcome (and `outcome` that of the first role). A role whose text
    breaks the rules (`play` raises a `PolicyFault`) reads why and tries again, `retries` times in a row; then it
    forfeits."""

    roles: tuple[str, ...]
    retries: int = 2
    max_turns: int = 200
    cut_off: bool = False
    """Whether a limit of the game's own ended it, and not the game: set it in `play`. The episode is then truncated."""

    task: Mapping[str, Json]
    _game: _Game | None = None

    # --- what an author writes

    @abstractmethod
    def start(self, task: Mapping[str, Json]) -> str | Awaitable[str]:
        """Set the game up, with `self.np_random`; the role that acts first."""

    @abstractmethod
    def see(self, role: str) -> str | Sequence[Message] | Awaitable[str | Sequence[Message]]:
        """The news for `role` now that it acts; the first time, its rules too."""

    @abstractmethod
    def play(self, role: str, text: str) -> str | Awaitable[str | None] | None:
        """Apply what `role` wrote; who acts next, None if the game is over. Raise ToolError or ParseError for a move
        against the rules."""

    @abstractmethod
    def outcomes(self, forfeited: str | None) -> Mapping[str, float] | Awaitable[Mapping[str, float]]:
        """The outcome of every role, at the end; `forfeited` names the one that could not keep to the rules."""

    def teardown(self) -> Awaitable[None] | None:
        """Close what `start` opened."""

    def reward(self, amount: float, role: str | None = None) -> None:
        """Add to a role's process reward; the acting role's, if none is named."""
        live_game = self._live()
        role = role or live_game.role
        live_game.rewards[role] = live_game.rewards.get(role, 0.0) + amount

    # --- the contract

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Json] | None = None) -> ResetResult:
        await self.aclose()
        await super().areset(seed=seed)
        self.task = dict(options or {})
        new_game = self._game = _Game(busy=True)
        new_game.role = self._known(await self._hook(self.start, self.task))
        observation = _messages(await self._hook(self.see, new_game.role))
        new_game.busy = False
        return observation, {"role": new_game.role}

    async def astep(self, action: str) -> StepResult:
        running_game = self._game
        if running_game is None or running_game.over or running_game.busy:
            raise ResetNeeded(f"{type(self).__name__}: call reset before step, and after the end of an episode")
        running_game.busy, running_game.rewards = True, {}
        running_game.turns += 1
        acting_role, forfeited = running_game.role, None
        observation: Messages = ()
        try:
            following = await self._hook(self.play, acting_role, action)
            running_game.faults = 0
        except PolicyFault as policy_fault:
            running_game.faults += 1
            following = acting_role
            # The same role again, with the reason alone: `see` would show it the table a second time, and many games
            # mark what they showed as seen.
            observation = _messages(f"not possible: {policy_fault}")
            if running_game.faults > self.retries:
                forfeited, following = acting_role, None
        if following is not None:
            running_game.role = self._known(following)
            if running_game.faults == 0:
                observation = _messages(await self._hook(self.see, running_game.role))
        # A forfeit is the end of the game and no truncation: the outcome is known, so no value of a later state may be
        # added to it.
        stop_reason: StopReason | None = None
        if following is None:
            is_cut_off = forfeited is None and self.cut_off
            stop_reason = (
                StopReason.PARSE_FAILURE if forfeited else StopReason.TRUNCATED if is_cut_off else StopReason.DONE
            )
        elif running_game.turns >= self.max_turns:
            stop_reason = StopReason.TURN_LIMIT
        # Before the outcomes are awaited, so that an `aend` which comes in between does not judge the game twice.
        running_game.over = stop_reason is not None
        step_info = await self._info(running_game, acting_role, forfeited, stop_reason)
        running_game.busy = False
        truncated = stop_reason in (StopReason.TURN_LIMIT, StopReason.TRUNCATED)
        return (
            observation,
            running_game.rewards.get(acting_role, 0.0),
            running_game.over and not truncated,
            truncated,
            step_info,
        )

    async def aend(self, reason: StopReason) -> Info:
        """End the running episode as it stands: the outcome of every role."""
        live_game = self._live()
        if live_game.over:
            return {}
        live_game.over = True
        return await self._judged(None, reason)

    async def aclose(self) -> None:
        if self._game is not None:
            self._game = None
            await self._hook(self.teardown)

    # --- inside

    async def _info(self, game: _Game, acting: str, forfeited: str | None, stop: StopReason | None) -> Info:
        turn_info: Info = {"acted": acting}
        other_rewards = {
            other_role: role_reward for other_role, role_reward in game.rewards.items() if other_role != acting
        }
        if other_rewards:
            turn_info["rewards"] = other_rewards
        if stop is None:
            return {**turn_info, "role": game.role}
        return {**turn_info, **await self._judged(forfeited, stop)}

    async def _judged(self, forfeited: str | None, stop: StopReason) -> Info:
        outcomes = {
            role_name: float(role_outcome)
            for role_name, role_outcome in (await self._hook(self.outcomes, forfeited)).items()
        }
        return {"outcomes": outcomes, "outcome": outcomes[self.roles[0]], "stop_reason": stop.value}

    def _known(self, role: str) -> str:
        if role not in self.roles:
            raise UsageError(f"{type(self).__name__} named {role!r} to act; its roles are {', '.join(self.roles)}")
        return role

    def _live(self) -> _Game:
        if self._game is None:
            raise ResetNeeded(f"{type(self).__name__} has no episode yet: call reset")
        return self._game

    async def _hook(self, function: Any, *args: Any) -> Any:
        return await sync_async.call(function, *args, blocking=self.blocking)


class OneRole(Env):
    """A `RolesEnv` in which one role is the policy that learns and the others follow fixed policies.

    `others` binds each other role to a `Policy`. The learner's observation is what its role sees; rewards that it
    gets for others' moves are added to the step that led to them; its outcome is a success from `success_outcome` on.
    `role="seed"` gives the learner another role from seed to seed."""

    def __init__(
        self, env: RolesEnv, *, role: str, others: Mapping[str, Policy] | Policy, success_outcome: float = 1.0
    ) -> None:
        role_names = env.roles
        if role not in (*role_names, "seed"):
            raise UsageError(f"role = {role!r}: give one of {', '.join(role_names)}, or 'seed'")
        self._players = dict.fromkeys(role_names, others) if callable(others) else dict(others)
        missing_roles = [role_name for role_name in role_names if role_name != role and role_name not in self._players]
        if missing_roles:
            raise UsageError(f"nobody plays {', '.join(missing_roles)}: bind them in others")
        self._env, self._chosen_role, self._success = env, role, success_outcome
        self.replayable, self.blocking = env.replayable, env.blocking  # pyright: ignore[reportAttributeAccessIssue]
        self._role = role

    @property
    def role(self) -> str:
        """The role that the learner plays in this episode."""
        return self._role

    def deal(self, options: Mapping[str, Json]) -> tuple[str, Mapping[str, Json]]:
        """The learner's role in the episode to come and the table's reset options; override to choose by the task."""
        if self._chosen_role != "seed":
            return self._chosen_role, options
        return self._env.roles[int(self.np_random.integers(len(self._env.roles)))], options

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Json] | None = None) -> ResetResult:
        await super().areset(seed=seed)
        self._role, options = self.deal(dict(options or {}))
        self._heard: dict[str, list[Message]] = {role_name: [] for role_name in self._env.roles}
        # A seed drawn from ours and not ours itself: two generators of one seed give the same numbers, and the hand
        # that is dealt would hang together with the role that was chosen.
        observation, table_info = await self._env.areset(seed=int(self.np_random.integers(2**31)), options=options)
        observation, _, _, _, table_info = await self._others((observation, 0.0, False, False, table_info))
        return observation, self._mine(table_info)

    async def astep(self, action: str) -> StepResult:
        observation, reward, terminated, truncated, table_info = await self._others(await self._env.astep(action))
        return observation, reward, terminated, truncated, self._mine(table_info)

    async def aend(self, reason: StopReason) -> Info:
        return self._mine(await self._env.aend(reason))

    async def aclose(self) -> None:
        await self._env.aclose()

    def _mine(self, info: Info) -> Info:
        """An info as the learner's alone."""
        own_info = {info_key: info_value for info_key, info_value in info.items() if info_key not in _ROLE_KEYS}
        if "outcomes" in info:
            own_info["outcome"] = info["outcomes"][self._role]
            own_info["success"] = own_info["outcome"] >= self._success
        return own_info

    async def _others(self, step: StepResult) -> StepResult:
        """Let the others play until the learner acts or the game is over; the learner's rewards add up."""
        observation, reward, terminated, truncated, table_info = step
        # The reward of a step is the acting role's. A learner that moves and is then fined for what its opponent did
        # gets both in one number, because it sees the game only when it acts again.
        own_reward = reward if table_info.get("acted") == self._role else 0.0
        while True:
            if table_info.get("acted") != self._role:
                own_reward += table_info.get("rewards", {}).get(self._role, 0.0)
            acting_role = table_info.get("role")
            if terminated or truncated or acting_role == self._role:
                return observation, own_reward, terminated, truncated, dict(table_info)
            heard_messages = self._heard[cast(str, acting_role)]
            heard_messages.extend(observation)
            policy_text = await sync_async.call(
                self._players[str(acting_role)], tuple(heard_messages), self.np_random, blocking=self.blocking
            )
            heard_messages.append(Message(role="assistant", content=policy_text))
            observation, _, terminated, truncated, table_info = await self._env.astep(policy_text)


_ROLE_KEYS = frozenset({"role", "acted", "rewards", "outcomes"})


def _messages(value: str | Sequence[Message]) -> Messages:
    if isinstance(value, str):
        return (Message(role="user", content=clean_text(value)),)
    return tuple(cast(Message, dict(message)) for message in value)
