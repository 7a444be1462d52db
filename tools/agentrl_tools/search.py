"""Search the files of a box for a regular expression, with `grep` inside the box: a slow pattern costs its own time."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.env.limits import positive_seconds
from agentrl.env.tools.tool_results import readable
from agentrl.errors import ToolError
from agentrl.protocols import Sandbox, ToolResult
from agentrl.records import Json
from agentrl_tools.base import OUTPUT_BYTES, SchemaChecked, text_result


class Search(SchemaChecked):
    """`search(pattern, path?, glob?, ignore_case?)`: matching lines as `file:line:text`."""

    parallel = True

    def __init__(
        self, sandbox: Sandbox, *, matches: int = 100, timeout_s: float = 20.0, output_bytes: int = OUTPUT_BYTES
    ) -> None:
        """At most `matches` lines of each file are shown."""
        parameters: dict[str, Json] = {
            "pattern": {"type": "string", "description": "extended regular expression", "minLength": 1},
            "path": {"type": "string", "description": "file or folder, by default all"},
            "glob": {"type": "string", "description": "only files whose name matches, like *.py"},
            "ignore_case": {"type": "boolean"},
        }
        super().__init__("search", "Search files for a regular expression.", parameters, "pattern")
        self._sandbox, self._matches = sandbox, matches
        self.timeout_s = positive_seconds("timeout_s", timeout_s)
        self._output_bytes = output_bytes

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError, SandboxError."""
        checked = self.checked(arguments)
        place = checked.get("path") or "."
        match = [
            "-nHIE",
            "-m",
            str(self._matches),
            *(["-i"] if checked.get("ignore_case") else []),
            "-e",
            checked["pattern"],
        ]
        command = ["grep", "-r", *match, "--", place]
        if "glob" in checked:  # and not --include, which busybox lacks
            place = place if place.startswith("/") else f"./{place}"
            command = ["find", place, "-type", "f", "-name", checked["glob"], "-exec", "grep", *match, "--", "{}", "+"]
        result = await self._sandbox.exec(command, timeout_s=self.timeout_s)
        if result.timed_out:
            raise ToolError(f"the search was ended after {self.timeout_s:g} s: narrow it")
        complaint = readable(result.stderr).strip()  # find ends with 1 also where grep has found nothing
        if not result.stdout and (result.exit_code > 1 or (result.exit_code and complaint)):
            raise ToolError(complaint or f"grep ended with {result.exit_code}")
        lines = readable(result.stdout).splitlines()
        text = "\n".join(_short(line) for line in lines[: self._output_bytes])  # more are never shown
        more = result.truncated or len(lines) > self._output_bytes
        return text_result(text or "no match", self._output_bytes, truncated=more)


def _short(line: str) -> str:
    while line.startswith("./"):
        line = line[2:]
    return line
