"""TextArena's games, for one player or several, as an environment of roles."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import numpy as np

from agentrl.env.optional import require
from agentrl.env.roles import RolesEnv
from agentrl.errors import ToolError, UsageError
from agentrl.records import Json

T = TypeVar("T")


class TextArena(RolesEnv):
    """`agentrl/TextArena-v0`. A game of TextArena. `game` is a TextArena id (`TicTacToe-v0`, `Wordle-v0`, …),
    `players` how many sit down.

    Roles are `player_0`, `player_1`, …; each sees what the game and the others said since its own last turn. Outcomes
    are TextArena's rewards. Its games draw from Python's and numpy's global generators: their states are exchanged
    around every call, so that instances do not disturb each other and replay is exact."""

    blocking = False
    replayable = True

    def __init__(self, game: str, *, players: int = 1, kwargs: Mapping[str, Any] | None = None) -> None:
        arena = require("textarena", what="TextArena")
        raw = game if game.endswith("-raw") else f"{game}-raw"
        try:
            self._env: Any = arena.make(raw, **dict(kwargs or {}))
        except ValueError as error:
            raise UsageError(f"textarena makes no {game!r}: {error}") from error
        self._own_words = arena.ObservationType.PLAYER_ACTION
        self.roles = tuple(f"player_{number}" for number in range(players))
        self._generators: tuple[Any, Any] | None = None

    def start(self, task: Mapping[str, Json]) -> str:
        seed = int(self.np_random.integers(2**31))
        self._generators = (random.Random(seed).getstate(), np.random.RandomState(seed).get_state())
        try:
            self._privately(lambda: self._env.reset(num_players=len(self.roles), seed=seed))
        except AssertionError as error:
            raise UsageError(f"{len(self.roles)} players cannot play this game: {error}") from error
        self._results: Mapping[int, float] = {}
        return self._next()

    def see(self, role: str) -> str:
        number, said = cast("tuple[int, list[tuple[int, str, Any]]]", self._seen)
        return "\n".join(text for speaker, text, kind in said if speaker != number or kind != self._own_words)

    def play(self, role: str, text: str) -> str | None:
        try:
            over, _ = self._privately(lambda: self._env.step(text))
        except Exception as error:  # the game's code read the text: a number of 5,000 digits, say
            raise ToolError(f"the game cannot read this ({type(error).__name__})") from error
        if not over:
            return self._next()
        rewards, _ = self._privately(self._env.close)
        self._results = rewards or {}
        return None

    def outcomes(self, forfeited: str | None) -> Mapping[str, float]:
        return {role: float(self._results.get(number, 0)) for number, role in enumerate(self.roles)}

    def _next(self) -> str:
        self._seen: Any = self._privately(self._env.get_observation)
        return self.roles[int(self._seen[0])]

    def _privately(self, body: Callable[[], T]) -> T:
        """Run `body` with this instance's own state of the global generators."""
        before = (random.getstate(), np.random.get_state())
        assert self._generators is not None
        random.setstate(self._generators[0])
        np.random.set_state(self._generators[1])
        try:
            return body()
        finally:
            self._generators = (random.getstate(), np.random.get_state())
            random.setstate(before[0])
            np.random.set_state(before[1])
