"""verifiers' real machinery, both ways: its harness and rewards with our policy, and our environment in its hands."""

import os
import sys
from pathlib import Path

import pytest
import trio

import agentrl
from agentrl.env.adapters.verifiers_env import Verifiers
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.errors import UsageError
from agentrl_environments.calculator.arithmetic import evaluate, written

pytestmark = pytest.mark.adapters
HERMES = get_format("hermes")


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    """This folder's modules are its plugins; uv, which it calls, lies beside this Python or where uv was found."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.medium
async def test_an_episode_in_its_own_harness_with_its_own_rewards():
    async with Verifiers("vf_sums", tasks=6) as env:
        observation, _ = await env.areset(seed=0, options={"index": 4})
        assert [message["content"] for message in observation] == ["Answer with the number.", "What is 4 + 4?"]
        *_, terminated, truncated, info = await env.astep("It is 8.")
        assert terminated and not truncated
        assert info["outcome"] == 1.0 and info["rewards_by_name"] == {"right": 1.0, "brief": 0.0}
        observation, _ = await env.areset(seed=3)
        asked = int(observation[1]["content"].split()[2])
        info = (await env.astep(str(2 * asked)))[4]
        assert info["outcome"] == 1.5 and info["success"]


@pytest.mark.medium
async def test_episodes_that_begin_at_once_share_what_belongs_to_an_event_loop():
    """The harness of verifiers is installed under a lock of the module: whoever comes second waits for it."""
    outcomes = []

    async def play(index):
        async with Verifiers("vf_sums", tasks=6) as env:
            await env.areset(seed=0, options={"index": index})
            *_, info = await env.astep(f"It is {2 * index}.")
            outcomes.append(info["outcome"])

    async with trio.open_nursery() as nursery:
        for index in range(4):
            nursery.start_soon(play, index)
    assert outcomes == [1.0] * 4


@pytest.mark.medium
async def test_our_environment_in_their_hands_and_back_again():
    async with Verifiers("vf_calculator", tasks=10) as env:
        observation, _ = await env.areset(seed=0, options={"index": 3})
        async with agentrl.make("agentrl/Calculator-v0") as near:
            # Their chat template is told of no tools: the system message tells them.
            system, question = (await near.areset(seed=3))[0]
            assert observation[0]["content"].startswith(system["content"]) and observation[1:] == (question,)
            assert '"name": "calculate"' in observation[0]["content"]
        expression = observation[-1]["content"].removeprefix("What is ").removesuffix("?")
        observation, *_, info = await env.astep(HERMES.write(ToolCall("calculate", {"expression": expression})))
        answer = written(evaluate(expression))
        assert observation == ({"role": "user", "content": answer},) and info == {}
        *_, terminated, _, info = await env.astep(HERMES.write(ToolCall("submit", {"answer": answer})))
        assert terminated and info["outcome"] == 1.0


def test_what_it_cannot_make_is_named():
    with pytest.raises(UsageError, match="verifiers makes no environment of 'no_such_taskset'"):
        Verifiers("no_such_taskset")
    with pytest.raises(UsageError, match="tasks = 0"):
        Verifiers("vf_sums", tasks=0)
    with pytest.raises(UsageError, match="tasks = 100: the taskset 'vf_sums' has 6: give as many or fewer"):
        Verifiers("vf_sums")


def test_an_environment_of_the_old_kind_is_told_what_it_is(tmp_path, monkeypatch):
    (tmp_path / "vf_of_old.py").write_text("def load_environment(**kwargs): return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=r"as verifiers v0 had: v1 has no such environments; make it a taskset of v1"):
        Verifiers("vf_of_old")
