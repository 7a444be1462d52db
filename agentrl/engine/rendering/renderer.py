"""Messages to tokens and back, so that sampled tokens are never tokenized again.

Owns the model's tokenizer and chat templates. A conversation starts with `start`; each further turn is `extend`: only
what comes *after* the sampled tokens is rendered, and the ids before it stay as they are, whatever the template would
make of the same history today (stripped reasoning, re-ordered tool arguments, other merges). A rewritten history has
no such prefix: render it with `start`, as a fork. May be used by several threads at once, and lets others run while it
tokenizes. Never knows engines or environments.

How `extend` finds the new part: it renders a small conversation whose assistant turn is a sentinel, followed by the
new messages, and the same without them. Both go on behind the sentinel with the end of the assistant's turn; what
follows it in the first is the new part. In front of the answers to tool calls the small turn makes these calls, since
many templates write an answer only to a call.

Not every template knows tools. If one leaves out their schemas, these go into the system message as text; if it leaves
out calls, they are written into the assistant's text; answers that it refuses or leaves out become user messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, cast

from tokenizers import Tokenizer

from agentrl import notices
from agentrl.engine.rendering.chat_template import MARK, PROBE, PROBE_NAME, ChatTemplate, one_by_one
from agentrl.engine.rendering.guards import Guards, encode_piece
from agentrl.env.chat_messages import CALL_KEYS, FUNCTION_KEYS, MESSAGE_KEYS, plain_message
from agentrl.env.tools.calls import ToolCall, dump
from agentrl.env.tools.parsers import FALLBACK, get_format, spoken_by
from agentrl.env.tools.tool_format import ToolFormat
from agentrl.errors import ModelError
from agentrl.records import ImagePart, Json, Message
from agentrl.tokens import images
from agentrl.tokens.vision import FAMILIES, read_vision

_SENTINEL: Final = "zqTURNqz"
_PREFIX_END: Final = "zqENDqz"
_ASKED: Final[Message] = {"role": "user", "content": "."}
_ANSWER: Final[Message] = {"role": "tool", "content": "."}

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})

_READS_NONE: Final = (
    "the model in {!r} reads no images that are known here (give one of the families {}, such as"
    " Qwen/Qwen2.5-VL-3B-Instruct, or an environment without images)"
)

Tools = Sequence[Mapping[str, Json]]


class Renderer:
    """Tokenizer and chat templates of a model folder. `template_kwargs` are passed on to the template
    (`enable_thinking=False`, …).

    `stop_token_ids` end a turn. `no_images` says why messages may hold no images; it is empty if they may. Raises
    ModelError in one line for a folder without tokenizer or chat template, for one whose images are not known here, and
    for an argument that the template does not read."""

    def __init__(self, model_dir: str | Path, *, template_kwargs: Mapping[str, Json] | None = None) -> None:
        self._folder = Path(model_dir)
        self._tokenizer = _read_tokenizer(self._folder)
        settings = _read_json(self._folder / "tokenizer_config.json")
        tokens = {name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        given = dict(template_kwargs or {})
        variables: dict[str, Any] = {name: text for name, text in tokens.items() if text} | given
        self._templates = {
            name: ChatTemplate(source, str(self._folder), variables, given.keys() if name == "default" else ())
            for name, source in _read_templates(self._folder, settings).items()
        }
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._special = [token.content for token in added if token.special]
        self._guards = Guards(self._tokenizer, self._templates.values(), self._special)
        self._encode_again = lru_cache(maxsize=16)(self._encode)  # for a text that each turn has
        self._vision = read_vision(self._folder)
        self.no_images = "" if self._vision else _READS_NONE.format(str(self._folder), ", ".join(FAMILIES))
        self._ends: set[int] = set()
        self._ends, self.stop_token_ids = self._find_stops(tokens["eos_token"])

    @property
    def tool_format(self) -> str | None:
        """The dialect in which the template writes tool calls, and the policy is to write them; `json` for a template
        that knows no calls. None if the template writes them in a dialect that is not known here."""
        return self._spoken

    @cached_property
    def _spoken(self) -> str | None:
        template = self._template(tools=True)
        return spoken_by(template.written_call, template.source, ToolCall(PROBE_NAME, {"key": MARK}), PROBE)

    @cached_property
    def untold(self) -> str | None:
        """What the chat template does not write of tools, and where it goes instead, in one line; None if it writes all
        of it."""
        template = self._template(tools=True)
        ways = {
            "tools (they go into the system message)": template.writes_tools,
            f"tool calls (they are written as text, in the format {self._text_format.name})": template.writes_calls,
            "answers to tool calls (they become user messages)": self._keeps_results,
        }
        left_out = [what for what, written in ways.items() if not written]
        return f"the chat template of {str(self._folder)!r} writes no {', no '.join(left_out)}" if left_out else None

    @property
    def writes_thoughts(self) -> bool:
        """Whether the chat template looks for an assistant's thoughts beside its content."""
        return self._templates["default"].writes_thoughts

    def start(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """The prompt of a fresh conversation (or a fork), up to where the assistant speaks. Where the last message is
        the assistant's own text, the assistant goes on with it, as transformers' `continue_final_message` has it: a
        turn that is closed and opened again would be a conversation that no model was trained on."""
        plain, template, tools = self._plain(messages), self._template(tools=bool(tools)), self._guards.tools(tools)
        plain = plain if template.writes_several else one_by_one(plain)
        text = self._prefilled(plain, tools) if _ends_with_prefix(plain) else self._whole(plain, tools)
        self._name_left_out(plain, tools, text)
        return self._with_images(self._encode(text), messages)

    def extend(self, sampled: Sequence[int], messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """The tokens to append after a turn's `sampled` ones: the turn's end, if the model did not write it
        itself, the new messages, and the opening of the next turn. `tools` are those of the conversation."""
        return self._with_images(self._extended(sampled, self._plain(messages), self._guards.tools(tools)), messages)

    def _extended(self, sampled: Sequence[int], news: list[Message], tools: Tools) -> tuple[int, ...]:
        template = self._template(tools=bool(tools))
        behind, alone, called = self._continued(template, self._readable(template, news), tools)
        end, closed = self._end_of_turn(behind, alone)
        last = sampled[-1] if sampled else None
        if last == behind[end] or (closed and last in self.stop_token_ids):
            return tuple(behind[end + 1 :])
        if called:  # the call may be broken off anywhere: nothing of its syntax is added
            return tuple(behind[end:])
        return tuple(behind[_overlap(sampled, behind[:end]) :])

    def demonstrated(
        self, messages: Sequence[Message], tools: Tools = ()
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """For each message of the assistant, the tokens before it and its own, with the one that ends its turn: what
        the policy would see and should say. Tool calls are as the template writes them. Raises ModelError if it writes
        a message otherwise than where the assistant speaks, or leaves out a part of it."""
        if any(message.get("images") for message in messages):
            raise ModelError("demonstrations with images are not learned from: leave the images out")
        plain, tools = self._plain(messages), self._guards.tools(tools)
        found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for at in (at for at, message in enumerate(plain) if message["role"] == "assistant"):
            before = self._whole(plain[:at], tools)
            whole = self._whole(plain[: at + 1], tools, asks=False)
            if not whole.startswith(before):
                raise ModelError(
                    f"the chat template of {str(self._folder)!r} does not write message {at} where the assistant "
                    f"speaks{self._thinking_hint(plain[at], before)}"
                )
            self._check_whole(at, plain[at], whole[len(before) :])
            self._check_parts(plain[: at + 1], tools, whole)
            thoughts = plain[at].get("reasoning_content", "").strip()
            openings = tuple(opening for opening, _ in self._text_format.thoughts)
            if thoughts and plain[at]["content"].lstrip().startswith(openings):
                raise ModelError(f"message {at} has thoughts in its content and beside it: give one of them")
            if thoughts and thoughts not in whole[len(before) :]:
                notices.note("demonstrations", "the chat template leaves out the thoughts of an assistant's message")
            turn_ids = self._encode(whole[len(before) :])
            ends = [place for place, token in enumerate(turn_ids) if token in self._ends]
            turn_ids = turn_ids[: ends[-1] + 1] if ends else self._ended(turn_ids, plain[at], tools)
            found.append((self._encode(before), turn_ids))
        return found

    def tokens(self, text: str) -> tuple[int, ...]:
        """The tokens of a text as it is; no part of it is a special token. Other added tokens stay, as in the policy's
        own words."""
        return self._encode(self._guards.text(text, inner=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled tokens, special ones written out, without the one that ends the turn."""
        text_ids = list(ids)
        if text_ids and text_ids[-1] in self.stop_token_ids:
            text_ids.pop()
        return self._tokenizer.decode(text_ids, skip_special_tokens=False)

    # --- conversations as the template takes them ----------------------------------------------------------------

    def _prefilled(self, messages: list[Message], tools: Tools) -> str:
        """The text up to the end of the last message's content. A sentinel finds that end: the template may write the
        end of a turn behind it, and may write the content twice.

        Thoughts in that content stay where they are. Templates of thinking models take them for those of a closed turn:
        Qwen3's writes an empty block before a `<think>` that is still open, and R1's strips all up to `</think>`."""
        sentinel = _unused(_PREFIX_END, messages)
        written = self._whole(_marked(messages, sentinel), tools, asks=False)
        if sentinel not in written:
            raise ModelError(
                f"the chat template of {str(self._folder)!r} does not write the assistant's text at the end of the "
                "prompt: end the prompt with the user's message"
            )
        prefix = written[: written.rindex(sentinel)].replace(sentinel, "")
        words, thoughts = messages[-1]["content"], messages[-1].get("reasoning_content", "")
        tags = [tag for pair in self._text_format.thoughts for tag in pair]
        pieces = re.split("|".join(map(re.escape, tags)), words)  # a template may write other blanks around its tags
        is_whole = all(piece.strip() in prefix for piece in pieces)
        for opening, closing in self._text_format.thoughts:
            if opening not in words:
                continue
            try:
                before = self._whole(messages[:-1], tools)
            except ModelError:  # a template may refuse the conversation without its last turn: an empty one, say
                continue
            if not is_whole or prefix.count(closing) > before.count(closing) + words.count(closing):
                return (before.rstrip().removesuffix(opening) if before.rstrip().endswith(opening) else before) + words
        if not is_whole or thoughts.strip() not in prefix:
            case = "the chat template leaves out a part of the words with which the assistant begins"
            notices.note("messages", case, by_policy=True)
        return prefix

    def _name_left_out(self, messages: Sequence[Message], tools: Tools, written: str) -> None:
        """Name messages that the template did not write, and keys that it does not look at. An earlier turn of the
        assistant may lose its thoughts by the template's own rule, so only other roles are looked for. Never a refusal:
        a policy's program may have sent the messages."""
        template = self._template(tools=bool(tools))
        for at, message in enumerate(messages):
            for key in _unread(template, message):
                notices.note("messages", f"the key {key!r} is not read by the chat template", by_policy=True)
            content = message["content"].strip()
            if message["role"] == "assistant" or not content or content in written or message.get("images"):
                continue
            if self._makes_no_difference(messages, at, tools, written):
                case = f"the chat template writes no message of role {message['role']!r} there: its text is not shown"
                notices.note("messages", case, by_policy=True)

    def name_unread(self, messages: Sequence[Message], tools: Tools = ()) -> None:
        """Name the keys of demonstrated messages that the chat template does not read."""
        template = self._template(tools=bool(tools))
        for key in (key for message in messages for key in _unread(template, message)):
            notices.note("demonstrations", f"the key {key!r} of a message is not read by the chat template")
        for role in sorted({message["role"] for message in messages} - _ROLES):
            if not template.reads(role):
                notices.note("demonstrations", f"the role {role!r} is not known to the chat template: it is context")

    def _makes_no_difference(self, messages: Sequence[Message], at: int, tools: Tools, written: str) -> bool:
        """Whether the conversation reads the same without the content of this message."""
        emptied = cast("Message", {**messages[at], "content": "."})
        try:
            return self._whole([*messages[:at], emptied, *messages[at + 1 :]], tools) == written
        except ModelError:
            return False

    def _template(self, *, tools: bool) -> ChatTemplate:
        """Some models have a template of its own for conversations with tools."""
        return self._templates.get("tool_use" if tools else "default", self._templates["default"])

    @cached_property
    def _text_format(self) -> ToolFormat:
        return get_format(self.tool_format or FALLBACK)

    @cached_property
    def _keeps_results(self) -> bool:
        """A template that knows neither tools nor calls writes any role: no model was trained on a tool's."""
        template = self._template(tools=True)
        return template.writes_results and (template.writes_tools or template.writes_calls)

    def _whole(self, messages: list[Message], tools: Tools, *, asks: bool = True) -> str:
        template = self._template(tools=bool(tools))
        readable = self._readable(template, messages)
        if not tools or template.writes_tools:
            return template.render(readable, tools, asks=asks)
        # The dialect's own tags in them are ours: what comes from outside, the schemas, is guarded already.
        instructions = self._guards.text(self._text_format.instructions(tools), inner=False)
        try:
            return template.render(_with_instructions(readable, instructions, "system"), asks=asks)
        except ModelError:
            # it knows no system messages either
            return template.render(_with_instructions(readable, instructions, "user"), asks=asks)

    def _readable(self, template: ChatTemplate, messages: Sequence[Message]) -> list[Message]:
        """The messages with calls and their answers as text if the template leaves these out."""
        found, before = list[Message](), ""
        for message in messages:
            calls = message.get("tool_calls")
            if calls and not template.writes_calls:
                found.append(_with_calls_as_text(message, self._text_format))
            elif message["role"] == "tool" and not self._keeps_results:
                (answer,) = self._text_format.pictured_as_user((message,))
                found.append(_joined(found.pop(), answer) if before == "tool" else answer)
            else:
                found.append(message)
            before = message["role"]
        return found

    def _continued(
        self, template: ChatTemplate, news: Sequence[Message], tools: Tools
    ) -> tuple[list[int], list[int], bool]:
        """The tokens behind the sentinel of a small conversation with and without the new messages, and whether its
        turn made calls. Raises ModelError for messages that the template refuses behind every kind of turn."""
        sentinel, refusal = _unused(_SENTINEL, news), ModelError("")
        prefix_end = _unused(_PREFIX_END, news) if _ends_with_prefix(news) else ""
        kinds = _turns_before(news, sentinel)
        if not template.writes_tools:
            tools = ()
        for turn, answers in kinds:
            try:
                behind = template.render([_ASKED, turn, *_marked(answers, prefix_end)], tools, asks=not prefix_end)
                behind = behind.rpartition(prefix_end)[0] if prefix_end else behind
                alone = template.render([_ASKED, turn], tools, asks=False)
            except ModelError as error:
                refusal = error if not str(refusal) else refusal
                continue
            places = alone.count(sentinel) or behind.count(sentinel)
            talk = [_ASKED, turn, *answers]
            if places and all(self._shown(template, talk, at, behind) for at in range(2, len(talk))):
                ended, last = (text.split(sentinel, places)[-1] if sentinel in text else "" for text in (behind, alone))
                return list(self._encode(ended)), list(self._encode_again(last)), "tool_calls" in turn
        if str(refusal):
            raise refusal
        raise ModelError(
            f"the chat template of {str(self._folder)!r} does not write an assistant's text as it is, once, and what "
            "follows it"
        )

    def _shown(self, template: ChatTemplate, messages: list[Message], at: int, written: str) -> bool:
        """Whether the answer at this place is in what was written, if need be by the difference that it makes."""
        if messages[at]["role"] != "tool" or (content := messages[at]["content"].strip()) in written:
            return True
        without = cast("Message", {**messages[at], "content": ""})
        return bool(content) and template.render([*messages[:at], without, *messages[at + 1 :]]) != written

    def _end_of_turn(self, behind: list[int], alone: list[int]) -> tuple[int, bool]:
        """Where the assistant's turn ends in the tokens `behind` it, which are `alone` if no message follows; and
        whether a token there ends it, as against the first one of the next message."""
        same = _common(behind, alone)
        for at in range(same):
            if behind[at] in self._ends:
                return at, not self._opens_block(behind[at])
        special = self._tokenizer.get_added_tokens_decoder()
        if same < len(alone) and alone[same] in self._ends and behind[same : same + 1] and behind[same] in special:
            return same, True  # a last turn ends with another token
        mark = next((at for at in range(same, len(behind)) if behind[at] in special), same)
        if mark > same and behind[mark] in self._ends:  # a last turn ends with none
            return mark, True
        return min(same, len(behind) - 1), False

    def _opens_block(self, token: int) -> bool:
        """Gemma's `<|tool_response>`, with which a turn ends, is the head of the answer, which ends with
        `<tool_response|>`."""
        text = self._tokenizer.id_to_token(token) or ""
        return text.startswith("<|") and not text.endswith("|>")

    def _ended(self, turn_ids: tuple[int, ...], message: Message, tools: Tools) -> tuple[int, ...]:
        """A message that the template ends only where another one follows, with the token that a model ends it with."""
        news = _ANSWER if message.get("tool_calls") else _ASKED
        template = self._template(tools=bool(tools))
        behind, alone, _ = self._continued(template, self._readable(template, [news]), tools)
        end, _ = self._end_of_turn(behind, alone)
        return (*turn_ids, behind[end])

    def _thinking_hint(self, message: Message, before: str) -> str:
        """What to give for a template that opens a block of reasoning where the assistant speaks."""
        opens = before.rstrip().endswith(tuple(opening for opening, _ in self._text_format.thoughts))
        if not opens or "reasoning_content" in message:
            return ""
        return ": give its reasoning_content, or a template argument without reasoning ({ enable_thinking = false })"

    def _check_whole(self, at: int, message: Message, written: str) -> None:
        """Raises ModelError if a call of the message is not in what the template wrote."""
        for call in message.get("tool_calls", ()):
            function = cast("dict[str, Any]", call["function"])
            if str(function.get("name")) not in written:
                raise ModelError(
                    f"the chat template of {str(self._folder)!r} leaves out the call of {function.get('name')!r} in "
                    f"message {at}"
                )

    def _check_parts(self, messages: list[Message], tools: Tools, written: str) -> None:
        """Raise ModelError for one of several calls of the last message that makes no difference in what the template
        wrote (gpt-oss' writes the first alone), and name its text if that makes none (Mistral's leaves out words beside
        calls)."""
        message, at = messages[-1], len(messages) - 1
        calls = message.get("tool_calls", [])

        def is_without(**changes: Any) -> bool:
            return self._whole([*messages[:-1], cast("Message", {**message, **changes})], tools, asks=False) == written

        for left_out in range(len(calls) if len(calls) > 1 else 0):
            if is_without(tool_calls=[*calls[:left_out], *calls[left_out + 1 :]]):
                raise ModelError(
                    f"the chat template of {str(self._folder)!r} leaves out call {left_out} of message {at}: give one "
                    "call a message"
                )
        content = message["content"].strip()
        if content and content not in written and is_without(content=""):
            notices.note("demonstrations", "the chat template leaves out the text of an assistant's message")

    def _encode(self, text: str) -> tuple[int, ...]:
        """Ids of a rendered text; the stand-ins of guarded texts become the ordinary tokens of what they stand for."""
        ids: list[int] = []
        for piece, literal in self._guards.pieces(text):
            ids += literal if literal is not None else encode_piece(self._tokenizer, piece)
        return tuple(ids)

    def _plain(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in one shape, in which no text can pass for a control token: an environment's output is not the
        template's."""
        if self.no_images and any(message.get("images") for message in messages):
            raise ModelError(f"{self.no_images}, and a message has one")
        try:
            return [self._guards.message(self._named_role(plain_message(message))) for message in messages]
        except TypeError as error:
            raise ModelError(f"the messages are of another shape: {error}") from error

    def _named_role(self, message: Message) -> Message:
        """OpenAI's role `developer` is the system's for a template that does not know it."""
        if message["role"] == "developer" and not self._templates["default"].reads("developer"):
            return cast("Message", {**message, "role": "system"})
        return message

    def _with_images(self, ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a prompt with those of its images, for each of which the template wrote a placeholder. Raises
        ModelError if it wrote other than one for each."""
        if self._vision is None:
            return tuple(ids)
        try:
            shown = images.of_messages(messages)
            counts = [self._vision.tokens(image) for image in shown]
        except ValueError as error:
            raise ModelError(f"{error}: scale or crop it") from error
        places = [at for at, token in enumerate(ids) if token == self._vision.placeholder]
        if len(places) != len(shown) or any(after == at + 1 for at, after in pairwise(places)):
            where = f"{len(places)} placeholders for {len(shown)} images, or none between two"
            raise ModelError(f"the chat template of {str(self._folder)!r} writes {where}")
        found, last = list[int](), 0
        for at, image, count in zip(places, shown, counts, strict=True):
            found += [*ids[last:at], *[image.token] * count]
            last = at + 1
        return (*found, *ids[last:])

    def _find_stops(self, eos_token: str | None) -> tuple[set[int], tuple[int, ...]]:
        """What ends a turn in a history; and what a model may end it with: the end tokens of its generation settings
        and the tokenizer's. Where the folder has no generation settings, also what the template writes there. (A format
        may close messages inside a turn with it.) Raises ModelError if no special token follows a turn."""
        eos = self._tokenizer.token_to_id(eos_token) if eos_token else None
        known: set[int] = set() if eos is None else {eos}
        given: Any = _read_json(self._folder / "generation_config.json").get("eos_token_id")
        known |= set(cast("list[int]", given) if isinstance(given, list) else [] if given is None else [given])
        ends, written = set(known), set[int]()
        special = self._tokenizer.get_added_tokens_decoder()
        for news in (_ASKED, _ANSWER) if given is None else (_ASKED,):
            try:
                behind, alone, _ = self._continued(self._template(tools=news is _ANSWER), [news], ())
            except ModelError:
                if news is _ASKED:
                    raise
                continue  # it knows no tools
            same = _common(behind, alone)
            marks = [
                token
                for token in behind
                if token in special and (news is _ASKED or special[token].content in self._special)
            ]
            common = [token for token in behind[:same] if token in marks]
            if any(token in known for token in common) or (marks and marks[0] in known):
                continue
            if common:  # a mark may close the text before the token that ends the turn
                ends.add(common[-1])
                written.add(common[-1])
            elif behind[same : same + 1] and behind[same] in marks:
                written.add(behind[same])
            elif news is _ASKED:
                raise ModelError(
                    f"the chat template of {str(self._folder)!r} does not end an assistant's turn with a special token"
                )
        return ends, tuple(sorted(known if given is not None else known | written))


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"model folder {str(folder)!r} has no tokenizer.json; save it with a fast tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"cannot read {str(path)!r}: {error}") from error


def _read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a folder by name, `default` among them, where transformers saves and finds them."""
    found: dict[str, str] = {}
    template = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        found |= {str(entry["name"]): str(entry["template"]) for entry in cast("list[dict[str, Any]]", template)}
    elif isinstance(template, str):
        found["default"] = template
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    path = folder / "chat_template.jinja"
    if path.is_file():
        found["default"] = path.read_text(encoding="utf-8")
    if "default" not in found:
        raise ModelError(
            f"model folder {str(folder)!r} has no chat template; put one into chat_template.jinja beside its tokenizer"
        )
    return found


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return cast("dict[str, Any]", json.loads(path.read_text()))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error


def _token_text(token: object) -> str | None:
    """A special token is written as text, or as an object with its text in `content`."""
    if isinstance(token, dict):
        token = cast("dict[str, Any]", token).get("content")
    return token if isinstance(token, str) else None


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same


def _overlap(sampled: Sequence[int], behind: Sequence[int]) -> int:
    """How many of the first tokens `behind` the turn are its last ones already."""
    most = min(len(sampled), len(behind))
    return next((n for n in range(most, 0, -1) if list(sampled[-n:]) == list(behind[:n])), 0)


def _turns_before(news: Sequence[Message], sentinel: str) -> Iterator[tuple[Message, list[Message]]]:
    """Turns that may stand before the new messages, with these, the likeliest first: one that makes the calls that the
    messages answer, with their ids or with such as the strictest template takes; only the last call, for templates that
    know one at a time; a text."""
    first_other = next((at for at, message in enumerate(news) if message["role"] != "tool"), len(news))
    if answered := news[:first_other]:
        named = [cast("Message", {"name": "tool", **message}) for message in answered]
        counted = [cast("Message", {**one, "tool_call_id": f"call{at:05d}"}) for at, one in enumerate(named)]
        given = [cast("Message", {**count, **one}) for count, one in zip(counted, named, strict=True)]
        for last in (0, len(named) - 1)[: len(named)]:
            for answers in (given, counted):
                calls = [_call_answered(answer, sentinel) for answer in answers[last:]]
                turn = cast("Message", {"role": "assistant", "content": "", "tool_calls": calls})
                yield turn, [*answers, *news[first_other:]]
        news = [*given, *news[first_other:]]
    yield {"role": "assistant", "content": sentinel}, list(news)


def _call_answered(answer: Message, sentinel: str) -> dict[str, Json]:
    function: dict[str, Json] = {"name": answer.get("name", ""), "arguments": {"key": sentinel}}
    return {"id": answer.get("tool_call_id"), "type": "function", "function": function}


def _with_calls_as_text(message: Message, form: ToolFormat) -> Message:
    functions = [cast("dict[str, Any]", call["function"]) for call in message.get("tool_calls", ())]
    calls = [ToolCall(str(function.get("name")), _arguments(function)) for function in functions]
    texts = [message["content"], form.write(*calls)]
    return {"role": message["role"], "content": "\n".join(text for text in texts if text)}


def _arguments(function: Mapping[str, Any]) -> dict[str, Json]:
    arguments = function.get("arguments")
    return cast("dict[str, Json]", arguments) if isinstance(arguments, dict) else {"arguments": cast("Json", arguments)}


def _joined(first: Message, second: Message) -> Message:
    content, begin = f"{first['content']}\n{second['content']}", len(first["content"]) + 1
    later = [ImagePart(at=begin + image["at"], url=image["url"]) for image in second.get("images", ())]
    images = [*first.get("images", ()), *later]
    return cast("Message", {**first, "content": content, **({"images": images} if images else {})})


def _with_instructions(messages: Sequence[Message], instructions: str, role: str) -> list[Message]:
    """The messages with a text in front, in the first message if that has the `role`."""
    if messages and messages[0]["role"] == role:
        first = cast("Message", {**messages[0], "content": f"{messages[0]['content']}\n\n{instructions}"})
        return [first, *messages[1:]]
    return [{"role": role, "content": instructions}, *messages]


def _unread(template: ChatTemplate, message: Message) -> list[str]:
    """Keys of a message and of its calls that neither our records nor the template know."""
    keys = {*message} - MESSAGE_KEYS
    for call in message.get("tool_calls", ()):
        function = call.get("function")
        keys |= {*call} - CALL_KEYS | ({*function} - FUNCTION_KEYS if isinstance(function, dict) else set())
    return sorted(key for key in keys if not template.reads(key))


def _unused(sentinel: str, messages: Sequence[Message]) -> str:
    """The sentinel, made longer until no text of the messages has it."""
    while any(sentinel in text for text in _texts(messages)):
        sentinel += "x"
    return sentinel


def _marked(messages: Sequence[Message], mark: str) -> list[Message]:
    """The messages with a mark at the end of the last one, if there is a mark."""
    if not mark:
        return list(messages)
    return [*messages[:-1], cast("Message", {**messages[-1], "content": messages[-1]["content"] + mark})]


def _ends_with_prefix(messages: Sequence[Message]) -> bool:
    """Whether the assistant has begun to speak at the end of the messages."""
    last = messages[-1] if messages else None
    return last is not None and last["role"] == "assistant" and not last.get("tool_calls")


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        yield dump(message)
