"""The shape of the loop benchmark, and the one environment of it in both dialects: agentrl's and TRL's.

An episode has three turns of 32 sampled tokens after a prompt of 362; the tool does nothing but answer, so that what
is measured is the loop. Standard library only, because TRL's side runs in an environment of its own. Texts are plain
ASCII: with the byte tokenizer of `_loop_model.py` a text has as many tokens as characters.
"""

from __future__ import annotations

import random
import string

GROUPS = 16  # groups of a step
MEMBERS = 8  # episodes of a group
TURNS = 3
TURN_TOKENS = 32
PROMPT_TOKENS = 362
ANSWER = "noted"
_FRAME_TOKENS = 1 + len("user\n") + 1 + len("\n") + 1 + len("assistant\n")  # what the chat template adds to a text


def task_text(seed: int, length: int) -> str:
    """The user's message of one task: groups differ from their first characters on, so none shares another's cache."""
    letters = random.Random(seed)
    return "".join(letters.choice(string.ascii_lowercase + " ") for _ in range(length))


def score(text: str) -> float:
    """The outcome reward: the share of distinct characters in the last turn's text; it only has to vary."""
    return len(set(text)) / max(len(text), 1)


class Loop:
    """Agentrl's side: an environment of three turns whatever the policy says."""

    def tool_schemas(self) -> list[dict[str, object]]:
        return []

    async def areset(
        self, *, seed: int | None = None, options: object = None
    ) -> tuple[tuple[dict[str, str], ...], dict[str, object]]:
        self._turn = 0
        return ({"role": "user", "content": task_text(seed or 0, PROMPT_TOKENS - _FRAME_TOKENS)},), {}

    async def astep(self, action: str) -> tuple[tuple[dict[str, str], ...], float, bool, bool, dict[str, object]]:
        self._turn += 1
        if self._turn < TURNS:
            return ({"role": "tool", "content": ANSWER},), 0.0, False, False, {}
        return (), 0.0, True, False, {"outcome": score(action)}

    async def aclose(self) -> None:
        pass


class LoopForTRL:
    """TRL's side: `reset` and one public method, which TRL offers to the model as a tool."""

    def reset(self, **_: object) -> None:
        return None

    def look(self) -> str:
        """Look."""
        return ANSWER
