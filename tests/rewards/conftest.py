"""An episode to score."""

from __future__ import annotations

import pytest

from agentrl.records import Message, Step, StopReason, Task, Trajectory, Turn, VersionSpan


def turn(index: int, text: str, *answer: Message, role: str = "policy") -> Turn:
    return Turn(
        index=index,
        parent=index - 1 if index else None,
        prompt_ids=(1,),
        token_ids=(2,),
        logprobs=(-0.5,),
        spans=(VersionSpan(0, 0, 1),),
        finish="stop",
        text=text,
        step=Step(observation=answer),
        role=role,
    )


def episode(start: tuple[Message, ...], *turns: Turn) -> Trajectory:
    return Trajectory(
        episode_id=1,
        group_id=1,
        member=0,
        task=Task(index=0, env="test/Env", seed=0),
        start=start,
        turns=turns,
        stop_reason=StopReason.DONE,
    )


@pytest.fixture
def trajectory() -> Trajectory:
    """A question, a tool call, its result, an answer that nobody answered."""
    last = Turn(
        index=1,
        parent=0,
        prompt_ids=(1,),
        token_ids=(2,),
        logprobs=(-0.5,),
        spans=(VersionSpan(0, 0, 1),),
        finish="stop",
        text="It is 4.",
    )
    found: Message = {"role": "tool", "content": "4", "name": "sum", "tool_call_id": "call00000"}
    return episode(
        ({"role": "user", "content": "2 + 2?"},), turn(0, '<tool_call>{"name": "sum"}</tool_call>', found), last
    )
