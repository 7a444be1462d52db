"""The part of an answer that a client may read before the answer is whole.

Owns which text that is: it has to be the beginning of the whole answer's, whatever tokens are still to come. Tool
calls, what may become one, and what may become a stop text are held back. Never knows requests, APIs or the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from agentrl.env.agent_programs.model_apis import Conversation
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.tool_format import ToolFormat
from agentrl.store import Partial

_MARKS: Final = "<[{`"
"""Characters with which a call or a tag begins, in each dialect that is known."""
_UNFINISHED: Final = "\ufffd"  # of a character some of whose bytes are still to come


class AnswerStream:
    """The text of one turn, from the tokens that are written. `decode` gives the text of tokens, `form` is the dialect
    of the policy's calls; a model that `thinks` streams nothing, since nobody knows before the end of its thoughts
    which text is one of them."""

    def __init__(self, decode: Callable[[Sequence[int]], str], form: ToolFormat, *, thinks: bool) -> None:
        self._decode, self._thinks, self._framed = decode, thinks, form.framing is not None
        self._thought_tags = [opening_tag for opening_tag, _ in form.thoughts]
        self._calls_are_marked = form.write(ToolCall("f", {"a": "b"})).lstrip()[:1] in _MARKS
        self._turn = -1
        self._ids: list[int] = []
        self._known, self._read = 0, 0  # tokens before the last piece, and up to its end
        self._text = ""

    def add(self, part: Partial) -> None:
        """Take tokens that are written."""
        if part.index != self._turn:
            self._turn, self._ids, self._text = part.index, [], ""
            self._known = self._read = 0
        if part.at != len(self._ids):  # what was written before is not known here: nothing more of this turn comes
            self._turn = -1
            return
        self._ids += part.token_ids
        # Decoded from the piece before the last on, and not from the start: a turn of n tokens would cost n² / 2 of
        # them. A piece before it is enough for tokenizers that write a blank in front of what is not the first.
        earlier = self._decode(self._ids[self._known : self._read])
        both = self._decode(self._ids[self._known :])
        if both.endswith(_UNFINISHED) or not both.startswith(earlier):
            return
        self._text += both[len(earlier) :]
        self._known, self._read = self._read, len(self._ids)

    def text(self, conversation: Conversation, turn: int) -> str:
        """The text of the answer to `conversation`, the turn of that index, that may be read."""
        if turn != self._turn:
            return ""
        safe_text = self._text
        if not conversation.is_raw:
            if self._thinks or self._may_be_thoughts(safe_text):
                return ""
            if conversation.tools and (not self._calls_are_marked or safe_text[:1].isspace()):
                return ""
            if conversation.tools or self._framed:
                safe_text = safe_text[: min((at for mark in _MARKS if (at := safe_text.find(mark)) >= 0), default=None)]
                safe_text = safe_text.rstrip()  # the text before a call ends without blanks
        return _before_stops(safe_text, [stop_text for stop_text in conversation.stops if stop_text])

    def _may_be_thoughts(self, text: str) -> bool:
        """Whether a text begins with thoughts, or may come to: a system message can ask for them, too, and then the
        chat template knows nothing of them."""
        head = text.lstrip()
        return any(head.startswith(tag) or tag.startswith(head) for tag in self._thought_tags)


def _before_stops(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop text, and without an end that may become one."""
    for stop_text in stops:
        text = text.partition(stop_text)[0]
    held_chars = max(
        (
            count
            for stop_text in stops
            for count in range(1, min(len(stop_text), len(text) + 1))
            if text.endswith(stop_text[:count])
        ),
        default=0,
    )
    return text[: len(text) - held_chars]
