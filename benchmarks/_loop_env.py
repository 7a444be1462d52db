"""Agentrl's side of the loop benchmark: an environment of three turns, whatever the policy says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from _loop_shape import ANSWER, PROMPT_TOKENS, TURNS, score, task_text

import agentrl
from agentrl.records import Message

_FRAME_TOKENS = 1 + len("user\n") + 1 + len("\n") + 1 + len("assistant\n")  # what the chat template adds to a text


class Loop(agentrl.Env):
    """Answers every action with the same word; the episode's outcome is a property of its last text."""

    blocking = False
    replayable = True

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._turn = 0
        text = task_text(seed or 0, PROMPT_TOKENS - _FRAME_TOKENS)
        return (Message(role="user", content=text),), {}

    def step(self, action: str) -> Any:
        self._turn += 1
        if self._turn < TURNS:
            return (Message(role="tool", content=ANSWER),), 0.0, False, False, {}
        return (), 0.0, True, False, {"outcome": score(action)}
