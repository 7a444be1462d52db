"""Tools to repair a text: replace a line, run the tests, submit. They work for one environment's episode at a time.

Owns: the text that is being edited and the tools' schemas and answers. Knows nothing of how tests run or of rewards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from agentrl.errors import ToolError
from agentrl.protocols import ToolResult
from agentrl.records import Json

_MAX_LINES: Final = 10_000
_MAX_BYTES: Final = 1 << 20


class TextLines:
    """A text as lines, counted from 1."""

    def __init__(self, text: str) -> None:
        self.load(text)

    def load(self, text: str) -> None:
        """Start over with `text`."""
        self._lines = text.split("\n")

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def replace(self, line: int, text: str) -> None:
        """Put `text` (one line, or several) where line `line` stands. Raises ToolError that says what to do."""
        if not 1 <= line <= len(self._lines):
            raise ToolError(f"there is no line {line}: give one from 1 to {len(self._lines)}")
        new_lines = text.split("\n")
        if len(self._lines) + len(new_lines) > _MAX_LINES or len(text.encode("utf-8", "replace")) > _MAX_BYTES:
            raise ToolError(f"the text grows past {_MAX_LINES} lines or {_MAX_BYTES} bytes: write less")
        self._lines[line - 1 : line] = new_lines


class ReplaceLine:
    """`replace_line(line, text)` on a document."""

    name = "replace_line"
    parallel = False

    def __init__(self, document: TextLines) -> None:
        self._document = document

    @property
    def schema(self) -> Mapping[str, Json]:
        return _schema(
            self.name,
            "Replace one line of the module.",
            line={"type": "integer", "description": "number of the line, as shown", "minimum": 1},
            text={"type": "string", "description": "the whole new line, with its indentation"},
        )

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        self._document.replace(arguments["line"], arguments["text"])
        return ToolResult(content="ok")


class RunTests:
    """`run_tests()`: the report of `run` on the text as it stands."""

    name = "run_tests"
    parallel = False

    def __init__(self, run: Callable[[], Awaitable[ToolResult]]) -> None:
        self._run = run

    @property
    def schema(self) -> Mapping[str, Json]:
        return _schema(self.name, "Run the visible tests on the module as it stands.")

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        return await self._run()


class Submit:
    """`submit()`: the work is done; `finish` ends the episode."""

    name = "submit"
    parallel = False

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    @property
    def schema(self) -> Mapping[str, Json]:
        return _schema(self.name, "Hand in the module as it stands and end the episode.")

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        self._finish()
        return ToolResult(content="submitted")


def _schema(name: str, description: str, **properties: Json) -> Mapping[str, Json]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"name": name, "description": description, "parameters": parameters}
