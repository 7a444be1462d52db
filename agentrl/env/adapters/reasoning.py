"""The tasks of reasoning-gym: one question, one answer, its own verifier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentrl.env.limits import EpisodeLimits
from agentrl.env.optional import require
from agentrl.env.tool_env import Grade, ToolEnv
from agentrl.errors import ContentParseError, UsageError
from agentrl.records import Json


class ReasoningGym(ToolEnv):
    """`agentrl/ReasoningGym-v0`. Questions of reasoning-gym. `task` names a data set of reasoning-gym
    (`leg_counting`, `basic_arithmetic`, …), `config` its settings. Every seed is a question of its own; the outcome
    is the data set's own score from 0 to 1.

    The model answers within `<answer>…</answer>`; an answer without the tags costs a turn."""

    system = "Think about the question, then give the final answer as <answer>…</answer>."
    limits = EpisodeLimits(turns=2)
    blocking = False
    replayable = True

    def __init__(self, task: str, *, config: Mapping[str, Any] | None = None, **settings: Any) -> None:
        self._package = require("reasoning_gym", what="ReasoningGym", package="reasoning-gym")
        self._name, self._config = task, dict(config or {})
        try:
            self._questions(0)
        except (ValueError, TypeError, AssertionError) as error:
            raise UsageError(f"reasoning-gym makes no {task!r} with {self._config}: {error}") from error
        super().__init__(**settings)

    def make_task(self, options: Mapping[str, Json]) -> Mapping[str, Json]:
        return {"seed": int(self.np_random.integers(2**31))}

    def prompt(self, task: Mapping[str, Any]) -> str:
        self._score = 0.0
        self._source = self._questions(task["seed"])
        self._entry = self._source[0]
        return self._entry["question"]

    def on_text(self, text: str) -> str | None:
        answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        if not answers:
            raise ContentParseError("no answer found: write <answer>…</answer>")
        self._score = float(self._source.score_answer(answers[-1].strip(), self._entry))
        self.finish()
        return None

    def grade(self) -> Grade:
        return Grade(outcome=self._score, success=self._score >= 1.0)

    def _questions(self, seed: int) -> Any:
        return self._package.create_dataset(self._name, seed=seed, size=1, **self._config)
