"""Whose time is it? What the host and the engine take is in no clock of the policy; what it asked for is."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

import agentrl
from agentrl.engine.rendering.renderer import Renderer
from agentrl.records import StopReason
from agentrl.rollout.episode import play
from agentrl.store import RunStore
from tests.parts.fake_engine import FakeEngine

from .conftest import ScriptedEnv, done, going
from .saying import saying

ROOM: dict[str, Any] = {"max_context": 100_000, "max_tokens_per_turn": 10_000}


class Napping(agentrl.ToolEnv):
    """`nap` sleeps as long as it is let; `grade` finds every episode worth 0.5."""

    blocking = False
    grading_s = prompting_s = 0.0

    async def prompt(self, task: Any) -> str:
        await trio.sleep(self.prompting_s)
        return "go"

    @agentrl.tool
    async def nap(self) -> str:
        """Sleep."""
        await trio.sleep_forever()
        return ""

    @agentrl.tool
    def stop(self) -> str:
        """End."""
        self.finish()
        return "over"

    async def grade(self) -> float:
        await trio.sleep(self.grading_s)
        return 0.5


def observed(store: RunStore, episode_id: int) -> list[list[str]]:
    """The texts that each turn was answered with."""
    turns = store.reads.trajectory(episode_id).turns
    return [[message["content"] for message in turn.step.observation] if turn.step else [] for turn in turns]


async def test_law_3_an_engine_that_needs_45_seconds_a_turn_costs_the_policy_nothing(
    store: RunStore, claim_one: Any, context: Any, autojump_clock: MockClock
) -> None:
    claim = claim_one()
    engine = FakeEngine(version=1, chunk_s=15.0)  # three chunks a turn
    ending = await play(claim, context(ScriptedEnv([*[going()] * 9, done(1.0)]), engine, max_turns=20, **ROOM))
    assert ending.stop_reason is StopReason.DONE
    assert store.reads.trajectory(claim.episode_id).outcome == 1.0
    assert trio.current_time() > 400, "the deadline of an episode is 300 s"


@pytest.mark.parametrize("naps", [2, 5])
async def test_law_3_tools_of_a_turn_share_less_than_the_steps_deadline_and_the_policy_reads_so(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer, autojump_clock: MockClock, naps: int
) -> None:
    env = Napping()
    claim = claim_one()
    ending = await play(claim, context(env, saying(renderer, env.call("nap") * naps, env.call("stop")), **ROOM))
    assert (ending.stop_reason, store.reads.trajectory(claim.episode_id).outcome) == (StopReason.DONE, 0.5), ending
    said, _ = observed(store, claim.episode_id)
    assert len(said) == naps
    assert said[0] == "timeout: nap was ended after 30 s"
    assert "45 s" in said[1]
    assert "share" in said[1]
    assert trio.current_time() < 60


@pytest.mark.parametrize("hanging", ["prompting_s", "grading_s"])
async def test_law_3_an_environments_own_code_that_hangs_is_not_the_policys_doing(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer, autojump_clock: MockClock, hanging: str
) -> None:
    env = Napping()
    setattr(env, hanging, 1e6)
    claim = claim_one()
    ending = await play(claim, context(env, saying(renderer, env.call("stop")), **ROOM))
    assert ending.stop_reason is StopReason.ENV_FAILED
    assert ending.detail.endswith("took over 60 s")
    assert not store.reads.trajectory(claim.episode_id).scored


async def test_law_3_naps_cannot_turn_an_honest_grade_into_a_failure_of_the_environment(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer, autojump_clock: MockClock
) -> None:
    """The grade takes 50 of its 60 seconds, beside the seconds that the policy slept away in the same step."""
    env = Napping()
    env.grading_s = 50.0
    claim = claim_one()
    ending = await play(claim, context(env, saying(renderer, env.call("nap") + env.call("stop")), **ROOM))
    assert (ending.stop_reason, store.reads.trajectory(claim.episode_id).outcome) == (StopReason.DONE, 0.5), ending
