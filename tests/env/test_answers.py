"""What an environment answers: what a driver takes, and the one line that says why it does not."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.env import answers
from agentrl.errors import EnvError
from agentrl.records import StopReason, Task

TASK = Task(index=0, env="my/Env-v0", seed=1)
WORD = {"role": "user", "content": "hi"}


def env(answer: Any) -> Any:
    async def give(*_: Any, **__: Any) -> Any:
        return answer

    return SimpleNamespace(areset=give, astep=give, aend=give)


async def test_lists_of_messages_and_numbers_of_numpy_are_taken() -> None:
    step = await answers.act(
        env(([WORD], np.float32(0.5), np.bool_(True), np.bool_(False), {"outcome": True})), "", TASK
    )
    assert (step.observation, step.reward, step.terminated, step.truncated) == ((WORD,), 0.5, True, False)
    assert (type(step.reward), type(step.terminated), type(step.truncated)) == (float, bool, bool)
    assert await answers.start(env(([WORD], {})), TASK) == ((WORD,), {})


FORM = "return (messages, reward, terminated, truncated, info)"


@pytest.mark.parametrize(
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
        (((), 0.0, True, False, None), "step: info is a NoneType, not a dict"),
        (
            ((), 0.0, True, False, {"n": np.int64(3)}),
            "step: info is not JSON-safe: Object of type int64 is not JSON serializable",
        ),
        (((), 0.0, True, False, {"outcome": "good"}), "step: info['outcome'] = 'good': give a finite number"),
        (((), 0.0, True, False, {"outcomes": {"a": None}}), "step: info['outcomes']['a'] = None: give a finite number"),
        (((), 0.0, True, False, {"outcomes": 1}), "step: info['outcomes'] = 1: give a number for each role"),
        (
            ((), 0.0, True, False, {"history": ["x"]}),
            "step: info['history']: message 0: a str, not a dict",
        ),
    ],
)
async def test_what_is_no_answer_is_one_line(answer: Any, said: str) -> None:
    with pytest.raises(EnvError) as raised:
        await answers.act(env(answer), "", TASK)
    assert str(raised.value) == f"my/Env-v0: {said}"


async def test_reset_and_end_are_looked_at_too() -> None:
    with pytest.raises(EnvError, match=r"^my/Env-v0: reset returned 1 values: return \(messages, info\)$"):
        await answers.start(env((WORD,)), TASK)
    with pytest.raises(EnvError, match=r"^my/Env-v0: end: info is not JSON-safe"):
        await answers.end(env({"outcome": float("inf")}), StopReason.TURN_LIMIT, TASK)
