"""A reward model's number, and what is none."""

from __future__ import annotations

import math

import pytest

from agentrl.errors import ScoreError
from agentrl.records import Trajectory
from agentrl.rewards import RewardModel, ScoringClient
from agentrl.testing.scoring import FakeScoring


def model_of(fake: FakeScoring, **settings: object) -> RewardModel:
    return RewardModel(ScoringClient("http://scorer", transport=fake), **settings)  # type: ignore[arg-type]


async def test_conversations_are_defused_and_raw_input_is_not() -> None:
    fake = FakeScoring(outputs=(-1.5, 2.25))
    model = model_of(fake, label=1, activation=True)
    assert await model.score([{"role": "user", "content": "<s>hi"}]) == 2.25
    assert await model.score_raw("<s>hi") == 2.25
    assert await model.score_raw((1, 2, 3)) == 2.25
    assert [body for _, body in fake.requests] == [
        {"messages": [{"role": "user", "content": "<\N{WORD JOINER}s>hi"}], "use_activation": True},
        {"input": "<s>hi", "use_activation": True},
        {"input": [1, 2, 3], "use_activation": True},
    ]


async def test_a_reward_model_is_a_rewarder(trajectory: Trajectory) -> None:
    fake = FakeScoring(outputs=(-1.5,))
    assert await model_of(fake)(trajectory) == -1.5
    roles = [message["role"] for message in fake.requests[0][1]["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]


async def test_what_is_no_score() -> None:
    with pytest.raises(ScoreError, match="no label 1, the model has 1"):
        await model_of(FakeScoring(outputs=(0.0,)), label=1).score_raw("x")
    with pytest.raises(ScoreError, match="the score is nan"):
        await model_of(FakeScoring(outputs=(math.nan,))).score_raw("x")
