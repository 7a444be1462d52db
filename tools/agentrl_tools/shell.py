"""A shell in a box. Each call is a new shell; files stay, variables do not."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.env.limits import positive_seconds
from agentrl.protocols import Sandbox, ToolResult
from agentrl.records import Json
from agentrl_tools.base import OUTPUT_BYTES, SchemaChecked, command_result


class Shell(SchemaChecked):
    """`shell(command, timeout?)`. A failing or timed-out command is a result that the model reads."""

    def __init__(self, sandbox: Sandbox, *, timeout_s: float = 30.0, output_bytes: int = OUTPUT_BYTES) -> None:
        """`timeout_s` is default and upper bound of a command's seconds."""
        positive_seconds("timeout_s", timeout_s)
        timeout_schema: Json = {"type": "number", "description": "seconds", "exclusiveMinimum": 0, "maximum": timeout_s}
        command_schema: Json = {"type": "string", "description": "what `sh` runs, in the work folder"}
        super().__init__(
            "shell", "Run a shell command.", {"command": command_schema, "timeout": timeout_schema}, "command"
        )
        self._sandbox, self.timeout_s, self._output_bytes = sandbox, timeout_s + 10.0, output_bytes
        self._limit_s = timeout_s

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, SandboxError."""
        checked_arguments = self.checked(arguments)
        limit_s = float(checked_arguments.get("timeout", self._limit_s))
        exec_result = await self._sandbox.exec(["sh", "-c", checked_arguments["command"]], timeout_s=limit_s)
        return command_result(exec_result, self._output_bytes, limit_s)
