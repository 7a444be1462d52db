"""An assistant's text at the end of a prompt, with which the model goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from agentrl import notices
from agentrl.engine.rendering.conversations import Conversations, Tools
from agentrl.env.tools.calls import dump
from agentrl.errors import ModelError
from agentrl.records import Message

PREFIX_END: Final = "zqENDqz"


def prefilled(conversations: Conversations, messages: list[Message], tools: Tools) -> str:
    """The text up to the end of the last message's content. A sentinel finds that end: the template may write the
    end of a turn behind it, and may write the content twice.

    Thoughts in that content stay where they are. Templates of thinking models take them for those of a closed turn:
    Qwen3's writes an empty block before a `<think>` that is still open, and R1's strips all up to `</think>`."""
    sentinel = unused(PREFIX_END, messages)
    written_text = conversations.text(marked(messages, sentinel), tools, asks=False)
    if sentinel not in written_text:
        raise ModelError(
            f"the chat template of {conversations.folder!r} does not write the assistant's text at the end of the "
            "prompt: end the prompt with the user's message"
        )
    # The last place: a template may show the content in a preface too, and what is gone on with is what stands last.
    prefix = written_text[: written_text.rindex(sentinel)].replace(sentinel, "")
    begun_text, thoughts = messages[-1]["content"], messages[-1].get("reasoning_content", "")
    tags = [tag for tag_pair in conversations.text_format.thoughts for tag in tag_pair]
    pieces = re.split("|".join(map(re.escape, tags)), begun_text)  # a template may write other blanks around its tags
    is_whole = all(piece.strip() in prefix for piece in pieces)
    for opening, closing in conversations.text_format.thoughts:
        if opening not in begun_text:
            continue
        try:
            text_before = conversations.text(messages[:-1], tools)
        except ModelError:  # a template may refuse the conversation without its last turn: an empty one, say
            continue
        # The template closed a block of thoughts that the words leave open. So the text is put together here: what
        # opens a turn, and the words as they are.
        if not is_whole or prefix.count(closing) > text_before.count(closing) + begun_text.count(closing):
            opens_thoughts = text_before.rstrip().endswith(opening)
            return (text_before.rstrip().removesuffix(opening) if opens_thoughts else text_before) + begun_text
    if not is_whole or thoughts.strip() not in prefix:
        left_out = "the chat template leaves out a part of the words with which the assistant begins"
        notices.note("messages", left_out, by_policy=True)
    return prefix


def unused(sentinel: str, messages: Sequence[Message]) -> str:
    """The sentinel, made longer until no text of the messages has it."""
    while any(sentinel in text for text in _texts(messages)):
        sentinel += "x"
    return sentinel


def marked(messages: Sequence[Message], mark: str) -> list[Message]:
    """The messages with a mark at the end of the last one, if there is a mark."""
    if not mark:
        return list(messages)
    return [*messages[:-1], cast("Message", {**messages[-1], "content": messages[-1]["content"] + mark})]


def ends_with_prefix(messages: Sequence[Message]) -> bool:
    """Whether the assistant has begun to speak at the end of the messages."""
    last_message = messages[-1] if messages else None
    return last_message is not None and last_message["role"] == "assistant" and not last_message.get("tool_calls")


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        yield dump(message)
