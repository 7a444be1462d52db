"""Ids: agentrl.make, gymnasium.make and the public names."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from each_case import each_case
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

import agentrl
from agentrl.errors import UnknownIdError, UsageError

CALCULATOR = "agentrl/Calculator-v0"


def test_public_names_are_pinned():
    assert agentrl.__all__ == [
        "Callback",
        "EarlyStopping",
        "Env",
        "EpisodeEnded",
        "EpisodeLimits",
        "EvalEnded",
        "FileTracker",
        "Grade",
        "RunEnded",
        "RunStarted",
        "StepEnded",
        "StopTraining",
        "ToolEnv",
        "Trainer",
        "WeightsServed",
        "check_env",
        "evaluate",
        "load_run",
        "make",
        "make_vec",
        "register",
        "tool",
    ]
    with pytest.raises(AttributeError, match="no attribute 'Agent'"):
        _ = agentrl.Agent


def test_importing_agentrl_is_light():
    heavy = ("torch", "transformers", "ray", "trio", "jsonschema", "httpx")
    code = f"import sys, agentrl; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


def test_both_makes_know_installed_ids():
    ours, theirs = agentrl.make(CALCULATOR, terms=2), gymnasium.make(CALCULATOR, terms=2)
    assert type(ours) is type(theirs.unwrapped)
    assert ours.reset(seed=3) == theirs.reset(seed=3)
    assert ours.spec.id == theirs.spec.id == CALCULATOR and ours.spec.kwargs == {"terms": 2}
    again = ours.spec.make()
    assert again.reset(seed=3) == ours.reset(seed=3)
    for env in (ours, theirs, again):
        env.close()


@each_case(
    ("id", "given", "told"),
    [
        (CALCULATOR, {"terms": 2.5}, "terms = 2.5: give a whole number"),
        (CALCULATOR, {"terms": True}, "terms = True: give a whole number"),
        ("agentrl/Nim-v0", {"heaps": "3"}, "heaps = '3': give a whole number"),
        ("agentrl/TextGame-v0", {"shaped": 1}, "shaped = 1: give true or false"),
        ("agentrl/CodeRepair-v0", {"image": 3}, "image = 3: give a text or nothing"),
    ],
)
def test_an_argument_of_another_kind_is_named(id, given, told):
    with pytest.raises(UsageError, match=f"^{id}: {told}$"):
        agentrl.make(id, **given)


def test_only_what_is_annotated_with_plain_kinds_is_looked_at():
    class Odd(agentrl.Env):
        def __init__(self, size: "int | None", *, rate: float, of: "list[int]" = (), **rest):
            self.given = (size, rate, of, rest)

    class Unknown(Odd):
        def __init__(self, size: int, of: "Nowhere" = None):  # noqa: F821
            self.given = (size, of)

    agentrl.register("test/Odd-v0", Odd)
    agentrl.register("test/Unknown-v0", Unknown)
    assert agentrl.make("test/Odd-v0", size=np.int64(3), rate=2, of=1, more=[]).given == (3, 2, 1, {"more": []})
    assert agentrl.make("test/Odd-v0", size=None, rate=np.float32(2)).given == (None, 2.0, (), {})
    assert agentrl.make("test/Unknown-v0", size=1.5, of=2).given == (1.5, 2), "nobody can say what its annotations mean"
    with pytest.raises(UsageError, match=r"size = 1.5: give a whole number or nothing"):
        agentrl.make("test/Odd-v0", size=1.5, rate=2)


def test_register_makes_an_id_known_to_both_and_replaces():
    class Mine(agentrl.Env):
        def __init__(self, size=1):
            self.size = size

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return (), {}

        def step(self, action):
            return (), 0.0, True, False, {}

    agentrl.register("test_registration/Mine-v0", "agentrl_environments.calculator:Calculator")
    agentrl.register("test_registration/Mine-v0", Mine)
    assert agentrl.make("test_registration/Mine-v0", size=4).size == 4
    assert gymnasium.make("test_registration/Mine-v0", size=5).unwrapped.size == 5
    with pytest.raises(gymnasium.error.Error):
        agentrl.register("no good id!", Mine)


def test_an_unknown_id_names_its_neighbour():
    with pytest.raises(UnknownIdError, match="agentrl/Calculator-v0"):
        agentrl.make("agentrl/Calculater-v0")


def test_arguments_that_do_not_fit_are_named():
    with pytest.raises(
        UsageError, match=r"^agentrl/Calculator-v0 cannot be made with {'term': 2}: .*'term' is near 'terms'$"
    ):
        agentrl.make(CALCULATOR, term=2)


def test_a_reference_makes_an_env_too():
    env = agentrl.make("agentrl_environments.calculator:Calculator", terms=2)
    assert env.spec is None and env.reset(seed=1)[0]
    env.close()


SUBMIT = '<tool_call>\n{"name": "submit", "arguments": {"answer": "1"}}\n</tool_call>'


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_environments_vectorise(kind):
    options = {"shared_memory": False} if kind is AsyncVectorEnv else {}
    make = [lambda: agentrl.make(CALCULATOR)] * 2
    vector = kind(make, autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED, **options)
    try:
        observations, _ = vector.reset(seed=[3, 4])
        with agentrl.make(CALCULATOR) as env:
            assert list(observations) == [env.reset(seed=3)[0], env.reset(seed=4)[0]]
        observations, _, terminated, _, _ = vector.step((SUBMIT, "é"))
        assert list(terminated) == [True, False]
        assert [messages[0]["role"] for messages in observations] == ["tool", "user"]
    finally:
        vector.close()
