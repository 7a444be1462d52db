"""Soft overlong punishment: by hand, as a source of a run, and its gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from each_case import each_case

from agentrl import config
from agentrl.config.sections import RewardSource
from agentrl.errors import ConfigError
from agentrl.records import VersionSpan
from agentrl.rewards.scorer import rewarder_of
from tests.algos.test_credit import expected_estimate
from tests.rewards.conftest import episode, turn


def punished(*lengths: int) -> float:
    """What the last of some turns earns: 4 tokens of margin before 10."""
    turns = [
        replace(
            turn(at, f"turn {at}"), token_ids=(2,) * n, logprobs=(-0.5,) * n, spans=(VersionSpan(0, 0, n),) if n else ()
        )
        for at, n in enumerate(lengths)
    ]
    settings = RewardSource(source="length", kind="overlong", margin_tokens=4)
    found = rewarder_of(settings, turn_tokens=10)(episode((), *turns))
    assert isinstance(found, float)
    return found


def test_a_turn_pays_for_the_tokens_near_its_limit() -> None:
    assert [punished(n) for n in (0, 5, 6, 7, 8, 9, 10, 11)] == [0, 0, 0, -0.25, -0.5, -0.75, -1, -1]


def test_each_turn_pays_for_itself() -> None:
    assert (punished(10, 3), punished(3, 9)) == (0, -0.75)


def test_its_gradient_is_that_of_the_return_with_it() -> None:
    """Actions are turns of 3, 8 and 10 tokens. It is unbiased for that return, which is another one."""

    def paid(path: tuple[int, ...]) -> list[float]:
        return [punished((3, 8, 10)[action]) for action in path]

    estimate, exact = expected_estimate(2, "leave_one_out", "none", 1.0, rewards=paid)
    torch.testing.assert_close(estimate, exact, atol=1e-12, rtol=1e-10)
    _, without = expected_estimate(2, "leave_one_out", "none", 0.0)
    assert torch.nn.functional.cosine_similarity(exact.flatten(), without.flatten(), dim=0) < 0.999


@each_case(
    ("given", "said"),
    [
        ({}, r"rewards\.margin_tokens = None: a source of kind 'overlong' needs it"),
        ({"margin_tokens": 65}, r"margin_tokens = 65: must be at most rollout\.max_tokens_per_turn = 64"),
    ],
)
def test_a_punishment_that_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    source = {"source": "length", "kind": "overlong", **given}
    with pytest.raises(ConfigError, match=said):
        config.parse({"model": "m", "env": {"id": "e"}, "rewards": [source]})
