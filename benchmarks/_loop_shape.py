"""The shape of the loop benchmark: what both sides play. Standard library only, as TRL's side lives apart.

An episode has three turns of 32 sampled tokens after a prompt of 362; the tool does nothing but answer, so that what
is measured is the loop. Texts are plain ASCII: with the byte tokenizer of `_loop_model.py` a text has as many tokens
as characters.
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


def task_text(seed: int, length: int) -> str:
    """The user's message of one task: groups differ from their first characters on, so none shares another's cache."""
    letters = random.Random(seed)
    return "".join(letters.choice(string.ascii_lowercase + " ") for _ in range(length))


def score(text: str) -> float:
    """The outcome reward: the share of distinct characters in the last turn's text; it only has to vary."""
    return len(set(text)) / max(len(text), 1)
