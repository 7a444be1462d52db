"""The task and the program of the cases, as verifiers loads them. Imported by `verifiers_rollouts` alone."""

# pyright: reportCallIssue=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
# (verifiers leaves parts of its signatures untyped)

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Final

import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

from agentrl.conformance.adapters.adapter import Setup
from agentrl.conformance.scenario import NAME, TOOL, Scenario, task_text

CASE: ContextVar[tuple[Scenario, Setup]] = ContextVar("case")
"""The case that is played in this context."""

_REQUEST_S: Final = 100.0
_MOST_TRIES: Final = 20
_SCHEMA: Final = {
    "name": TOOL,
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}


class LookTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Its reward is the grader's."""

    @vf.reward
    async def graded(self, trace: Any) -> float:
        last_text = trace.branches[-1].messages[-1].content if trace.branches else None
        name_match = NAME.search(last_text or "")
        return await asyncio.to_thread(CASE.get()[1].grade, name_match[0] if name_match else "none")


class LookTaskset(vf.Taskset[LookTask, vf.TasksetConfig]):
    """One task."""

    def load(self) -> Iterator[LookTask]:
        yield LookTask(vf.TaskData(name="g0", prompt=task_text(0)), self.config.task)


class LookHarnessConfig(vf.HarnessConfig):
    """No settings."""


class LookHarness(vf.Harness[LookHarnessConfig]):
    """Asks the model until it calls no tool."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        scenario, _ = CASE.get()
        messages: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        while True:
            request_body = {
                "model": ctx.model,
                "messages": messages,
                "tools": [{"type": "function", "function": _SCHEMA}],
            }
            model_message = await _answer(
                f"{endpoint}/chat/completions", secret, request_body, scenario.client_patience_s
            )
            messages.append(model_message)
            if not model_message.get("tool_calls"):
                return ProgramResult(0, "", "")
            for tool_call in model_message["tool_calls"]:
                messages.append({"role": "tool", "tool_call_id": tool_call["id"], "content": scenario.tool_text})


async def _answer(url: str, secret: str, body: dict[str, Any], patience_s: float | None) -> dict[str, Any]:
    """The model's message. A client with patience gives a request up after so many seconds, and sends it again."""
    for _ in range(_MOST_TRIES):
        try:
            return await asyncio.to_thread(_completion, url, secret, body, patience_s or _REQUEST_S)
        except TimeoutError:
            if patience_s is None:
                raise
    raise TimeoutError(f"no answer after {_MOST_TRIES} tries")


def _completion(url: str, secret: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    request_headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
    model_request = urllib.request.Request(url, json.dumps(body).encode(), request_headers)
    with urllib.request.urlopen(model_request, timeout=timeout_s) as model_response:
        return json.load(model_response)["choices"][0]["message"]


__all__ = ["LookHarness", "LookTaskset"]
