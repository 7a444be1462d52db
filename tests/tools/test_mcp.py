"""MCP servers over stdio, streamable HTTP and in a box: their tools work, and they die with the episode."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import cast

import pytest
import trio

from agentrl.errors import InfrastructureError, ToolArgumentError, ToolError, UsageError
from agentrl.host.ports import free_port
from agentrl.protocols import Sandbox
from agentrl_tools.mcp import McpServer, McpTool, _parsed
from tests.parts.kill_sweep import sweep

from .floods import Floods

pytest.importorskip("mcp")

HERE = Path(__file__).parent
STDIO = [sys.executable, str(HERE / "mcp_server.py")]
START_S = 300.0  # the package takes its time on a busy machine


@pytest.fixture
async def server() -> AsyncGenerator[McpServer]:
    server = McpServer(command=STDIO, start_s=START_S)
    yield server
    await server.aclose()


def named(tools: list[McpTool]) -> dict[str, McpTool]:
    return {tool.name: tool for tool in tools}


@pytest.mark.medium
async def test_stdio_tools_have_schemas_and_answer(server: McpServer) -> None:
    tools = named(await server.open())
    assert tools["add"].schema["description"] == "Add two numbers."
    assert tools["add"].schema["parameters"]["required"] == ["a", "b"]
    assert (await tools["add"].call({"a": 2, "b": 3})).content == "5"
    with pytest.raises(ToolArgumentError):
        await tools["add"].call({"a": "two"})
    result = await tools["fail"].call({})
    assert result.is_error and "fail" in result.content


@pytest.mark.medium
async def test_law_4_server_dies_with_the_episode(server: McpServer) -> None:
    tools = named(await server.open())
    pid = int((await tools["pid"].call({})).content)
    descriptor = os.pidfd_open(pid)
    try:
        await server.aclose()
        await server.aclose()
        with trio.fail_after(300):
            await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)
    with pytest.raises(InfrastructureError, match="gone"):
        await tools["add"].call({"a": 1, "b": 1})


EACH_CALL = """
import sys, trio
import mcp.client.stdio  # once, not in every fork
from agentrl.errors import InfrastructureError
from agentrl.host import janitor as owner
from tests.parts.kill_sweep import killed_after_each_call
from agentrl_tools.mcp import McpServer

owner.reap = lambda home: []  # nobody else cleans up here
deaf = f"setsid sleep {sys.argv[1]} & sleep {sys.argv[1]}"

async def main():
    try:
        await McpServer(command=["sh", "-c", deaf], start_s=0.5).open()
    except InfrastructureError:
        return
    raise AssertionError

for pid in killed_after_each_call(lambda: trio.run(main)):
    print(pid)
"""


@pytest.mark.medium
def test_law_4_server_dies_with_its_owner_at_every_instant() -> None:
    """Also one that does not mind the end of its stdin, and what it started in a session of its own."""
    marker = f"4326.{os.getpid()}"
    assert sweep(EACH_CALL, marker) >= 4


@pytest.mark.medium
async def test_call_that_takes_too_long_is_the_model_s_to_read() -> None:
    server = McpServer(command=STDIO, start_s=START_S, call_s=1.0)
    try:
        tools = named(await server.open())
        with pytest.raises(ToolError, match="ended after 1 s"):
            await tools["hang"].call({})
    finally:
        await server.aclose()


async def test_server_that_leaves_is_a_failure_of_the_host(server: McpServer) -> None:
    """Law 3: a trusted server outside of the box is infrastructure."""
    tools = named(await server.open())
    with pytest.raises(InfrastructureError, match="ended during leave"):
        await tools["leave"].call({})
    with pytest.raises(InfrastructureError):
        await tools["add"].call({"a": 1, "b": 1})


async def test_server_that_does_not_start_says_so() -> None:
    for command in (["no-such-server-program"], [sys.executable, "-c", "raise SystemExit(1)"]):
        with pytest.raises(InfrastructureError, match="does not start"):
            await McpServer(command=command, start_s=START_S).open()
    with pytest.raises(UsageError):
        McpServer()
    with pytest.raises(UsageError):
        McpServer(command=["x"], url="http://localhost")


@pytest.fixture
def http_server() -> Iterator[str]:
    port = free_port()
    with subprocess.Popen([*STDIO, str(port)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        for line in process.stderr:
            if "running on" in line:
                break
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


async def test_streamable_http(http_server: str) -> None:
    server = McpServer(url=http_server, start_s=START_S)
    try:
        tools = named(await server.open())
        assert (await tools["add"].call({"a": 20, "b": 22})).content == "42"
    finally:
        await server.aclose()


@pytest.mark.bubblewrap
async def test_server_in_a_box(box: Sandbox) -> None:
    await box.write("server.py", (HERE / "box_mcp_server.py").read_bytes())
    server = McpServer(command=["python3", "server.py"], sandbox=box, start_s=START_S)
    try:
        tool, *wrong = await server.open()
        assert (await tool.call({})).content == "/workspace 1000"
        for one in wrong:
            with pytest.raises(ToolError, match=f"^{one.name}: "):
                await one.call({})
        assert len(wrong) == 6 and not (await tool.call({})).is_error, "it goes on after what it should not have said"
        await box.close()
        with pytest.raises(ToolError, match="is gone"):
            await tool.call({})
    finally:
        await server.aclose()


async def test_what_a_server_in_a_box_writes_is_bounded() -> None:
    box = Floods()
    server = McpServer(command=["any"], sandbox=cast(Sandbox, box), start_s=START_S)
    with pytest.raises(InfrastructureError, match=r"'any' does not start: .*"):
        await server.open()
    assert (8 << 20) < box.written <= (8 << 20) + (1 << 16) and box.killed


def test_law_3_a_result_of_many_parts_reaches_the_loop_as_few() -> None:
    """Half a million empty parts fit into the bytes of a line, and each would cost the worker's loop an object."""
    parts = ",".join(['{"type":"text","text":""}'] * 3_000)
    values = ",".join(["{}"] * 30_000)
    line = f'{{"jsonrpc":"2.0","id":1,"result":{{"content":[{parts}],"structuredContent":{{"a":[{values}]}}}}}}'
    result = _parsed(line.encode()).message.result
    assert len(result["content"]) == 1_001
    assert result["content"][-1] == {"type": "text", "text": "[2000 more parts are left out]"}
    assert result["structuredContent"] == {"left_out": "a result of more than 20000 values"}
    few = b'{"jsonrpc":"2.0","id":1,"result":{"content":[],"structuredContent":{"a":[1,{"b":2}]}}}'
    assert _parsed(few).message.result["structuredContent"] == {"a": [1, {"b": 2}]}
    assert isinstance(_parsed(b"[1"), ValueError)


def test_settings_of_another_kind_are_named() -> None:
    with pytest.raises(UsageError, match=r"^command = 'server --fast': give a list of the program and its arguments$"):
        McpServer(command="server --fast")


@pytest.mark.bubblewrap
async def test_a_list_of_tools_that_is_none_is_a_server_that_does_not_start(box: Sandbox) -> None:
    program = (HERE / "box_mcp_server.py").read_text().replace('{"tools": TOOLS}', '{"tools": 1}')
    await box.write("server.py", program.encode())
    server = McpServer(command=["python3", "server.py"], sandbox=box, start_s=START_S)
    with pytest.raises(InfrastructureError, match="'python3' does not list its tools: ValidationError"):
        await server.open()
