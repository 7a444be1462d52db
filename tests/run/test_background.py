"""Work beside a trio program: one thread for torch, jobs whose errors wait, store calls that wait for space."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from agentrl.errors import DiskFull, RunFailed, StoreError
from agentrl.run.learning.background import Job, TorchThread
from agentrl.run.learning.store_calls import StoreCalls


async def test_all_calls_of_a_torch_thread_have_the_state_of_one_thread() -> None:
    """`trio.to_thread` would take whichever thread is free, and each has a gradient mode of its own."""
    thread, names = TorchThread(), list[str]()

    def call() -> bool:
        names.append(threading.current_thread().name)
        return torch.is_grad_enabled()

    await thread.run(lambda: torch.set_grad_enabled(False) and None)
    assert [await thread.run(call) for _ in range(3)] == [False] * 3
    assert torch.is_grad_enabled() and len(set(names)) == 1 and names[0] != threading.current_thread().name


async def test_the_loop_goes_on_while_torch_computes_and_calls_keep_their_order() -> None:
    thread, gate, order = TorchThread(), threading.Event(), list[int]()

    def first() -> None:
        assert gate.wait(60), "the loop stands still"
        order.append(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(thread.run, first)
        await wait_all_tasks_blocked()
        nursery.start_soon(thread.run, lambda: order.append(2))
        await wait_all_tasks_blocked()
        assert order == []
        gate.set()
    assert order == [1, 2]


async def test_a_caller_that_is_cancelled_waits_for_its_call() -> None:
    thread, gate, ended = TorchThread(), threading.Event(), list[str]()

    def computes() -> str:
        assert gate.wait(60)
        return "a step"

    async def caller() -> None:
        ended.append(await thread.run(computes))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
            assert ended == []
            gate.set()
    assert ended == ["a step"]


async def test_the_error_of_a_call_goes_to_its_caller_and_the_thread_goes_on() -> None:
    def fails() -> None:
        raise RunFailed("a gradient")

    thread = TorchThread()
    with pytest.raises(RunFailed, match="a gradient"):
        await thread.run(fails)
    assert await thread.run(lambda: 3) == 3


async def test_the_error_of_a_job_waits_for_who_settles_it_and_cancels_nobody(autojump_clock: MockClock) -> None:
    async def fails() -> None:
        await trio.sleep(2.5)
        raise RunFailed("no engine")

    beats: list[float] = []
    async with trio.open_nursery() as nursery:
        job = Job(nursery, fails)
        assert not job.has_ended
        began = trio.current_time()
        await job.wait(lambda: beats.append(trio.current_time() - began), 1.0)
        assert beats == [1.0, 2.0] and job.has_ended
        await trio.sleep(1.0)  # the loop goes on
        with pytest.raises(RunFailed, match="no engine"):
            await job.result()


async def test_a_job_ends_with_its_loop() -> None:
    async with trio.open_nursery() as nursery:
        job = Job(nursery, trio.sleep_forever)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert job.has_ended


async def test_a_call_is_made_again_until_there_is_space_and_marks_meanwhile(
    autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    fails, marks = [DiskFull("no space left: free some")] * 20, list[float]()

    def write(store: Any) -> str:
        if fails:
            raise fails.pop()
        return store.name

    calls = StoreCalls(
        SimpleNamespace(name="store", signal=None),  # type: ignore[arg-type]
        lambda: marks.append(trio.current_time()),
        deadline_s=100.0,
        inline=True,
    )
    assert await calls(write) == "store"
    assert len(marks) == 20
    assert capsys.readouterr().err == "agentrl: no space left: free some; the learner waits for it\n"


async def test_law_4_the_wait_for_space_has_a_deadline_and_other_errors_have_none(autojump_clock: MockClock) -> None:
    calls = StoreCalls(SimpleNamespace(), lambda: None, deadline_s=100.0, inline=True)  # type: ignore[arg-type]
    for error, waited_s in ((DiskFull("full"), 100.0), (StoreError("damaged"), 0.0)):

        def write(_: object, error: Exception = error) -> None:
            raise error

        began = trio.current_time()
        with pytest.raises(type(error)):
            await calls(write)
        assert waited_s <= trio.current_time() - began < waited_s + 2.0
