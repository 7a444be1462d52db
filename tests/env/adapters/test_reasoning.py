"""reasoning-gym's own questions, scored by its own verifiers."""

import re

import pytest

import agentrl
from agentrl.env.adapters.reasoning import ReasoningGym
from agentrl.errors import UsageError

pytestmark = pytest.mark.adapters


@pytest.mark.parametrize("task", ["leg_counting", "basic_arithmetic", "chain_sum"])
async def test_its_own_answer_scores_one_and_another_less(task):
    import reasoning_gym

    questions = set()
    async with ReasoningGym(task) as env:
        for seed in range(5):
            opening, _ = await env.areset(seed=seed)
            source = reasoning_gym.create_dataset(task, seed=env.task["seed"], size=1)
            assert opening[-1]["content"] == source[0]["question"]
            questions.add(opening[-1]["content"])
            observation, *_ = await env.astep("no tags")
            assert "write <answer>" in observation[0]["content"]
            right = source[0]["answer"]
            *_, terminated, _, info = await env.astep(f"<answer>0.123</answer> no: <answer> {right} </answer>")
            assert terminated and info["outcome"] == 1.0 and info["success"]
            await env.areset(seed=seed)
            assert (await env.astep("<answer>-0.123</answer>"))[4]["outcome"] < 1.0
    assert len(questions) == 5


def test_settings_reach_the_data_set_and_mistakes_are_named():
    env = ReasoningGym("leg_counting", config={"min_animals": 2, "max_animals": 2})
    assert len(re.findall(r"\d+ \w+", env.reset(seed=0)[0][-1]["content"])) == 2, "two kinds of animals"
    env.close()
    with pytest.raises(UsageError, match="reasoning-gym makes no 'nothing'"):
        ReasoningGym("nothing")
    with pytest.raises(UsageError, match="min_animals"):
        ReasoningGym("leg_counting", config={"min_animals": 5, "max_animals": 2})


def test_passes_the_checker():
    assert agentrl.check_env(lambda: ReasoningGym("leg_counting")).findings == ()
