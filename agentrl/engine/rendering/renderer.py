"""Messages to tokens and back, so that sampled tokens are never tokenized again.

A conversation starts with `start`; each further turn is `extend`: only what comes *after* the sampled tokens is
rendered, and the ids before it stay as they are, whatever the template would make of the same history today (stripped
reasoning, re-ordered tool arguments, other merges). A rewritten history has no such prefix: render it with `start`, as
a fork. May be used by several threads at once, and lets others run while it tokenizes. Never knows engines or
environments.

    model_folder.py    the files of a model folder
    chat_template.py   one chat template: what it expects and writes
    guards.py          texts from outside, which can pass for no control token
    conversations.py   whole conversations as the templates write them
    prefilled.py       an assistant's text at the end of a prompt
    extensions.py      the tokens behind a turn's sampled ones
    demonstrations.py  turns that are learned from
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from agentrl import notices
from agentrl.engine.rendering.chat_template import one_by_one
from agentrl.engine.rendering.conversations import Conversations, Tools, unread
from agentrl.engine.rendering.demonstrations import Demonstrations
from agentrl.engine.rendering.extensions import Extensions
from agentrl.engine.rendering.guards import encode_piece
from agentrl.engine.rendering.model_folder import ModelFolder
from agentrl.engine.rendering.prefilled import ends_with_prefix, prefilled
from agentrl.errors import ModelError
from agentrl.records import Json, Message


class Renderer:
    """Tokenizer and chat templates of a model folder. `template_kwargs` are passed on to the template
    (`enable_thinking=False`, …).

    `stop_token_ids` end a turn. `no_images` says why messages may hold no images; it is empty if they may. Raises
    ModelError in one line for a folder without tokenizer or chat template, for one whose images are not known here, and
    for an argument that the template does not read."""

    def __init__(self, model_dir: str | Path, *, template_kwargs: Mapping[str, Json] | None = None) -> None:
        model_folder = ModelFolder(model_dir)
        self.conversations = Conversations(model_folder, template_kwargs or {})
        self.extensions = Extensions(self.conversations, model_folder)
        self._demonstrations = Demonstrations(self.conversations, self.extensions)
        self.no_images = self.conversations.no_images
        self.stop_token_ids = self.extensions.stop_token_ids

    @property
    def tool_format(self) -> str | None:
        """The dialect in which the template writes tool calls, and the policy is to write them; `json` for a template
        that knows no calls. None if the template writes them in a dialect that is not known here."""
        return self.conversations.tool_format

    @property
    def untold(self) -> str | None:
        """Name in one line the parts of tools that the chat template does not write, and where they go instead; None if
        it writes all of them."""
        return self.conversations.untold

    @property
    def writes_thoughts(self) -> bool:
        """Whether the chat template looks for an assistant's thoughts beside its content."""
        return self.conversations.writes_thoughts

    @property
    def thinks(self) -> bool:
        """Whether the model may think in front of its words: the chat template looks for thoughts, or for their end."""
        thought_ends = [closing_tag for _, closing_tag in self.conversations.text_format.thoughts]
        template = self.conversations.template(tools=False)
        return self.writes_thoughts or any(closing_tag in template.source for closing_tag in thought_ends)

    def start(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """The prompt of a fresh conversation (or a fork), up to where the assistant speaks. Where the last message is
        the assistant's own text, the assistant goes on with it, as transformers' `continue_final_message` has it: a
        turn that is closed and opened again would be a conversation that no model was trained on. Raw messages are the
        prompt as they are, with the tokens that the tokenizer puts in front of every text."""
        conversations = self.conversations
        if any(message.get("raw") for message in messages):
            raw_text = "".join(message["content"] for message in messages)
            return conversations.with_images(conversations.tokenizer.encode(raw_text).ids, messages)
        plain_messages, template, tools = (
            conversations.plain(messages),
            conversations.template(tools=bool(tools)),
            conversations.guards.tools(tools),
        )
        # A template with one call a message would drop the others in silence; divided, each call stands before its
        # answer.
        plain_messages = plain_messages if template.writes_several else one_by_one(plain_messages)
        if ends_with_prefix(plain_messages):
            prompt_text = prefilled(conversations, plain_messages, tools)
        else:
            prompt_text = conversations.text(plain_messages, tools)
        self._name_left_out(plain_messages, tools, prompt_text)
        return conversations.with_images(conversations.encode(prompt_text), messages)

    def extend(self, sampled: Sequence[int], messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """The tokens to append after a turn's `sampled` ones: the turn's end, if the model did not write it
        itself, the new messages, and the opening of the next turn. `tools` are those of the conversation. Raw messages
        are appended as they are."""
        conversations = self.conversations
        if any(message.get("raw") for message in messages):
            raw_text = "".join(message["content"] for message in messages)
            return conversations.with_images(encode_piece(conversations.tokenizer, raw_text), messages)
        added_ids = self.extensions.extended(sampled, conversations.plain(messages), conversations.guards.tools(tools))
        return conversations.with_images(added_ids, messages)

    def demonstrated(
        self, messages: Sequence[Message], tools: Tools = ()
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """For each message of the assistant, the tokens before it and its own, with the one that ends its turn: what
        the policy would see and should say. Tool calls are as the template writes them. Raises ModelError if it writes
        a message otherwise than where the assistant speaks, or leaves out a part of it."""
        return self._demonstrations.turns(messages, tools)

    def name_unread(self, messages: Sequence[Message], tools: Tools = ()) -> None:
        """Name the keys of demonstrated messages that the chat template does not read."""
        self._demonstrations.name_unread(messages, tools)

    def tokens(self, text: str) -> tuple[int, ...]:
        """The tokens of a text as it is; no part of it is a special token. Other added tokens stay, as in the policy's
        own words."""
        return self.conversations.encode(self.conversations.guards.text(text, inner=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled tokens, special ones written out, without the one that ends the turn."""
        text_ids = list(ids)
        # Only the last one: a dialect may close messages inside a turn with the same token (harmony), and there it is
        # text that a parser reads.
        if text_ids and text_ids[-1] in self.stop_token_ids:
            text_ids.pop()
        return self.conversations.tokenizer.decode(text_ids, skip_special_tokens=False)

    def _name_left_out(self, messages: Sequence[Message], tools: Tools, written: str) -> None:
        """Note each message whose text is not in `written`, the rendered conversation, and each key that the template
        does not read. Messages of the assistant are not looked for: many templates drop the thoughts of earlier turns
        on purpose. Never a refusal: a policy's program may have sent the messages."""
        template = self.conversations.template(tools=bool(tools))
        for position, message in enumerate(messages):
            for unread_key in unread(template, message):
                notices.note("messages", f"the key {unread_key!r} is not read by the chat template", by_policy=True)
            content = message["content"].strip()
            if message["role"] == "assistant" or not content or content in written or message.get("images"):
                continue
            if self._makes_no_difference(messages, position, tools, written):
                absent = f"the chat template writes no message of role {message['role']!r} there: its text is not shown"
                notices.note("messages", absent, by_policy=True)

    def _makes_no_difference(self, messages: Sequence[Message], at: int, tools: Tools, written: str) -> bool:
        """Whether the conversation reads the same without the content of this message."""
        # A point, and not an empty text: many templates write nothing at all for an empty message, which would look
        # like a difference.
        emptied_message = cast("Message", {**messages[at], "content": "."})
        try:
            return self.conversations.text([*messages[:at], emptied_message, *messages[at + 1 :]], tools) == written
        except ModelError:
            return False
