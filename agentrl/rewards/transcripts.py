"""Episodes as text for another model to read, written so that nothing in them can pass for anything but a part of them.

Two ways out of a transcript are closed. A control token of a chat template (`<|im_end|>`, `[INST]`, `</s>`) would end
the message that the transcript stands in: servers tokenize it as the token that it names, so it is broken up. And a
line that looks like another speaker's, or like the end of the transcript: such lines begin with a boundary that is
drawn anew for each call, which the policy cannot know. Knows neither judges nor servers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import cast

from agentrl.records import POLICY, Json, Message, Messages, Trajectory

_JOINER = "\N{WORD JOINER}"  # shows nothing, and no control token has one
_CONTROL = re.compile(r"<(?=[^\s<>]+>)|\[(?=/?[A-Z_]+\])")


def messages_of(trajectory: Trajectory) -> Messages:
    """The whole conversation in its order; if several roles took turns, each action has its role as `name`."""
    messages = list(trajectory.start)
    for turn in trajectory.turns:
        action: Message = {"role": "assistant", "content": turn.text}
        messages.append(action if turn.role == POLICY else {**action, "name": turn.role})
        if turn.step is not None:
            messages.extend(turn.step.observation)
    return tuple(messages)


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
    sizes, level, left = sorted(map(_chars, messages)), 0, most
    for at, size in enumerate(sizes):
        if size > (level := left // (len(sizes) - at)):
            break
        left -= size
    return [message if _chars(message) <= level else _cut(message, level, mark) for message in messages]


def _chars(message: Message) -> int:
    return len(message["content"])


def _cut(message: Message, most: int, mark: str) -> Message:
    text, half = message["content"], most // 2
    note = f"\n{mark}{len(text) - 2 * half} characters are left out here\n"
    return {**message, "content": text[:half] + note + text[len(text) - half :]}


def fenced(messages: Sequence[Message], boundary: str) -> str:
    """The messages, each behind a line with `boundary` and who speaks, and a last such line."""
    parts = [f"{boundary} {_speaker(message)}\n{_body(message)}" for message in messages]
    return "\n".join([*parts, f"{boundary} end"])


def _speaker(message: Message) -> str:
    words = [message["role"], message.get("name", "")]
    return " ".join(re.sub(r"\W+", "_", word)[:100] for word in words if word)


def _body(message: Message) -> str:
    calls = message.get("tool_calls")
    return defused(message["content"] + (f"\n{json.dumps(calls)}" if calls else ""))


def _defused(value: Json) -> Json:
    if isinstance(value, str):
        return defused(value)
    if isinstance(value, dict):
        return {defused(name): _defused(inner) for name, inner in cast("dict[str, Json]", value).items()}
    if isinstance(value, list):
        return [_defused(inner) for inner in cast("list[Json]", value)]
    return value
