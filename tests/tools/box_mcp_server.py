"""The least of an MCP server over stdio, standard library only: what runs in a box that has no packages."""

import json
import os
import sys
from pathlib import Path

SHAPE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"name": "where", "description": "Folder.", "inputSchema": {"type": "object", "properties": {}}}
WRONG = {
    "no_list": {"content": "text"},
    "no_content": {"else": 1},
    "no_block": {"content": [{"type": "unheard"}]},
    "unshaped": {"content": [], "structuredContent": {"a": "x"}},
    "unstructured": {"content": []},
    "asks_back": {"resultType": "input_required", "inputRequests": {"x": 1}},
}
TOOLS = [TOOL, *(TOOL | {"name": name} | ({"outputSchema": SHAPE} if name[:2] == "un" else {}) for name in WRONG)]

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
        answer["result"] = {"tools": TOOLS}
    elif asked["method"] == "tools/call":
        where = {"content": [{"type": "text", "text": f"{Path.cwd()} {os.getuid()}"}]}
        answer["result"] = WRONG.get(asked["params"]["name"], where)
    else:
        answer["error"] = {"code": -32601, "message": "unknown method"}
    print(json.dumps(answer), flush=True)
