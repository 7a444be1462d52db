"""The requests of `agentrl bench running --beside` and nothing else: no parsing, no environment, no journal.

`raw` is one loop over sockets, which no client of an engine can be cheaper than in Python; `aiohttp` is what one would
write by hand. Each turn sends the ids of a conversation that grows as an episode's does, and reads the whole answer.

    python _running_clients.py raw|aiohttp URL EPISODES    prints a line of JSON
"""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import sys
import time
from urllib.parse import urlsplit

import aiohttp
from _running_shape import ANSWER, PROMPT, TOKENS, TURNS, memory_kib

PATH = "/inference/v1/generate"
END = b"data: [DONE]\n\n"
ROOM = len(ANSWER) + 44  # tokens that come between two turns: the answer and what the template writes around it


def body_of(turn: int) -> dict[str, object]:
    """The request of a turn."""
    ids = [100] * (len(PROMPT) + turn * (TOKENS + ROOM))
    params = {"max_tokens": TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 0}
    return {"request_id": f"1-1-{turn}", "token_ids": ids, "sampling_params": params, "stream": True}


class Talk:
    """One episode's requests over a socket of its own."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setblocking(False)
        self._head = f"POST {PATH} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        self._turn, self._answer = 0, b""

    def ask(self) -> None:
        body = json.dumps(body_of(self._turn))
        self.socket.sendall(f"{self._head}content-length: {len(body)}\r\n\r\n{body}".encode())

    def hear(self) -> bool:
        """Read what came, and ask again behind a whole answer; whether the last one is whole."""
        part = self.socket.recv(1 << 16)
        assert part, "the server closed the connection"
        self._answer += part
        if self._answer.endswith(END):
            self._turn, self._answer = self._turn + 1, b""
            if self._turn < TURNS:
                self.ask()
        return self._turn == TURNS


def raw(url: str, n: int) -> None:
    """Play with sockets."""
    at = urlsplit(url)
    assert at.hostname and at.port
    with selectors.DefaultSelector() as selector:
        for _ in range(n):
            talk = Talk(at.hostname, at.port)
            selector.register(talk.socket, selectors.EVENT_READ, talk)
            talk.ask()
        while n:
            for key, _ in selector.select():
                if key.data.hear():
                    selector.unregister(key.data.socket)
                    key.data.socket.close()
                    n -= 1


async def with_aiohttp(url: str, n: int) -> None:
    """Play with aiohttp."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def play() -> None:
            for turn in range(TURNS):
                async with session.post(url + PATH, json=body_of(turn)) as answer:
                    assert (await answer.read()).endswith(END)

        await asyncio.gather(*(play() for _ in range(n)))


def main(kind: str, url: str, n: int) -> None:
    before, began, cpu = memory_kib(), time.perf_counter(), time.process_time()
    if kind == "raw":
        raw(url, n)
    else:
        asyncio.run(with_aiohttp(url, n))
    spent, seconds = time.process_time() - cpu, time.perf_counter() - began
    found = {
        "cpu_ms_a_turn": 1000 * spent / (n * TURNS),
        "kib_an_episode": (memory_kib() - before) / n,
        "turns_s": n * TURNS / seconds,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
