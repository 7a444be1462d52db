"""When a place moves between engines and learner: in runs of days, under noise, and under predictions that err."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.cluster import ControllerSettings, Split
from agentrl.run.cluster.autoscaler import AutoscaleRule, WindowFigures

SPLITS = [Split(8 - ranks, ranks) for ranks in range(1, 8)]
SETTINGS = ControllerSettings(engines=(1, 7), ranks=[split.ranks for split in SPLITS])
WINDOW_S, COST_S = 120.0, 90.0
HOUR_S = 3600.0


@dataclass
class Run:
    """A run in virtual time. An engine samples as much as `worth(now)` ranks train; a learner of R ranks is as fast as
    R to the power of `scales`, while the prediction takes it for R. `noise` is the deviation of what a window shows."""

    judge: AutoscaleRule
    chance: Random
    at: Split
    worth: Callable[[float], float]
    noise: float = 0.1
    scales: float = 1.0
    now_s: float = 0.0
    moves: list[tuple[float, Split]] = field(default_factory=list)

    def rate(self, split: Split) -> float:
        return min(split.engines * self.worth(self.now_s), split.ranks**self.scales)

    def look(self) -> None:
        self.now_s += WINDOW_S
        engine, rank = (self.chance.lognormvariate(0, self.noise) for _ in "er")

        def predicted(split: Split) -> float:
            here = self.at.ranks**self.scales * rank  # as measured, then in proportion
            return min(split.engines * self.worth(self.now_s) * engine, here * split.ranks / self.at.ranks)

        index = SPLITS.index(self.at)
        beside = SPLITS[max(0, index - 1) : index] + SPLITS[index + 1 : index + 2]
        gains = {split: predicted(split) / predicted(self.at) - 1 for split in beside}
        rate = self.rate(self.at) * self.chance.lognormvariate(0, self.noise / 2)
        sight = WindowFigures(present=self.at, rate=rate, gains=gains, cost_s=COST_S, left_s=math.inf)
        if (to := self.judge.look(sight, self.now_s).to) is not None:
            self.at = to
            self.now_s += COST_S
            self.moves.append((self.now_s, to))

    def until(self, time_s: float) -> None:
        while self.now_s < time_s:
            self.look()

    @property
    def of_best(self) -> float:
        return self.rate(self.at) / max(map(self.rate, SPLITS))


def a_run(seed: int, begins: int, worth: Callable[[float], float], **world: float) -> Run:
    return Run(AutoscaleRule(SETTINGS), Random(seed), SPLITS[begins], worth, **world)


@settings(max_examples=20)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([0, len(SPLITS) - 1]),
    st.floats(0.2, 5),
    st.floats(0, 0.3),
    st.floats(0.6, 1),
)
def test_a_load_that_stays_is_reached_from_both_sides_and_then_left_alone(
    seed: int, begins: int, worth: float, noise: float, scales: float
) -> None:
    run = a_run(seed, begins, lambda _: worth, noise=noise, scales=scales)
    run.until(100 * HOUR_S)
    path = [(0.0, SPLITS[begins]), *run.moves]
    crossed = [(time_s, frozenset((was, now))) for (_, was), (time_s, now) in pairwise(path)]
    most = 2 + math.ceil(math.log2(100))  # of each pair of neighbours: each time, twice the wait
    for pair in {pair for _, pair in crossed}:
        times = [time_s for time_s, between in crossed if between == pair]
        assert len(times) <= most, times
        assert len({split.ranks for split in pair}) == 2 and abs(int.__sub__(*(split.ranks for split in pair))) == 1
    if noise < 0.1 and scales == 1:
        assert run.of_best >= 0.8, run.moves


@settings(max_examples=20)
@given(st.integers(0, 1 << 30), st.sampled_from([0, len(SPLITS) - 1]))
def test_with_little_noise_the_best_split_is_found_with_no_move_too_many(seed: int, begins: int) -> None:
    worth = Random(seed).choice([0.25, 0.5, 1.0, 2.0, 4.0])
    run = a_run(seed, begins, lambda _: worth, noise=0.02)
    run.until(24 * HOUR_S)
    best = max(map(run.rate, SPLITS))
    assert run.rate(run.at) > best / (1 + 1.5 * SETTINGS.gain)
    assert len(run.moves) == abs(SPLITS.index(run.at) - begins), "never back"


def test_a_load_that_drifts_is_followed() -> None:
    """Over two days an engine's worth falls from four ranks' to a quarter of one's: episodes grow long."""
    for seed in range(8):
        run = a_run(seed, 0, lambda now_s: 4.0 ** (1 - now_s / (24 * HOUR_S)), noise=0.05)
        run.until(4 * HOUR_S)
        assert run.of_best > 0.8 and run.at.ranks > run.at.engines, "the learner had the most to do"
        run.until(48 * HOUR_S)
        assert run.of_best > 0.75 and run.at.ranks < run.at.engines, (seed, run.at, run.moves)


def sight(
    present: Split, rate: float = 1.0, cost_s: float = 60.0, left_s: float = math.inf, **gains: float
) -> WindowFigures:
    beside = {SPLITS[int(name.removeprefix("ranks_")) - 1]: gain for name, gain in gains.items()}
    return WindowFigures(present=present, rate=rate, gains=beside, cost_s=cost_s, left_s=left_s)


def test_one_look_is_not_enough_and_a_look_that_differs_begins_anew() -> None:
    judge, here = AutoscaleRule(SETTINGS), SPLITS[1]
    promised = [
        judge.look(sight(here, ranks_1=1.0, ranks_3=gain), float(at)) for at, gain in enumerate((2, 0, 2, 2, 2))
    ]
    assert [decision.to for decision in promised] == [None, None, None, None, SPLITS[2]]
    assert promised[3].why == "5 + 3 promises +200% tokens a second, in 2 of 3 looks"


@pytest.mark.parametrize(("cost_s", "left_s"), [(600.0, math.inf), (60.0, 300.0)])
def test_a_move_that_does_not_earn_its_cost_is_not_made(cost_s: float, left_s: float) -> None:
    """A third more for an hour is twenty minutes, of which a move may cost ten; near a run's end it may cost less."""
    judge, here = AutoscaleRule(SETTINGS), SPLITS[1]
    found = [judge.look(sight(here, cost_s=cost_s, left_s=left_s, ranks_3=0.33), float(at)) for at in range(9)]
    assert {decision.to for decision in found} == {None}
    assert f"does not earn what a move costs, {cost_s:.0f} s" in found[-1].why


def test_a_move_that_did_harm_is_undone_at_once_and_not_made_again_for_ever_longer() -> None:
    """The prediction says each time that it pays."""
    judge, left = AutoscaleRule(SETTINGS), SPLITS[1]
    at, moves = left, list[float]()
    for minute in range(60 * 24 * 7):
        rate, beside = (1.0, {"ranks_3": 0.5}) if at == left else (0.5, {"ranks_2": 0.0})
        if (to := judge.look(sight(at, rate=rate, **beside), minute * 60.0).to) is not None:
            moves.append(minute * 60.0)
            at = to
    pairs = list(zip(moves[::2], moves[1::2], strict=True))
    assert at == left and all(back - there == 60.0 for there, back in pairs)
    waits = [later[0] - sooner[1] for sooner, later in pairwise(pairs)]
    assert all(2 * HOUR_S * 4**n <= wait < 2 * HOUR_S * 4**n + 300 for n, wait in enumerate(waits)), waits


def test_moves_of_an_earlier_life_of_the_run_count() -> None:
    judge = AutoscaleRule(SETTINGS)
    judge.moved(SPLITS[2], SPLITS[1], now_s=0.0)
    found = [judge.look(sight(SPLITS[1], ranks_3=1.0), 600.0 + at) for at in range(4)]
    assert found[-1].to is None and "a place moved between the two lately" in found[-1].why
    assert judge.look(sight(SPLITS[1], ranks_3=1.0), HOUR_S).to == SPLITS[2]
