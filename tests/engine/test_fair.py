"""Deficit round robin over tokens, against the bounds of its theory and a count by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.router.gateway import FairQueue

QUANTUM = 100.0


def queue_of(**weights: float) -> FairQueue[str]:
    queue = FairQueue[str](QUANTUM)
    for name, weight in weights.items():
        queue.join(name, weight=weight)
    return queue


def drained(queue: FairQueue[str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    while (one := queue.pop()) is not None:
        found.append(one)
    return found


def test_turns_go_round_by_tokens_and_not_by_requests() -> None:
    queue = queue_of(long=1, short=1)
    for number in range(3):
        queue.push("long", f"L{number}", 100)
    for number in range(9):
        queue.push("short", f"s{number}", 50)
    order = [item for _, item in drained(queue)]
    assert order == ["L0", "s0", "s1", "L1", "s2", "s3", "L2", "s4", "s5", "s6", "s7", "s8"]


def test_a_weight_of_three_is_three_times_the_tokens() -> None:
    queue = queue_of(three=3, one=1)
    for number in range(400):
        queue.push("three", str(number), 10)
        queue.push("one", str(number), 10)
    first = Counter(name for name, _ in itertools.islice(iter(queue.pop, None), 400) if name)
    assert first == {"three": 300, "one": 100}


COSTS = st.lists(st.integers(1, 300), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(backlogs=st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0, 5.0]), COSTS), min_size=2, max_size=5))
def test_while_two_wait_their_shares_differ_by_a_quantum_and_a_request_of_each(
    backlogs: list[tuple[float, list[int]]],
) -> None:
    queue = FairQueue[int](QUANTUM)
    for name, (weight, costs) in enumerate(backlogs):
        queue.join(str(name), weight=weight)
        for cost in costs:
            queue.push(str(name), cost, cost)
    served = Counter[str]()
    left = {str(name): list(costs) for name, (_, costs) in enumerate(backlogs)}
    total = sum(len(costs) for _, costs in backlogs)
    for _ in range(total):
        found = queue.pop()
        assert found is not None, "a place is free, requests wait, and none goes out"
        name, cost = found
        assert left[name].pop(0) == cost  # in their order
        served[name] += cost
        for a, b in itertools.combinations([name for name, costs in left.items() if costs], 2):
            (weight_a, costs_a), (weight_b, costs_b) = backlogs[int(a)], backlogs[int(b)]
            bound = QUANTUM + max(costs_a) / weight_a + max(costs_b) / weight_b
            assert abs(served[a] / weight_a - served[b] / weight_b) <= bound
    assert queue.pop() is None


def test_who_comes_late_waits_for_one_visit_of_each_other_and_no_longer() -> None:
    queue = queue_of(flood=1, quiet=1)
    for number in range(1000):
        queue.push("flood", str(number), 10)
    for _ in range(500):
        queue.pop()
    queue.push("quiet", "me", 10)
    waited = next(at for at in itertools.count() if queue.pop() == ("quiet", "me"))
    assert waited <= QUANTUM / 10


def test_nobody_saves_up_credit_while_it_has_nothing_to_send() -> None:
    queue = queue_of(idle=1, busy=1)
    queue.push("idle", "one", 10)
    for number in range(100):
        queue.push("busy", str(number), 10)
    drained(queue)
    for number in range(30):
        queue.push("idle", str(number), 10)
        queue.push("busy", str(number), 10)
    first = Counter(queue.pop()[0] for _ in range(40))  # type: ignore[index]
    assert first == {"idle": 20, "busy": 20}


def test_estimates_are_corrected_by_what_requests_took() -> None:
    """Both estimate 100; the requests of `small` take 20: in the long run each gets the same tokens."""
    queue = queue_of(small=1, large=1)
    took = {"small": 20, "large": 100}
    for number in range(2000):
        queue.push("small", str(number), 100)
        queue.push("large", str(number), 100)
    served = Counter[str]()
    for _ in range(600):
        found = queue.pop()
        assert found is not None
        served[found[0]] += took[found[0]]
        queue.done(found[0], took[found[0]] - 100)
    assert served["small"] / served["large"] > 0.35  # a visit spends two quanta at most: 2 * 20 for 100, not 20 for 100

    exact = queue_of(small=1, large=1)
    served.clear()
    for number in range(2000):
        exact.push("small", str(number), 30)  # nearly right
        exact.push("large", str(number), 100)
    for _ in range(600):
        found = exact.pop()
        assert found is not None
        served[found[0]] += took[found[0]]
        exact.done(found[0], took[found[0]] - {"small": 30, "large": 100}[found[0]])
    assert served["small"] / served["large"] == pytest.approx(1, abs=0.05)


def test_no_more_than_max_running_are_out_and_the_others_go_on() -> None:
    queue = FairQueue[str](QUANTUM)
    queue.join("narrow", max_running=2)
    queue.join("wide", max_running=inf)
    for number in range(4):
        queue.push("narrow", f"n{number}", 10)
    for number in range(3):
        queue.push("wide", f"w{number}", 10)
    assert sorted(item for _, item in drained(queue)) == ["n0", "n1", "w0", "w1", "w2"]
    assert queue.running("narrow") == 2 and queue.waiting("narrow") == (2, 20)
    queue.done("narrow")
    assert drained(queue) == [("narrow", "n2")]


def test_a_request_that_leaves_the_queue_costs_nothing() -> None:
    queue = queue_of(a=1, b=1)
    queue.push("a", "gone", 1000)
    queue.push("b", "stays", 10)
    queue.remove("a", "gone")
    assert queue.waiting("a") == (0, 0) and drained(queue) == [("b", "stays")]


def test_a_request_larger_than_many_quanta_goes_out_and_one_pushed_first_goes_before_it() -> None:
    queue = queue_of(a=1)
    queue.push("a", "huge", 100_000)
    queue.push("a", "canary", 10, first=True)
    assert [item for _, item in drained(queue)] == ["canary", "huge"]
