"""Streams of rewards on one scale: by hand, and against the exact gradient of each stream."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from torch import Tensor

from agentrl.algos.advantages import SLACK, STD_FLOOR
from agentrl.algos.credit import StreamScale, stream_advantages, turn_advantages
from tests.algos.test_credit import ACTIONS, HORIZON, PATHS, logprob_grads, outcome, rewards

ALL = torch.ones(3, dtype=torch.bool)
OUTCOMES = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
STREAMS = torch.tensor([[[4.0, 0.0], [0.0, 2.0], [0.0, 99.0]], [[0.1, 0.1], [0.3, 0.0], [0.2, 0.0]]]).double()
TURNS = torch.tensor([2, 2, 1])


def advantages(scale: StreamScale, **changes: object) -> Tensor:
    given = {"process_weight": 2.0, "baseline": "leave_one_out", "scale": scale, **changes}
    return stream_advantages(OUTCOMES, STREAMS, torch.tensor([1.0, 0.5]).double(), TURNS, ALL, **given)  # type: ignore[arg-type]


def spread(*turns: list[float]) -> float:
    return statistics.fmean(statistics.variance(turn) for turn in turns) ** 0.5 + STD_FLOOR


def test_each_stream_is_divided_by_the_spread_of_its_own_rewards_to_go() -> None:
    outcomes = spread([1, 0, 0])
    large = spread([4, 2, 0], [0, 2, 0])  # to go at the first turn, and at the second; 99 is past the end
    small = spread([0.2, 0.3, 0.2], [0.1, 0.0, 0.0])
    first = 1.0 / outcomes + 2 * (1.0 * (4 - 1) / large + 0.5 * (0.2 - 0.25) / small)
    second = 1.0 / outcomes + 2 * (1.0 * (0 - 1) / large + 0.5 * (0.1 - 0.0) / small)
    got = advantages("std")
    torch.testing.assert_close(got[0], torch.tensor([first, second], dtype=torch.float64))
    assert got[2, 1] == 0, "past its end"


def test_leaving_one_out_divides_by_the_spread_of_the_siblings() -> None:
    large, small = spread([2, 0], [2, 0]), spread([0.3, 0.2], [0.0, 0.0])
    first = 2 * (1.0 * (4 - 1) / large + 0.5 * (0.2 - 0.25) / small)  # the siblings' outcomes do not differ
    torch.testing.assert_close(advantages("leave_one_out")[0, 0], torch.tensor(first, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["std", "leave_one_out"])
def test_a_stream_in_other_units_says_the_same(kind: StreamScale) -> None:
    plain, scaled = (
        stream_advantages(
            OUTCOMES,
            100 * STREAMS * torch.tensor([units, 1.0]).double()[:, None, None],
            torch.ones(2),
            TURNS,
            ALL,
            baseline="leave_one_out",
            scale=kind,
            process_weight=1.0,
        )
        for units in (1.0, 1000.0)
    )
    torch.testing.assert_close(scaled, plain, rtol=1e-3, atol=1e-3)


def test_a_stream_that_is_the_same_for_all_says_nothing() -> None:
    streams = torch.full((1, 3, 2), 0.1).double()
    for kind in ("std", "leave_one_out"):
        got = stream_advantages(
            torch.zeros(3), streams, torch.ones(1), torch.tensor([2, 2, 2]), ALL, baseline="leave_one_out", scale=kind,
            process_weight=1.0,
        )  # fmt: skip
        assert got.abs().max() == 0


def test_a_late_member_is_scaled_as_the_closed_group_was_and_changes_nothing_for_it() -> None:
    judges = torch.tensor([True, True, True, False])
    outcomes, turns = torch.cat([OUTCOMES, torch.tensor([7.0]).double()]), torch.tensor([2, 2, 1, 2])
    streams = torch.cat([STREAMS, torch.full((2, 1, 2), 5.0).double()], 1)
    for kind in ("std", "leave_one_out"):
        got = stream_advantages(
            outcomes,
            streams,
            torch.tensor([1.0, 0.5]).double(),
            turns,
            torch.ones(4, dtype=torch.bool),
            baseline="leave_one_out",
            scale=kind,
            process_weight=2.0,
            judges_G=judges,
        )
        torch.testing.assert_close(got[:3], advantages(kind))
        late = 0.0
        for value, mean, weight, to_go in (
            (7, 1 / 3, 1, ([1, 0, 0],)),
            (10, 2, 2, ([4, 2, 0], [0, 2, 0])),
            (10, 0.7 / 3, 1, ([0.2, 0.3, 0.2], [0.1, 0, 0])),
        ):
            with_it = spread(*[[*turn, own] for turn, own in zip(to_go, (value, 5), strict=False)])
            judges_alone = spread(*to_go)
            # of each in time the siblings alone are the divisor, also if it is far from them
            late += weight * (value - mean) / (max(judges_alone, with_it / SLACK) if kind == "std" else judges_alone)
        torch.testing.assert_close(got[3, 0], torch.tensor(late, dtype=torch.float64))


# --- exact --------------------------------------------------------------------------------------------------------


def second(path: tuple[int, ...]) -> list[float]:
    """Another stream, in other units."""
    return [20.0 * (action == 2) - 3.0 * t for t, action in enumerate(path)]


def padded(of: object) -> Tensor:
    table = torch.zeros(len(PATHS), HORIZON, dtype=torch.float64)
    for index, path in enumerate(PATHS):
        table[index, : len(path)] = torch.tensor(of(path), dtype=torch.float64)  # type: ignore[operator]
    return table


def enumerated(scale: StreamScale) -> tuple[Tensor, list[Tensor], list[float]]:
    """Exact expectation of the estimator over all groups of three; the exact gradient of each stream; and each stream's
    expected inverse spread over pairs of siblings."""
    generator = torch.Generator().manual_seed(3)
    theta = torch.randn(HORIZON, ACTIONS, ACTIONS, generator=generator, dtype=torch.float64, requires_grad=True)
    probability_P, scores = logprob_grads(theta)
    outcome_P = torch.tensor([outcome(path) for path in PATHS], dtype=torch.float64)
    tables = [padded(rewards), padded(second)]
    turns_P = torch.tensor([len(path) for path in PATHS])
    gradients = [
        torch.autograd.grad((probability_P * returns_P).sum(), theta, retain_graph=True)[0]
        for returns_P in (outcome_P, *(table.sum(1) for table in tables))
    ]
    p = probability_P.detach().tolist()
    inverse = [0.0, 0.0, 0.0]
    to_go = [[[value] for value in outcome_P.tolist()], *(table.flip(1).cumsum(1).flip(1).tolist() for table in tables)]
    for a, b in itertools.product(range(len(PATHS)), repeat=2):
        longest = int(max(turns_P[a], turns_P[b]))
        for stream, values in enumerate(to_go):
            found = statistics.fmean(
                statistics.variance(pair) for pair in list(zip(values[a], values[b], strict=True))[:longest]
            )
            inverse[stream] += p[a] * p[b] / (found**0.5 + STD_FLOOR) if found > 1e-18 else 0.0
    estimate = torch.zeros_like(theta)
    weights = torch.tensor([1.0, 0.25], dtype=torch.float64)
    for group in itertools.combinations_with_replacement(range(len(PATHS)), 3):
        chosen = list(group)
        times = len(set(itertools.permutations(group)))
        got = stream_advantages(
            outcome_P[chosen],
            torch.stack([table[chosen] for table in tables]),
            weights,
            turns_P[chosen],
            ALL,
            baseline="leave_one_out",
            scale=scale,
            process_weight=0.6,
        ).tolist()
        mass = times * p[group[0]] * p[group[1]] * p[group[2]] / 3
        for member, path in enumerate(chosen):
            for t, score in enumerate(scores[path]):
                estimate += mass * got[member][t] * score
    return estimate.detach(), gradients, inverse


@pytest.mark.medium
def test_with_the_siblings_spread_the_expected_gradient_is_a_mixture_of_the_streams_gradients() -> None:
    estimate, (of_outcome, of_first, of_second), inverse = enumerated("leave_one_out")
    expected = inverse[0] * of_outcome + 0.6 * (1.0 * inverse[1] * of_first + 0.25 * inverse[2] * of_second)
    torch.testing.assert_close(estimate, expected, atol=1e-12, rtol=1e-9)
    assert estimate.abs().max() > 0.05


def test_with_the_groups_spread_it_is_no_mixture_of_them() -> None:
    estimate, gradients, _ = enumerated("std")
    basis = torch.stack([gradient.flatten() for gradient in gradients], 1)
    best = basis @ torch.linalg.lstsq(basis, estimate.flatten()[:, None]).solution
    residual = (best.flatten() - estimate.flatten()).norm() / estimate.norm()
    assert residual > 0.01


@pytest.mark.parametrize("baseline", ["leave_one_out", "group_mean"])
def test_centring_alone_is_the_same_for_streams_as_for_their_sum(baseline: str) -> None:
    """Why only the spread is taken stream by stream."""
    apart = [
        turn_advantages(torch.zeros(3), stream, TURNS, ALL, baseline=baseline, scale="none", process_weight=1.0)  # type: ignore[arg-type]
        for stream in STREAMS
    ]
    whole = turn_advantages(
        torch.zeros(3), STREAMS.sum(0), TURNS, ALL, baseline=baseline, scale="none", process_weight=1.0  # type: ignore[arg-type]
    )  # fmt: skip
    torch.testing.assert_close(apart[0] + apart[1], whole)


@pytest.mark.parametrize("scale", ["std", "leave_one_out"])
def test_a_role_that_nobody_scored_has_played_has_no_advantages(scale: StreamScale) -> None:
    """Of a role that only a failed member reached: no member has a turn, so there is nothing to divide by."""
    nobody = torch.zeros(3, dtype=torch.long)
    found = stream_advantages(
        torch.tensor([1.0, 0.0, 1.0]),
        torch.zeros(2, 3, 0),
        torch.ones(2),
        nobody,
        torch.ones(3, dtype=torch.bool),
        baseline="leave_one_out",
        scale=scale,
        process_weight=1.0,
    )
    assert found.shape == (3, 0)
