"""TextArena's games, for one player or several, as an environment of roles."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Final, cast

from agentrl.env.adapters.random_generators import OwnGenerators
from agentrl.env.multi_agent import RolesEnv
from agentrl.env.optional_imports import require
from agentrl.errors import ToolError, UsageError
from agentrl.records import Json

_INVALID: Final = -1.0
"""TextArena's own reward for an invalid move."""
_PLAYED: Final = set[tuple[str, int, str]]()
"""Games that could be reset in this process, with their players and arguments."""


class TextArena(RolesEnv):
    """`agentrl/TextArena-v0`. A game of TextArena. `game` is a TextArena id (`TicTacToe-v0`, `Wordle-v0`, …),
    `players` how many sit down.

    Roles are "player_0", "player_1", …; each sees the messages of the game and the others since its own last turn.
    Outcomes are TextArena's rewards. What a game's code makes of an illegal move is the policy's doing: if it raises,
    the role may try again, and a role that forfeits so gets -1, as for an invalid move in TextArena; if its reward for
    that move is no number (some games mix up their arguments), it is -1 too.

    Its games draw from Python's and numpy's global generators: their states are exchanged around every call, so that
    instances do not disturb each other and replay is exact. Raises UsageError for a game that this machine cannot
    play (an API key, word lists), or not with so many players."""

    blocking = False
    replayable = True

    def __init__(self, game: str, *, players: int = 1, kwargs: Mapping[str, Any] | None = None) -> None:
        textarena = require("textarena", what="TextArena")
        # The raw game, as TextArena's wrappers rewrite what a player reads; a role's messages have to stay as the game
        # said them.
        raw_game_id = game if game.endswith("-raw") else f"{game}-raw"
        self.roles = tuple(f"player_{player_number}" for player_number in range(players))
        try:
            self._env: Any = textarena.make(raw_game_id, **dict(kwargs or {}))
            if (game_key := (game, players, repr(kwargs))) not in _PLAYED:  # once: a reset may read whole dictionaries
                self._deal(0)
                self._next()
                _PLAYED.add(game_key)
        except UsageError:
            raise
        except Exception as game_error:  # a game may need a key or data, or be written for another Python
            raise UsageError(f"textarena makes no {game!r}: {_reason(game_error)}") from game_error
        self._own_words = textarena.ObservationType.PLAYER_ACTION

    def start(self, task: Mapping[str, Json]) -> str:
        self._deal(int(self.np_random.integers(2**31)))
        self._results: Mapping[int, Any] = {}
        return self._next()

    def _deal(self, seed: int) -> None:
        self._generators = OwnGenerators(seed)
        try:
            self._generators.run(lambda: self._env.reset(num_players=len(self.roles), seed=seed))
        except AssertionError as reset_error:
            raise UsageError(f"{len(self.roles)} players cannot play this game: {reset_error}") from reset_error
        _end_when_nobody_is_left(self._env.state)

    def see(self, role: str) -> str:
        own_number, messages = cast("tuple[int, list[tuple[int, Any, Any]]]", self._seen)
        message_texts = (
            message_text
            for speaker, message_text, message_kind in messages
            if speaker != own_number or message_kind != self._own_words
        )
        # Some games put a number in the place of a text.
        return "\n".join(message_text for message_text in message_texts if isinstance(message_text, str))

    def play(self, role: str, text: str) -> str | None:
        try:
            is_over, _ = self._generators.run(lambda: self._env.step(text))
            if not is_over:
                return self._next()
            self._results = self._generators.run(self._env.close)[0] or {}
        except Exception as game_error:  # the game's code read the text: a number of 5,000 digits, say
            raise ToolError(f"the game cannot read this ({type(game_error).__name__})") from game_error
        return None

    def outcomes(self, forfeited: str | None) -> Mapping[str, float]:
        if forfeited is not None:
            other_outcome = 1.0 if len(self.roles) == 2 else 0.0
            return {role_name: _INVALID if role_name == forfeited else other_outcome for role_name in self.roles}
        return {
            role_name: _number(self._results.get(player_number, 0))
            for player_number, role_name in enumerate(self.roles)
        }

    def _next(self) -> str:
        self._seen: Any = self._generators.run(self._env.get_observation)
        return self.roles[int(self._seen[0])]


def _end_when_nobody_is_left(state: Any) -> None:
    """TextArena looks for the next player who was not eliminated, and for ever once invalid moves eliminated all."""
    game_step: Callable[..., Any] | None = getattr(state, "step", None)
    if game_step is None or not hasattr(state, "elimination_order"):
        return

    def ending(*args: Any, **kwargs: Any) -> Any:
        if not state.done and {*range(state.num_players)} <= {*state.elimination_order}:
            state.rewards = dict.fromkeys(range(state.num_players), _INVALID)
            state.done = True
        return game_step(*args, **kwargs)

    state.step = ending


def _number(reward: Any) -> float:
    return float(reward) if isinstance(reward, Real) and math.isfinite(reward) else _INVALID


def _reason(error: Exception) -> str:
    """The first line of an error that says something, with the error's kind."""
    error_lines = [error_line.strip() for error_line in str(error).splitlines()]
    return f"{type(error).__name__}: " + next(
        (error_line for error_line in error_lines if re.search(r"\w", error_line)), "no reason given"
    )
