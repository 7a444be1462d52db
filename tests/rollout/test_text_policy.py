"""A policy that writes texts is driven by the loop of a run: one conversation a role, tokens as they are counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import agentrl
from agentrl.config import Rollout
from agentrl.records import Json, Message, StopReason, Task
from agentrl.rollout.text_policy import TextAnswer, TextPolicy, play_text


def user(content: str) -> Message:
    return {"role": "user", "content": content}


class Duet(agentrl.Env):
    """Anna and Ben speak in turns; three turns."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []
        self.charged: list[int] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return (user("to Anna"),), {"role": "anna"}

    def step(self, action: str) -> Any:
        self.heard.append(action)
        others = {1: ("to Ben", "ben"), 2: ("again, Anna", "anna"), 3: ("over", "anna")}
        text, role = others[len(self.heard)]
        return (user(text),), 0.0, len(self.heard) == 3, False, {"role": role, "outcome": 1.0}

    def charge_tokens(self, count: int) -> None:
        self.charged.append(count)


async def test_each_role_has_its_conversation_and_an_answer_its_tokens() -> None:
    asked: list[tuple[Sequence[Message], Sequence[Message]]] = []

    async def answer(
        messages: Sequence[Message], news: Sequence[Message], tools: Sequence[Mapping[str, Json]]
    ) -> TextAnswer:
        asked.append((messages, news))
        n = len(asked)
        return TextAnswer(f"say {n}", tokens=5 if n == 1 else None)

    env, policy = Duet(), TextPolicy(answer)
    trajectory, ending = await play_text(env, Task(index=0, env="Duet", seed=0), policy, Rollout(max_context=100))
    said: Message = {"role": "assistant", "content": "say 1"}
    assert asked == [
        ([user("to Anna")], [user("to Anna")]),
        ([user("to Ben")], [user("to Ben")]),
        ([user("to Anna"), said, user("again, Anna")], [user("again, Anna")]),
    ]
    assert env.heard == ["say 1", "say 2", "say 3"] and env.charged == [5, 1, 1]
    assert (ending.stop_reason, ending.error, trajectory.outcome) == (StopReason.DONE, None, 1.0)
    assert [turn.role for turn in trajectory.turns] == ["anna", "ben", "anna"]
    assert policy.conversation(trajectory)[-1] == user("over")
