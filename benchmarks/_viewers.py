"""Viewers of a run's page in a process of their own: each follows the news and asks as the page does."""

from __future__ import annotations

import sys
import time

import anyio
import httpx

_ASKED = ("", "/metrics?names=loss,kl_k3,entropy,lag_mean", "/lanes", "/health")


async def _look(client: httpx.AsyncClient, run: str, begun: anyio.Semaphore) -> None:
    known = dict[str, float]()  # until when an answer would be the same
    async with client.stream("GET", f"/api/runs/{run}/events") as news:
        begun.release()
        async for line in news.aiter_lines():
            if not line.startswith("event: change"):
                continue
            began = time.perf_counter()
            for path in _ASKED:
                if time.perf_counter() >= known.get(path, 0.0):
                    sent = time.perf_counter()
                    answer = (await client.get(f"/api/runs/{run}{path}")).raise_for_status()
                    known[path] = sent + float(answer.headers.get("x-known-s", 0.0))
            await anyio.sleep(min(15.0, max(0.7, 10 * (time.perf_counter() - began))))


async def _main(address: str, n: int, run: str) -> None:
    base, _, token = address.partition("/#token=")
    begun = anyio.Semaphore(0)
    limits = httpx.Limits(max_connections=4 * n, keepalive_expiry=2.0)  # the server closes an idle one after 5
    headers = {"authorization": f"Bearer {token}"}
    async with (
        httpx.AsyncClient(base_url=base, headers=headers, timeout=120, limits=limits) as client,
        anyio.create_task_group() as group,
    ):
        for _ in range(n):
            group.start_soon(_look, client, run, begun)
        for _ in range(n):
            await begun.acquire()
        print("all look", flush=True)


if __name__ == "__main__":
    anyio.run(_main, sys.argv[1], int(sys.argv[2]), sys.argv[3])
