"""Coroutines of asyncio under trio: one loop for all, whose locks many may wait for."""

from __future__ import annotations

import asyncio

import pytest
import trio

from agentrl.env.asyncio_code import in_asyncio


async def test_calls_at_once_wait_for_one_lock_and_give_their_results() -> None:
    lock, all_wait, waiting = asyncio.Lock(), asyncio.Event(), list[int]()
    results = list[int]()

    async def locked(number: int) -> int:
        waiting.append(number)
        if len(waiting) == 3:
            all_wait.set()
        async with lock:
            await all_wait.wait()  # the others stand before the lock by now
            return number

    async def call(number: int) -> None:
        results.append(await in_asyncio(locked, number))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(call, number)
    assert sorted(results) == [0, 1, 2]


async def test_an_error_is_the_callers_and_a_cancelled_call_ends_its_coroutine() -> None:
    async def fails() -> None:
        raise KeyError("a")

    with pytest.raises(KeyError, match="a"):
        await in_asyncio(fails)

    begun, ended = trio.Event(), list[str]()
    token = trio.lowlevel.current_trio_token()

    async def sleeps() -> None:
        try:
            token.run_sync_soon(begun.set)
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_asyncio, sleeps)
            await begun.wait()
            nursery.cancel_scope.cancel()
    assert ended == ["ended"]
