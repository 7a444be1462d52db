"""The tools share this: schemas, and how a command's result becomes text that a model reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agentrl.env.tools.tool_results import cut, readable
from agentrl.env.tools.tools import argument_check
from agentrl.protocols import ExecResult, ToolResult
from agentrl.records import Json

OUTPUT_BYTES: Final = 16_384
"""Default bound of what a tool tells the model."""


class SchemaChecked:
    """Base of the tools here: a name, a schema, and arguments that are checked against it before anything is done."""

    parallel = False

    def __init__(self, name: str, description: str, parameters: Mapping[str, Json], *required: str) -> None:
        self.name = name
        self._schema = {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": dict(parameters),
                "required": list(required),
                "additionalProperties": False,
            },
        }
        self._check = argument_check(self._schema)

    @property
    def schema(self) -> Mapping[str, Json]:
        return self._schema

    def checked(self, arguments: Mapping[str, Json]) -> dict[str, Json]:
        """The arguments, whole numbers as integers. Raises ToolArgumentError where they do not fit the schema."""
        return self._check(arguments)


def text_result(text: str, limit: int, *, is_error: bool = False, truncated: bool = False) -> ToolResult:
    """Text cut at `limit` bytes, and flagged if it was or if `truncated` says that some is missing already."""
    content, was_cut = cut(text, limit)
    if truncated and not was_cut:
        content += "\n[output cut]"
    return ToolResult(content=content, is_error=is_error, truncated=was_cut or truncated)


def command_result(result: ExecResult, limit: int, timeout_s: float) -> ToolResult:
    """How a command ended, as a shell would show it: its output, then what went wrong. `data` holds the parts."""
    text_parts = [readable(result.stdout)]
    if result.stderr:
        text_parts.append(readable(result.stderr))
    if result.timed_out:
        text_parts.append(f"[ended after {timeout_s:g} s]")
    elif result.oom:
        text_parts.append("[killed: out of memory]")
    elif result.exit_code != 0:
        text_parts.append(f"[exit code {result.exit_code}]")
    whole_text = "\n".join(text_part.rstrip("\n") for text_part in text_parts if text_part)
    cut_result = text_result(whole_text or "[no output]", limit, truncated=result.truncated)
    has_failed = result.exit_code != 0 or result.timed_out
    exit_data = {"exit_code": result.exit_code, "timed_out": result.timed_out, "oom": result.oom}
    return ToolResult(content=cut_result.content, is_error=has_failed, truncated=cut_result.truncated, data=exit_data)
