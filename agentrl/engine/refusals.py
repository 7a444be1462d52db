"""Refusals of a server: the codes and the words of its error body, and whether they mean that the conversation has
outgrown the model's context.

Servers agree on no field for that. OpenAI and those that follow it send the code "context_length_exceeded"; llama.cpp
sends the type "exceed_context_size_error"; vLLM, SGLang, TGI and most providers send status 400 or 422 with nothing but
a sentence. So fields are read first, and the sentences below only where no field decides. A body that matches none of
them is another refusal, which must never become a score of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

_CODE_FIELDS: Final = ("code", "type", "error_type", "reason")
_WORD_FIELDS: Final = ("message", "msg", "error", "detail", "raw", "error_message")
_NESTED_FIELDS: Final = ("error", "detail", "errors", "metadata", "innererror", "inner_error")  # never "input": an echo
_TOO_LARGE: Final = 413
# Some servers echo the whole request: the patterns are not run over megabytes of a conversation.
_MOST_WORDS: Final = 4_000

# Why words are matched at all, in a project whose errors carry data: these are other people's servers, and the case
# decides between "the policy has filled its context", which is scored, and "the server refused", which is not (law
# 3). A sentence counts only where no code decides, and `test_a_refusal_for_length_is_told_from_every_other` has the
# bodies of real servers on both sides.
_CONTEXT_CODE: Final = re.compile(
    r"context_?(?:length|window|size|limit)_?\w*exceed|exceed\w*_context|context_?(?:full|overflow)"
    r"|(?:prompt|input|request)_?too_?(?:long|large)"
)
_CONTEXT_WORDS: Final = re.compile(
    r"maximum (?:allowed )?(?:context|model|sequence|prompt|input) (?:length|window|size)"
    r"|context ?(?:length|window|size|limit) ?(?:of|is|was|has been|exceed|overflow)"
    r"|(?:exceed|longer than|overflow|larger than|beyond|outside)[^.]{0,80}context"
    r"|(?:prompt|input|conversation|context|messages|request) (?:is |are |was |were )?too long"
    r"|input token count[^.]{0,40}exceed"
    r"|too many (?:input |prompt )?tokens"
    r"|number of (?:input |prompt )?tokens[^.]{0,60}(?:in the prompt )?(?:cannot|can't|must not|may not) exceed"
    r"|`?inputs`?[^.]{0,60}must (?:be <=|have less than)"
    r"|reduce the length of (?:the |your )?(?:messages|prompt|input|conversation)"
    r"|(?:leave|is|has) no room to generate"
    r"|^\W*too long\W*$",
    re.IGNORECASE,
)


def codes_of(document: Mapping[str, Any]) -> tuple[str, ...]:
    """The codes and types of an error body, in lower case with underscores. Numbers, which repeat the status, are left
    out."""
    return tuple(
        re.sub(r"[\s-]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", code_text)).lower()
        for fields in _errors(document)
        for code_field in _CODE_FIELDS
        # `code: "400"` says no more than the status.
        if isinstance(code_text := fields.get(code_field), str) and not code_text.isdigit()
    )


def words_of(document: Mapping[str, Any]) -> str:
    """The sentences of an error body. What it echoes of the request is left out."""
    sentences = (
        sentence
        for fields in _errors(document)
        for word_field in _WORD_FIELDS
        if isinstance(sentence := fields.get(word_field), str) and sentence
    )
    return "\n".join(sentences)[:_MOST_WORDS]


def is_context_full(status: int, codes: tuple[str, ...], words: str) -> bool:
    """Whether a refusal says that the conversation is too long for the model: by a code, by the status of a request
    that is too large, else by a known sentence."""
    if status == _TOO_LARGE or any(_CONTEXT_CODE.search(code) for code in codes):
        return True
    return _CONTEXT_WORDS.search(words) is not None


def _errors(document: Any, depth: int = 4) -> Iterator[Mapping[str, Any]]:
    """The objects of an error body that describe the error, the outermost first."""
    if isinstance(document, list):
        # FastAPI lists one entry for each invalid field; eight of them, at four levels, bound the work for a body
        # that somebody made.
        for list_entry in cast("list[Any]", document)[:8]:
            yield from _errors(list_entry, depth)
    if not isinstance(document, Mapping) or depth == 0:
        return
    fields = cast("Mapping[str, Any]", document)
    yield fields
    for nested_field in _NESTED_FIELDS:
        yield from _errors(fields.get(nested_field), depth - 1)
