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
        root = checked.get("path") or "."
        options = [
            "-nHIE",
            "-m",
            str(self._matches),
            *(["-i"] if checked.get("ignore_case") else []),
            "-e",
            checked["pattern"],
        ]
        command = ["grep", "-r", *options, "--", root]
        if "glob" in checked:  # and not --include, which busybox lacks
            root = root if root.startswith("/") else f"./{root}"
            command = ["find", root, "-type", "f", "-name", checked["glob"], "-exec", "grep", *options, "--", "{}", "+"]
        exec_result = await self._sandbox.exec(command, timeout_s=self.timeout_s)
        if exec_result.timed_out:
            raise ToolError(f"the search was ended after {self.timeout_s:g} s: narrow it")
        complaint = readable(exec_result.stderr).strip()  # find ends with 1 also where grep has found nothing
        if not exec_result.stdout and (exec_result.exit_code > 1 or (exec_result.exit_code and complaint)):
            raise ToolError(complaint or f"grep ended with {exec_result.exit_code}")
        match_lines = readable(exec_result.stdout).splitlines()
        # More lines than bytes of output are never shown.
        match_text = "\n".join(_short(match_line) for match_line in match_lines[: self._output_bytes])
        has_more = exec_result.truncated or len(match_lines) > self._output_bytes
        return text_result(match_text or "no match", self._output_bytes, truncated=has_more)


def _short(line: str) -> str:
    while line.startswith("./"):
        line = line[2:]
    return line
