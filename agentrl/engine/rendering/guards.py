"""Guards: no text from outside can pass for a control token of the chat template.

A tokenizer turns `<|im_end|>` into one token wherever it stands, in the template's text and in a page that a tool read.
So each text from outside gets a stand-in, a character of a private use area, for every control token that it writes
out; in the rendered text the stand-ins become the ordinary tokens of that text. What the template writes stays.

Control tokens are the special tokens of a tokenizer, and of its other added tokens the *inner* ones: those that a chat
template writes or a dialect thinks in. Qwen's families have `<tool_call>`, `</tool_response>` and `<think>` as added
tokens that are not marked special, and a page that closes its own answer and opens a call is an injection like any
other. The rest of the added tokens is ordinary text (runs of blanks, HTML tags of Gemma, words) and stays one token.

An assistant's words keep inner tokens: there they are the policy's own, sampled as these tokens, and a demonstration
that spelled `<think>` in characters would teach characters. The arguments of its calls are data and keep none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, cast

from tokenizers import AddedToken, Tokenizer

from agentrl.engine.rendering.chat_template import PROBE, ChatTemplate, probe_call
from agentrl.env.tools.calls import ToolCall, dump
from agentrl.env.tools.parsers import FORMATS
from agentrl.errors import ModelError
from agentrl.records import Json, Message

# A supplementary private use area: no text of a page or a tool holds these characters by accident, and tokenizers'
# normalizers leave them alone.
_PRIVATE_USE: Final = 0xF0000
_ORDINARY: Final = re.compile(r"[\w\s\u2581]*")
_MARKER: Final = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>", re.DOTALL)
_DIALECTS: Final = "\n".join(
    (
        *(tag for form in FORMATS.values() for pair in form.thoughts for tag in pair),
        *(form.write(ToolCall("f", {"x": "y"})) for form in FORMATS.values()),
    )
)
"""The tags of all dialects: a template need not write those in which its model answers."""


class Guards:
    """The control tokens of a tokenizer with its chat templates, and their stand-ins. `special` are the tokens that the
    model's folder marks so; the inner ones are marked in `tokenizer` here, so that it can spell them out."""

    def __init__(self, tokenizer: Tokenizer, templates: Iterable[ChatTemplate], special: Sequence[str]) -> None:
        added_tokens = tokenizer.get_added_tokens_decoder()
        template_texts = "\n".join(text for template in templates for text in (template.source, *_written_by(template)))
        other_texts = {token.content for token in added_tokens.values()} - set(special)
        inner_texts = {token for token in other_texts if _is_control(token, template_texts)}
        # Longest first: `<|im_start|>` may hold a shorter token, which would otherwise be cut out of its middle.
        self._tokens = sorted(filter(None, {*special, *inner_texts}), key=len, reverse=True)
        self._is_inner = [token in inner_texts for token in self._tokens]
        self._literal = _literals(tokenizer, self._tokens, inner_texts)
        last_stand_in = chr(_PRIVATE_USE + max(len(self._tokens), 1) - 1)
        self._stand_ins = re.compile(f"([{chr(_PRIVATE_USE)}-{last_stand_in}])")
        controls = [token for token in added_tokens.values() if token.content in self._tokens]
        self._normalizer: Any = tokenizer.normalizer if any(token.normalized for token in controls) else None

    def pieces(self, rendered: str) -> Iterator[tuple[str, list[int] | None]]:
        """A rendered text in pieces: one to be tokenized, or a stand-in with the tokens that it stands for."""
        for piece_number, piece in enumerate(self._stand_ins.split(rendered)):
            yield piece, self._literal[ord(piece) - _PRIVATE_USE] if piece_number % 2 and self._literal else None

    def text(self, text: str, *, inner: bool = True) -> str:
        """A text from outside with its stand-ins; inner tokens stay as they are without `inner`."""
        guarded = self._replaced(text, inner)
        if self._normalizer is not None and (normalized := self._normalizer.normalize_str(guarded)) != guarded:
            # The tokenizer looks for some added tokens in the normalized text: other characters may become one there.
            guarded_again = self._replaced(normalized, inner)
            # The text as it came, unless normalizing it makes a control token. Always to normalize would change what
            # a tool wrote, and the tokenizer does it anyway.
            return guarded if guarded_again == normalized else guarded_again
        return guarded

    def value(self, value: Json, *, inner: bool = True) -> Json:
        """JSON from outside; keys are guarded too."""
        if isinstance(value, str):
            return self.text(value, inner=inner)
        if isinstance(value, dict):
            items = cast("dict[str, Json]", value).items()
            return {self.text(name, inner=inner): self.value(item, inner=inner) for name, item in items}
        if isinstance(value, list):
            return [self.value(item, inner=inner) for item in cast("list[Json]", value)]
        return value

    def message(self, message: Message) -> Message:
        """A message in whose texts nothing is a control token; its images stay where they were."""
        inner, shown = message["role"] != "assistant", message.get("images", [])
        plain_fields = {name: value for name, value in message.items() if name not in ("images", "tool_calls")}
        guarded_message = cast("Message", self.value(plain_fields, inner=inner))
        if "tool_calls" in message:
            guarded_message["tool_calls"] = self.value(message["tool_calls"])
        if shown:
            borders = [0, *(image["at"] for image in shown), len(message["content"])]
            text_pieces = [self.text(message["content"][start:end], inner=inner) for start, end in pairwise(borders)]
            positions = list(accumulate(map(len, text_pieces)))
            guarded_message["content"] = "".join(text_pieces)
            guarded_message["images"] = [{**image, "at": place} for image, place in zip(shown, positions, strict=False)]
        return guarded_message

    def tools(self, tools: Sequence[Mapping[str, Json]]) -> Sequence[Mapping[str, Json]]:
        """Schemas of tools, whose descriptions a server elsewhere may have written."""
        # A quick look first, since schemas are the same for every turn and hardly ever hold such a token.
        schemas_text = dump([dict(tool) for tool in tools]) if tools else ""
        if self._normalizer is None and not any(token in schemas_text for token in self._tokens):
            return tools
        return [cast("Mapping[str, Json]", self.value(dict(tool))) for tool in tools]

    def _replaced(self, text: str, inner: bool) -> str:
        for token_number, token in enumerate(self._tokens):
            if token in text and (inner or not self._is_inner[token_number]):
                text = text.replace(token, chr(_PRIVATE_USE + token_number))
        return text


def encode_piece(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, added ones among them."""
    if not text:
        return []
    # Unlike `encode`, a batch lets the GIL go; the fast one leaves out offsets, which nobody asks for.
    (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return encoded.ids


def _is_control(token: str, written: str) -> bool:
    """Whether an added token that is not marked special is a control token."""
    if _ORDINARY.fullmatch(token) or not re.search(r"[^\W\d_]", token):  # words, blanks and mere punctuation
        return False
    return token in _DIALECTS or token in written or _MARKER.fullmatch(token) is not None


def _written_by(template: ChatTemplate) -> Iterator[str]:
    """Yield the texts that a template writes for a call and its answer: some put their tags together from pieces."""
    tool_answer = {"role": "tool", "content": "x", "name": "x", "tool_call_id": "call00000"}
    try:
        yield template.written_call
        yield template.render([*probe_call(), tool_answer], [PROBE])
    except ModelError:  # it knows no tools
        return


def _literals(tokenizer: Tokenizer, tokens: Sequence[str], inner: set[str]) -> list[list[int]]:
    """The ordinary tokens of each control token's text.

    The tokenizer spells out special tokens alone, so the inner ones are marked special in it. Nothing else changes by
    that, since `Renderer.decode` writes special tokens out."""
    inner_tokens = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content in inner]
    mark_special = cast("Callable[[list[AddedToken]], int]", tokenizer.add_special_tokens)  # pyright: ignore[reportUnknownMemberType]
    mark_special(
        [
            AddedToken(
                token.content,
                special=True,
                normalized=token.normalized,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
            )
            for token in inner_tokens
        ]
    )
    tokenizer.encode_special_tokens = True
    try:
        return [encode_piece(tokenizer, token) for token in tokens]
    # The flag is the tokenizer's, and all threads share it: it stands for the few calls at start alone, before the
    # renderer is handed out.
    finally:
        tokenizer.encode_special_tokens = False
