"""A person plays the policy: prints the model's input and takes typed text as the model's output."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import trio

from agentrl.env import as_async
from agentrl.env.gymnasium_wrappers import shown
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import format_of, get_format
from agentrl.errors import EnvError, PolicyFault, boundary
from agentrl.protocols import AsyncEnv
from agentrl.records import Json, Messages, StopReason
from agentrl.registration import make

_HELP = "a line is your action; `/TOOL key=value …` calls a tool; `/quit` ends"


def play(
    env_id: str, *, seed: int, kwargs: Mapping[str, Any], read: Callable[[str], str], write: Callable[[str], None]
) -> bool:
    """Play one episode. Returns whether it ended in success. Raises UsageError, InfrastructureError."""
    return trio.run(_play, env_id, seed, dict(kwargs), read, write)


async def _play(
    env_id: str, seed: int, kwargs: dict[str, Any], read: Callable[[str], str], write: Callable[[str], None]
) -> bool:
    with boundary(EnvError, f"{env_id} raised", place=True):
        env: AsyncEnv = as_async(make(env_id, **kwargs))
        try:
            return await _episode(env, seed, read, write)
        finally:
            await env.aclose()


async def _episode(env: AsyncEnv, seed: int, read: Callable[[str], str], write: Callable[[str], None]) -> bool:
    tool_format = format_of(env).name
    messages, info = await env.areset(seed=seed)
    write(f"({_HELP})")
    for schema in env.tool_schemas():
        write(f"tool {_signature(schema)}")
    total, over = 0.0, False
    while not over:
        _show(messages, write)
        try:
            line = read("> ")
        except EOFError:
            return False
        if line.strip() == "/quit":
            return False
        try:
            action = action_of(line, tool_format)
        except ValueError as error:
            write(f"({error})")
            continue
        try:
            messages, reward, terminated, truncated, info = await env.astep(action)
        except PolicyFault as fault:
            write(f"episode over: {StopReason.POLICY_FAULT.value} ({fault})")
            return False
        total, over = total + reward, terminated or truncated
        if reward:
            write(f"(reward {reward:+.2f})")
    _show(messages, write)
    write(f"episode over: outcome {info.get('outcome')}, success {info.get('success')}, step rewards {total:+.2f}")
    return bool(info.get("success"))


def action_of(line: str, tool_format: str = "hermes") -> str:
    """A typed line as an action: `/tool key=value` becomes a tool call of that format, `\\n` in text a new line.

    Raises ValueError for a call that is not of that form."""
    if not line.startswith("/"):
        return line.replace("\\n", "\n")
    name, *rest = shlex.split(line[1:]) or [""]
    if not name:
        raise ValueError("name a tool: /TOOL key=value")
    arguments: dict[str, Json] = {}
    for part in rest:
        key, sign, text = part.partition("=")
        if not sign:
            raise ValueError(f"{part!r} is not key=value")
        try:
            arguments[key] = json.loads(text)
        except json.JSONDecodeError:
            arguments[key] = text
    return get_format(tool_format).write(ToolCall(name, arguments))


def _signature(schema: Mapping[str, Json]) -> str:
    function = schema.get("function", schema)
    parameters = function.get("parameters", {}).get("properties", {})
    return f"/{function['name']} {' '.join(f'{key}=…' for key in parameters)}: {function.get('description', '')}"


def _show(messages: Messages, write: Callable[[str], None]) -> None:
    for message in messages:
        write(shown(message))
