"""Deficit round robin over tokens, against the bounds of its theory and a count by hand."""

from __future__ import annotations

import itertools
from collections import Counter

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from agentrl.run.training_server.fair_turns import FairQueue, FairTurns

QUANTUM = 100.0


def drained(queue: FairQueue[str]) -> list[str]:
    return list(iter(queue.pop, None))


def test_turns_go_round_by_tokens_and_not_by_requests() -> None:
    queue = FairQueue[str](QUANTUM)
    for number in range(3):
        queue.push("long", f"L{number}", 100)
    for number in range(9):
        queue.push("short", f"s{number}", 50)
    assert drained(queue) == ["L0", "s0", "s1", "L1", "s2", "s3", "L2", "s4", "s5", "s6", "s7", "s8"]


COSTS = st.lists(st.integers(1, 300), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(backlogs=st.lists(COSTS, min_size=2, max_size=5))
def test_while_two_wait_their_shares_differ_by_a_quantum_and_a_request_of_each(backlogs: list[list[int]]) -> None:
    queue = FairQueue[tuple[str, int]](QUANTUM)
    for name, costs in enumerate(backlogs):
        for cost in costs:
            queue.push(str(name), (str(name), cost), cost)
    served = Counter[str]()
    left = {str(name): list(costs) for name, costs in enumerate(backlogs)}
    for _ in range(sum(map(len, backlogs))):
        request = queue.pop()
        assert request is not None, "requests wait, and none goes out"
        name, cost = request
        assert left[name].pop(0) == cost  # in their order
        served[name] += cost
        for a, b in itertools.combinations([name for name, costs in left.items() if costs], 2):
            bound = QUANTUM + max(backlogs[int(a)]) + max(backlogs[int(b)])
            assert abs(served[a] - served[b]) <= bound
    assert queue.pop() is None


def test_who_comes_late_waits_for_one_visit_of_each_other_and_no_longer() -> None:
    queue = FairQueue[str](QUANTUM)
    for _ in range(1000):
        queue.push("flood", "flood", 10)
    for _ in range(500):
        queue.pop()
    queue.push("quiet", "me", 10)
    waited = next(count for count in itertools.count() if queue.pop() == "me")
    assert waited <= QUANTUM / 10


def test_nobody_saves_up_credit_while_it_has_nothing_to_send() -> None:
    queue = FairQueue[str](QUANTUM)
    queue.push("idle", "idle", 10)
    for _ in range(100):
        queue.push("busy", "busy", 10)
    drained(queue)
    for _ in range(30):
        queue.push("idle", "idle", 10)
        queue.push("busy", "busy", 10)
    assert Counter(itertools.islice(iter(queue.pop, None), 40)) == {"idle": 20, "busy": 20}


def test_a_request_that_leaves_the_queue_costs_nothing() -> None:
    queue, gone = FairQueue[str](QUANTUM), "gone"
    queue.push("a", gone, 1000)
    queue.push("b", "stays", 10)
    queue.remove("a", gone)
    assert drained(queue) == ["stays"]


def test_a_request_larger_than_many_quanta_goes_out() -> None:
    queue = FairQueue[str](QUANTUM)
    queue.push("a", "huge", 100_000)
    assert drained(queue) == ["huge"]


async def test_a_place_is_given_back_whether_its_holder_ends_or_its_waiter_leaves() -> None:
    turns, order = FairTurns(1), list[str]()

    async def work(session: str, scope: trio.CancelScope, event: trio.Event) -> None:
        with scope:
            async with turns.turn(session, 10):
                order.append(session)
                await event.wait()

    ends, leaves = trio.Event(), trio.CancelScope()
    async with trio.open_nursery() as nursery:
        for session, scope in (("first", trio.CancelScope()), ("leaver", leaves), ("last", trio.CancelScope())):
            nursery.start_soon(work, session, scope, ends)
            await wait_all_tasks_blocked()
        assert order == ["first"]
        leaves.cancel()
        await wait_all_tasks_blocked()
        ends.set()
    assert order == ["first", "last"]
