"""What a flood of one tenant does to the waits of another: alone, through the fair gateway, in one queue for all.

In virtual time: queue and places are the gateway's own, the engine is that of `agentrl.testing.vllm_server`, which
computes so many requests at once at a fixed pace. So the figures are exact, and the same on every machine. They say
nothing about an engine's speed.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import httpx
import trio
from trio.testing import MockClock

from agentrl.config.shared_engines import Tenant
from agentrl.engine.client import EngineClient
from agentrl.engine.router.gateway import Gateway, SharedEngine
from agentrl.protocols import GenerateRequest
from agentrl.records import SamplingParams
from agentrl.testing.vllm_server import FakeVLLM

PAGE = Path(__file__).with_suffix(".md")
MARK = "<!-- the table, by `agentrl bench tenants` -->\n"
PLACES, TOKEN_S, PROMPT, TOKENS = 8, 0.1, 50, 6


class Door(httpx.AsyncBaseTransport):
    """The gateway without a socket: virtual time does not know of sockets."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = await request.aread()
        status, body = await self._gateway.answer(request.method, request.url.path, "", dict(request.headers), content)
        if isinstance(body, bytes):
            return httpx.Response(status, content=body)

        class Stream(httpx.AsyncByteStream):
            async def __aiter__(self) -> AsyncGenerator[bytes, None]:
                async for part in body:
                    yield part

            async def aclose(self) -> None:
                await body.aclose()

        return httpx.Response(status, stream=Stream())


@dataclass(frozen=True)
class Arm:
    """`flood` requests of another run always wait; `fair`: under a tenant of its own."""

    name: str
    flood: int
    fair: bool


ARMS = (
    Arm("alone", 0, True),
    Arm("beside 100, a queue for all", 100, False),
    Arm("beside 100, fair", 100, True),
)


async def waits(arm: Arm, turns: int) -> tuple[list[float], float]:
    """Seconds from each turn of the quiet run to its first token, and the share of the engine's places in use."""
    fake = FakeVLLM(token_s=TOKEN_S, stream_tokens=2)
    tenants = [Tenant(name="quiet", open=True), Tenant(name="flood", open=True)]
    engine = SharedEngine(tenants, places=PLACES, url=fake.url, transport=fake, lease_s=1e9, queue_deadline_s=1e9)
    door, rng, found = Door(Gateway(tenants, [engine])), random.Random(1), list[float]()

    async def turn(tenant: str, id: str, tokens: int) -> float:
        sampling = SamplingParams(max_tokens=tokens)
        ids = tuple(range(1, PROMPT + 1))
        request = GenerateRequest(request_id=id, session=id, token_ids=ids, sampling=sampling, deadline_s=1e9)
        began, first = trio.current_time(), 0.0
        client = EngineClient(f"http://gateway/{tenant}/0", transport=door)
        async with aclosing(client.stream(request)) as chunks:
            async for _ in chunks:
                first = first or trio.current_time() - began
        return first

    async def floods(number: int) -> None:
        count = 0
        while True:
            count += 1
            tokens = rng.randint(TOKENS, 3 * TOKENS)
            await turn("flood" if arm.fair else "quiet", f"flood-{number}-{count}", tokens)

    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        for number in range(arm.flood):
            nursery.start_soon(floods, number)
        await trio.sleep(10 if arm.flood else 0)
        began = trio.current_time()
        before = sum(row["served_tokens_total"] for _, row in engine.gauges())
        for number in range(turns):
            found.append(await turn("quiet", f"quiet-{number}", TOKENS))
            await trio.sleep(rng.expovariate(1 / 0.5))  # its tool calls
        served = sum(row["served_tokens_total"] for _, row in engine.gauges()) - before
        seconds = trio.current_time() - began
        nursery.cancel_scope.cancel()
    return found, served / seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="agentrl bench tenants", description=__doc__)
    parser.add_argument("--turns", type=int, default=40, help="of the quiet run")
    arguments = parser.parse_args()
    lines = [
        "| quiet run | wait p50, s | p99, s | longest, s | tokens/s of the engine, both runs |",
        "|---|---|---|---|---|",
    ]
    for arm in ARMS:
        clock = MockClock(autojump_threshold=0)
        found, pace = trio.run(waits, arm, arguments.turns, clock=clock)
        found.sort()
        p50, p99 = (found[int(share * (len(found) - 1))] for share in (0.5, 0.99))
        lines.append(f"| {arm.name} | {p50:.2f} | {p99:.2f} | {found[-1]:.2f} | {pace:,.0f} |")
        print(lines[-1], flush=True)
    if PAGE.exists():
        before = PAGE.read_text().partition(MARK)[0]
        PAGE.write_text(f"{before}{MARK}\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
