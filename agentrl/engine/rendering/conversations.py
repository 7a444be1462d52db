"""Whole conversations as a chat template writes them, and the tokens of what it wrote.

Not every template knows tools. If one leaves out their schemas, these go into the system message as text; if it leaves
out calls, they are written into the assistant's text; answers that it refuses or leaves out become user messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, cast

from agentrl.engine.rendering.chat_template import MARK, PROBE, PROBE_NAME, ChatTemplate
from agentrl.engine.rendering.guards import Guards, encode_piece
from agentrl.engine.rendering.model_folder import ModelFolder
from agentrl.env.chat_messages import CALL_KEYS, FUNCTION_KEYS, MESSAGE_KEYS, plain_message
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import FALLBACK, get_format, spoken_by
from agentrl.env.tools.tool_format import ToolFormat
from agentrl.errors import ModelError
from agentrl.records import ImagePart, Json, Message
from agentrl.tokens import images
from agentrl.tokens.vision import FAMILIES, read_vision

Tools = Sequence[Mapping[str, Json]]

_READS_NONE: Final = (
    "the model in {!r} reads no images that are known here (give one of the families {}, such as"
    " Qwen/Qwen2.5-VL-3B-Instruct, or an environment without images)"
)


class Conversations:
    """Writes conversations with the templates of a model folder. `no_images` says why messages may hold no images; it
    is empty if they may. Raises ModelError for a template argument that the template does not read."""

    def __init__(self, folder: ModelFolder, template_kwargs: Mapping[str, Json]) -> None:
        self.folder = str(folder.path)
        self.tokenizer = folder.tokenizer
        variables: dict[str, Any] = {**folder.token_texts, **template_kwargs}
        # Arguments are checked against the default template alone: one of several may well not read what another
        # reads.
        self._templates = {
            name: ChatTemplate(source, self.folder, variables, template_kwargs.keys() if name == "default" else ())
            for name, source in folder.templates.items()
        }
        # Before `Guards` is made, which marks further tokens as special in this tokenizer.
        added_tokens = self.tokenizer.get_added_tokens_decoder().values()
        self.special = [token.content for token in added_tokens if token.special]
        """The texts of the tokens that the folder marks as special."""
        self.guards = Guards(self.tokenizer, self._templates.values(), self.special)
        self.added_tokens = self.tokenizer.get_added_tokens_decoder()
        self._vision = read_vision(folder.path)
        self.no_images = "" if self._vision else _READS_NONE.format(self.folder, ", ".join(FAMILIES))

    @cached_property
    def tool_format(self) -> str | None:
        """The dialect in which the template writes tool calls, and the policy is to write them; `json` for a template
        that knows no calls. None if the template writes them in a dialect that is not known here."""
        template = self.template(tools=True)
        return spoken_by(template.written_call, template.source, ToolCall(PROBE_NAME, {"key": MARK}), PROBE)

    @cached_property
    def untold(self) -> str | None:
        """Name in one line the parts of tools that the chat template does not write, and where they go instead; None if
        it writes all of them."""
        template = self.template(tools=True)
        written_parts = {
            "tools (they go into the system message)": template.writes_tools,
            f"tool calls (they are written as text, in the format {self.text_format.name})": template.writes_calls,
            "answers to tool calls (they become user messages)": self._keeps_results,
        }
        left_out = [part for part, is_written in written_parts.items() if not is_written]
        return f"the chat template of {self.folder!r} writes no {', no '.join(left_out)}" if left_out else None

    @property
    def writes_thoughts(self) -> bool:
        """Whether the chat template looks for an assistant's thoughts beside its content."""
        return self._templates["default"].writes_thoughts

    def template(self, *, tools: bool) -> ChatTemplate:
        """The template of a conversation: some models have another one for conversations with tools."""
        return self._templates.get("tool_use" if tools else "default", self._templates["default"])

    @cached_property
    def text_format(self) -> ToolFormat:
        """The format of calls and tools that are written as text, since the template leaves them out."""
        return get_format(self.tool_format or FALLBACK)

    @cached_property
    def _keeps_results(self) -> bool:
        """A template that knows neither tools nor calls writes any role: no model was trained on a tool's."""
        template = self.template(tools=True)
        return template.writes_results and (template.writes_tools or template.writes_calls)

    def text(self, messages: list[Message], tools: Tools, *, asks: bool = True) -> str:
        """The text of a conversation; with `asks` up to where the assistant speaks next."""
        template = self.template(tools=bool(tools))
        readable = self.readable(template, messages)
        if not tools or template.writes_tools:
            return template.render(readable, tools, asks=asks)
        # The dialect's own tags in them are ours: what comes from outside, the schemas, is guarded already.
        instructions = self.guards.text(self.text_format.instructions(tools), inner=False)
        try:
            return template.render(_with_instructions(readable, instructions, "system"), asks=asks)
        except ModelError:
            # it knows no system messages either
            return template.render(_with_instructions(readable, instructions, "user"), asks=asks)

    def readable(self, template: ChatTemplate, messages: Sequence[Message]) -> list[Message]:
        """The messages with calls and their answers as text if the template leaves these out."""
        rewritten, previous_role = list[Message](), ""
        for message in messages:
            tool_calls = message.get("tool_calls")
            if tool_calls and not template.writes_calls:
                rewritten.append(_with_calls_as_text(message, self.text_format))
            elif message["role"] == "tool" and not self._keeps_results:
                # Consecutive answers are joined to one user message: many templates refuse two of a role in a row.
                (answer,) = self.text_format.pictured_as_user((message,))
                rewritten.append(_joined(rewritten.pop(), answer) if previous_role == "tool" else answer)
            else:
                rewritten.append(message)
            previous_role = message["role"]
        return rewritten

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a rendered text; the stand-ins of guarded texts become the ordinary tokens of what they stand for."""
        token_ids: list[int] = []
        for text_piece, literal in self.guards.pieces(text):
            token_ids += literal if literal is not None else encode_piece(self.tokenizer, text_piece)
        return tuple(token_ids)

    def plain(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in one shape, in which no text can pass for a control token: an environment's output is not the
        template's."""
        if self.no_images and any(message.get("images") for message in messages):
            raise ModelError(f"{self.no_images}, and a message has one")
        try:
            return [self.guards.message(self._named_role(plain_message(message))) for message in messages]
        except TypeError as error:
            raise ModelError(f"the messages are of another shape: {error}") from error

    def _named_role(self, message: Message) -> Message:
        """OpenAI's role `developer` is the system's for a template that does not know it."""
        # Most templates drop a role that they do not know without a word, and this one carries the task's
        # instructions.
        if message["role"] == "developer" and not self._templates["default"].reads("developer"):
            return cast("Message", {**message, "role": "system"})
        return message

    def with_images(self, ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a prompt with those of its images, for each of which the template wrote a placeholder. Raises
        ModelError if it wrote other than one for each."""
        if self._vision is None:
            return tuple(ids)
        try:
            shown_images = images.of_messages(messages)
            counts = [self._vision.tokens(image) for image in shown_images]
        except ValueError as error:
            raise ModelError(f"{error}: scale or crop it") from error
        places = [place for place, token in enumerate(ids) if token == self._vision.placeholder]
        # The placeholder is one token in the text, and as many as the image has patches in the prompt: they are
        # counted before they are expanded, so that no image slides into the place of another.
        if len(places) != len(shown_images) or any(after == place + 1 for place, after in pairwise(places)):
            mismatch = f"{len(places)} placeholders for {len(shown_images)} images, or none between two"
            raise ModelError(f"the chat template of {self.folder!r} writes {mismatch}")
        token_ids, next_position = list[int](), 0
        for place, image, count in zip(places, shown_images, counts, strict=True):
            token_ids += [*ids[next_position:place], *[image.token] * count]
            next_position = place + 1
        return (*token_ids, *ids[next_position:])


def _with_calls_as_text(message: Message, form: ToolFormat) -> Message:
    functions = [cast("dict[str, Any]", raw_call["function"]) for raw_call in message.get("tool_calls", ())]
    tool_calls = [ToolCall(str(function.get("name")), _arguments(function)) for function in functions]
    text_parts = [message["content"], form.write(*tool_calls)]
    return {"role": message["role"], "content": "\n".join(text for text in text_parts if text)}


def _arguments(function: Mapping[str, Any]) -> dict[str, Json]:
    arguments = function.get("arguments")
    return cast("dict[str, Json]", arguments) if isinstance(arguments, dict) else {"arguments": cast("Json", arguments)}


def _joined(first: Message, second: Message) -> Message:
    content, second_start = f"{first['content']}\n{second['content']}", len(first["content"]) + 1
    second_images = [ImagePart(at=second_start + image["at"], url=image["url"]) for image in second.get("images", ())]
    joined_images = [*first.get("images", ()), *second_images]
    return cast("Message", {**first, "content": content, **({"images": joined_images} if joined_images else {})})


def _with_instructions(messages: Sequence[Message], instructions: str, role: str) -> list[Message]:
    """The messages with a text in front, in the first message if that has the `role`."""
    if messages and messages[0]["role"] == role:
        first_message = cast("Message", {**messages[0], "content": f"{messages[0]['content']}\n\n{instructions}"})
        return [first_message, *messages[1:]]
    return [{"role": role, "content": instructions}, *messages]


def unread(template: ChatTemplate, message: Message) -> list[str]:
    """Keys of a message and of its calls that neither our records nor the template know."""
    unknown_keys = {*message} - MESSAGE_KEYS
    for call in message.get("tool_calls", ()):
        function = call.get("function")
        unknown_keys |= {*call} - CALL_KEYS | ({*function} - FUNCTION_KEYS if isinstance(function, dict) else set())
    return sorted(message_key for message_key in unknown_keys if not template.reads(message_key))
