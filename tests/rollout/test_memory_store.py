"""An episode without a database is the episode that a run's store holds: the store is the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.errors import EngineBroke, LeaseLost, PolicyFault, SandboxError
from agentrl.records import StopReason, Task, Trajectory
from agentrl.rollout.episode import play
from agentrl.rollout.memory_store import MemoryStore
from agentrl.store import Ending, RunStore
from tests.parts.fake_engine import Failure, FakeEngine

from .conftest import ScriptedEnv, done, going

SCRIPTS: dict[str, list[Any]] = {
    "three turns": [going("more", 0.25), going("again", -0.5), done(0.75)],
    "a fork": [going("more", history=({"role": "user", "content": "anew"},)), done()],
    "the policy's fault": [going(), PolicyFault("it broke its box")],
    "the host's failure": [going(), SandboxError("the host is gone")],
}


def timeless(trajectory: Trajectory) -> Trajectory:
    """Without what two plays of one episode cannot share: its ids and its hours."""
    turns = tuple(replace(turn, started_s=0.0, ended_s=0.0, id="") for turn in trajectory.turns)
    return replace(trajectory, episode_id=0, group_id=0, turns=turns)


@pytest.mark.parametrize("script", SCRIPTS)
async def test_an_episode_in_memory_is_that_of_a_store(
    script: str, store: RunStore, claim_one: Any, context: Any
) -> None:
    claim = claim_one()
    scene = context(ScriptedEnv(SCRIPTS[script]), FakeEngine(version=1))
    ending = await play(claim, scene)
    memory = MemoryStore()
    held = memory.claim(claim.task, size=2)
    other = replace(context(ScriptedEnv(SCRIPTS[script]), FakeEngine(version=1)), store=memory)
    assert await play(held, other) == ending
    trajectory, detail = memory.take(held.episode_id)
    assert timeless(trajectory) == timeless(store.reads.trajectory(claim.episode_id))
    assert detail == ending.detail
    assert trajectory.turns and trajectory.turns[0].id == "1.0.0"


async def test_an_engine_that_fails_ends_the_episode_outside_the_loss(context: Any) -> None:
    memory = MemoryStore()
    claim = memory.claim(Task(index=0, env="test/Env", seed=3))
    scene = context(
        ScriptedEnv([done()]), FakeEngine(version=1, failures=[Failure(request=0, error=EngineBroke("it broke off"))])
    )
    await play(claim, replace(scene, store=memory))
    trajectory, detail = memory.take(claim.episode_id)
    assert trajectory.stop_reason is StopReason.ENGINE_FAILED and not trajectory.scored and detail


async def test_an_episode_is_taken_once_and_not_before_its_end() -> None:
    memory = MemoryStore()
    claim = memory.claim(Task(index=0, env="test/Env", seed=3))
    with pytest.raises(LookupError, match="has not ended"):
        memory.take(claim.episode_id)
    await memory.finish(claim.episode_id, 1, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True))
    memory.take(claim.episode_id)
    with pytest.raises(LeaseLost):
        memory.take(claim.episode_id)
