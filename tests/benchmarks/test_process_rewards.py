"""The benchmark of process rewards, where its numbers can be worked out by hand."""

from __future__ import annotations

import random

import pytest
from _turn_credit import Sampler
from process_rewards import seconds_per_step

from agentrl.models.resolve import model_dir


@pytest.mark.medium
def test_a_learner_that_is_slower_than_its_episodes_sets_the_pace() -> None:
    assert seconds_per_step(slow=False, seed=1, max_lag=4, step_s=30.0, steps=13) == 30.0


@pytest.mark.slow
@pytest.mark.long
def test_a_source_that_is_slower_than_the_bound_on_staleness_is_waited_for() -> None:
    assert seconds_per_step(slow=True, seed=1, max_lag=0, step_s=0.1, steps=13) > 8.0


def test_a_group_is_eight_episodes_of_one_lock_whose_turns_are_paid_and_whose_end_is_all_or_nothing() -> None:
    (group, other) = Sampler(model_dir("agentrl/tiny-locksmith"), seed=1).groups(0, random.Random(1))
    assert (group.size, len(group.trajectories)) == (8, 8)
    assert len({member.turns[0].prompt_ids for member in group.trajectories}) == 1
    assert group.trajectories[0].turns[0].prompt_ids != other.trajectories[0].turns[0].prompt_ids
    for member in group.trajectories:
        rewards = [turn.step.reward for turn in member.turns if turn.step]
        assert len(rewards) == 8 and set(rewards) <= {0.0, 1.0}
        assert member.outcome == float(sum(rewards) == 8)
    assert 0.3 < sum(sum(member.rewards) for member in group.trajectories) / 64 < 0.9
