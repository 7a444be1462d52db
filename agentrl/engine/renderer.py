"""Messages to tokens and back, so that sampled tokens are never tokenized again.

Owns the model's tokenizer and chat template. A conversation starts with `start`; each further turn is `extend`: only
what comes *after* the sampled tokens is rendered, and the ids before it stay as they are, whatever the template would
make of the same history today (stripped reasoning, re-ordered tool arguments, other merges). A rewritten history has
no such prefix: render it with `start`, as a fork. May be used by several threads at once, and lets others run while it
tokenizes. Never knows engines or environments.

How `extend` finds the new part: it renders a small conversation whose assistant turn is a sentinel, followed by the
new messages; what stands behind the sentinel closes the assistant's turn and opens the next one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from tokenizers import Tokenizer

from agentrl.engine.template import compile_template
from agentrl.errors import ModelError
from agentrl.records import Json, Message

_SENTINEL = "\N{OBJECT REPLACEMENT CHARACTER}turn\N{OBJECT REPLACEMENT CHARACTER}"
_PRIVATE_USE = 0xF0000  # first of the code points that stand for special tokens written out in messages


class Renderer:
    """Tokenizer and chat template of a model folder. `template_kwargs` are passed on to the template
    (`enable_thinking=False`, …).

    `stop_token_ids` end a turn. Raises ModelError in one line for a folder without tokenizer or chat template, and for
    an argument that the template does not read."""

    def __init__(self, model_dir: str | Path, *, template_kwargs: Mapping[str, Json] | None = None) -> None:
        self._folder = Path(model_dir)
        self._tokenizer = _read_tokenizer(self._folder)
        settings = _read_json(self._folder / "tokenizer_config.json")
        tokens = {name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        self._kwargs: dict[str, Any] = {name: text for name, text in tokens.items() if text} | dict(
            template_kwargs or {}
        )
        self._template = compile_template(
            _read_template(self._folder, settings), str(self._folder), (template_kwargs or {}).keys()
        )
        self._special = sorted(
            (token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special),
            key=len,
            reverse=True,
        )
        self._literal = self._literals()
        self._stand_ins = re.compile(f"([{chr(_PRIVATE_USE)}-{chr(_PRIVATE_USE + max(len(self._special), 1) - 1)}])")
        self._closing = self._find_closing()
        self.stop_token_ids = self._find_stops(tokens["eos_token"])

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] = ()) -> tuple[int, ...]:
        """The prompt of a fresh conversation (or a fork), up to where the assistant speaks."""
        return self._encode(self._render(self._guard(messages), tools))

    def extend(self, sampled: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens to append after a turn's `sampled` ones: the turn's end, if the model did not write it
        itself, the new messages, and the opening of the next turn."""
        asked: Message = {"role": "user", "content": "."}
        sentinel: Message = {"role": "assistant", "content": _SENTINEL}
        text = self._render([asked, sentinel, *self._guard(messages)], ())
        ids = self._encode(self._behind_sentinel(text))
        if sampled and sampled[-1] in self.stop_token_ids and ids[0] == self._closing:
            return ids[1:]
        return ids

    def demonstrated(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] = ()
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """For each message of the assistant, the tokens before it and its own, with the one that ends its turn: what
        the policy would see and should say. Tool calls are as the template writes them. Raises ModelError if it writes
        a message otherwise than where the assistant speaks."""
        guarded = self._guard(messages)
        found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for at in (at for at, message in enumerate(messages) if message["role"] == "assistant"):
            before = self._render(guarded[:at], tools)
            whole = self._render(guarded[: at + 1], tools, asks=False)
            if not whole.startswith(before):
                raise ModelError(
                    f"the chat template of {str(self._folder)!r} does not write message {at} where the assistant speaks"
                )
            said = self._encode(whole[len(before) :])
            ends = [place for place, token in enumerate(said) if token == self._closing]
            if not ends:
                raise ModelError(f"the chat template of {str(self._folder)!r} does not end message {at}")
            found.append((self._encode(before), said[: ends[-1] + 1]))
        return found

    def tokens(self, text: str) -> tuple[int, ...]:
        """The tokens of a text as it is; no part of it is a control token."""
        return self._encode(self._guard_value(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled tokens, special ones written out, without the one that ends the turn."""
        kept = list(ids)
        if kept and kept[-1] in self.stop_token_ids:
            kept.pop()
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    # --- how ----------------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]], *, asks: bool = True) -> str:
        schemas = [_as_function(tool) for tool in tools] or None
        try:
            return self._template.render(messages=messages, tools=schemas, add_generation_prompt=asks, **self._kwargs)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ModelError(f"the chat template of {str(self._folder)!r} refuses these messages: {error}") from error

    def _behind_sentinel(self, text: str, *, once: bool = False) -> str:
        """What stands behind the first one: new messages may say the same, unless there is only `once`."""
        _, found, behind = text.partition(_SENTINEL)
        if not found or (once and _SENTINEL in behind):
            raise ModelError(
                f"the chat template of {str(self._folder)!r} does not write an assistant's text as it is, once"
            )
        return behind

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

    def _guard(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in which no text can pass for a control token: an environment's output is not the template's."""
        return [cast("Message", self._guard_value(dict(message))) for message in messages]

    def _guard_value(self, value: Json) -> Json:
        if isinstance(value, str):
            for at, token in enumerate(self._special):
                if token in value:
                    value = value.replace(token, chr(_PRIVATE_USE + at))
            return value
        if isinstance(value, dict):
            inner = cast("dict[str, Json]", value).items()  # a tool call's arguments have the policy's names
            return {cast("str", self._guard_value(name)): self._guard_value(one) for name, one in inner}
        if isinstance(value, list):
            return [self._guard_value(inner) for inner in cast("list[Json]", value)]
        return value

    def _find_closing(self) -> int:
        """The token with which the template ends an assistant's turn."""
        probe: list[Message] = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": _SENTINEL},
            {"role": "user", "content": "."},
        ]
        ids = self._encode(self._behind_sentinel(self._render(probe, ()), once=True))
        if not ids or ids[0] not in self._tokenizer.get_added_tokens_decoder():
            raise ModelError(
                f"the chat template of {str(self._folder)!r} does not end an assistant's turn with a special token"
            )
        return ids[0]

    def _find_stops(self, eos_token: str | None) -> tuple[int, ...]:
        """What ends a turn: the generation settings' end tokens, the tokenizer's, and, where the folder has no
        generation settings, the template's closing token. (A format may close messages inside a turn with it.)"""
        stops: set[int] = set()
        eos = self._tokenizer.token_to_id(eos_token) if eos_token else None
        if eos is not None:
            stops.add(eos)
        given = _read_json(self._folder / "generation_config.json").get("eos_token_id")
        if given is None:
            stops.add(self._closing)
        else:
            stops |= set(cast("list[int]", given) if isinstance(given, list) else [given])
        return tuple(sorted(stops))


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"model folder {str(folder)!r} has no tokenizer.json; save it with a fast tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"cannot read {str(path)!r}: {error}") from error


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {str(entry["name"]): str(entry["template"]) for entry in cast("list[dict[str, Any]]", template)}
        template = named.get("default")
    if not isinstance(template, str):
        raise ModelError(
            f"model folder {str(folder)!r} has no chat template; put one into chat_template.jinja beside its tokenizer"
        )
    return template


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


def _as_function(tool: Mapping[str, Json]) -> Mapping[str, Json]:
    """Templates expect OpenAI's envelope around a function schema."""
    return tool if "function" in tool else {"type": "function", "function": dict(tool)}
