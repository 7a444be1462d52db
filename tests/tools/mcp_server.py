"""An MCP server for the tests, made with the official package: `python mcp_server.py [PORT]` (stdio without a port)."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail on purpose."""
    raise ValueError("on purpose")


@server.tool()
def pid() -> str:
    """Process id of the server."""
    return str(os.getpid())


@server.tool()
def hang() -> str:
    """Take very long."""
    time.sleep(60)
    return "late"


@server.tool()
def leave() -> str:
    """End the server in the middle of a call."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
