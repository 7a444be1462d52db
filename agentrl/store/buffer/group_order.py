"""Which of the closed groups a learner's step takes: small objects with one rule each, pure, their bias stated.

An order sees when groups closed, how old their tokens are and how much signal they carry; never the store or a token.
Late members need no order: each step takes all of them. Groups that an order leaves behind too long leave as stale
(law 5); with `oldest` these are the fewest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Ready(NamedTuple):
    """A closed group that may be taken: its id (groups are admitted in the order of their ids), when it closed, the lag
    of its youngest token in steps, and its `strength` (mean |advantage|, see `algos.judging`)."""

    group_id: int
    closed_s: float
    lag: int
    strength: float


class Pick(NamedTuple):
    """A group to take. `weight` multiplies its share of the loss."""

    group_id: int
    weight: float = 1.0


class TakeOrder(Protocol):
    """Chooses the groups of a step."""

    def choose(self, ready: Sequence[Ready], n: int, *, under_way: Sequence[int], step: int) -> Sequence[Pick]:
        """`n` of the groups in `ready`, which are in the order of admission; fewer: the learner waits, and asks again.
        `under_way` are the ids of groups that have not closed, in the same order; `step` is the step that is to train.
        Called often and outside any transaction; the same arguments give the same answer."""
        ...


@dataclass(frozen=True, slots=True)
class Oldest:
    """The closed groups that were admitted first.

    Bias: none in what is trained as long as each group is taken before it grows stale, which admission sees to; slow
    groups only come later than fast ones that were admitted with them. If more groups close than are trained, slow
    ones are favoured: of what has closed they are the oldest."""

    def choose(self, ready: Sequence[Ready], n: int, *, under_way: Sequence[int], step: int) -> Sequence[Pick]:
        return [Pick(ready_group.group_id) for ready_group in ready[:n]]


@dataclass(frozen=True, slots=True)
class Windowed:
    """The oldest of the closed groups within a window: the first `fraction` of all groups not yet taken, closed or not,
    and at least `n` of them. The window moves on only when the groups at its head are taken (Forge, MiniMax 2026).

    Bias: less towards fast groups than `Oldest`, since one outside the window waits for the slow ones before it; at
    `fraction` 1 it is `Oldest`. The price is the learner's waiting for them."""

    fraction: float = 0.3

    def choose(self, ready: Sequence[Ready], n: int, *, under_way: Sequence[int], step: int) -> Sequence[Pick]:
        waiting_ids = sorted([*(ready_group.group_id for ready_group in ready), *under_way])
        window_ids = set(waiting_ids[: max(n, math.ceil(self.fraction * len(waiting_ids)))])
        window_picks = [Pick(ready_group.group_id) for ready_group in ready if ready_group.group_id in window_ids]
        return window_picks[:n]


@dataclass(frozen=True, slots=True)
class Freshest:
    """The closed groups whose youngest tokens are the newest; among equals, those that closed last.

    Bias: towards whatever has just been sampled. If generation is ahead, groups left behind grow stale and are lost,
    and slow groups are among them more often than fast ones: short episodes win. It has the smallest lag of all."""

    def choose(self, ready: Sequence[Ready], n: int, *, under_way: Sequence[int], step: int) -> Sequence[Pick]:
        newest_first = sorted(ready, key=lambda group: (group.lag, -group.closed_s, -group.group_id))
        return [Pick(ready_group.group_id) for ready_group in newest_first[:n]]


@dataclass(frozen=True, slots=True)
class Prioritised:
    """Groups drawn at random, in proportion to their mean |advantage|, with the correction that makes this unbiased.
    That is the advantage over the siblings, of returns as the group's own algorithm makes them, before any scale. It is
    so for every algorithm: what a critic, a teacher or the step's spread would say is known only after the learner's
    forward pass, or of the groups together. The draw needs no more, since any chance is unbiased with its correction;
    one nearer to an algorithm's own advantages would only have less variance.

    Of N closed groups, group i is taken with probability p_i (systematic sampling; p_i sum to n), and its share of the
    loss is multiplied by n / (N p_i). The expected gradient of a step is then the mean over all N, as if it were drawn
    evenly (Horvitz and Thompson 1952; the correction of prioritised replay, Schaul et al. 2016, at full strength).
    `floor` of the mean |advantage| is added to each, so that no group waits for ever and no weight exceeds
    (1 + floor) / floor.

    Bias: none in the expected gradient of a step over what waits, up to the loss being a mean over tokens. Over a run,
    weak groups wait longer, and grow stale more often."""

    seed: int = 0
    floor: float = 0.1

    def choose(self, ready: Sequence[Ready], n: int, *, under_way: Sequence[int], step: int) -> Sequence[Pick]:
        if len(ready) < n:
            return []
        # Why systematic sampling and not `random.choices` with weights: that draws with replacement, and a group may
        # enter the loss once (law 2). Draws one after the other without replacement have inclusion probabilities
        # without a closed form, so the weights below could not be exact. Here marks lie at distance 1 on a line on
        # which each group covers a stretch of its probability: exactly n marks, and each group is hit with exactly its
        # probability.
        chances = inclusion(self._sizes(ready), n)
        # Seeded by the step: a learner that crashed after its choice and chooses again takes the same groups, and
        # `agentrl retrain` repeats the step. A generator that lives across steps would have to be a part of every
        # checkpoint.
        generator = random.Random(f"{self.seed}/{step}")
        # In a random order, or neighbours in the order of admission could hardly ever be taken together: their
        # stretches lie side by side, and the marks are a whole unit apart.
        random_order = generator.sample(range(len(ready)), len(ready))
        group_picks: list[Pick] = []
        covered_distance, next_mark = 0.0, generator.random()
        for position in random_order:
            covered_distance += chances[position]
            # The last group also covers a mark that the sum misses by rounding.
            if covered_distance > next_mark or (position == random_order[-1] and len(group_picks) < n):
                group_picks.append(Pick(ready[position].group_id, n / (len(ready) * chances[position])))
                next_mark += 1.0
        return sorted(group_picks[:n])

    def _sizes(self, ready: Sequence[Ready]) -> list[float]:
        mean_strength = sum(ready_group.strength for ready_group in ready) / len(ready)
        return [ready_group.strength + self.floor * mean_strength if mean_strength else 1.0 for ready_group in ready]


def inclusion(sizes: Sequence[float], n: int) -> list[float]:
    """The probability of each of several things, of which `n` are drawn in proportion to their sizes; none above 1."""
    # A group may be so strong that its share of n exceeds 1. It is taken for certain, and the rest is divided anew
    # among the others; that may lift another one over 1, hence the loop. To cut at 1 without dividing anew would make
    # the probabilities sum to less than n, and the correction biased.
    certain_positions: set[int] = set()
    while True:
        remaining_size = sum(
            size_measure for position, size_measure in enumerate(sizes) if position not in certain_positions
        )
        chance_per_size = (n - len(certain_positions)) / remaining_size if remaining_size else 0.0
        newly_certain = {
            position
            for position, size_measure in enumerate(sizes)
            if position not in certain_positions and chance_per_size * size_measure >= 1.0
        }
        if not newly_certain:
            return [
                1.0 if position in certain_positions else chance_per_size * size_measure
                for position, size_measure in enumerate(sizes)
            ]
        certain_positions |= newly_certain


OLDEST = Oldest()


@dataclass(frozen=True, slots=True)
class Offered:
    """Groups that a step may take: `ready` groups, in the order of admission, of which `silent` ones give no signal;
    whether there are `stale` groups and `late` members; the groups `under_way`, and those of them `at_bound` that could
    close, with how many of their members are scored. `skipped`: how many groups left for this step without signal
    before."""

    ready: Sequence[Ready]
    silent: Sequence[int]
    under_way: Sequence[int]
    at_bound: Mapping[int, int]
    skipped: int
    stale: bool
    late: bool


@dataclass(frozen=True, slots=True)
class Chosen:
    """Choice for a step: `picks`, or nothing yet (None); the groups in `skips` leave in either case."""

    picks: Sequence[Pick] | None
    skips: frozenset[int]


def to_close(offer: Offered, n: int, least: int | None) -> frozenset[int]:
    """The groups at the lag bound that close for a step: those with `least` scored members (None: none), if the step
    then has its `n` groups. If it has not, the learner waits anyway, and they may still get more."""
    closing_ids = frozenset(
        group_id for group_id, scored_count in offer.at_bound.items() if least is not None and scored_count >= least
    )
    return closing_ids if n and len(closing_ids) + len(offer.ready) >= n else frozenset()


def choose(offer: Offered, step: int, n: int, order: TakeOrder, skip_at_most: int) -> Chosen | None:
    """`n` groups that `order` chooses, after the oldest silent ones were skipped, of which a step skips `skip_at_most`.
    None if there is nothing to do for the step, not even to drop what is stale."""
    # What was skipped before counts, as the store has it: a learner that waits asks many times for one step, and may
    # crash in between. Without the count a run whose rewards have all become equal would skip for ever and never end.
    allowed_skips = max(0, skip_at_most - offer.skipped) if skip_at_most else 0
    skipped_ids = frozenset(sorted(offer.silent)[:allowed_skips])
    ready_groups = [ready_group for ready_group in offer.ready if ready_group.group_id not in skipped_ids]
    group_picks: Sequence[Pick] = []
    if len(ready_groups) >= n > 0:
        group_picks = order.choose(ready_groups, n, under_way=offer.under_way, step=step)
    is_enough = len(group_picks) >= n and (n > 0 or offer.late)
    if not is_enough and not skipped_ids and not offer.stale:
        return None
    return Chosen(group_picks if is_enough else None, skipped_ids)
