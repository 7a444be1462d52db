"""The clock that leaves out what the process was stopped for, and watches that tell apart whom a call waits for."""

from __future__ import annotations

import math

import pytest
import trio
from trio.testing import MockClock

from agentrl.env.sync_async import LoopThread, in_thread
from agentrl.errors import HostBusy
from agentrl.host.clocks import HostClock, Whose, granted, host_time, policy_seconds_left, policy_time, unwatched, watch


class Machine:
    """Seconds of a machine; a test may let some pass at once."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        self.seconds += 0.001  # each look takes a moment, so that time passes at all
        return self.seconds


def test_a_deadline_does_not_pass_while_the_process_is_stopped() -> None:
    machine, seen = Machine(), list[bool]()

    async def main() -> None:
        with trio.move_on_after(30.0) as deadline:
            machine.seconds += 3600.0
            for _ in range(10):
                await trio.lowlevel.checkpoint()
            machine.seconds += 3600.0
            await trio.sleep(0.01)
        seen.append(deadline.cancelled_caught)
        with trio.move_on_after(2.0) as deadline:
            for _ in range(20):
                machine.seconds += 0.5
                await trio.lowlevel.checkpoint()
        seen.append(deadline.cancelled_caught)

    trio.run(main, clock=HostClock(machine))
    assert seen == [False, True], "what passes in small steps passes"


def test_the_clock_is_looked_at_often_also_where_nothing_is_due() -> None:
    clock = HostClock()
    clock.start_clock()
    assert 0 < clock.deadline_to_sleep_time(math.inf) <= 0.25
    assert clock.deadline_to_sleep_time(-1.0) <= 0


async def test_own_time_and_the_policys_have_a_deadline_each(autojump_clock: MockClock) -> None:
    with watch(own_s=10, policy_s=20) as watching:
        await trio.sleep(9)
        with policy_time():
            await trio.sleep(19)
            assert policy_seconds_left() == 1
        with host_time("a slot"):
            await trio.sleep(500)
    assert (watching.over, watching.seconds) == (None, 28)


@pytest.mark.parametrize(("whose", "after"), [(Whose.OWN, 10), (Whose.POLICY, 20)])
async def test_what_runs_out_is_named(autojump_clock: MockClock, whose: Whose, after: float) -> None:
    with watch(own_s=10, policy_s=20) as watching:
        try:
            if whose is Whose.OWN:
                await trio.sleep_forever()
            with policy_time():
                await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):  # cleaning up belongs to nobody any more
                await trio.sleep(100)
    assert watching.over is whose
    assert trio.current_time() == after + 100


async def test_a_watch_within_a_watch_stops_with_it(autojump_clock: MockClock) -> None:
    with watch(policy_s=30) as outer:
        with policy_time(), watch(own_s=5, policy_s=5) as inner, host_time("a slot"):
            await trio.sleep(100)
        assert (inner.over, outer.over) == (None, None)
        with watch(policy_s=5) as inner, policy_time():
            await trio.sleep(100)
        assert (inner.over, outer.over) == (Whose.POLICY, None)
    assert outer.seconds == 5


async def test_side_by_side_the_time_is_the_hosts_only_if_nobody_waits_for_the_policy(
    autojump_clock: MockClock,
) -> None:
    async def waits(policy_s: float, host_s: float) -> None:
        with policy_time():
            await trio.sleep(policy_s)
            with host_time("a slot"):
                await trio.sleep(host_s)

    with watch() as watching:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits, 10, 100)
            nursery.start_soon(waits, 30, 100)
    assert trio.current_time() == 130
    assert watching.seconds == 30


async def test_law_4_who_waits_for_the_host_waits_with_a_deadline(autojump_clock: MockClock) -> None:
    slots = trio.CapacityLimiter(1)
    await slots.acquire_on_behalf_of("somebody")
    with pytest.raises(HostBusy, match="waited 600 s for a slot to judge in"):
        async with granted(slots, "a slot to judge in"):
            pass
    assert trio.current_time() == 600
    slots.release_on_behalf_of("somebody")
    async with granted(slots, "a slot"):
        assert slots.borrowed_tokens == 1
    assert slots.borrowed_tokens == 0


async def test_what_outlives_a_call_is_not_in_its_clocks(autojump_clock: MockClock) -> None:
    async def lives_on() -> None:
        with policy_time():
            await trio.sleep(50)

    async with trio.open_nursery() as nursery:
        with watch(own_s=100, policy_s=10) as watching:
            with unwatched():
                nursery.start_soon(lives_on)
            await trio.sleep(20)
    assert (watching.over, watching.seconds) == (None, 20)


async def test_another_threads_loop_tells_whose_time_it_is() -> None:
    loop = LoopThread()
    asked, answered = trio.Event(), trio.Event()
    token = trio.lowlevel.current_trio_token()
    left: list[float] = []

    async def act() -> None:
        with policy_time():
            left.append(policy_seconds_left())
            token.run_sync_soon(asked.set)
            with trio.move_on_after(60):
                while not answered.is_set():  # noqa: ASYNC110  (an event of another loop)
                    await trio.sleep(0.001)

    try:
        with watch(own_s=1e6, policy_s=1e6) as watching:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(in_thread, lambda: loop.run(act))
                await asked.wait()
                own_s, policy_s = watching.left(Whose.OWN), watching.left(Whose.POLICY)
                await trio.sleep(0.001)
                assert watching.left(Whose.OWN) == own_s
                assert watching.left(Whose.POLICY) < policy_s
                answered.set()
    finally:
        loop.stop()
    assert 0 < left[0] <= 1e6
