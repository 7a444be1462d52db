"""A data set and reward functions in the place of an environment."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from agentrl.env.rows import RowsEnv
from agentrl.errors import EnvError, UsageError

HERE = __name__


def length(prompt: Any, completion: str, row: Any) -> float:
    return float(len(completion))


def same(prompt: Any, completion: str, row: Any) -> bool:
    return completion == row["answer"] and prompt[-1]["role"] == "user"


def nothing(prompt: Any, completion: str, row: Any) -> Any:
    return math.nan


def env(*rewards: str, **settings: Any) -> RowsEnv:
    return RowsEnv(rewards=[f"{HERE}:{name}" for name in rewards], **settings)


def test_the_outcome_is_the_weighted_sum_of_what_the_functions_say_of_prompt_answer_and_row() -> None:
    one = env("length", "same", weights=[0.1, 2.0], prompt="{question}!", system="be brief", success_from=2.0)
    messages, _ = one.reset(options={"question": "2 + 2?", "answer": "4"})
    assert [message["content"] for message in messages] == ["be brief", "2 + 2?!"]
    *_, terminated, _, info = one.step("4")
    assert terminated and info["outcome"] == pytest.approx(2.1) and info["success"]
    one.reset(options={"question": "2 + 2?", "answer": "4"})
    *_, info = one.step("five")
    assert info["outcome"] == pytest.approx(0.4) and not info["success"]
    assert info["scores"] == {f"{HERE}:length": 4.0, f"{HERE}:same": 0.0}


def test_a_column_of_messages_is_asked_as_it_is() -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "{c}"}]
    assert env("length").reset(options={"prompt": talk})[0] == tuple(talk)


def test_held_out_rows_are_asked_by_seed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{at}"}) + "\n" for at in range(3)))
    one = env("length", rows=str(file))
    assert [one.reset(seed=seed)[0][0]["content"] for seed in (0, 1, 2, 3)] == ["q0", "q1", "q2", "q0"]


def test_what_cannot_be_asked_or_judged_is_named() -> None:
    with pytest.raises(UsageError, match=r"prompt = '\{question\}' cannot be filled: 'question'; a row has prompt"):
        env("length", prompt="{question}").reset(options={"prompt": "a"})
    with pytest.raises(UsageError, match="no row to ask"):
        env("length").reset(seed=1)
    with pytest.raises(UsageError, match="give one for each of the 1 rewards"):
        env("length", weights=[1, 2])
    one = env("nothing")
    one.reset(options={"prompt": "a"})
    with pytest.raises(EnvError, match=r"'\S+:nothing' returned nan: return a finite number"):
        one.step("b")
