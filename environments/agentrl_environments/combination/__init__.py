"""A lock of several dials, one a turn: a task whose outcome says nothing of which turn was right or wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentrl.env import EpisodeLimits, ToolEnv
from agentrl.env.checks.oracles import Oracle, say, script
from agentrl.errors import UsageError

Pair = tuple[int, int]
_CARRY: Final = 10  # sums from here on have a second digit


class Combination(ToolEnv):
    """`agentrl/Combination-v0`: `dials` sums of two digits, one a turn; the policy writes the last digit of each.

    Outcome: 1 if all dials are right, else 0. Process reward of a turn: 1 if its dial is right. A wrong dial does not
    end the episode, and nothing that the policy reads shows whether a dial was right. Reset option `sums`: the
    pairs of digits themselves."""

    blocking = False
    replayable = True

    def __init__(self, *, dials: int = 5, **settings: Any) -> None:
        if dials < 1:
            raise UsageError(f"dials = {dials}: give 1 or more")
        self._dials = dials
        super().__init__(**{"limits": EpisodeLimits(turns=dials), **settings})

    def make_task(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        drawn_sums = self.np_random.integers(0, 10, size=(self._dials, 2)).tolist()
        dial_sums = options.get("sums", drawn_sums)
        if len(dial_sums) != self._dials:
            raise UsageError(f"sums has {len(dial_sums)} pairs: give {self._dials}, one a dial")
        return {"sums": dial_sums}

    def prompt(self, task: Mapping[str, Any]) -> str:
        self._sums: list[Pair] = [(int(first_term), int(second_term)) for first_term, second_term in task["sums"]]
        self._right = self._set = 0
        return opening(self._sums)

    def on_text(self, text: str) -> str | None:
        if text.strip() == answer(self._sums[self._set]):
            self._right += 1
            self.reward(1.0)
        self._set += 1
        if self._set == self._dials:
            self.finish()
            return None
        return shown(self._sums[self._set])

    def grade(self) -> bool:
        return self._right == self._dials

    def oracles(self) -> list[Oracle]:
        right_digits = [answer(dial_sum) for dial_sum in self._sums]
        wrong_digit = str((int(right_digits[0]) + 1) % 10)
        return [
            Oracle("gold", 1.0, script(*right_digits)),
            Oracle("the first dial wrong", 0.0, script(wrong_digit, *right_digits[1:])),
            Oracle("no-op", 0.0, say("")),
        ]


def opening(sums: Sequence[Pair]) -> str:
    """The first message: how many dials, and the first one."""
    return f"{len(sums)} dials\n{shown(sums[0])}"


def shown(pair: Pair) -> str:
    """The message of a dial."""
    return f"{pair[0]} + {pair[1]}"


def answer(pair: Pair) -> str:
    """The last digit of a sum."""
    return str(sum(pair) % 10)


def apprentice(pair: Pair, rng: random.Random, *, plain: float = 0.85, carry: float = 0.3, slip: float = 0.5) -> str:
    """An answer of somebody who is mostly wrong where a sum has two digits. It is right with probability `plain`, or
    `carry` for such a sum; there it is one too many with probability `slip`, else any digit."""
    right_digit, drawn_share = int(answer(pair)), rng.random()
    if sum(pair) < _CARRY:
        return str(right_digit if drawn_share < plain else rng.randrange(10))
    if drawn_share < carry:
        return str(right_digit)
    return str((right_digit + 1) % 10 if drawn_share < carry + slip else rng.randrange(10))
