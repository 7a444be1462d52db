"""An episode to score, and the store of a run with the source that a test module describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config import RunConfig
from agentrl.config.sections import RewardSource
from agentrl.records import Message, Step, StopReason, Task, Trajectory, Turn, VersionSpan
from agentrl.run import reward_services
from agentrl.store import RunStore
from tests.store.play import admit, serve


def run_config(*sources: RewardSource) -> RunConfig:
    document = {"model": "agentrl/tiny-coder", "env": {"id": "agentrl/TextGame-v0"}}
    return RunConfig(**document, rewards=list(sources))  # pyright: ignore[reportArgumentType]


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunStore]:
    """A store with one group admitted; its episodes wait for the source of the module's `settings()`."""
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        serve(store, 0)
        admit(store, limit=1)
        reward_services.declare(run_config(request.module.settings()), store)
        yield store


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
