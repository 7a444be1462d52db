"""Tools that a model may call, ready to be handed to a `ToolEnv` (`tools=` or `add_tool`).

Each satisfies `agentrl.protocols.Tool`. Those that execute something take a `Sandbox`; `fetch` and MCP servers outside
of a box run on the host. Registered under the entry points `agentrl.tools`; knows nothing of rollouts or training.

    shell    python    files (list_files, read_file, write_file, replace_text, apply_patch)    search
    fetch    mcp       calculator                                                   editing (for code repair)
"""
