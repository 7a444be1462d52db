"""Moves places between engines and the learner's ranks while a run trains (`[cluster.controller]`).

    steps and episodes of a window ─► simulated with each neighbouring split ─► Judge
      ─► the row of the requested split ─► Scaler (engines), learner (ends between two steps, starts with other ranks)

Owns what it measured of the run: the learner's pace by its ranks, and what a move costs. After each look a row of kind
`controller` says what it saw and decided. Never starts or ends a process.

When a run moves a place between its engines and its learner: a pure rule, which knows no process and no store.

A look is made at a window of steps that no other look has seen. A place moves if

- the same move promises at least `gain` in `AGREE` looks in a row,
- within `HORIZON_S`, or what is left of the run, it earns twice what a move was measured to cost, and
- nothing moved between the same two splits lately: for `HORIZON_S` after the first time, for twice as long after each
  further one. So the moves of a run are few, whatever its load and its predictions do: between two neighbours their
  number grows with the logarithm of its length.

After each move its promise is checked once: if the run trains fewer tokens than before by `gain` or more, the place
goes back at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from agentrl.config import RunConfig
from agentrl.config.cluster import ControllerSettings, Split, splits
from agentrl.errors import StoreError, UsageError
from agentrl.planning.simulate.measured import measure, start_up_steps
from agentrl.records import Json
from agentrl.run.cluster import scale_requests
from agentrl.run.cluster.scale_requests import DECISIONS, split_of
from agentrl.run.cluster.scaling import Size, requested_size
from agentrl.run.cluster.split_gains import gains
from agentrl.run.run_folder import RunDir
from agentrl.run.take_orders import returns_of
from agentrl.run.telemetry import Telemetry
from agentrl.store import RunStore
from agentrl.store.async_calls import Aside, Looks
from agentrl.store.metrics import Metric
from agentrl.store.run_values import LEARNER_STARTED

# The rule was tuned on simulated runs (`tests/run/test_judge.py`), not for one of them: how much a window of 16 steps
# scatters depends on the steps in it, and what a move costs is measured. So only `gain`, the user's wish, is a setting.
EVERY_S = 20.0  # between two looks, for which a window of new steps has to be there as well
WINDOW_STEPS = 16
AGREE = 3
HORIZON_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFigures:
    """Measurements of a window. `rate`: trained tokens per second; `gains`: for each split beside the present one, the
    share by which it is predicted to raise that rate; `cost_s`: seconds of training that a move costs; `left_s`:
    seconds until the run's end."""

    present: Split
    rate: float
    gains: Mapping[Split, float]
    cost_s: float
    left_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Split to move to, None to stay, and why, for a reader."""

    to: Split | None
    why: str


@dataclass(slots=True)
class AutoscaleRule:
    """Looks in the order of time; `now_s` never decreases, in seconds of any clock."""

    settings: ControllerSettings
    _toward: Split | None = None
    _seen: int = 0  # looks in a row that would move there
    _moves: dict[frozenset[Split], list[float]] = field(default_factory=dict[frozenset[Split], list[float]])
    _before: tuple[Split, float] | None = None  # the split before the last move, and its rate: not checked yet

    def moved(self, was: Split, to: Split, now_s: float) -> None:
        """Note a move, also one of an earlier life of the run."""
        self._moves.setdefault(frozenset((was, to)), []).append(now_s)
        self._toward, self._seen = None, 0

    def look(self, sight: WindowFigures, now_s: float) -> Decision:
        decision = self._check(sight) or self._judge(sight, now_s)
        if decision.to is not None:
            self.moved(sight.present, decision.to, now_s)
        return decision

    def _check(self, sight: WindowFigures) -> Decision | None:
        """Go back if the last move did harm."""
        if self._before is None:
            return None
        # Checked once, at the first full window after the move. A later look compares with the split that is there now,
        # and the load may have changed meanwhile.
        (earlier_split, earlier_rate), self._before = self._before, None
        lost_share = 1 - sight.rate / earlier_rate if earlier_rate else 0.0
        if earlier_split == sight.present or lost_share < self.settings.gain or not self._pays(lost_share, sight):
            return None
        return Decision(earlier_split, f"{lost_share:.0%} fewer tokens a second than with {earlier_split}")

    def _judge(self, sight: WindowFigures, now_s: float) -> Decision:
        settings = self.settings
        best_split = max(sight.gains, key=lambda split: sight.gains[split], default=None)
        if best_split is None or (expected_gain := sight.gains[best_split]) < settings.gain:
            self._toward, self._seen = None, 0
            return Decision(None, f"no move promises {settings.gain:.0%} more tokens a second")
        # One window scatters by more than what a move gains. Several in a row that agree on the same move are evidence;
        # a change of mind begins the count anew.
        self._seen = self._seen + 1 if best_split == self._toward else 1
        self._toward = best_split
        promise_text = f"{best_split} promises {expected_gain:+.0%} tokens a second"
        if self._seen < AGREE:
            return Decision(None, f"{promise_text}, in {self._seen} of {AGREE} looks")
        move_times = self._moves.get(frozenset((sight.present, best_split)), [])
        # The wait doubles with each move between the same two splits. Two splits that are about as good would otherwise
        # be exchanged for ever, each move paying its cost, because noise lets now the one and now the other look
        # better.
        if move_times and now_s < (earliest_s := move_times[-1] + HORIZON_S * 2.0 ** (len(move_times) - 1)):
            return Decision(
                None, f"{promise_text}; a place moved between the two lately, {earliest_s - now_s:.0f} s to wait"
            )
        if not self._pays(expected_gain, sight):
            return Decision(None, f"{promise_text}, which does not earn what a move costs, {sight.cost_s:.0f} s")
        self._before = (sight.present, sight.rate)
        return Decision(best_split, promise_text)

    def _pays(self, gain: float, sight: WindowFigures) -> bool:
        return gain * min(HORIZON_S, sight.left_s) > _MARGIN * sight.cost_s


_MARGIN = 2.0  # times the measured cost of a move that it has to earn


@dataclass(slots=True, kw_only=True)
class Controller:
    """`engines` says how many serve, `engine_start_s` what the start of one took."""

    run: RunDir
    config: RunConfig
    settings: ControllerSettings
    looks: Looks[RunStore]
    writes: Aside[RunStore]
    telemetry: Telemetry
    engines: Callable[[], int]
    engine_start_s: Callable[[], float]
    clock: Callable[[], float] = time.time
    _judge: AutoscaleRule = field(init=False)
    _judged: int = 0  # the last step that a look has seen
    _pace: dict[int, float] = field(default_factory=dict[int, float])  # by ranks: seconds of work for a token
    _moving: tuple[Split, float] | None = None  # from where, and since when
    _cost_s: float | None = None  # of the last move

    def __post_init__(self) -> None:
        self._judge = AutoscaleRule(self.settings)

    async def keep_looking(self) -> None:
        """Look at the run again and again until cancelled."""
        remembers = False
        while True:
            with suppress(StoreError):
                if remembers:
                    await self._look()
                else:
                    await self.looks(self._remember)
                    remembers = True
            await trio.sleep(EVERY_S)

    def _remember(self, store: RunStore) -> None:
        # None of an earlier life.
        self._judged = max((metric_row.step for metric_row in store.metrics.values("step")), default=0)
        # Also moves that a rollback undid: they happened, and cost what they cost. A run that crashes after every move
        # would otherwise make the same one again and again.
        for metric_row in store.metrics.values(DECISIONS, undone=True):
            if target_split := metric_row.values.get("to"):
                self._judge.moved(split_of(metric_row.values["split"]), split_of(target_split), metric_row.time_s)

    def _rows(self, store: RunStore) -> tuple[dict[str, Any], Split, list[Metric]]:
        """The learner that runs, the requested split, and the steps of this learner."""
        learner_start = LEARNER_STARTED.of(store.meta)
        requested_split = Split(
            requested_size(self.config, store.meta).engines, scale_requests.ranks(self.config, store.meta)
        )
        return (
            learner_start,
            requested_split,
            store.metrics.values("step", after=int(learner_start["step"])) if learner_start else [],
        )

    async def _look(self) -> None:
        learner_start, requested_split, step_rows = await self.looks(self._rows)
        present_split = Split(self.engines(), int(learner_start.get("ranks", 0)))
        if present_split != requested_split:
            return  # a place is on its way
        if not step_rows or not await self._arrived(step_rows[0]):
            return
        first_step = max(step_rows[0].step + start_up_steps(self.config.buffer), self._judged)
        if step_rows[-1].step - first_step < WINDOW_STEPS:
            return
        self._judged = step_rows[-1].step
        if (figures := await self._see(present_split, step_rows[-WINDOW_STEPS:], learner_start)) is None:
            return
        decision = self._judge.look(figures, self.clock())
        await self._record(step_rows[-1].step, figures, decision)
        if (target_split := decision.to) is not None:
            self._moving = (present_split, self.clock())
            await self.writes(lambda store: scale_requests.move(store, target_split, was=present_split))

    async def _see(self, present: Split, rows: Sequence[Metric], learner: Mapping[str, Any]) -> WindowFigures | None:
        """Measure a window and predict the splits beside the present one. None if the window has too little data."""
        busy_seconds, token_count = (
            sum(float(step_row.values[metric_name] or 0) for step_row in rows)  # pyright: ignore[reportArgumentType]
            for metric_name in ("busy_s", "tokens_scored")
        )
        window_s = rows[-1].time_s - rows[0].time_s
        if not token_count or window_s <= 0:
            return None
        # The pace of the learner is measured where it was, and assumed to be in proportion to its ranks where it was
        # not: the first move to a number of ranks is a guess, every later one is not.
        self._pace[present.ranks] = busy_seconds / token_count
        possible_splits = splits(
            self.config.cluster, Split(Size.of(self.config).engines, self.config.train.parallel.ranks)
        )
        if present not in possible_splits:
            return None
        split_index = possible_splits.index(present)
        neighbours = (
            possible_splits[max(0, split_index - 1) : split_index] + possible_splits[split_index + 1 : split_index + 2]
        )
        group_count = len(rows) * self.config.buffer.groups_per_step
        predict_gains = partial(self._predict, present, neighbours, after=rows[0].step - 1, newest=group_count)
        try:
            # Simulating takes seconds of pure Python: in the loop it would hold up the supervision of every child.
            expected_gains = await trio.to_thread.run_sync(predict_gains, abandon_on_cancel=True)
        except UsageError:  # too few groups
            return None
        step_duration_s = window_s / (len(rows) - 1)
        token_rate = sum(float(step_row.values["tokens_scored"] or 0) for step_row in rows[1:]) / window_s  # pyright: ignore[reportArgumentType]
        return WindowFigures(
            present=present,
            rate=token_rate,
            gains=expected_gains,
            cost_s=self._cost_s if self._cost_s is not None else float(learner["start_s"]) + self.engine_start_s(),
            left_s=step_duration_s * max(0, self.config.train.steps - rows[-1].step),
        )

    def _predict(self, present: Split, beside: Sequence[Split], *, after: int, newest: int) -> dict[Split, float]:
        with RunStore.read(self.run.store_path) as run_store:
            measured = measure(
                run_store,
                self.config.buffer,
                start_up=after,
                end=self.config.train.steps,
                returns=returns_of(self.config),
                newest=newest,
            )
        return gains(self.config, measured, present, beside, faster=partial(self._faster, present.ranks))

    def _faster(self, now: int, then: int) -> float:
        """How many times as fast the learner is with other ranks: as it was, if it had them; in proportion, if not."""
        if now in self._pace and then in self._pace:
            return self._pace[now] / self._pace[then]
        return then / now

    async def _arrived(self, first: Metric) -> bool:
        """Note what the move cost that ended with this step, if one did, or why it was taken back."""
        if self._moving is None:
            return True
        (earlier_split, move_began_s), self._moving = self._moving, None
        refusal = await self.looks(lambda store: scale_requests.refused(store.meta))
        self._cost_s = max(0.0, first.time_s - move_began_s)
        move_row: dict[str, Json] = {
            "split": None,
            "was": list(earlier_split),
            "took_s": self._cost_s,
            "refused": refusal,
        }
        await self.writes(lambda _: self.telemetry.record(DECISIONS, first.step, move_row))
        return refusal is None

    async def _record(self, step: int, sight: WindowFigures, decision: Decision) -> None:
        look_row: dict[str, Json] = {
            "split": list(sight.present),
            "rate": sight.rate,
            "gains": {str(neighbour): expected_gain for neighbour, expected_gain in sight.gains.items()},
            "cost_s": sight.cost_s,
            "left_s": sight.left_s if math.isfinite(sight.left_s) else None,
            "to": None if decision.to is None else list(decision.to),
            "why": decision.why,
        }
        await self.writes(lambda _: self.telemetry.record(DECISIONS, step, look_row))
