"""Digests of conversations: a request continues the conversation whose digest one of its beginnings has.

A place is the digest of the tools and of all messages so far. Equal places are equal conversations as a client sees
them: thoughts, the ids of calls, the spelling of a call's arguments and blanks around an answer are left out, since
clients rebuild answers from what they parsed. A raw text has no messages: there a place is the digest of so many of
its first characters, and says how many.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, cast

from agentrl.env.agent_programs.model_apis import Conversation, Reply
from agentrl.records import Json, Message

_RAW: Final = b"raw:"
_LENGTH_BYTES: Final = 8


def opening(tools: Sequence[Mapping[str, Json]]) -> bytes:
    """The place before the first message of a conversation that offers `tools`."""
    return _digest(b"", list(tools))


def after(place: bytes, message: Message) -> bytes:
    """The place behind a message."""
    return _digest(place, _compared(message))


def places(conversation: Conversation) -> list[bytes]:
    """The place before each message of a conversation, and last the one behind all of them."""
    if conversation.is_raw:
        return [_raw_place(_raw_text(conversation))]
    all_places = [opening(conversation.tools)]
    for message in conversation.messages:
        all_places.append(after(all_places[-1], message))
    return all_places


def answered(conversation: Conversation, reply: Reply) -> bytes:
    """The place behind the reply to a conversation, as its client sees it."""
    if not conversation.is_raw:
        return after(places(conversation)[-1], reply.message)
    # Behind an empty answer to a text stands the text itself, and to send it again is no way of going on.
    return _raw_place(_raw_text(conversation) + reply.text) if reply.text else _digest(b"", reply.name)


def earlier(conversation: Conversation, known: Iterable[bytes]) -> list[bytes]:
    """The places of which a conversation may be the continuation, the longest first: of a raw text those whose length
    one of the `known` places has."""
    if not conversation.is_raw:
        return places(conversation)[::-1]
    raw_text = _raw_text(conversation)
    lengths = {
        int.from_bytes(place[len(_RAW) : len(_RAW) + _LENGTH_BYTES]) for place in known if place.startswith(_RAW)
    }
    # A text has no borders at which it could have been answered, so only lengths that are known are looked for. One
    # pass over the text gives the digests of all of them: a digest of its own for each would hold up all other requests
    # for a second where thousands of long texts are known.
    earlier_places, running_digest, digested = list[bytes](), blake2b(digest_size=16), 0
    for length in sorted(length for length in lengths if length <= len(raw_text)):
        running_digest.update(raw_text[digested:length].encode())
        digested = length
        earlier_places.append(_RAW + length.to_bytes(_LENGTH_BYTES) + running_digest.digest())
    return earlier_places[::-1]


def _raw_text(conversation: Conversation) -> str:
    return "".join(message["content"] for message in conversation.messages)


def _raw_place(text: str) -> bytes:
    return _RAW + len(text).to_bytes(_LENGTH_BYTES) + blake2b(text.encode(), digest_size=16).digest()


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
    with suppress(ValueError, RecursionError):  # what is no JSON is compared as it is
        arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        arguments = json.loads(arguments_text, parse_float=_number)
    return [function.get("name"), arguments]


def _number(digits: str) -> float:
    """A number of a call's arguments: JavaScript writes 1.0 as 1."""
    number = float(digits)
    return int(number) if number.is_integer() else number


def _digest(before: bytes, value: Json) -> bytes:
    # Chained, so that a conversation of n messages is known by n digests of 16 bytes, and none of its text is kept.
    return blake2b(before + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
