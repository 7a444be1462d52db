"""reasoning-gym's own questions, scored by its own verifiers."""

import re

import pytest
from each_case import each_case

import agentrl
from agentrl.env.adapters.reasoning_gym_tasks import ReasoningGym, answer_in
from agentrl.errors import UsageError
from agentrl.testing.printing import check_linear

pytestmark = pytest.mark.adapters


@pytest.mark.medium
@each_case("task", ["leg_counting", "basic_arithmetic", "chain_sum"])
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


@pytest.mark.medium
@each_case("task", ["leg_counting", *EVALUATING])
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


def drawing_globally(reasoning_gym):
    """A data set that draws from the global generators, as none of its own configuration says."""
    import random

    import numpy as np

    class Drawing(reasoning_gym.dataset.ProceduralDataset):
        def __getitem__(self, at):
            return {"question": f"{random.random()} {np.random.random()}", "answer": "1", "metadata": {}}

    return lambda name, *, seed, size, **config: Drawing(config=None, seed=seed, size=size)


async def test_a_question_depends_on_its_seed_alone(monkeypatch):
    import random

    reasoning_gym = pytest.importorskip("reasoning_gym")
    monkeypatch.setattr(reasoning_gym, "create_dataset", drawing_globally(reasoning_gym))
    asked = []
    for state in (1, 2):
        random.seed(state)
        async with ReasoningGym("leg_counting") as env:
            asked.append([(await env.areset(seed=seed))[0][-1]["content"] for seed in (5, 6)])
        assert random.random() == random.Random(state).random(), "the global generator is left alone"
    assert asked[0] == asked[1] and asked[0][0] != asked[0][1]


ASKS = """
import sys
from agentrl.env.adapters.reasoning_gym_tasks import ReasoningGym
for task in sys.argv[1:]:
    env = ReasoningGym(task)
    print("\\n@", task, env.replayable, [env.reset(seed=seed)[0][-1]["content"] for seed in range(3)])
"""


def asked_in_processes(tasks, *hashes):
    """What processes print of the first questions, each with its PYTHONHASHSEED: [flag, questions] by task."""
    import os
    import subprocess
    import sys

    for seed in hashes:
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-W", "ignore", "-c", ASKS, *tasks]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
        lines = [line.split(maxsplit=3)[1:] for line in done.stdout.splitlines() if line.startswith("@ ")]
        yield {task: (flag, questions) for task, flag, questions in lines}


@pytest.mark.long
def test_a_data_set_that_draws_from_a_set_is_replayable_where_hashes_are_fixed():
    from agentrl.env.adapters.reasoning_gym_tasks import UNORDERED

    loose, other, first, again = asked_in_processes(sorted(UNORDERED), "random", "random", "7", "7")
    assert all(flag == "False" for flag, _ in loose.values()) and loose != other
    assert first == again and {flag for flag, _ in first.values()} == {"True"}
    assert set(first) == UNORDERED


@pytest.mark.slow
@pytest.mark.long
def test_every_data_set_said_to_be_replayable_is_so_whatever_the_order_of_sets():
    factory = pytest.importorskip("reasoning_gym.factory")
    from agentrl.env.adapters.reasoning_gym_tasks import UNORDERED

    tasks = sorted(set(factory.DATASETS) - UNORDERED - {"composite"})
    first, second = asked_in_processes(tasks, "1", "2")
    assert {task: first.get(task) for task in tasks} == {task: second.get(task) for task in tasks}
    assert set(first) >= set(tasks)
