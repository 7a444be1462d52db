"""What an environment answers: what a driver takes, and the one line that says why it does not."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from each_case import each_case

from agentrl.env import step_results
from agentrl.errors import EnvError
from agentrl.records import Step, StopReason, Task

TASK = Task(index=0, env="my/Env-v0", seed=1)
WORD = {"role": "user", "content": "hi"}


def env(answer: Any) -> Any:
    async def give(*_: Any, **__: Any) -> Any:
        return answer

    return SimpleNamespace(areset=give, astep=give, aend=give)


async def test_lists_of_messages_and_numbers_of_numpy_are_taken() -> None:
    step = await step_results.act(
        env(([WORD], np.float32(0.5), np.bool_(True), np.bool_(False), {"outcome": True})), "", TASK
    )
    assert (step.observation, step.reward, step.terminated, step.truncated) == ((WORD,), 0.5, True, False)
    assert (type(step.reward), type(step.terminated), type(step.truncated)) == (float, bool, bool)
    assert await step_results.start(env(([WORD], {})), TASK) == Step(observation=(WORD,))


async def test_what_a_run_acts_on_is_in_fields_and_the_rest_in_info() -> None:
    info = {
        "outcome": 1,
        "success": 1,
        "stop_reason": "parse_failure",
        "history": [WORD],
        "masked": True,
        "role": "ann",
        "rewards": {"bob": 2},
        "outcomes": {"ann": 1, "bob": -1},
        "unsettled": -0.5,
        "observation_cut": "mine",
        "kept": 3,
    }
    given = dict(info)
    step = await step_results.act(env(([], 0.0, True, False, info)), "", TASK)
    assert step == Step(
        observation=(),
        terminated=True,
        outcome=1.0,
        success=True,
        stop_reason=StopReason.PARSE_FAILURE,
        history=(WORD,),
        masked=True,
        role="ann",
        rewards={"bob": 2.0},
        outcomes={"ann": 1.0, "bob": -1.0},
        unsettled=-0.5,
        info={"kept": 3},
    )
    assert info == given, "the environment's own dict stays as it was"


async def test_keys_that_say_nothing_are_as_if_they_were_not_there() -> None:
    nothing = dict.fromkeys(["outcome", "success", "stop_reason", "history", "masked", "role", "rewards", "unsettled"])
    assert await step_results.start(env(((), nothing)), TASK) == Step(observation=())


async def test_the_last_word_of_an_environment_goes_over_its_last_step() -> None:
    step = Step(observation=(WORD,), reward=1.0, outcome=0.25, success=True, role="ann", info={"a": 1, "b": 1})
    last = await step_results.end(env({"outcome": 0.0, "outcomes": {"ann": 0.0}, "b": 2}), StopReason.TURN_LIMIT, TASK)
    assert step_results.joined(step, last) == Step(
        observation=(WORD,),
        reward=1.0,
        outcome=0.0,
        success=True,
        outcomes={"ann": 0.0},
        role="ann",
        info={"a": 1, "b": 2},
    )


FORM = "return (messages, reward, terminated, truncated, info)"


@each_case(
    ("answer", "said"),
    [
        (None, f"step returned a NoneType: {FORM}"),
        (((), 0.0, True, {}), f"step returned 4 values: {FORM}"),
        (("text", 0.0, True, False, {}), "step: observation: a str, not a tuple of messages"),
        (((b"x",), 0.0, True, False, {}), "step: observation: message 0: a bytes, not a dict"),
        (
            (({**WORD, "content": b"x"},), 0.0, True, False, {}),
            "step: observation: message 0: content is a bytes, not text",
        ),
        (((), None, True, False, {}), "step: reward = None: give a finite number"),
        (((), float("nan"), True, False, {}), "step: reward = nan: give a finite number"),
        (((), 1e31, True, False, {}), "step: reward = 1e+31: give a number within 1e+30 of 0"),
        (((), 10**400, True, False, {}), "step: reward: give a number within 1e+30 of 0"),
        (((), 0.0, True, False, {"outcome": float("-inf")}), "step: info['outcome'] = -inf: give a finite number"),
        (
            ((), 0.0, True, False, {"outcomes": {"a": -1e300}}),
            "step: info['outcomes']['a'] = -1e+300: give a number within 1e+30 of 0",
        ),
        (((), 0.0, True, False, None), "step: info is a NoneType, not a dict"),
        (
            ((), 0.0, True, False, {"n": np.int64(3)}),
            "step: info is not JSON-safe: Object of type int64 is not JSON serializable",
        ),
        (((), 0.0, True, False, {"outcome": "good"}), "step: info['outcome'] = 'good': give a finite number"),
        (((), 0.0, True, False, {"outcomes": {"a": None}}), "step: info['outcomes']['a'] = None: give a finite number"),
        (((), 0.0, True, False, {"outcomes": 1}), "step: info['outcomes'] = 1: give a number for each role"),
        (((), 0.0, True, False, {"rewards": {"a": "b"}}), "step: info['rewards']['a'] = 'b': give a finite number"),
        (((), 0.0, True, False, {"role": 3}), "step: info['role'] = 3: give a text"),
        (
            ((), 0.0, True, False, {"stop_reason": "tired"}),
            f"step: info['stop_reason'] = 'tired': give one of {', '.join(StopReason)}",
        ),
        (
            ((), 0.0, True, False, {"history": ["x"]}),
            "step: info['history']: message 0: a str, not a dict",
        ),
    ],
)
async def test_what_is_no_answer_is_one_line(answer: Any, said: str) -> None:
    with pytest.raises(EnvError) as raised:
        await step_results.act(env(answer), "", TASK)
    assert str(raised.value) == f"my/Env-v0: {said}"


async def test_reset_and_end_are_looked_at_too() -> None:
    with pytest.raises(EnvError, match=r"^my/Env-v0: reset returned 1 values: return \(messages, info\)$"):
        await step_results.start(env((WORD,)), TASK)
    with pytest.raises(EnvError, match=r"^my/Env-v0: end: info\['outcome'\] = inf: give a finite number"):
        await step_results.end(env({"outcome": float("inf")}), StopReason.TURN_LIMIT, TASK)
