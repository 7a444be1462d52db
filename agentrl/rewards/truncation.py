"""What a server that scores is asked when it refuses a text: less of it.

A policy writes the texts, so one that is too long, or that brings a judge to ramble, must not cost it nothing: if the
episode left the loss for it, to write so would pay whenever the score would be bad. Knows neither rubrics nor
models."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from agentrl.errors import EngineError, EngineRefusal, ScoreError
from agentrl.records import Message

T = TypeVar("T")

_PARTS: Final = (2, 4, 8, 16, 32, 64)  # of a text that was refused: what it is divided by, one after the other
_ANY: Final[list[Message]] = [{"role": "user", "content": "Hello."}]

log = logging.getLogger(__name__)


async def asked_shorter(
    ask: Callable[[Sequence[Message], int | None], Awaitable[T]], messages: Sequence[Message], lowest: T
) -> T:
    """What `ask` gets for the messages, all of them (None) or at most so many characters: half as many after each
    EngineRefusal. If the server refuses all, or answers with no score (ScoreError), and does score another text, then
    `lowest`: a server that has no score for any text is no fault of this one. Raises its error then, and what else
    `ask` raises."""
    chars = sum(len(message["content"]) for message in messages)
    why: EngineError | None = None
    for most in (None, *(chars // part for part in _PARTS)):
        try:
            return await ask(messages, most)
        except EngineRefusal as error:
            why = error
        except ScoreError as error:
            why = error
            break
    try:
        await ask(_ANY, None)
    except ScoreError:
        if isinstance(why, ScoreError):
            raise why from None
    log.warning("a text of %d characters has no score, and another one has: it counts %s: %s", chars, lowest, why)
    return lowest
