"""The tools of one environment by their names, each with the check of its arguments. Runs none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.tools import ArgumentCheck, argument_check, clean_text, function_schema
from agentrl.errors import ContentParseError, UsageError
from agentrl.protocols import Tool
from agentrl.records import Json

_PARTS: Final = ("name", "parallel", "schema", "call")  # of a `protocols.Tool`


class Toolbox:
    """The tools of `owner`, in the order in which they were added."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tools: dict[str, Tool] = {}
        self._checks: dict[str, ArgumentCheck] = {}

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def names(self) -> str:
        """The names of all tools, as a text."""
        return ", ".join(self._tools)

    @property
    def schemas(self) -> list[Mapping[str, Json]]:
        """The function schema (name, description, parameters) of every tool."""
        return [function_schema(own_tool.schema) for own_tool in self._tools.values()]

    def add(self, tool: Tool) -> None:
        """Add a tool. Raises UsageError for a value that is no tool, a taken name or an invalid schema."""
        if missing_parts := [tool_part for tool_part in _PARTS if not hasattr(tool, tool_part)]:
            raise UsageError(f"{tool!r} is no tool: it has no {' and no '.join(missing_parts)}")
        if (schema_name := function_schema(tool.schema).get("name")) != tool.name:
            raise UsageError(f"the tool {tool.name!r} is named {schema_name!r} in its schema: give both one name")
        if tool.name in self._tools:
            raise UsageError(f"{self._owner} has two tools named {tool.name!r}: rename one")
        self._checks[tool.name] = argument_check(tool.schema)
        self._tools[tool.name] = tool

    def remove(self, name: str) -> None:
        """Remove the tool `name`."""
        del self._tools[name], self._checks[name]

    def get(self, name: str) -> Tool | None:
        """The tool `name`; None if there is none."""
        return self._tools.get(name)

    def checked(self, call: ToolCall) -> tuple[Tool, ToolCall]:
        """The tool that a call names, and the call with arguments as the tool may take them. Raises ContentParseError
        for an unknown name, ToolArgumentError for arguments that do not fit."""
        called_tool = self._tools.get(call.name)
        if called_tool is None:
            raise ContentParseError(f"no tool named {clean_text(call.name)[:100]!r}; known: {self.names}")
        return called_tool, ToolCall(call.name, self._checks[call.name](call.arguments))
