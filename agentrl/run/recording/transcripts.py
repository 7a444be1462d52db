"""Digests of conversations: a request continues the conversation whose digest one of its beginnings has.

A place is the digest of the tools and of all messages so far. Equal places are equal conversations as a client sees
them: thoughts, the ids of calls, the spelling of a call's arguments and blanks around an answer are left out, since
clients rebuild answers from what they parsed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, cast

from agentrl.env.agent_programs.model_apis import Conversation
from agentrl.records import Json, Message


def opening(tools: Sequence[Mapping[str, Json]]) -> bytes:
    """The place before the first message of a conversation that offers `tools`."""
    return _digest(b"", list(tools))


def after(place: bytes, message: Message) -> bytes:
    """The place behind a message."""
    return _digest(place, _compared(message))


def places(conversation: Conversation) -> list[bytes]:
    """The place before each message of a conversation, and last the one behind all of them."""
    all_places = [opening(conversation.tools)]
    for message in conversation.messages:
        all_places.append(after(all_places[-1], message))
    return all_places


def _compared(message: Message) -> list[Json]:
    """The parts of a message that make it another one."""
    message_role, content = message["role"], message["content"]
    if message_role == "assistant":
        return [message_role, content.strip(), [_compared_call(call) for call in message.get("tool_calls", ())]]
    if message_role == "tool":  # without its name: few clients give it, and it is added to what is journaled
        return [message_role, content, message.get("tool_call_id", "")]
    return [message_role, content, message.get("name", "")]


def _compared_call(call: Mapping[str, Json]) -> list[Json]:
    function = cast("Mapping[str, Any]", call.get("function", {}))
    arguments: Any = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # what is no JSON is compared as it is
            arguments = json.loads(arguments)
    return [function.get("name"), arguments]


def _digest(before: bytes, value: Json) -> bytes:
    # Chained, so that a conversation of n messages is known by n digests of 16 bytes, and none of its text is kept.
    return blake2b(before + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
