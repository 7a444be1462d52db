"""A person plays the policy's part: prints what the model would read, takes what the model would write."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import trio

from agentrl import registry
from agentrl.env import as_async
from agentrl.errors import EnvError, InfrastructureError
from agentrl.protocols import AsyncEnv
from agentrl.records import Json, Messages
from agentrl.runtime.report import printable

_HELP = "a line is your action; `/TOOL key=value …` calls a tool; `/quit` ends"


def play(
    env_id: str, *, seed: int, kwargs: Mapping[str, Any], read: Callable[[str], str], write: Callable[[str], None]
) -> bool:
    """Play one episode; whether it ended in success. Raises UnknownIdError, EnvError."""
    return trio.run(_play, env_id, seed, dict(kwargs), read, write)


async def _play(
    env_id: str, seed: int, kwargs: dict[str, Any], read: Callable[[str], str], write: Callable[[str], None]
) -> bool:
    env: AsyncEnv = as_async(registry.resolve("environments", env_id)(**kwargs))
    try:
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
                break
            if line.strip() == "/quit":
                break
            try:
                action = action_of(line)
            except ValueError as error:
                write(f"({error})")
                continue
            messages, reward, terminated, truncated, info = await env.astep(action)
            total, over = total + reward, terminated or truncated
            if reward:
                write(f"(reward {reward:+.2f})")
        _show(messages, write)
        write(f"episode over: outcome {info.get('outcome')}, success {info.get('success')}, step rewards {total:+.2f}")
        return bool(info.get("success"))
    except InfrastructureError:
        raise
    except Exception as error:
        raise EnvError(f"{env_id} raised {type(error).__name__}: {error}") from error
    finally:
        await env.aclose()


def action_of(line: str) -> str:
    """A typed line as an action: `/tool key=value` becomes a Hermes tool call, `\\n` in text a new line.

    Raises ValueError for a call that is not of that form."""
    if not line.startswith("/"):
        return line.replace("\\n", "\n")
    name, *rest = shlex.split(line[1:])
    arguments: dict[str, Json] = {}
    for part in rest:
        key, sign, text = part.partition("=")
        if not sign:
            raise ValueError(f"{part!r} is not key=value")
        try:
            arguments[key] = json.loads(text)
        except json.JSONDecodeError:
            arguments[key] = text
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _signature(schema: Mapping[str, Json]) -> str:
    function = schema.get("function", schema)
    parameters = function.get("parameters", {}).get("properties", {})
    return f"/{function['name']} {' '.join(f'{key}=…' for key in parameters)}: {function.get('description', '')}"


def _show(messages: Messages, write: Callable[[str], None]) -> None:
    for message in messages:
        body = "\n".join(printable(line) for line in message["content"].splitlines())
        write(f"[{message['role']}]\n{body}")
