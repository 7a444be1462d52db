"""Demonstrations: conversations whose assistant turns are learned from, as what the policy would see and should say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from agentrl import notices
from agentrl.engine.rendering.conversations import Conversations, Tools, unread
from agentrl.engine.rendering.extensions import Extensions
from agentrl.errors import ModelError
from agentrl.records import Message

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})


class Demonstrations:
    """Splits demonstrations into turns."""

    def __init__(self, conversations: Conversations, extensions: Extensions) -> None:
        self._conversations, self._extensions = conversations, extensions
        self._template_name = f"the chat template of {conversations.folder!r}"

    def turns(self, messages: Sequence[Message], tools: Tools = ()) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The turns of a conversation, as `Renderer.demonstrated` gives them."""
        if any(message.get("images") for message in messages):
            raise ModelError("demonstrations with images are not learned from: leave the images out")
        plain_messages, tools = self._conversations.plain(messages), self._conversations.guards.tools(tools)
        turns: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for number in (number for number, message in enumerate(plain_messages) if message["role"] == "assistant"):
            text_before = self._conversations.text(plain_messages[:number], tools)
            with_turn = self._conversations.text(plain_messages[: number + 1], tools, asks=False)
            # What the policy would see has to be a prefix of what is learned from. A template that writes a past turn
            # in another way (thoughts dropped, say) would teach an answer to a prompt that never comes.
            if not with_turn.startswith(text_before):
                raise ModelError(
                    f"{self._template_name} does not write message {number} where the assistant "
                    f"speaks{self._thinking_hint(plain_messages[number], text_before)}"
                )
            self._check_whole(number, plain_messages[number], with_turn[len(text_before) :])
            self._check_parts(plain_messages[: number + 1], tools, with_turn)
            thoughts = plain_messages[number].get("reasoning_content", "").strip()
            openings = tuple(opening for opening, _ in self._conversations.text_format.thoughts)
            if thoughts and plain_messages[number]["content"].lstrip().startswith(openings):
                raise ModelError(f"message {number} has thoughts in its content and beside it: give one of them")
            if thoughts and thoughts not in with_turn[len(text_before) :]:
                notices.note("demonstrations", "the chat template leaves out the thoughts of an assistant's message")
            turn_ids = self._conversations.encode(with_turn[len(text_before) :])
            end_positions = [place for place, token in enumerate(turn_ids) if token in self._extensions.ends]
            # Up to the end token and no further: templates often write a line end behind it, which the engine adds
            # and the policy never samples. Without an end token the policy would learn not to stop.
            if end_positions:
                turn_ids = turn_ids[: end_positions[-1] + 1]
            else:
                turn_ids = self._extensions.ended(turn_ids, plain_messages[number], tools)
            turns.append((self._conversations.encode(text_before), turn_ids))
        return turns

    def name_unread(self, messages: Sequence[Message], tools: Tools = ()) -> None:
        """Name the keys of demonstrated messages that the chat template does not read."""
        template = self._conversations.template(tools=bool(tools))
        for unread_key in (unread_key for message in messages for unread_key in unread(template, message)):
            notices.note("demonstrations", f"the key {unread_key!r} of a message is not read by the chat template")
        for role in sorted({message["role"] for message in messages} - _ROLES):
            if not template.reads(role):
                notices.note("demonstrations", f"the role {role!r} is not known to the chat template: it is context")

    def _thinking_hint(self, message: Message, before: str) -> str:
        """A hint for a template that opens a block of reasoning where the assistant speaks; empty if it does not
        apply."""
        is_opened = before.rstrip().endswith(tuple(opening for opening, _ in self._conversations.text_format.thoughts))
        if not is_opened or "reasoning_content" in message:
            return ""
        return ": give its reasoning_content, or a template argument without reasoning ({ enable_thinking = false })"

    def _check_whole(self, at: int, message: Message, written: str) -> None:
        """Raises ModelError if a call of the message is not in what the template wrote."""
        for call in message.get("tool_calls", ()):
            function = cast("dict[str, Any]", call["function"])
            if str(function.get("name")) not in written:
                raise ModelError(
                    f"{self._template_name} leaves out the call of {function.get('name')!r} in message {at}"
                )

    def _check_parts(self, messages: list[Message], tools: Tools, written: str) -> None:
        """Raise ModelError for one of several calls of the last message that makes no difference in what the template
        wrote (gpt-oss' writes the first alone), and name its text if that makes none (Mistral's leaves out words beside
        calls)."""
        message, number = messages[-1], len(messages) - 1
        tool_calls = message.get("tool_calls", [])

        # By difference, and not by a search for the text: a template may escape, indent or reorder what it writes,
        # and what changes nothing in the output was left out for certain.
        def is_without(**changes: Any) -> bool:
            changed_messages = [*messages[:-1], cast("Message", {**message, **changes})]
            return self._conversations.text(changed_messages, tools, asks=False) == written

        for left_out in range(len(tool_calls) if len(tool_calls) > 1 else 0):
            if is_without(tool_calls=[*tool_calls[:left_out], *tool_calls[left_out + 1 :]]):
                raise ModelError(
                    f"{self._template_name} leaves out call {left_out} of message {number}: give one call a message"
                )
        content = message["content"].strip()
        if content and content not in written and is_without(content=""):
            notices.note("demonstrations", "the chat template leaves out the text of an assistant's message")
