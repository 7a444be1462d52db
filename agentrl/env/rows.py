"""`RowsEnv`: an environment of a data set and reward functions. Nobody has to write an environment for one question and
one answer.

A row is asked, the policy answers once, and functions `(prompt, completion, row) -> float` judge the answer. Its rows
are reset options, of `[[tasks]] rows = "train.jsonl"`; held-out ones are those of its argument `rows`, by seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Final, cast

from agentrl.env.core import Env, ResetResult, StepResult
from agentrl.env.datasets import read_rows
from agentrl.env.limits import finite
from agentrl.errors import EnvError, UsageError
from agentrl.records import Json, Message, Messages
from agentrl.registry import load_reference

RewardFunction = Callable[[Messages, str, Mapping[str, Json]], float]
"""Messages asked, the text answered, the row as it stands in the data set; to a number."""

ID: Final = "agentrl.env.rows:RowsEnv"
"""What a run file names it by."""


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


class RowsEnv(Env):
    """One question, one answer. `rewards` are references of functions (`module:name`, `file.py:name`), and `weights`
    what each is multiplied by (default: 1); the outcome is the sum. It is a success from `success_from` on.

    `prompt` is the question with the row's columns in braces; a column of chat messages may stand there alone. `rows`
    is a file, or `hf:NAME:SPLIT`, whose row `seed` modulo their number is asked where no options are given."""

    replayable = True

    def __init__(
        self,
        *,
        rewards: Sequence[str],
        weights: Sequence[float] | None = None,
        prompt: str = "{prompt}",
        system: str | None = None,
        rows: str | None = None,
        success_from: float = 1.0,
    ) -> None:
        if not _is_list(rewards) or not all(isinstance(name, str) for name in cast("Sequence[object]", rewards)):
            raise UsageError(f"rewards = {rewards!r}: give a list of functions, as ['rewards.py:correct']")
        if not rewards:
            raise UsageError("rewards = []: name a function, as ['rewards.py:correct']")
        if weights is not None and (not _is_list(weights) or len(weights) != len(rewards)):
            raise UsageError(f"weights = {weights!r}: give one for each of the {len(rewards)} rewards")
        for at, weight in enumerate(weights or ()):
            finite(f"weights[{at}]", weight)
        finite("success_from", success_from)
        texts: dict[str, object] = {"prompt": prompt, "system": system or ""}
        for field, text in texts.items():
            if not isinstance(text, str):
                raise UsageError(f"{field} = {text!r}: give a text")
        self._names = tuple(rewards)
        self._functions: list[RewardFunction] = [load_reference(name) for name in rewards]
        self._weights = tuple(weights) if weights is not None else (1.0,) * len(rewards)
        self._prompt, self._system, self._success_from = prompt, system, success_from
        self._rows = None if rows is None else read_rows(rows)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        row = dict(options or {})
        if not row:
            if not self._rows:
                raise UsageError(f"{ID} has no row to ask: give [[tasks]] rows = FILE, or its argument rows")
            row = dict(self._rows[(seed or 0) % len(self._rows)])
        self._row, self._asked = row, self._messages(row)
        return self._asked, {}

    def step(self, action: str) -> StepResult:
        scores = {
            name: self._score(name, each, action) for name, each in zip(self._names, self._functions, strict=True)
        }
        outcome = sum(weight * score for weight, score in zip(self._weights, scores.values(), strict=True))
        info: dict[str, Json] = {"outcome": outcome, "success": outcome >= self._success_from, "scores": dict(scores)}
        return (), 0.0, True, False, info

    def _messages(self, row: Mapping[str, Any]) -> Messages:
        column = row.get(self._prompt.strip("{}"))
        if isinstance(column, list):
            asked = list(cast("list[Message]", column))
        else:
            try:
                asked = [Message(role="user", content=self._prompt.format_map(row))]
            except (KeyError, IndexError, ValueError) as error:
                known = ", ".join(sorted(row))
                raise UsageError(f"prompt = {self._prompt!r} cannot be filled: {error}; a row has {known}") from error
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return (*system, *asked)

    def _score(self, name: str, function: RewardFunction, action: str) -> float:
        score: Any = function(self._asked, action, self._row)
        if not isinstance(score, Real) or not math.isfinite(score):
            raise EnvError(f"the reward function {name!r} returned {score!r}: return a finite number")
        return float(score)
