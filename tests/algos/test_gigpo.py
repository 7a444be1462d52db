"""GiGPO: against the paper's formula in loops, against its exact expectation, and from the store to the rows."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from typing import Any

import pytest
import torch
from each_case import each_case

from agentrl import config
from agentrl.algos.advantages import SLACK, STD_FLOOR
from agentrl.algos.algorithm import Siblings
from agentrl.algos.gigpo import GiGPO
from agentrl.algos.grpo import GRPO
from agentrl.errors import ConfigError

from .test_credit import PATHS, logprob_grads, outcome, rewards
from .test_maxrl import parameters


def siblings(
    outcomes: list[float], processes: list[list[float]], states: list[list[int]], late: frozenset[int] = frozenset()
) -> Siblings:
    width = max(map(len, processes))
    rewards_GT = torch.tensor([[*own, *[0.0] * (width - len(own))] for own in processes], dtype=torch.float64)
    return Siblings(
        outcomes_G=torch.tensor(outcomes, dtype=torch.float64),
        rewards_GT=rewards_GT,
        turns_G=torch.tensor([len(own) for own in processes]),
        scored_G=torch.ones(len(outcomes), dtype=torch.bool),
        judges_G=torch.tensor([member not in late for member in range(len(outcomes))]),
        streams_KGT=rewards_GT[None],
        weights_K=torch.ones(1, dtype=torch.float64),
        states_GT=torch.tensor([[*own, *[-1] * (width - len(own))] for own in states]),
    )


def to_go(of_episode: float, process: list[float], t: int, discount: float) -> float:
    last = len(process) - 1
    return sum(discount ** (u - t) * process[u] for u in range(t, last + 1)) + discount ** (last - t) * of_episode


# --- the formula ----------------------------------------------------------------------------------------------------


@each_case("late", [frozenset[int](), frozenset({3})])
@each_case(("baseline", "scale"), [("group_mean", "std"), ("leave_one_out", "none"), ("group_mean", "none")])
@each_case("seed", range(4))
def test_the_advantage_among_turns_in_a_state_is_the_papers(
    seed: int, baseline: str, scale: str, late: frozenset[int]
) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 6) for _ in range(4)]
    outcomes = [rng.choice([0.0, 1.0]) for _ in lengths]
    processes = [[rng.choice([0.0, 0.5]) for _ in range(length)] for length in lengths]
    states = [[7, *(rng.randrange(3) for _ in range(length - 1))] for length in lengths]
    group = siblings(outcomes, processes, states, late)
    settings = {"baseline": baseline, "scale": scale, "process_weight": 1.0}
    algo = GiGPO.model_validate({**settings, "step_weight": 0.5, "step_discount": 0.9})
    whole = GRPO.model_validate(settings).prepare(group)["advantage"]
    found = (algo.prepare(group)["advantage"] - whole) / 0.5
    for i, length in enumerate(lengths):
        for t in range(length):
            own = to_go(outcomes[i], processes[i], t, 0.9)
            cell = [
                (j, to_go(outcomes[j], processes[j], u, 0.9))
                for j in range(4)
                for u in range(lengths[j])
                if states[j][u] == states[i][t] and j not in late
            ]
            judges = [value for j, value in cell if baseline == "group_mean" or j != i]
            values = [value for _, value in cell]
            expected = own - statistics.fmean(judges) if judges else 0.0
            if scale == "std":
                own_visits = [
                    to_go(outcomes[i], processes[i], u, 0.9) for u in range(length) if states[i][u] == states[i][t]
                ]
                with_own = values + own_visits if i in late else values
                equal = len(values) < 2 or statistics.stdev(values) == 0
                expected /= (
                    math.inf if equal else max(statistics.stdev(values), statistics.stdev(with_own) / SLACK) + STD_FLOOR
                )
            assert float(found[i, t]) == pytest.approx(expected, abs=1e-9), (i, t)


def test_turns_of_unknown_states_and_past_the_end_have_the_episodes_advantage_alone() -> None:
    group = siblings([1.0, 0.0], [[0.0, 0.0], [0.0]], [[-1, -1], [-1]])
    assert (
        GiGPO().prepare(group)["advantage"].tolist() == GRPO().prepare(group)["advantage"].tolist() != [[0, 0], [0, 0]]
    )


def test_by_hand_the_turn_that_went_wrong_is_found() -> None:
    """Both pass state 5 and then differ; one moves on and succeeds."""
    group = siblings([1.0, 0.0], [[0.0] * 3, [0.0] * 2], [[1, 5, 6], [1, 5]])
    found = GiGPO(step_discount=0.5, step_weight=2.0).prepare(group)["advantage"].tolist()
    assert found == [[1 + 2 * 0.25, 1 + 2 * 0.5, 1.0], [-1 - 2 * 0.25, -1 - 2 * 0.5, 0.0]]


# --- the expectation ------------------------------------------------------------------------------------------------

ANCHORS = [[-2 % 5, *path[:-1]] for path in PATHS]  # a state is what was done last, whenever: paths come back to some


def step_part(baseline: str, members: int, discount: float) -> torch.Tensor:
    """The exact expectation of the part of the gradient that turns in the same state give."""
    probability_P, scores = logprob_grads(parameters())
    probability = probability_P.detach().tolist()
    algo = GiGPO.model_validate({"baseline": baseline, "step_discount": discount})
    whole = GRPO.model_validate({"baseline": baseline})
    estimate = torch.zeros_like(parameters())
    for group in itertools.combinations_with_replacement(range(len(PATHS)), members):
        given = siblings(
            [outcome(PATHS[path]) for path in group],
            [rewards(PATHS[path]) for path in group],
            [ANCHORS[path] for path in group],
        )
        found = algo.prepare(given)["advantage"] - whole.prepare(given)["advantage"]
        mass = len(set(itertools.permutations(group))) / members
        for path in group:
            mass *= probability[path]
        for advantage_T, path in zip(found.tolist(), group, strict=True):
            for advantage, score in zip(advantage_T, scores[path], strict=False):
                estimate += mass * advantage * score
    return estimate.detach()


def test_leaving_one_out_each_turn_is_credited_without_bias_by_the_chance_that_a_sibling_met_its_state() -> None:
    members, discount = 2, 0.8
    probability_P, scores = logprob_grads(parameters())
    probability = probability_P.detach().tolist()
    visited = {
        state: sum(p for p, own in zip(probability, ANCHORS, strict=True) if state in own)
        for state in {state for own in ANCHORS for state in own}
    }
    exact = torch.zeros_like(parameters())
    for path, own in enumerate(scores):
        for t, score in enumerate(own):
            met = 1 - (1 - visited[ANCHORS[path][t]]) ** (members - 1)
            value = to_go(outcome(PATHS[path]), rewards(PATHS[path]), t, discount)
            exact += probability[path] * met * value * score
    torch.testing.assert_close(step_part("leave_one_out", members, discount), exact.detach(), atol=1e-12, rtol=1e-9)
    mean = step_part("group_mean", members, discount)  # an episode's later visits are in its own baseline
    assert torch.nn.functional.cosine_similarity(mean.flatten(), exact.detach().flatten(), dim=0) < 0.9999


# --- settings -------------------------------------------------------------------------------------------------------


def test_without_the_advantage_of_turns_it_is_grpo() -> None:
    group = siblings([1.0, 0.0], [[0.0, 0.5], [0.0]], [[1, 5], [1]])
    got = GiGPO(step_weight=0.0).prepare(group)["advantage"]
    assert got.tolist() == GRPO().prepare(group)["advantage"].tolist()


@each_case(
    ("more", "said"),
    [
        ({"algo": {"kind": "gigpo", "baseline": "none"}}, "kind = 'gigpo' takes baseline = 'leave_one_out'"),
        ({"algo": {"kind": "gigpo", "scale": "std_by_source"}}, "scale = 'none' or 'std'"),
        (
            {"algo": {"kind": "gigpo"}, "buffer": {"skip_without_signal": True}},
            "learns from a group whose returns are equal",
        ),
    ],
)
def test_what_it_cannot_be_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config.parse({"model": "m", "env": {"id": "e"}, **more})
