"""A server that scores without a model: answers `ScoringClient` from a script. For tests of code that asks a judge or a
reward model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import httpx

from agentrl.records import Json


class FakeScoring(httpx.AsyncBaseTransport):
    """Pass it to `ScoringClient(transport=...)`. `script` has one entry per call, and the last one is repeated: a
    judge's points, a judge's text instead of a verdict, or an httpx exception to raise. A reward model's `outputs` are
    the same in every call that does not fail.

    `requests` records all requests as (path, body)."""

    def __init__(self, *script: int | str | httpx.TransportError, outputs: Sequence[float] = (0.0,)) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._script, self._outputs = script or (0,), list(outputs)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The next answer of the script."""
        body: dict[str, Any] = json.loads(await request.aread())
        entry = self._script[min(len(self.requests), len(self._script) - 1)]
        self.requests.append((request.url.path, body))
        if isinstance(entry, httpx.TransportError):
            raise entry
        if request.url.path == "/classify":
            return _answer({"data": [{"index": 0, "probs": self._outputs, "num_classes": len(self._outputs)}]})
        content = entry if isinstance(entry, str) else _verdict(body["messages"][0]["content"], entry)
        return _answer({"choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]})


def _verdict(system: str, points: int) -> str:
    boundary = re.search(r'"boundary": "(\w+)"', system)
    return json.dumps({"reason": "scripted", "boundary": boundary[1] if boundary else "", "score": points})


def _answer(document: dict[str, Json]) -> httpx.Response:
    return httpx.Response(200, content=json.dumps(document).encode())
