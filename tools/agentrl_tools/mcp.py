"""Tools of an MCP server (Model Context Protocol), over stdio or streamable HTTP, through the official package.

    server = McpServer(command=["my-server"], sandbox=box)      # or command=[...] on the host, or url="http://..."
    tools = await server.open()                                 # each is a protocols.Tool
    ...
    await server.aclose()                                       # the server's processes die here, at the latest

The connection lives in a trio system task of its own, so that it may be opened in one task and closed in another, as
an environment's `setup` and `teardown` are. A server in a sandbox dies with its box, one on the host with this process
(all that it started, too: a janitor sees to it).
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, cast

import trio

from agentrl.env.limits import positive_seconds
from agentrl.env.tools.tools import argument_check, clean_text
from agentrl.errors import InfrastructureError, ToolError, UsageError, boundary
from agentrl.host.janitor import owned_folder
from agentrl.protocols import Sandbox, ToolResult
from agentrl.records import Json
from agentrl_tools.base import OUTPUT_BYTES, text_result

_LINE_BYTES: Final = 8 << 20
_SMALL_LINE: Final = 64 << 10  # bytes that take a moment to parse
_MOST_PARTS: Final = 1_000  # of a result: the package makes an object of each in the loop
_MOST_VALUES: Final = 20_000  # of a structured result, which may be checked against a schema in the loop
_WHY: Final = 300  # characters of what is wrong with an answer
_WAITING_MESSAGES: Final = 16  # of a server in a box, which the policy may have made its own

logging.getLogger("mcp").addHandler(logging.NullHandler())  # else each line that is no message is a traceback on stderr


class McpServer:
    """One server of an episode. Exactly one of `command` and `url`; `sandbox` puts the command into a box."""

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        url: str = "",
        sandbox: Sandbox | None = None,
        env: Mapping[str, str] | None = None,
        start_s: float = 30.0,
        call_s: float = 30.0,
        output_bytes: int = OUTPUT_BYTES,
    ) -> None:
        """`start_s` bounds the hand-shake and the listing of tools, `call_s` each call (seconds)."""
        if isinstance(command, str):
            raise UsageError(f"command = {command!r}: give a list of the program and its arguments")
        if bool(command) == bool(url):
            raise UsageError("McpServer needs either command=[...] or url='...'")
        self._command, self._url, self._sandbox, self._env = list(command), url, sandbox, dict(env or {})
        self._start_s, self.call_s = positive_seconds("start_s", start_s), positive_seconds("call_s", call_s)
        self.output_bytes = output_bytes
        self._client: Any = None
        self._failure: BaseException | None = None
        self._started = False
        self._scope = trio.CancelScope()
        self._ready, self._gone = trio.Event(), trio.Event()

    @property
    def _name(self) -> str:
        return self._url or self._command[0]

    async def open(self) -> list[McpTool]:
        """Start and shake hands: the server's tools. Raises InfrastructureError if it does not answer."""
        trio.lowlevel.spawn_system_task(self._live)
        self._started = True
        try:
            with trio.move_on_after(self._start_s):
                await self._ready.wait()
                if self._client is not None:
                    with boundary(InfrastructureError, f"MCP server {self._name!r} does not list its tools:"):
                        return await self._listed()
        except BaseException:
            await self.aclose()
            raise
        await self.aclose()
        failure_reason = self._failure or f"no answer within {self._start_s:g} s"
        raise InfrastructureError(f"MCP server {self._name!r} does not start: {failure_reason}")

    async def _listed(self) -> list[McpTool]:
        all_tools: list[McpTool] = []
        cursor: str | None = None
        while True:
            tool_page = await self._client.list_tools(cursor=cursor)
            all_tools += [
                McpTool(self, listed_tool.name, listed_tool.description or "", listed_tool.input_schema)
                for listed_tool in tool_page.tools
            ]
            cursor = tool_page.next_cursor
            if not cursor:
                return all_tools

    async def aclose(self) -> None:
        """End the connection and the server's processes. Idempotent."""
        self._scope.cancel()
        if self._started:
            with trio.CancelScope(shield=True):
                await self._gone.wait()

    async def ask(self, name: str, arguments: dict[str, Json]) -> Any:
        """Call a tool: the package's `CallToolResult`. Raises ToolError for a call that the server refuses or answers
        in no shape of the protocol, and if a server in a box is gone; InfrastructureError if one elsewhere is gone."""
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        mcp_client = self._client
        if mcp_client is None:
            raise self._lost(f"{self._failure or 'it was closed'}")
        call_result: Any = None
        with trio.move_on_after(self.call_s) as deadline:
            try:
                call_result = await mcp_client.call_tool(name, arguments)
            except MCPError as error:
                if error.code == CONNECTION_CLOSED:
                    raise self._lost(f"it ended during {name}") from error
                raise ToolError(f"{name}: {error}") from error
            except (ValueError, RuntimeError) as error:  # the package's, for an answer that fits no schema
                raise ToolError(f"{name}: the server's answer cannot be read: {str(error)[:_WHY]}") from error
        if deadline.cancelled_caught:
            raise ToolError(f"{name} was ended after {self.call_s:g} s")
        return call_result

    def _lost(self, why: str) -> InfrastructureError | ToolError:
        """A server in a box may have been ended by the policy; any other is the host's affair."""
        error_class = InfrastructureError if self._sandbox is None else ToolError
        return error_class(f"MCP server {self._name!r} is gone: {why}")

    async def _live(self) -> None:
        """Body of the system task: holds the connection open; never raises."""
        try:
            with self._scope:
                from mcp import Client

                async with AsyncExitStack() as exit_stack:
                    owner_mark: Mapping[str, str] = {}
                    if self._command and self._sandbox is None:
                        owner_mark = (await exit_stack.enter_async_context(owned_folder())).mark
                    self._client = await exit_stack.enter_async_context(Client(self._target(owner_mark)))
                    self._ready.set()
                    await trio.sleep_forever()
        except Exception as error:
            self._failure = _innermost(error)
        finally:
            self._client = None
            self._ready.set()
            self._gone.set()

    def _target(self, mark: Mapping[str, str]) -> Any:
        """Open what the package's client speaks to. `mark` is for the environment of a command of the host."""
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        if self._url:
            return self._url
        if self._sandbox is not None:
            return _box_transport(self._sandbox, self._command, self._env)
        program, *arguments = self._command
        return stdio_client(StdioServerParameters(command=program, args=arguments, env={**self._env, **mark}))


class McpTool:
    """One tool of a server."""

    parallel = False

    def __init__(self, server: McpServer, name: str, description: str, parameters: Mapping[str, Json]) -> None:
        self.name = name
        self.timeout_s = server.call_s + 5.0
        self._server = server
        self._schema = {"name": name, "description": clean_text(description), "parameters": dict(parameters)}
        self._check = argument_check(self._schema)

    @property
    def schema(self) -> Mapping[str, Json]:
        return self._schema

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError, InfrastructureError if the server is gone."""
        call_result = await self._server.ask(self.name, self._check(arguments))
        text_parts = [_part(content_block) for content_block in call_result.content]
        if not text_parts and call_result.structured_content is not None:
            text_parts = [json.dumps(call_result.structured_content, ensure_ascii=False)]
        result_text = clean_text("\n".join(text_parts)) or "[no output]"
        return text_result(result_text, self._server.output_bytes, is_error=bool(call_result.is_error))


def _part(block: Any) -> str:
    """A block of a result as text; what is not text is named."""
    block_text = getattr(block, "text", None)
    if isinstance(block_text, str):
        return block_text
    mime_or_uri = getattr(block, "mime_type", None) or getattr(block, "uri", None) or ""
    return f"[{getattr(block, 'type', 'content')} {mime_or_uri}]".replace(" ]", "]")


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _parsed(line: bytes) -> Any:
    """A line of a server as the package's message, or as the error why it is none. What a result has beyond the bounds
    is left out, and named in it."""
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    try:
        server_message: Any = jsonrpc_message_adapter.validate_json(line)
    except ValueError as error:
        return error
    call_result: Any = getattr(server_message, "result", None)
    if isinstance(call_result, dict):
        result_fields = cast("dict[str, Any]", call_result)
        content_parts: Any = result_fields.get("content")
        if (
            isinstance(content_parts, list)
            and (excess_count := len(cast("list[Any]", content_parts)) - _MOST_PARTS) > 0
        ):
            excess_note = {"type": "text", "text": f"[{excess_count} more parts are left out]"}
            result_fields["content"] = [*cast("list[Any]", content_parts)[:_MOST_PARTS], excess_note]
        if not _has_at_most(_MOST_VALUES, result_fields.get("structuredContent")):
            result_fields["structuredContent"] = {"left_out": f"a result of more than {_MOST_VALUES} values"}
    return SessionMessage(server_message)


def _has_at_most(most: int, value: Any) -> bool:
    """Whether a JSON value has `most` values within it at most. Stops at the first one beyond."""
    remaining_values, value_count = [value], 0
    while remaining_values:
        inner_value: Any = remaining_values.pop()
        value_count += 1
        if isinstance(inner_value, dict):
            remaining_values += cast("dict[str, Any]", inner_value).values()
        elif isinstance(inner_value, list):
            remaining_values += cast("list[Any]", inner_value)
        if value_count + len(remaining_values) > most:
            return False
    return True


@asynccontextmanager
async def _box_transport(sandbox: Sandbox, command: Sequence[str], env: Mapping[str, str]) -> AsyncGenerator[Any]:
    """The package's streams over stdin and stdout of a process in a box: one JSON-RPC message a line."""
    import anyio

    box_process = await sandbox.start(command, env=env)
    to_client, from_server = anyio.create_memory_object_stream[Any](_WAITING_MESSAGES)
    to_server, from_client = anyio.create_memory_object_stream[Any](0)

    async def read() -> None:
        unread_bytes = bytearray()
        async with to_client:
            while output_chunk := await box_process.receive():
                unread_bytes += output_chunk
                if len(unread_bytes) > _LINE_BYTES:
                    raise ValueError(f"it wrote a line of more than {_LINE_BYTES} bytes")
                if b"\n" not in output_chunk:
                    continue
                *whole_lines, unread_bytes = unread_bytes.split(b"\n")
                for whole_line in filter(None, whole_lines):
                    # The policy may write what it likes: a long line is parsed beside the loop.
                    if len(whole_line) <= _SMALL_LINE:
                        server_message = _parsed(bytes(whole_line))
                    else:
                        server_message = await trio.to_thread.run_sync(_parsed, bytes(whole_line))
                    await to_client.send(server_message)

    async def write() -> None:
        async with from_client:
            async for client_message in from_client:
                message_json = client_message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await box_process.send(message_json.encode() + b"\n")

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(write)
            yield from_server, to_server
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await box_process.kill()
