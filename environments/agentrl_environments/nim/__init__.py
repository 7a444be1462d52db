"""Nim: a two-role game with a known best play. Both roles at one table, or one of them against a fixed player."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from agentrl.env.checks.oracles import Oracle, say
from agentrl.env.multi_agent import OneRole, Policy, RolesEnv
from agentrl.errors import ContentParseError, ToolError, UsageError
from agentrl.records import Messages

_RULES: Final = (
    "Nim. Players take turns; each takes one or more stones from one heap. Whoever takes the last stone wins."
    " Write your move as: take 2 from A"
)
_MOVE: Final = re.compile(r"\btake\s+(\d{1,6})\s+from\s+(?:heap\s+)?([a-z])\b", re.IGNORECASE)


class NimTable(RolesEnv):
    """`agentrl/NimTable-v0`: two roles, `first` and `second`. Outcome: 1 for the winner, 0 for the loser; who breaks
    the rules three times in a row has lost."""

    roles = ("first", "second")
    blocking = False
    replayable = True

    def __init__(self, *, heaps: int = 3, largest: int = 5) -> None:
        if not 1 <= heaps <= 26 or largest < 1:
            raise UsageError(f"heaps = {heaps}, largest = {largest}: give 1 to 26 heaps of 1 or more stones")
        self._count, self._largest = heaps, largest

    def start(self, task: Mapping[str, Any]) -> str:
        self.heaps = list(task["heaps"]) if "heaps" in task else draw(self.np_random, self._count, self._largest)
        self._briefed: set[str] = set()
        self._moves: list[str] = []
        self._winner = ""
        return self.roles[0]

    def see(self, role: str) -> str:
        shown_lines = [] if role in self._briefed else [_RULES]
        self._briefed.add(role)
        if self._moves:
            shown_lines.append(f"The other player: {self._moves[-1]}.")
        return "\n".join([*shown_lines, _shown(self.heaps)])

    def play(self, role: str, text: str) -> str | None:
        named_moves = _MOVE.findall(text)
        if not named_moves:
            raise ContentParseError("no move found; write for example: take 2 from A")
        stone_count, heap_index = int(named_moves[-1][0]), ord(named_moves[-1][1].upper()) - ord("A")
        if heap_index >= len(self.heaps) or not 1 <= stone_count <= self.heaps[heap_index]:
            raise ToolError(
                f"{named_moves[-1][1].upper()} does not hold {stone_count} stones to take. {_shown(self.heaps)}"
            )
        self.heaps[heap_index] -= stone_count
        self._moves.append(_move(stone_count, heap_index))
        if not any(self.heaps):
            self._winner = role
            return None
        return self._other(role)

    def outcomes(self, forfeited: str | None) -> Mapping[str, float]:
        winner = self._other(forfeited) if forfeited else self._winner
        return {player_role: float(player_role == winner) for player_role in self.roles}

    def _other(self, role: str) -> str:
        return self.roles[1 - self.roles.index(role)]


class Nim(OneRole):
    """`agentrl/Nim-v0`: play Nim against a `random` or a `perfect` opponent. Who begins follows the seed; with
    `winnable` (the default) it is who can win. Outcome: 1 for a win."""

    def __init__(self, *, opponent: str = "perfect", heaps: int = 3, largest: int = 5, winnable: bool = True) -> None:
        if opponent not in PLAYERS:
            raise UsageError(f"opponent = {opponent!r}: give one of {', '.join(PLAYERS)}")
        self._winnable, self._count, self._largest = winnable, heaps, largest
        super().__init__(NimTable(heaps=heaps, largest=largest), role="seed", others=PLAYERS[opponent])

    def deal(self, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        dealt_role, options = super().deal(options)
        drawn_heaps = options.get("heaps") or draw(self.np_random, self._count, self._largest)
        if self._winnable:
            dealt_role = "first" if nim_sum(drawn_heaps) else "second"
        return dealt_role, {**options, "heaps": drawn_heaps}

    def oracles(self) -> list[Oracle]:
        perfect_oracle = Oracle("perfect play", 1.0, lambda heard: perfect_player(heard, self.np_random))
        return [*([perfect_oracle] if self._winnable else []), Oracle("no-op", 0.0, say(""))]


def draw(rng: np.random.Generator, heaps: int, largest: int) -> list[int]:
    """Heaps of 1 to `largest` stones."""
    return [int(stone_count) for stone_count in rng.integers(1, largest + 1, size=heaps)]


def perfect_player(heard: Messages, rng: np.random.Generator) -> str:
    """Leaves a nim-sum of 0 wherever that is possible (Bouton, 1901), else takes one stone."""
    heaps = _read(heard)
    game_sum = nim_sum(heaps)
    for heap_index, stone_count in enumerate(heaps):
        if stone_count ^ game_sum < stone_count:
            return _move(stone_count - (stone_count ^ game_sum), heap_index)
    return _move(1, next(heap_index for heap_index, stone_count in enumerate(heaps) if stone_count))


def random_player(heard: Messages, rng: np.random.Generator) -> str:
    """Any legal move, drawn evenly."""
    legal_moves = [
        (taken_stones, heap_index)
        for heap_index, stone_count in enumerate(_read(heard))
        for taken_stones in range(1, stone_count + 1)
    ]
    return _move(*legal_moves[int(rng.integers(len(legal_moves)))])


PLAYERS: Final[Mapping[str, Policy]] = {"random": random_player, "perfect": perfect_player}


def nim_sum(heaps: Sequence[int]) -> int:
    """The nim-sum; a player who leaves 0 can win."""
    return functools.reduce(operator.xor, heaps, 0)


def _shown(heaps: Sequence[int]) -> str:
    return "Heaps: " + ", ".join(f"{chr(ord('A') + heap)} {stones}" for heap, stones in enumerate(heaps)) + "."


def _move(stones: int, heap: int) -> str:
    return f"take {stones} from {chr(ord('A') + heap)}"


def _read(heard: Messages) -> list[int]:
    """The heaps as the last message shows them."""
    shown_heaps = heard[-1]["content"].rpartition("Heaps: ")[2]
    return [int(stone_count) for stone_count in re.findall(r"[A-Z] (\d+)", shown_heaps)]
