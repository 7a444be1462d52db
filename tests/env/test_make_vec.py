"""Several environments as one of gymnasium's vector environments: texts in, messages out, in either mode."""

from __future__ import annotations

import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

import agentrl
from agentrl.errors import UsageError

ID = "agentrl/Calculator-v0"


def submit(answer: str) -> str:
    return f'<tool_call>{{"name": "submit", "arguments": {{"answer": "{answer}"}}}}</tool_call>'


@pytest.mark.parametrize(("mode", "cls"), [("sync", SyncVectorEnv), ("async", AsyncVectorEnv)])
def test_every_environment_is_played_with_its_own_text(mode: str, cls: type) -> None:
    vector = agentrl.make_vec(ID, 3, vectorization_mode=mode, terms=1, largest=9)
    try:
        assert isinstance(vector, cls)
        observations, _ = vector.reset(seed=[11, 12, 13])
        assert observations in vector.observation_space
        alone = [agentrl.make(ID, terms=1, largest=9).reset(seed=seed)[0] for seed in (11, 12, 13)]
        assert list(observations) == alone, "the same as one by one"
        asked = [messages[-1]["content"].removeprefix("What is ").rstrip("?") for messages in observations]
        actions = (submit(asked[0]), "Ünïcode \N{GRINNING FACE}, no call", submit("1000"))
        assert actions in vector.action_space
        observations, rewards, terminated, truncated, info = vector.step(actions)
        assert terminated.tolist() == [True, False, True]
        assert (rewards.tolist(), truncated.tolist()) == ([0.0] * 3, [False] * 3)
        assert (info["outcome"].tolist(), info["_outcome"].tolist()) == ([1.0, 0.0, 0.0], [True, False, True])
        assert [messages[0]["role"] for messages in observations] == ["tool", "user", "tool"]
        observations, *_ = vector.step(("", "", ""))
        assert [messages[-1]["content"][:8] for messages in observations] == ["What is ", "malforme", "What is "]
    finally:
        vector.close()


def test_its_spaces_sample_and_contain() -> None:
    vector = agentrl.make_vec(ID, 2)
    try:
        for space in (vector.action_space, vector.observation_space):
            space.seed(3)
            sample = space.sample()
            assert len(sample) == 2 and sample in space
            assert space.from_jsonable(space.to_jsonable([sample])) == [sample]
    finally:
        vector.close()


def test_settings_of_the_vector_class_are_passed_on_save_shared_memory() -> None:
    vector = agentrl.make_vec(ID, 2, vector_kwargs={"autoreset_mode": "Disabled", "shared_memory": False})
    assert vector.metadata["autoreset_mode"].value == "Disabled"
    vector.close()
    with pytest.raises(UsageError, match="shared_memory = True: messages go by pipe here"):
        agentrl.make_vec(ID, 2, vectorization_mode="async", vector_kwargs={"shared_memory": True})
    with pytest.raises(UsageError, match="vectorization_mode = 'threads': give 'sync' or 'async'"):
        agentrl.make_vec(ID, 2, vectorization_mode="threads")


def test_no_environment_is_no_vector():
    with pytest.raises(UsageError, match=r"^num_envs = 0: give 1 or more$"):
        agentrl.make_vec("agentrl/Calculator-v0", 0)
