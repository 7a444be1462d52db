"""What a server that scores is asked when it refuses a text: less of it.

A policy writes the texts, so a text that is too long must not cost it nothing: if the episode left the loss for it, to
write too long would pay whenever the score would be bad. Knows neither rubrics nor models."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from agentrl.errors import EngineRefusal, ScoreError
from agentrl.records import Message

T = TypeVar("T")

_PARTS: Final = (2, 4, 8, 16, 32, 64)  # of a text that was refused: what it is divided by, one after the other
_ANY: Final[list[Message]] = [{"role": "user", "content": "Hello."}]

log = logging.getLogger(__name__)


async def asked_shorter(
    ask: Callable[[Sequence[Message], int | None], Awaitable[T]], messages: Sequence[Message], refused: T
) -> T:
    """What `ask` gets for the messages, all of them (None) or at most so many characters: half as many after each
    EngineRefusal, and `refused` after the last one, if the server does take another text. A server that refuses any is
    no fault of this one. Raises EngineRefusal then, and what else `ask` raises."""
    try:
        return await ask(messages, None)
    except EngineRefusal as error:
        why = error
    chars = sum(len(message["content"]) for message in messages)
    for part in _PARTS:
        with suppress(EngineRefusal):
            return await ask(messages, chars // part)
    with suppress(ScoreError):  # which is an answer
        await ask(_ANY, None)
    log.warning("a text of %d characters is refused, also a part of it, and scored as %s: %s", chars, refused, why)
    return refused
