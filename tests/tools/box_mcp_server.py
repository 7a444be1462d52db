"""The least of an MCP server over stdio, standard library only: what runs in a box that has no packages."""

import json
import os
import sys
from pathlib import Path

TOOL = {"name": "where", "description": "Folder.", "inputSchema": {"type": "object", "properties": {}}}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        info = {"name": "least", "version": "1"}
        answer["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif asked["method"] == "tools/list":
        answer["result"] = {"tools": [TOOL]}
    elif asked["method"] == "tools/call":
        answer["result"] = {"content": [{"type": "text", "text": f"{Path.cwd()} {os.getuid()}"}]}
    else:
        answer["error"] = {"code": -32601, "message": "unknown method"}
    print(json.dumps(answer), flush=True)
