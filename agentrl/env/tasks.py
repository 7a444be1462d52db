"""The sources of tasks: streams of seeds, rows of data sets, mixtures of them, a curriculum over them.

A source maps a running index to a task, the same in every process and after every restart; only a curriculum also
depends on measured results, and it is rebuilt by observing the same results in the same order. Sources never know
who plays the tasks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from agentrl.errors import ConfigError
from agentrl.records import Json, Task
from agentrl.task_ids import task_key


class TaskSource(ABC):
    """Tasks by running index. `size` is how many there are, None for an endless stream."""

    size: int | None = None

    @abstractmethod
    def task(self, index: int) -> Task:
        """The task at `index`, 0, 1, 2, …; its `index` is set to it. Raises IndexError past the end."""

    def __iter__(self) -> Iterator[Task]:
        task_index = 0
        while self.size is None or task_index < self.size:
            yield self.task(task_index)
            task_index += 1

    def _within(self, index: int) -> int:
        if index < 0 or (self.size is not None and index >= self.size):
            raise IndexError(f"task {index} of a source of {self.size}")
        return index


@dataclass(frozen=True)
class Seeds(TaskSource):
    """An environment that makes its own tasks: seed `first_seed`, `first_seed + 1`, …, endless or `size` of them."""

    env: str
    kwargs: Mapping[str, Json] = field(default_factory=dict[str, Json])
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])
    first_seed: int = 0
    size: int | None = None

    def task(self, index: int) -> Task:
        self._within(index)
        return Task(index=index, env=self.env, seed=self.first_seed + index, kwargs=self.kwargs, options=self.options)


class Epochs(TaskSource):
    """A finite source `epochs` times over (None: endlessly), each time in an order of its own, drawn from `seed`.

    Raises ConfigError for a source without end."""

    def __init__(self, source: TaskSource, *, seed: int = 0, epochs: int | None = None) -> None:
        if source.size is None:
            raise ConfigError("epochs", epochs, "an endless source has none: leave it out")
        self._source, self._each, self._order = source, source.size, _Orders(seed, source.size)
        self.size = None if epochs is None else epochs * self._each

    def task(self, index: int) -> Task:
        epoch_index, place_in_epoch = divmod(self._within(index), self._each)
        return replace(self._source.task(self._order.at(epoch_index, place_in_epoch)), index=index)


class Rows(TaskSource):
    """The rows of a data set as reset options, `epochs` times over (None: endlessly).

    Every epoch has an order of its own, drawn from `seed`; `shuffle=False` keeps the file's. Row and epoch decide the
    task's seed, so that a row is played under fresh seeds in later epochs. `options` are defaults that rows override.
    Raises ConfigError for a data set without rows."""

    def __init__(
        self,
        env: str,
        rows: Sequence[Mapping[str, Json]],
        *,
        kwargs: Mapping[str, Json] | None = None,
        options: Mapping[str, Json] | None = None,
        seed: int = 0,
        epochs: int | None = None,
        shuffle: bool = True,
    ) -> None:
        if not rows:
            raise ConfigError("rows", "[]", "give a data set with at least one row")
        if epochs is not None and epochs < 1:
            raise ConfigError("epochs", epochs, "give 1 or more, or leave it out for an endless stream")
        self._env, self._rows, self._seed = env, rows, seed
        self._order = _Orders(seed, len(rows)) if shuffle else None
        self._kwargs, self._options = dict(kwargs or {}), dict(options or {})
        self.size = None if epochs is None else epochs * len(rows)

    def task(self, index: int) -> Task:
        epoch_index, place_in_epoch = divmod(self._within(index), len(self._rows))
        row_index = self._order.at(epoch_index, place_in_epoch) if self._order else place_in_epoch
        return Task(
            index=index,
            env=self._env,
            seed=_mixed(self._seed, epoch_index, row_index),
            kwargs=self._kwargs,
            options={**self._options, **self._rows[row_index]},
        )


class _Orders:
    """A permutation of `count` places for every epoch, drawn from `seed`; the last one used is cached."""

    def __init__(self, seed: int, count: int) -> None:
        self._seed, self._count = seed, count
        self._last: tuple[int, list[int]] | None = None

    def at(self, epoch: int, place: int) -> int:
        if self._last is None or self._last[0] != epoch:
            permutation = np.random.default_rng((self._seed, epoch)).permutation(self._count)
            self._last = (epoch, [int(drawn_place) for drawn_place in permutation])
        return self._last[1][place]


class Mixture(TaskSource):
    """Several sources in shares of `weights`; at every index each has had its share, to within a task or two.

    A source that has ended leaves the others their relative shares; the mixture ends with the last of them.
    Raises ConfigError for weights that are no shares."""

    def __init__(self, sources: Sequence[TaskSource], weights: Sequence[float]) -> None:
        if len(sources) != len(weights) or not sources:
            raise ConfigError("weights", list(weights), f"give one weight for each of {len(sources)} sources")
        if any(not math.isfinite(weight) or weight <= 0 for weight in weights):
            raise ConfigError("weights", list(weights), "give numbers above 0")
        self._sources, self._weights = tuple(sources), tuple(weights)
        source_sizes = [source.size for source in sources]
        self.size = None if None in source_sizes else sum(cast("list[int]", source_sizes))
        self._picks: list[tuple[int, int]] = []  # source and place in it, of every index so far
        self._credit = [0.0] * len(sources)
        self._taken = [0] * len(sources)

    def task(self, index: int) -> Task:
        self._within(index)
        # Remembered, not recomputed: whose turn it is depends on all turns before, so a task asked for out of order (a
        # restarted run asks for the one it had reached) would otherwise walk the list from its start each time.
        while len(self._picks) <= index:
            self._pick()
        source_index, place_in_source = self._picks[index]
        return replace(self._sources[source_index].task(place_in_source), index=index)

    def _pick(self) -> None:
        """The next source: the one that lags most behind its share (smooth weighted round robin)."""
        open_sources = [
            source_index
            for source_index, source in enumerate(self._sources)
            if source.size is None or self._taken[source_index] < source.size
        ]
        for source_index in open_sources:
            self._credit[source_index] += self._weights[source_index]
        # Not a draw by the weights: drawn shares wander by the square root of the count, and a source of weight 0.01
        # may not appear for hundreds of steps. Credits keep every prefix within a task or two of its shares, and need
        # no seed. The first of equals wins, so that every process picks alike.
        chosen_index = max(open_sources, key=lambda i: self._credit[i])
        self._credit[chosen_index] -= sum(self._weights[source_index] for source_index in open_sources)
        self._picks.append((chosen_index, self._taken[chosen_index]))
        self._taken[chosen_index] += 1


@dataclass(slots=True)
class _Record:
    """The record of one task: episodes played, smoothed success rate, the index from which it is due again."""

    plays: int = 0
    rate: float = 0.0
    due: int = 0


class Curriculum(TaskSource):
    """A pool of tasks that leaves out the solved and the hopeless ones, and tests them again from time to time.

    A task whose smoothed success rate is at least `solved` or at most `hopeless` after `min_plays` episodes pauses
    while `pause` others are played, then is due again, and stays if the result has changed. Groups in which all
    episodes end alike carry no gradient; the pauses avoid them.

    `task` gives the next one by what was observed so far; feed `observe` with every finished task, in the order of
    the journal, and a restarted curriculum makes the same choices. Endless pools are cut to their first `pool`."""

    def __init__(
        self,
        source: TaskSource,
        *,
        pool: int = 10_000,
        solved: float = 0.95,
        hopeless: float = 0.02,
        min_plays: int = 8,
        pause: int = 1_000,
        smoothing: float = 0.5,
    ) -> None:
        if not 0 <= hopeless < solved <= 1:
            raise ConfigError("hopeless", hopeless, f"give 0 <= hopeless < solved = {solved} <= 1")
        pool_size = pool if source.size is None else min(pool, source.size)
        self._pool = [source.task(pool_index) for pool_index in range(pool_size)]
        self._records = [_Record() for _ in self._pool]
        self._places = {task_key(pool_task): pool_place for pool_place, pool_task in enumerate(self._pool)}
        self._solved, self._hopeless, self._min_plays = solved, hopeless, min_plays
        self._pause, self._smoothing = pause, smoothing

    def task(self, index: int) -> Task:
        """A task that does not pause, in turn; if all pause, the one that is due first."""
        active_places = [pool_place for pool_place, task_record in enumerate(self._records) if task_record.due <= index]
        if active_places:
            pool_place = active_places[index % len(active_places)]
        else:
            pool_place = min(range(len(self._pool)), key=lambda i: self._records[i].due)
        return replace(self._pool[pool_place], index=index)

    def observe(self, task: Task, success: float, *, plays: int = 1) -> None:
        """`plays` episodes of `task` had the success rate `success`. A task of another source is ignored."""
        pool_place = self._places.get(task_key(task))
        if pool_place is None:
            return
        task_record = self._records[pool_place]
        # The first result is taken whole. Smoothed from 0.0, every task would begin as hopeless and could pause before
        # it had a fair trial.
        kept_share = self._smoothing if task_record.plays else 0.0
        task_record.rate = kept_share * task_record.rate + (1 - kept_share) * success
        task_record.plays += plays
        is_settled = task_record.rate >= self._solved or task_record.rate <= self._hopeless
        # It comes back because the policy changes: what was hopeless at step 100 is often the best task at step 1,000,
        # and a solved one may be forgotten. Dropped for good, neither would be noticed.
        task_record.due = task.index + self._pause if is_settled and task_record.plays >= self._min_plays else 0

    @property
    def pausing(self) -> tuple[int, int]:
        """How many tasks of the pool are held for solved, and how many for hopeless."""
        paused_records = [task_record for task_record in self._records if task_record.due > 0]
        solved_count = sum(task_record.rate >= self._solved for task_record in paused_records)
        return solved_count, len(paused_records) - solved_count


def _mixed(*parts: int) -> int:
    """A seed from several numbers, below 2**31 as some environments want it."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0]) & 0x7FFF_FFFF
