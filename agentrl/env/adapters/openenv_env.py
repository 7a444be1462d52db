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
        action_schema = _action_schema(base_url)
        action_fields = {
            field_name: field_schema
            for field_name, field_schema in action_schema.get("properties", {}).items()
            if field_name != "metadata"
        }
        self._text_field = next(iter(action_fields)) if len(action_fields) == 1 and _is_text(action_fields) else ""
        if {"tool_name", "arguments"} <= action_fields.keys():
            server_tools = [
                self._mcp_tool(described) for described in _mcp_tools(self._package, base_url, message_timeout_s)
            ]
        elif self._text_field:
            server_tools = []
        else:
            parameters = {**action_schema, "type": "object", "properties": action_fields}
            server_tools = [
                SchemaTool("step", action_schema.get("description", "Take one action."), parameters, self._step)
            ]
        super().__init__(tools=server_tools, **settings)

    def setup(self, task: Mapping[str, Json]) -> None:
        self._client = self._package.GenericEnvClient(
            self._url, connect_timeout_s=CONNECT_S, message_timeout_s=self._timeout_s
        )
        self._query("connect", self._client.connect)
        self._waiting = False

    def prompt(self, task: Mapping[str, Json]) -> Messages:
        reset_seed = int(self.np_random.integers(2**31))
        reset_result = self._query("reset", functools.partial(self._client.reset, seed=reset_seed, **task))
        shown_observation = _shown(reset_result.observation)
        opening_parts = (
            as_messages(opening_part) for opening_part in (self._instructions, shown_observation) if opening_part
        )
        return tuple(message for messages in opening_parts for message in messages)

    def on_text(self, text: str) -> str | Messages:
        if not self._text_field:
            raise StructuralParseError(
                "no tool call found; call " + ", ".join(tool_schema["name"] for tool_schema in self.schemas)
            )
        return self._answer({self._text_field: text})

    def teardown(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _step(self, arguments: Mapping[str, Json]) -> ToolResult:
        shown_answer = self._answer(arguments)
        return as_result(
            shown_answer if isinstance(shown_answer, str) else "\n".join(message["content"] for message in shown_answer)
        )

    def _answer(self, action: Mapping[str, Json]) -> str | Messages:
        if self._waiting:  # a call that was ended leaves its answer to the next one
            self.finish()
            raise ToolError("an earlier action is not done: the episode is over")
        # Left set by no one but a call that still waits: a call that ran past its deadline goes on in its thread, and
        # takes the answer to the next action as its own.
        self._waiting = True
        try:
            step_result = self._stepped(action)
        finally:
            self._waiting = False
        reward = float(step_result.reward or 0.0)
        # The policy's fault and not the server's: it may have found the action that divides by zero, and an episode
        # that leaves the loss for that would be a way out of it.
        if not math.isfinite(reward):
            raise ToolError(f"the environment gives {reward} for this action")
        self.reward(reward)
        if step_result.done:
            self.finish()
        return _shown(step_result.observation)

    def _mcp_tool(self, described: Mapping[str, Any]) -> SchemaTool:
        tool_name = str(described["name"])
        parameters = described.get("inputSchema") or described.get("input_schema") or {"type": "object"}

        def run(arguments: Mapping[str, Json]) -> str | Messages:
            return self._answer({"tool_name": tool_name, "arguments": dict(arguments)})

        return SchemaTool(tool_name, str(described.get("description") or tool_name), parameters, run)

    def _stepped(self, action: Mapping[str, Json]) -> Any:
        """The server's answer to an action. Raises ToolError if the server refuses the action, fails at it or ends the
        session, since the policy could have caused that, and EnvError if no server is there any more."""
        own_client = self._client
        try:
            return own_client.step(dict(action))
        except RuntimeError as server_error:
            if "VALIDATION_ERROR" in str(server_error):
                raise ToolError("the environment does not understand this action") from server_error
            raise ToolError(f"the environment failed at this action: {server_error}") from server_error
        except Exception as server_error:
            # The question that tells two cases apart: a session that ends under an action may be the action's doing, as
            # long as the server still answers. If it does not, this raises EnvError.
            _fetched_schema(self._url)
            if own_client is self._client:  # else this call was left behind, and another episode runs
                self.finish()
            raise ToolError(f"the environment ended the session at this action: {server_error}") from server_error

    def _query(self, what: str, body: Callable[[], Any]) -> Any:
        """Ask the server for what no action is part of. Raises EnvError."""
        with boundary(EnvError, f"OpenEnv server {self._url}: {what}:"):
            return body()


def serve(make: Callable[[], Any], *, max_sessions: int = 64) -> Any:
    """An ASGI application that serves an environment of ours over OpenEnv's protocol; run it with uvicorn.

    An action is `{"text": …}`, what the policy wrote; an observation holds `messages` and `info`. Every session has
    an instance of its own, made by `make()`."""
    interfaces = require("openenv.core.env_server.interfaces", what="serving OpenEnv", package="openenv-core")
    server_types = require("openenv.core.env_server.types", what="serving OpenEnv", package="openenv-core")
    http_server = require("openenv.core.env_server.http_server", what="serving OpenEnv", package="openenv-core")

    class TextAction(server_types.Action):
        text: str

    class MessagesObservation(server_types.Observation):
        messages: list[dict[str, Any]]
        info: dict[str, Any]

    class Served(interfaces.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()  # pyright: ignore[reportUnknownMemberType]
            self._env, self._steps = make(), 0

        def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Any:
            observation, reset_info = self._env.reset(seed=seed, options=options or None)
            self._steps = 0
            return MessagesObservation(messages=list(as_messages(observation)), info=reset_info)

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            observation, reward, terminated, truncated, step_info = self._env.step(action.text)
            self._steps += 1
            return MessagesObservation(
                messages=list(as_messages(observation)),
                info=step_info,
                reward=float(reward),
                done=terminated or truncated,
            )

        @property
        def state(self) -> Any:
            return server_types.State(step_count=self._steps)

        def close(self) -> None:
            self._env.close()

    return http_server.create_app(Served, TextAction, MessagesObservation, max_concurrent_envs=max_sessions)


@functools.lru_cache(maxsize=64)
def _action_schema(base_url: str) -> Mapping[str, Any]:
    return _fetched_schema(base_url)


def _fetched_schema(base_url: str) -> Mapping[str, Any]:
    """The schema of a server's actions. Raises EnvError if no server answers."""
    try:
        http_answer = httpx.get(f"{base_url.rstrip('/')}/schema", timeout=CONNECT_S)
        http_answer.raise_for_status()
        return http_answer.json()["action"]
    except (httpx.HTTPError, ValueError, KeyError) as fetch_error:
        raise EnvError(
            f"no OpenEnv server answers at {base_url}: {type(fetch_error).__name__}: {fetch_error}"
        ) from fetch_error


def _mcp_tools(package: Any, base_url: str, timeout_s: float) -> list[Mapping[str, Any]]:
    """Read a server's list of tools, by `tools/list`. Raises EnvError if it lists none."""
    with package.GenericEnvClient(base_url, connect_timeout_s=CONNECT_S, message_timeout_s=timeout_s) as client:
        list_request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        mcp_answer = client._send_and_receive({"type": "mcp", "data": list_request})["data"]
    if "result" not in mcp_answer:
        raise EnvError(f"OpenEnv server {base_url} lists no tools: {mcp_answer.get('error', {}).get('message')}")
    return mcp_answer["result"]["tools"]


def _is_text(fields: Mapping[str, Any]) -> bool:
    return all(field_schema.get("type") == "string" for field_schema in fields.values())


def _shown(observation: Mapping[str, Any]) -> str | Messages:
    """An observation as the model reads it: messages as they are, one text field alone, else JSON."""
    shown_fields = {
        field_name: field_value
        for field_name, field_value in observation.items()
        if field_name not in ("done", "reward", "metadata")
    }
    if isinstance(shown_fields.get("messages"), list):
        return as_messages(shown_fields["messages"])
    if shown_fields.get("error"):
        return f"error: {shown_fields['error']}"
    if "tool_name" in shown_fields:
        return _tool_text(shown_fields.get("result"))
    if not shown_fields:
        return ""
    if len(shown_fields) == 1 and isinstance(only_text := next(iter(shown_fields.values())), str):
        return only_text
    return json.dumps(shown_fields, ensure_ascii=False)


def _tool_text(result: Any) -> str:
    """The texts of an MCP tool's result, or the result as JSON."""
    result_fields = cast("dict[str, Any]", result if isinstance(result, dict) else {})
    content_parts = cast("list[dict[str, Any]]", result_fields.get("content") or [])
    part_texts = [str(content_part["text"]) for content_part in content_parts if "text" in content_part]
    return "\n".join(part_texts) if part_texts else json.dumps(result, ensure_ascii=False)
