"""OpenEnv, both ways: a running OpenEnv server as an environment, and an environment of ours as such a server.

The client is OpenEnv's own; a session is one episode's WebSocket. A server that cannot be reached is a failure that
the policy did not cause; an action that the server finds invalid is one that it did.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import httpx

from agentrl.env.core import as_messages
from agentrl.env.limits import EpisodeLimits, positive_seconds
from agentrl.env.optional_imports import require
from agentrl.env.tool_env import ToolEnv
from agentrl.env.tools.tools import SchemaTool, as_result
from agentrl.errors import EnvError, StructuralParseError, ToolError, boundary
from agentrl.protocols import ToolResult
from agentrl.records import Json, Messages

CONNECT_S = 10.0


class OpenEnv(ToolEnv):
    """`agentrl/OpenEnv-v0`. A client of the OpenEnv server at `base_url`.

    The server's action schema becomes one tool, `step`. A server that offers MCP tools has those instead, and one
    whose action is a single text takes what the policy writes as it is. Rewards are process rewards; `done` ends the
    episode. `instructions` stand before the text of reset; reset options are passed on. Give `replayable=True`
    if that server repeats an episode exactly."""

    limits = EpisodeLimits(turns=100)
    graded = False  # step rewards are the whole signal

    def __init__(
        self,
        base_url: str,
        *,
        instructions: str = "",
        message_timeout_s: float = 60.0,
        replayable: bool = False,
        **settings: Any,
    ) -> None:
        self._package = require("openenv.core.generic_client", what="OpenEnv", package="openenv-core")
        self._timeout_s = positive_seconds("message_timeout_s", message_timeout_s)
        self._url, self.replayable = base_url, replayable
        self._instructions = instructions
        self._client: Any = None
        self._waiting = False
        schema = _action_schema(base_url)
        fields = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
        self._text_field = next(iter(fields)) if len(fields) == 1 and _is_text(fields) else ""
        if {"tool_name", "arguments"} <= fields.keys():
            tools = [self._mcp_tool(described) for described in _mcp_tools(self._package, base_url, message_timeout_s)]
        elif self._text_field:
            tools = []
        else:
            parameters = {**schema, "type": "object", "properties": fields}
            tools = [SchemaTool("step", schema.get("description", "Take one action."), parameters, self._step)]
        super().__init__(tools=tools, **settings)

    def setup(self, task: Mapping[str, Json]) -> None:
        self._client = self._package.GenericEnvClient(
            self._url, connect_timeout_s=CONNECT_S, message_timeout_s=self._timeout_s
        )
        self._query("connect", self._client.connect)
        self._waiting = False

    def prompt(self, task: Mapping[str, Json]) -> Messages:
        seed = int(self.np_random.integers(2**31))
        result = self._query("reset", functools.partial(self._client.reset, seed=seed, **task))
        shown = _shown(result.observation)
        opening = (as_messages(part) for part in (self._instructions, shown) if part)
        return tuple(message for messages in opening for message in messages)

    def on_text(self, text: str) -> str | Messages:
        if not self._text_field:
            raise StructuralParseError("no tool call found; call " + ", ".join(s["name"] for s in self.schemas))
        return self._answer({self._text_field: text})

    def teardown(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _step(self, arguments: Mapping[str, Json]) -> ToolResult:
        shown = self._answer(arguments)
        return as_result(shown if isinstance(shown, str) else "\n".join(message["content"] for message in shown))

    def _answer(self, action: Mapping[str, Json]) -> str | Messages:
        if self._waiting:  # a call that was ended leaves its answer to the next one
            self.finish()
            raise ToolError("an earlier action is not done: the episode is over")
        # Left set by no one but a call that still waits: a call that ran past its deadline goes on in its thread, and
        # takes the answer to the next action as its own.
        self._waiting = True
        try:
            result = self._stepped(action)
        finally:
            self._waiting = False
        reward = float(result.reward or 0.0)
        # The policy's fault and not the server's: it may have found the action that divides by zero, and an episode
        # that leaves the loss for that would be a way out of it.
        if not math.isfinite(reward):
            raise ToolError(f"the environment gives {reward} for this action")
        self.reward(reward)
        if result.done:
            self.finish()
        return _shown(result.observation)

    def _mcp_tool(self, described: Mapping[str, Any]) -> SchemaTool:
        name = str(described["name"])
        parameters = described.get("inputSchema") or described.get("input_schema") or {"type": "object"}

        def run(arguments: Mapping[str, Json]) -> str | Messages:
            return self._answer({"tool_name": name, "arguments": dict(arguments)})

        return SchemaTool(name, str(described.get("description") or name), parameters, run)

    def _stepped(self, action: Mapping[str, Json]) -> Any:
        """The server's answer to an action. Raises ToolError if the server refuses the action, fails at it or ends the
        session, since the policy could have caused that, and EnvError if no server is there any more."""
        client = self._client
        try:
            return client.step(dict(action))
        except RuntimeError as error:
            if "VALIDATION_ERROR" in str(error):
                raise ToolError("the environment does not understand this action") from error
            raise ToolError(f"the environment failed at this action: {error}") from error
        except Exception as error:
            # The question that tells two cases apart: a session that ends under an action may be the action's doing, as
            # long as the server still answers. If it does not, this raises EnvError.
            _fetched_schema(self._url)
            if client is self._client:  # else this call was left behind, and another episode runs
                self.finish()
            raise ToolError(f"the environment ended the session at this action: {error}") from error

    def _query(self, what: str, body: Callable[[], Any]) -> Any:
        """Ask the server for what no action is part of. Raises EnvError."""
        with boundary(EnvError, f"OpenEnv server {self._url}: {what}:"):
            return body()


def serve(make: Callable[[], Any], *, max_sessions: int = 64) -> Any:
    """An ASGI application that serves an environment of ours over OpenEnv's protocol; run it with uvicorn.

    An action is `{"text": …}`, what the policy wrote; an observation holds `messages` and `info`. Every session has
    an instance of its own, made by `make()`."""
    interfaces = require("openenv.core.env_server.interfaces", what="serving OpenEnv", package="openenv-core")
    types = require("openenv.core.env_server.types", what="serving OpenEnv", package="openenv-core")
    server = require("openenv.core.env_server.http_server", what="serving OpenEnv", package="openenv-core")

    class TextAction(types.Action):
        text: str

    class MessagesObservation(types.Observation):
        messages: list[dict[str, Any]]
        info: dict[str, Any]

    class Served(interfaces.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()  # pyright: ignore[reportUnknownMemberType]
            self._env, self._steps = make(), 0

        def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Any:
            observation, info = self._env.reset(seed=seed, options=options or None)
            self._steps = 0
            return MessagesObservation(messages=list(as_messages(observation)), info=info)

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            observation, reward, terminated, truncated, info = self._env.step(action.text)
            self._steps += 1
            return MessagesObservation(
                messages=list(as_messages(observation)), info=info, reward=float(reward), done=terminated or truncated
            )

        @property
        def state(self) -> Any:
            return types.State(step_count=self._steps)

        def close(self) -> None:
            self._env.close()

    return server.create_app(Served, TextAction, MessagesObservation, max_concurrent_envs=max_sessions)


@functools.lru_cache(maxsize=64)
def _action_schema(base_url: str) -> Mapping[str, Any]:
    return _fetched_schema(base_url)


def _fetched_schema(base_url: str) -> Mapping[str, Any]:
    """The schema of a server's actions. Raises EnvError if no server answers."""
    try:
        answer = httpx.get(f"{base_url.rstrip('/')}/schema", timeout=CONNECT_S)
        answer.raise_for_status()
        return answer.json()["action"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise EnvError(f"no OpenEnv server answers at {base_url}: {type(error).__name__}: {error}") from error


def _mcp_tools(package: Any, base_url: str, timeout_s: float) -> list[Mapping[str, Any]]:
    """Read a server's list of tools, by `tools/list`. Raises EnvError if it lists none."""
    with package.GenericEnvClient(base_url, connect_timeout_s=CONNECT_S, message_timeout_s=timeout_s) as client:
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        answer = client._send_and_receive({"type": "mcp", "data": request})["data"]
    if "result" not in answer:
        raise EnvError(f"OpenEnv server {base_url} lists no tools: {answer.get('error', {}).get('message')}")
    return answer["result"]["tools"]


def _is_text(fields: Mapping[str, Any]) -> bool:
    return all(field.get("type") == "string" for field in fields.values())


def _shown(observation: Mapping[str, Any]) -> str | Messages:
    """An observation as the model reads it: messages as they are, one text field alone, else JSON."""
    seen = {key: value for key, value in observation.items() if key not in ("done", "reward", "metadata")}
    if isinstance(seen.get("messages"), list):
        return as_messages(seen["messages"])
    if seen.get("error"):
        return f"error: {seen['error']}"
    if "tool_name" in seen:
        return _tool_text(seen.get("result"))
    if not seen:
        return ""
    if len(seen) == 1 and isinstance(text := next(iter(seen.values())), str):
        return text
    return json.dumps(seen, ensure_ascii=False)


def _tool_text(result: Any) -> str:
    """The texts of an MCP tool's result, or the result as JSON."""
    fields = cast("dict[str, Any]", result if isinstance(result, dict) else {})
    parts = cast("list[dict[str, Any]]", fields.get("content") or [])
    texts = [str(part["text"]) for part in parts if "text" in part]
    return "\n".join(texts) if texts else json.dumps(result, ensure_ascii=False)
