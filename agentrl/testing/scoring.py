"""A server that scores without a model: answers `ScoringClient` from a script. For tests of code that asks a judge or a
reward model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from agentrl.records import Json


class FakeScoring(httpx.AsyncBaseTransport):
    """Pass it to `ScoringClient(transport=...)`. `script` has one entry per call, and the last one is repeated: a
    judge's points, a judge's text instead of a verdict, the name and the arguments of a tool that a judge with tools
    calls, or an httpx exception to raise. A reward model's `outputs` are the same in every call that does not fail.

    A request with messages of more than `longest` characters is refused, as a model refuses what its context cannot
    hold; it takes no entry of the script. `requests` records all requests as (path, body)."""

    def __init__(
        self,
        *script: int | str | tuple[str, Mapping[str, Json]] | httpx.TransportError,
        outputs: Sequence[float] = (0.0,),
        longest: int | None = None,
    ) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._script, self._outputs, self._longest = script or (0,), list(outputs), longest
        self._answered = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The next answer of the script."""
        request_body: dict[str, Any] = json.loads(await request.aread())
        self.requests.append((request.url.path, request_body))
        character_count = sum(len(message["content"]) for message in request_body.get("messages", ()))
        if self._longest is not None and character_count > self._longest:
            problem = (
                f"This model's maximum context length is {self._longest} characters, and there are {character_count}"
            )
            return _answer({"error": {"message": problem, "code": 400}}, 400)
        entry = self._script[min(self._answered, len(self._script) - 1)]
        self._answered += 1
        if isinstance(entry, httpx.TransportError):
            raise entry
        if request.url.path == "/classify":
            return _answer({"data": [{"index": 0, "probs": self._outputs, "num_classes": len(self._outputs)}]})
        message: dict[str, Json] = {"role": "assistant", "content": entry}
        if not isinstance(entry, str) and (tools := request_body.get("tools")):
            name, arguments = ("verdict", _tool_verdict(tools, entry)) if isinstance(entry, int) else entry
            function: Json = {"name": name, "arguments": json.dumps(arguments)}
            message = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
        elif isinstance(entry, int):
            message["content"] = _verdict(request_body["messages"][0]["content"], entry)
        return _answer({"choices": [{"index": 0, "message": message}]})


def _verdict(system: str, points: int) -> str:
    boundary_match = re.search(r'"boundary": "(\w+)"', system)
    return json.dumps({"reason": "scripted", "boundary": boundary_match[1] if boundary_match else "", "score": points})


def _tool_verdict(tools: Sequence[Mapping[str, Any]], points: int) -> dict[str, Json]:
    (boundary,) = tools[-1]["function"]["parameters"]["properties"]["boundary"]["enum"]
    return {"evidence": "scripted", "boundary": boundary, "score": points}


def _answer(document: dict[str, Json], status: int = 200) -> httpx.Response:
    return httpx.Response(status, content=json.dumps(document).encode())
