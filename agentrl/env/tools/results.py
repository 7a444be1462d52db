"""The results of a turn's calls, and their text for the model. Knows neither tools nor episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agentrl.env.limits import Fault
from agentrl.env.tools.calls import Malformed, ToolCall, own_id
from agentrl.env.tools.tools import clean_text, cut
from agentrl.errors import ParseError, PolicyFault, StructuralParseError, ToolArgumentError, ToolTimeout
from agentrl.protocols import ToolResult
from agentrl.records import Message, Messages


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call of a turn and its result as the model reads it. `error` says why it failed, None if it did not."""

    call: ToolCall | Malformed
    result: ToolResult
    error: PolicyFault | None = None

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def fault(self) -> Fault | None:
        """The kind of parse failure, None for calls that reached their tool."""
        if isinstance(self.error, StructuralParseError):
            return "structural"
        return "content" if isinstance(self.error, ParseError | ToolArgumentError) else None


def failed(call: ToolCall | Malformed, error: PolicyFault, *, limit: int = 2_000) -> CallResult:
    """A call that went wrong, as the model is told of it."""
    content, was_cut = cut(clean_text(said(error)), limit)
    return CallResult(call, ToolResult(content=content, is_error=True, truncated=was_cut), error)


def said(error: PolicyFault) -> str:
    """An error as the model reads it: its kind, then its text."""
    for kind, name in _KINDS.items():
        if isinstance(error, kind):
            return f"{name}: {error}"
    return f"error: {error}"


_KINDS: Final[Mapping[type[PolicyFault], str]] = {
    StructuralParseError: "malformed call",
    ParseError: "invalid call",
    ToolArgumentError: "wrong arguments",
    ToolTimeout: "timeout",
}


def tool_messages(results: Sequence[CallResult], before: int) -> Messages:
    """One tool message per call, with the id that the model gave its call. Other ids count the episode's calls, of
    which there were `before`, and have the nine characters that Mistral wants."""
    return tuple(
        Message(
            role="tool",
            content=result.result.content,
            name=clean_text(result.name)[:100] or "unknown",
            tool_call_id=own_id(result.call) or f"call{before + index:05d}",
        )
        for index, result in enumerate(results)
    )
