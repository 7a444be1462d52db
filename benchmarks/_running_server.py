"""A server without a model for `agentrl bench running --beside`: each turn takes the same time and has the same tokens.

It speaks vLLM's streaming `/inference/v1/generate` (ids, four events) and OpenAI's `/v1/chat/completions` (text, ids
and log-probs in one answer), in a process of its own. The answers are made once, so that it costs next to nothing.

    python _running_server.py SECONDS_A_TURN TOKEN_ID,TOKEN_ID,…    prints its port
"""

from __future__ import annotations

import asyncio
import json
import sys

import httptools
from _running_shape import TEXT

EVENTS = 4


def stream_of(tokens: list[int]) -> bytes:
    """The whole answer to a generate request, head included."""
    events: list[bytes] = []
    size = len(tokens) // EVENTS
    for at in range(0, len(tokens), size):
        part = tokens[at : at + size]
        choice = {
            "index": 0,
            "token_ids": part,
            "logprobs": {"content": [{"token": f"token_id:{token}", "logprob": -0.5 - token / 512} for token in part]},
            "finish_reason": "length" if at + size >= len(tokens) else None,
            "weight_versions": [{"version": 1, "start": at, "end": at + size}],
        }
        events.append(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    body = b"".join([*events, b"data: [DONE]\n\n"])
    return _head("text/event-stream", body)


def completion_of(tokens: list[int]) -> bytes:
    """The whole answer to a chat request, head included."""
    entries = [{"token": "a", "logprob": -0.5 - token / 512, "bytes": [97], "top_logprobs": []} for token in tokens]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": TEXT},
        "finish_reason": "stop",
        "logprobs": {"content": entries},
        "token_ids": tokens,
    }
    usage = {"prompt_tokens": 100, "completion_tokens": len(tokens), "total_tokens": 100 + len(tokens)}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return _head("application/json", json.dumps(body).encode())


def _head(kind: str, body: bytes) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class Connection(asyncio.Protocol):
    """Answers each request of a connection after a pause."""

    def __init__(self, pause_s: float, answers: dict[bytes, bytes]) -> None:
        self._pause_s, self._answers = pause_s, answers
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_message_complete(self) -> None:
        asyncio.get_running_loop().call_later(self._pause_s, self._answer, self._answers[self._url])

    def _answer(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


async def serve(pause_s: float, tokens: list[int]) -> None:
    answers = {b"/inference/v1/generate": stream_of(tokens), b"/v1/chat/completions": completion_of(tokens)}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(pause_s, answers), "127.0.0.1", 0, backlog=8192)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]), [int(token) for token in sys.argv[2].split(",")]))
