"""Which groups a step takes, what each order favours on a fixed schedule, and the correction of the one that draws."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest

from agentrl.store import Freshest, Oldest, Pick, Prioritised, Ready, RunStore, TakeOrder, Windowed
from agentrl.store.buffer.group_order import inclusion

from .play import admit, play, play_all, serve


def ready(*groups: int | tuple[int, dict[str, Any]]) -> list[Ready]:
    """Groups by id; each closed at the time of its id, with lag 0 and strength 1 unless said otherwise."""
    found: list[Ready] = []
    for group in groups:
        id, changes = group if isinstance(group, tuple) else (group, {})
        found.append(Ready(**({"group_id": id, "closed_s": float(id), "lag": 0, "strength": 1.0} | changes)))
    return found


def ids(picks: Sequence[Pick]) -> list[int]:
    return [pick.group_id for pick in picks]


def choose(order: TakeOrder, groups: list[Ready], n: int, under_way: Sequence[int] = (), step: int = 1) -> list[int]:
    return ids(order.choose(groups, n, under_way=under_way, step=step))


def test_oldest_takes_what_was_admitted_first_whenever_it_closed() -> None:
    groups = ready((1, {"closed_s": 9.0}), (4, {"closed_s": 1.0}), 5)
    assert choose(Oldest(), groups, 2, under_way=[2, 3]) == [1, 4]


def test_windowed_waits_for_slow_groups_at_the_head_of_its_window() -> None:
    """Ten groups are not yet taken, the window has the first three of them: 1, 2 and 3."""
    assert choose(Windowed(0.3), ready(2, 5, 6, 7, 8), 1, under_way=[1, 3, 4, 9, 10]) == [2]
    assert choose(Windowed(0.3), ready(5, 6, 7, 8), 1, under_way=[1, 2, 3, 4, 9, 10]) == []
    assert choose(Windowed(1.0), ready(5, 6, 7, 8), 1, under_way=[1, 2, 3, 4, 9, 10]) == [5]


def test_a_window_always_has_room_for_a_step() -> None:
    assert choose(Windowed(0.1), ready(1, 2, 3), 3) == [1, 2, 3]


def test_freshest_takes_the_newest_tokens_and_among_equals_what_closed_last() -> None:
    groups = ready((1, {"closed_s": 9.0}), (2, {"lag": 1}), (3, {"closed_s": 8.0}), (4, {"lag": 2, "closed_s": 99.0}))
    assert choose(Freshest(), groups, 3) == [1, 3, 2]


# --- prioritised ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "n", "expected"),
    [
        ([1, 1, 1, 1], 2, [0.5, 0.5, 0.5, 0.5]),
        ([1, 3], 1, [0.25, 0.75]),
        ([8, 1, 1], 2, [1.0, 0.5, 0.5]),  # 1.6 is no probability: the first is certain, one of the others is drawn
        ([1, 2, 3], 3, [1.0, 1.0, 1.0]),
    ],
)
def test_things_are_drawn_in_proportion_to_their_size(sizes: list[float], n: int, expected: list[float]) -> None:
    assert inclusion(sizes, n) == pytest.approx(expected)


def test_the_same_step_draws_the_same_groups() -> None:
    groups = ready(*range(1, 40))
    drawn = [choose(Prioritised(seed=3), groups, 8, step=step) for step in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(len(set(each)) == 8 for each in drawn)


def test_with_the_correction_the_expected_gradient_is_that_of_all_groups() -> None:
    """A toy: group i has the gradient g_i, the step's is the mean over its groups. Drawn by strength alone, its
    expectation is far off; with each group's weight it is the mean over all groups that wait."""
    gradients = {1: 4.0, 2: -1.0, 3: 0.5, 4: 3.0, 5: 0.0, 6: -0.5}
    groups = ready(*((id, {"strength": abs(gradient)}) for id, gradient in gradients.items()))
    corrected: list[float] = []
    plain: list[float] = []
    for step in range(6000):
        picks = Prioritised(seed=1).choose(groups, 2, under_way=(), step=step)
        corrected.append(fmean(pick.weight * gradients[pick.group_id] for pick in picks))
        plain.append(fmean(gradients[pick.group_id] for pick in picks))
    mean = fmean(gradients.values())
    assert fmean(corrected) == pytest.approx(mean, abs=0.05)
    assert fmean(plain) > mean + 1


def test_strong_groups_come_first_and_no_weight_grows_without_bound() -> None:
    groups = ready(*((id, {"strength": 1.0 if id == 1 else 0.0}) for id in range(1, 21)))
    picks = [Prioritised().choose(groups, 4, under_way=(), step=step) for step in range(200)]
    assert all(1 in ids(each) for each in picks)
    assert max(pick.weight for each in picks for pick in each) <= (1 + 0.1) / 0.1
    assert {id for each in picks for id in ids(each)} == set(range(1, 21)), "none waits for ever"


def test_without_any_signal_all_are_alike() -> None:
    groups = ready(*((id, {"strength": 0.0}) for id in range(4)))
    picks = Prioritised().choose(groups, 2, under_way=(), step=1)
    assert [pick.weight for pick in picks] == [1.0, 1.0]


# --- the bias of each, on a fixed schedule --------------------------------------------------------------------------


def trained_by(order: TakeOrder) -> tuple[float, float, float]:
    """Each second two groups are admitted, of which every fourth runs for 8 s, the others for 1 s; the learner takes
    one each second, so groups wait, and after 12 s without training a group is too old. Of those trained: the share of
    long ones (of all: a quarter), and the mean age in seconds; then the share of seconds that it waited."""
    born = {id: id // 2 for id in range(400)}
    lasts = {id: 8 if id % 4 == 0 else 1 for id in born}
    left, trained, waited = set(born), list[tuple[int, int]](), 0
    for now in range(200):
        left -= {id for id in left if now - born[id] > 12}
        here = [id for id in sorted(left) if born[id] <= now]
        closed = [id for id in here if born[id] + lasts[id] <= now]
        waiting = [Ready(id, float(born[id] + lasts[id]), now - born[id], 1.0) for id in closed]
        running = [id for id in here if id not in closed]
        picks = choose(order, waiting, 1, running, step=now) if waiting else []
        waited += not picks
        left -= set(picks)
        trained += [(id, now - born[id]) for id in picks]
    return (
        fmean(lasts[id] == 8 for id, _ in trained),
        fmean(age for _, age in trained),
        waited / 200,
    )


def test_the_lengths_and_ages_that_each_order_favours() -> None:
    found = {type(order).__name__: trained_by(order) for order in (Oldest(), Windowed(0.3), Freshest(), Prioritised())}
    long = {name: one[0] for name, one in found.items()}
    age = {name: one[1] for name, one in found.items()}
    assert long["Freshest"] == 0, "it takes short ones alone: a long one is never the freshest"
    assert long["Oldest"] > 0.25 > long["Prioritised"], "the long ones are the oldest of what has closed"
    assert long["Windowed"] >= long["Oldest"]
    assert age["Freshest"] < age["Prioritised"] < age["Oldest"]


# --- in the store ---------------------------------------------------------------------------------------------------


class Newest:
    """Somebody's own order: the last admitted first, at half weight. It waits while anything runs."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int], int]] = []

    def choose(self, ready: Sequence[Ready], n: int, *, under_way: Sequence[int], step: int) -> list[Pick]:
        self.asked.append(([one.group_id for one in ready], list(under_way), step))
        return [] if under_way else [Pick(one.group_id, 0.5) for one in ready[::-1][:n]]


def test_the_store_asks_an_order_and_obeys_it(store: RunStore) -> None:
    admit(store, limit=3)
    claims = store.leases.claim("w", 6, lease_s=1e6)
    for claim in claims[:4]:
        play(store, claim)
    order = Newest()
    assert store.buffer.take(1, 1, max_lag=1, order=order) is None
    for claim in claims[4:]:
        play(store, claim)
    (group,) = store.buffer.take(1, 1, max_lag=1, order=order) or []
    assert order.asked == [([1, 2], [3], 1), ([1, 2, 3], [], 1)]
    assert (group.id, group.weight, group.taken_step) == (3, 0.5, 1)
    assert store.lineage.episodes_of(1) == [5, 6]


def test_law_5_groups_that_an_order_leaves_behind_expire(store: RunStore) -> None:
    admit(store, limit=2)
    play_all(store)
    serve(store, 1)
    assert [one.id for one in store.buffer.take(1, 1, max_lag=0, order=Freshest()) or []] == [2]
    assert store.buffer.take(2, 1, max_lag=0, order=Freshest()) is None
    assert store.metrics.drops() == {"stale": 1}
