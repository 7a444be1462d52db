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
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, cast

from tokenizers import Tokenizer

from agentrl.engine.rendering.chat_template import MARK, PROBE, PROBE_NAME, ChatTemplate, one_by_one
from agentrl.env.chat_messages import plain_message
from agentrl.env.tools.calls import ToolCall, dump
from agentrl.env.tools.parsers import FALLBACK, get_format, spoken_by
from agentrl.env.tools.tool_format import ToolFormat
from agentrl.errors import ModelError
from agentrl.records import Json, Message
from agentrl.tokens import images
from agentrl.tokens.vision import FAMILIES, read_vision

_SENTINEL: Final = "zqTURNqz"
_PRIVATE_USE: Final = 0xF0000  # first of the code points that stand for special tokens written out in messages
_ASKED: Final[Message] = {"role": "user", "content": "."}
_ANSWER: Final[Message] = {"role": "tool", "content": "."}

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
        self._special = sorted(
            (token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special),
            key=len,
            reverse=True,
        )
        self._literal = self._literals()
        self._encode_again = lru_cache(maxsize=16)(self._encode)  # for a text that each turn has
        self._stand_ins = re.compile(f"([{chr(_PRIVATE_USE)}-{chr(_PRIVATE_USE + max(len(self._special), 1) - 1)}])")
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

    def start(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """The prompt of a fresh conversation (or a fork), up to where the assistant speaks."""
        plain, template = self._plain(messages), self._template(tools=bool(tools))
        ids = self._encode(self._whole(plain if template.writes_several else one_by_one(plain), tools))
        return self._with_images(ids, messages)

    def extend(self, sampled: Sequence[int], messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """The tokens to append after a turn's `sampled` ones: the turn's end, if the model did not write it
        itself, the new messages, and the opening of the next turn. `tools` are those of the conversation."""
        return self._with_images(self._extended(sampled, self._plain(messages), tools), messages)

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
        plain = self._plain(messages)
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
            turn_ids = self._encode(whole[len(before) :])
            ends = [place for place, token in enumerate(turn_ids) if token in self._ends]
            turn_ids = turn_ids[: ends[-1] + 1] if ends else self._ended(turn_ids, plain[at], tools)
            found.append((self._encode(before), turn_ids))
        return found

    def tokens(self, text: str) -> tuple[int, ...]:
        """The tokens of a text as it is; no part of it is a control token."""
        return self._encode(self._guard_value(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled tokens, special ones written out, without the one that ends the turn."""
        text_ids = list(ids)
        if text_ids and text_ids[-1] in self.stop_token_ids:
            text_ids.pop()
        return self._tokenizer.decode(text_ids, skip_special_tokens=False)

    # --- conversations as the template takes them ----------------------------------------------------------------

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
        instructions = cast("str", self._guard_value(self._text_format.instructions(tools)))
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
                if message.get("images"):
                    hint = "show them in a user message behind it"
                    raise ModelError(f"the chat template of {template.where!r} writes no answers to tool calls: {hint}")
                (answer,) = self._text_format.answer_as_user((message,))
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
        sentinel, refusal = _SENTINEL, ModelError("")
        while any(sentinel in text for text in _texts(news)):
            sentinel += "x"
        kinds = _turns_before(news, sentinel)
        if not template.writes_tools:
            tools = ()
        for turn, answers in kinds:
            try:
                behind = template.render([_ASKED, turn, *answers], tools)
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

    def _encode(self, text: str) -> tuple[int, ...]:
        """Ids of a rendered text; the stand-ins of `_guard` become the ordinary tokens of what they stand for."""
        ids: list[int] = []
        for at, piece in enumerate(self._stand_ins.split(text)):
            ids += self._literal[ord(piece) - _PRIVATE_USE] if at % 2 and self._literal else self._encode_piece(piece)
        return tuple(ids)

    def _encode_piece(self, text: str) -> list[int]:
        if not text:
            return []
        # Unlike `encode`, a batch lets the GIL go; the fast one leaves out offsets, which nobody asks for.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return encoded.ids

    def _literals(self) -> list[list[int]]:
        """The ordinary tokens of each special token's text."""
        self._tokenizer.encode_special_tokens = True
        try:
            return [self._encode_piece(token) for token in self._special]
        finally:
            self._tokenizer.encode_special_tokens = False

    def _plain(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in one shape, in which no text can pass for a control token: an environment's output is not the
        template's."""
        if self.no_images and any(message.get("images") for message in messages):
            raise ModelError(f"{self.no_images}, and a message has one")
        try:
            return [self._guarded(plain_message(message)) for message in messages]
        except TypeError as error:
            raise ModelError(f"the messages are of another shape: {error}") from error

    def _guarded(self, message: Message) -> Message:
        """A message in whose texts nothing is a control token; its images stay where they were."""
        shown = message.get("images", [])
        bare = cast("Json", {name: value for name, value in message.items() if name != "images"})
        guarded = cast("Message", self._guard_value(bare))
        if shown:
            ends = [0, *(image["at"] for image in shown), len(message["content"])]
            texts = [str(self._guard_value(message["content"][start:end])) for start, end in pairwise(ends)]
            ats = list(accumulate(map(len, texts)))
            guarded["content"] = "".join(texts)
            guarded["images"] = [{**image, "at": at} for image, at in zip(shown, ats, strict=False)]
        return guarded

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

    def _guard_value(self, value: Json) -> Json:
        if isinstance(value, str):
            for at, token in enumerate(self._special):
                if token in value:
                    value = value.replace(token, chr(_PRIVATE_USE + at))
            return value
        if isinstance(value, dict):
            inner = cast("dict[str, Json]", value).items()  # a tool call's arguments have the policy's names
            return {cast("str", self._guard_value(name)): self._guard_value(item) for name, item in inner}
        if isinstance(value, list):
            return [self._guard_value(inner) for inner in cast("list[Json]", value)]
        return value

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
            marks = [token for token in behind if token in special and (news is _ASKED or special[token].special)]
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
    return cast("Message", {**first, "content": f"{first['content']}\n{second['content']}"})


def _with_instructions(messages: Sequence[Message], instructions: str, role: str) -> list[Message]:
    """The messages with a text in front, in the first message if that has the `role`."""
    if messages and messages[0]["role"] == role:
        first = cast("Message", {**messages[0], "content": f"{messages[0]['content']}\n\n{instructions}"})
        return [first, *messages[1:]]
    return [{"role": role, "content": instructions}, *messages]


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        yield dump(message)
