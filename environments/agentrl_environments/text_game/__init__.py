"""A text game: find the treasure of a house with locked doors, and carry it back to where you began."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.error import ResetNeeded

from agentrl.env import Env
from agentrl.env.checks.oracles import Oracle, say, script
from agentrl.env.core import Info, ResetResult, StepResult
from agentrl.env.tools.tools import clean_text
from agentrl.errors import UsageError
from agentrl.records import Message, StopReason
from agentrl_environments.text_game.world import COLOURS, HELP, ROOMS, act, begin, describe, draw, solve, won


class TextGame(Env):
    """`agentrl/TextGame-v0`: a house of `rooms` rooms with `locks` locked doors, another one for every seed.

    An action is one command, on its last line. Outcome: 1 for the treasure at the start within `turns` commands. With
    `shaped` every command earns what it takes off the shortest way to the end, as a share of the whole way: a
    difference of potentials, which leaves the best policy what it is (Ng, Harada and Russell 1999). An episode that
    ends on the way gives back what it earned."""

    blocking = False
    replayable = True

    def __init__(self, *, rooms: int = 6, locks: int = 1, turns: int = 60, shaped: bool = False) -> None:
        if not 2 <= rooms <= len(ROOMS):
            raise UsageError(f"rooms = {rooms}: give 2 to {len(ROOMS)}")
        if not 0 <= locks <= min(len(COLOURS), rooms - 1):
            raise UsageError(f"locks = {locks}: give 0 to {min(len(COLOURS), rooms - 1)} in {rooms} rooms")
        if turns < 1:
            raise UsageError(f"turns = {turns}: give 1 or more")
        self._rooms, self._locks, self._turns, self._shaped = rooms, locks, turns, shaped
        self._over = True

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        self._world = draw(self.np_random, self._rooms, self._locks)
        self._state = begin(self._world)
        self._solution = solve(self._world, self._state) or []
        self._left = len(self._solution)  # of the shortest way
        self._used, self._over = 0, False
        goal_text = (
            f"Somewhere in this house is a {self._world.treasure}, in a chest. Bring it to the {self._world.start}."
        )
        first_message = "\n".join([goal_text, HELP, "Write one command at a time.", describe(self._world, self._state)])
        return (Message(role="user", content=first_message),), {}

    def step(self, action: str) -> StepResult:
        if self._over:
            raise ResetNeeded("TextGame: call reset before step, and after the end of an episode")
        command_lines = [command_line for command_line in action.splitlines() if command_line.strip()]
        self._state, world_reply = act(self._world, self._state, command_lines[-1][:200] if command_lines else "")
        self._used += 1
        is_won = won(self._world, self._state)
        is_cut_off = not is_won and self._used >= self._turns
        self._over = is_won or is_cut_off
        reward = self._progress()
        step_info: Info = {}
        if self._over:
            step_info = self._judged(StopReason.DONE if is_won else StopReason.TURN_LIMIT)
        elif self._shaped:
            step_info = {"unsettled": self._left / len(self._solution) - 1.0}
        if is_cut_off and self._shaped:
            reward += self._left / len(self._solution) - 1.0
        return (Message(role="user", content=clean_text(world_reply)),), reward, is_won, is_cut_off, step_info

    async def aend(self, reason: StopReason) -> Info:
        self._over = True
        return self._judged(reason)

    def oracles(self) -> list[Oracle]:
        """The shortest solution; the same without its last command; and waiting."""
        short_solution = [*self._solution[:-1], "look"]
        return [
            Oracle("shortest solution", 1.0, script(*self._solution)),
            Oracle("one command short", 0.0, script(*short_solution)),
            Oracle("no-op", 0.0, say("")),
        ]

    def _progress(self) -> float:
        """The part of the shortest way by which the command shortened it, as a share of the whole way."""
        if not self._shaped:
            return 0.0
        left_before, self._left = self._left, len(solve(self._world, self._state) or [])
        return (left_before - self._left) / len(self._solution)

    def _judged(self, reason: StopReason) -> Info:
        is_won = won(self._world, self._state)
        return {"stop_reason": reason.value, "outcome": float(is_won), "success": is_won}
