"""Episodes as text for another model to read, written so that nothing in them can pass for anything but a part of them.

Two ways out of a transcript are closed. A control token of a chat template (`<|im_end|>`, `[INST]`, `</s>`) would end
the message that the transcript stands in: servers tokenize it as the token that it names, so it is broken up. And a
line that looks like another speaker's, or like the end of the transcript: such lines begin with a boundary that is
drawn anew for each call, which the policy cannot know.

A server that refuses a text for its length gets less of it (`ask_shortened`). A policy writes the texts, so one that is
too long, or that brings a judge to ramble, must not cost it nothing: if the episode left the loss for it, to write so
would pay whenever the score would be bad. Knows neither judges and rubrics, nor servers and models.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar, cast

from agentrl.errors import EngineError, EngineRefusal, ScoreError
from agentrl.records import POLICY, Json, Message, Messages, Trajectory

_JOINER = "\N{WORD JOINER}"  # shows nothing, and no control token has one
# By shape and not from a list: the judge's model may be any, and its control tokens are not known here. Ordinary text
# has few such places, and an invisible character in them harms no reading. Those of MiniMax alone have no such shape,
# and are listed: by one of brackets around a tilde, Python's `frame[~mask]` would be a control token, too.
_CONTROL = re.compile(r"<(?=[^\s<>]+>)|\[(?=/?[A-Z_]+\])|\](?=~!?b[\[\]])|\[(?=e~\[)")


def messages_of(trajectory: Trajectory) -> Messages:
    """The whole conversation in its order; if several roles took turns, each action has its role as `name`."""
    all_messages = list(trajectory.start)
    for turn in trajectory.turns:
        action_message: Message = {"role": "assistant", "content": turn.text}
        all_messages.append(action_message if turn.role == POLICY else {**action_message, "name": turn.role})
        if turn.step is not None:
            all_messages.extend(turn.step.observation)
    return tuple(all_messages)


def defused(text: str) -> str:
    """Text without control tokens: an invisible joiner stands in everything that is shaped like one. Lone surrogates,
    which cannot be sent, become question marks."""
    return _CONTROL.sub(lambda match: match[0] + _JOINER, text.encode(errors="replace").decode())


def defused_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages of which no text holds a control token."""
    return [cast("Message", _defused(dict(message))) for message in messages]


def shortened(messages: Sequence[Message], most: int, mark: str = "") -> list[Message]:
    """Messages whose contents have about `most` characters together: the longest ones lose their middle, and a line in
    its place, which begins with `mark`, says how much. Short ones stay whole: none pushes another out."""
    sorted_chars, water_level, remaining = sorted(map(_chars, messages)), 0, most
    # The level at which the water stands: from the shortest on, each takes what it needs as long as that is no more
    # than an equal share of what remains. Cutting all in proportion would shorten the one-line answer along with the
    # dump of a file.
    for position, message_chars in enumerate(sorted_chars):
        if message_chars > (water_level := remaining // (len(sorted_chars) - position)):
            break
        remaining -= message_chars
    return [message if _chars(message) <= water_level else _cut(message, water_level, mark) for message in messages]


def _chars(message: Message) -> int:
    return len(message["content"])


def _cut(message: Message, most: int, mark: str) -> Message:
    message_text, half_chars = message["content"], most // 2
    cut_note = f"\n{mark}{len(message_text) - 2 * half_chars} characters are left out here\n"
    # The middle goes, since a message states its aim at the beginning and its result at the end.
    return {**message, "content": message_text[:half_chars] + cut_note + message_text[len(message_text) - half_chars :]}


def fenced(messages: Sequence[Message], boundary: str) -> str:
    """The messages, each behind a line with `boundary` and who speaks, and a last such line."""
    fenced_parts = [f"{boundary} {_speaker(message)}\n{_body(message)}" for message in messages]
    return "\n".join([*fenced_parts, f"{boundary} end"])


def _speaker(message: Message) -> str:
    speaker_words = [message["role"], message.get("name", "")]
    # A role's name can come from an environment that passes on text: with a line break in it, it would begin a line
    # of its own.
    return " ".join(re.sub(r"\W+", "_", speaker_word)[:100] for speaker_word in speaker_words if speaker_word)


def _body(message: Message) -> str:
    tool_calls = message.get("tool_calls")
    return defused(message["content"] + (f"\n{json.dumps(tool_calls)}" if tool_calls else ""))


def _defused(value: Json) -> Json:
    """A JSON value in which `defused` was applied to every text, names of fields too."""
    if isinstance(value, str):
        return defused(value)
    if isinstance(value, dict):
        return {
            defused(field_name): _defused(field_value)
            for field_name, field_value in cast("dict[str, Json]", value).items()
        }
    if isinstance(value, list):
        return [_defused(field_value) for field_value in cast("list[Json]", value)]
    return value


T = TypeVar("T")

_PARTS: Final = (2, 4, 8, 16, 32, 64)  # of a text that was refused: what it is divided by, one after the other
_ANY: Final[list[Message]] = [{"role": "user", "content": "Hello."}]

log = logging.getLogger(__name__)


async def ask_shortened(
    ask: Callable[[Sequence[Message], int | None], Awaitable[T]], messages: Sequence[Message], lowest: T
) -> T:
    """Return the answer of `ask` for the messages, all of them (None) or at most so many characters: half as many after
    each EngineRefusal. If the server refuses all, or answers without a score (ScoreError) although it scores another
    text, return `lowest`. Raises the ScoreError of a server that scores no text at all, and what else `ask` raises."""
    total_chars = sum(len(message["content"]) for message in messages)
    last_error: EngineError | None = None
    # Halved until it is taken: the limit is in the server's tokens, which are not known here, and a wrong guess of
    # the ratio would cut too much or fail anyway.
    for most_chars in (None, *(total_chars // divisor for divisor in _PARTS)):
        try:
            return await ask(messages, most_chars)
        except EngineRefusal as error:
            last_error = error
        except ScoreError as error:
            last_error = error
            break
    try:
        # Is it the text or the server? If another text is scored, it is the text, which the policy wrote, and it gets
        # the lowest value: as a mere failure it would leave the loss, and a policy would learn to write what no judge
        # can read whenever its work is bad. If no text is scored, the server has failed, and that is nobody's fault
        # (law 3).
        await ask(_ANY, None)
    except ScoreError:
        if isinstance(last_error, ScoreError):
            raise last_error from None
    log.warning(
        "a text of %d characters has no score, and another one has: it counts %s: %s", total_chars, lowest, last_error
    )
    return lowest
