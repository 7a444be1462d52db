"""The content of a chat model's answer: text, null, or a list of parts with thoughts beside the text.

Servers of Mistral and proxies in front of Anthropic write lists. Knows the answer's side only; a message that an
environment or a data row writes is read in `agentrl.env.chat_messages`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from agentrl import notices

ANSWERS: Final = "answers of endpoints"
"""The boundary that notices name."""

_TEXT_PARTS: Final = ("text", "output_text", "refusal")
_THOUGHT_PARTS: Final = ("thinking", "redacted_thinking", "reasoning")


def text_of_answer(content: Any) -> tuple[str, bool]:
    """The text of a content, and whether it holds thoughts beside the text. A part of an unknown type is named and left
    out."""
    if content is None or isinstance(content, str):
        return content or "", False
    if not isinstance(content, list):
        # An answer of a shape that nobody knows is still the policy's action. Refusing it would turn a success into a
        # failed episode; an empty text would drop it without a word (law 8). So its JSON is read, and a notice counts
        # it.
        notice = f"a content of kind {type(content).__name__!r} is no text: it is read as its JSON"
        notices.note(ANSWERS, notice, by_policy=True)
        return json.dumps(content), False
    texts, has_thoughts = list[str](), False
    for part in cast("list[Any]", content):
        part_fields = cast("Mapping[str, Any]", part) if isinstance(part, Mapping) else {"type": "text", "text": part}
        part_type = part_fields.get("type", "text")
        part_text = part_fields.get("refusal" if part_type == "refusal" else "text")
        if part_type in _THOUGHT_PARTS:
            has_thoughts = True
        elif part_type in _TEXT_PARTS and isinstance(part_text, str):
            texts.append(part_text)
        else:
            # The name of the type comes from outside: it is cut, so that it cannot fill the log or make a notice of
            # its own each time.
            notices.note(ANSWERS, f"a part of type {str(part_type)[:60]!r} is no text: it is left out", by_policy=True)
    return "".join(texts), has_thoughts
