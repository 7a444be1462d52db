"""reasoning-gym's own questions, scored by its own verifiers."""

import re

import pytest

import agentrl
from agentrl.env.adapters.reasoning import ReasoningGym, answer_in
from agentrl.errors import UsageError
from agentrl.testing.printing import check_linear

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


EVALUATING = ("countdown", "puzzle24", "n_queens", "string_insertion", "spiral_matrix", "polynomial_multiplication")


@pytest.mark.parametrize("task", ["leg_counting", *EVALUATING])
async def test_an_answer_is_never_run_as_code_and_never_fails_the_environment(task, tmp_path):
    marker = tmp_path / "owned"
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    hostile = [code, f"[{code}]", f"({code},)", f"[x for x in [{code}]]", f"(lambda: {code})()", "''.__class__"]
    endless = ["9" * 5_000, "[" * 5_000, "9**9**9**9", "(9**60)**60", "'a' * 10**10", "''.join(['a'] * 10**10)"]
    async with ReasoningGym(task) as env:
        for answer in [*hostile, *endless, "", "\0", "1/0", "é"]:
            await env.areset(seed=0)
            *_, terminated, _, info = await env.astep(f"<answer>{answer}</answer>")
            assert terminated and 0.0 <= info["outcome"] < 1.0, answer
    assert not marker.exists()


@pytest.mark.parametrize("task", [*EVALUATING, "simple_integration", "intermediate_integration"])
async def test_right_answers_of_data_sets_that_evaluate_them_are_still_right(task):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    for seed in range(3):
        async with ReasoningGym(task) as env:
            await env.areset(seed=seed)
            right = reasoning_gym.create_dataset(task, seed=env.task["seed"], size=1)[0]
            given = right["answer"] if right["answer"] is not None else right["metadata"]["expression"]
            *_, info = await env.astep(f"<answer>{given}</answer>")
            assert info["outcome"] == 1.0, given


def test_finding_the_answer_costs_no_more_than_linear_time():
    check_linear(answer_in, words=["<answer>", "</answer>", "<", "answer"])
