"""Who ends an episode: its last answer is the same, and what is owed is paid, whoever it was."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

import agentrl
from agentrl.engine.rendering.renderer import Renderer
from agentrl.errors import PolicyFault
from agentrl.host.clocks import policy_time
from agentrl.records import StopReason
from agentrl.rollout.episode import play
from agentrl.store import RunStore

from .conftest import ScriptedEnv, done, going
from .saying import saying

ROOM: dict[str, Any] = {"max_context": 100_000, "max_tokens_per_turn": 10_000}


def at(potential: float, text: str = "on") -> Any:
    """An answer that raised the potential by 0.25."""
    return going(text, reward=0.25, unsettled=-potential)


async def slow() -> Any:
    await trio.sleep(50)
    return at(0.5)


async def nap() -> Any:
    with policy_time():
        await trio.sleep_forever()


@pytest.mark.parametrize(
    ("last", "settings", "reason"),
    [
        (at(0.5), {"max_turns": 2}, StopReason.TURN_LIMIT),
        (at(0.5, "x" * 500), {"max_context": 300}, StopReason.CONTEXT_LIMIT),
        (slow, {"episode_deadline_s": 50}, StopReason.TIME_LIMIT),
        (nap, {}, StopReason.TIME_LIMIT),
        (PolicyFault("it broke its box"), {}, StopReason.POLICY_FAULT),
    ],
)
async def test_what_shaping_owes_is_paid_whoever_ends_the_episode(
    store: RunStore,
    claim_one: Any,
    context: Any,
    autojump_clock: MockClock,
    last: Any,
    settings: Any,
    reason: StopReason,
) -> None:
    env = ScriptedEnv([at(0.25), last])
    claim = claim_one()
    ending = await play(claim, context(env, **{"max_context": 100_000, **settings}))
    trajectory = store.reads.trajectory(claim.episode_id)
    assert (ending.stop_reason, trajectory.scored, len(trajectory.turns)) == (reason, True, 2)
    assert trajectory.rewards == (0.25, -0.25), "the potential that was reached is given back with the last turn"
    step = trajectory.turns[-1].step
    assert step is not None
    assert step.truncated
    assert step.stop_reason is reason


async def test_an_episode_that_was_over_is_only_finished_after_a_crash(
    store: RunStore, claim_one: Any, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def dying(*args: Any, **kwargs: Any) -> None:
        raise Killed

    first = claim_one("first", now=0.0)
    env = ScriptedEnv([going(reward=0.5, unsettled=-0.5)], end={"outcome": 0.75})
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(store.journal, "end_entry", dying)
        await play(first, context(env, max_turns=1))
    second = next(c for c in store.leases.claim("second", 2, lease_s=10, now=11.0) if c.episode_id == first.episode_id)
    nobody = ScriptedEnv([])
    assert (await play(second, context(nobody, max_turns=1))).stop_reason is StopReason.TURN_LIMIT
    trajectory = store.reads.trajectory(first.episode_id)
    assert (trajectory.outcome, trajectory.rewards) == (0.75, (0.0,))
    assert nobody.closed == 0, "nothing is played, or graded, again"


async def test_the_runs_turns_are_the_environments_where_the_run_names_none(
    store: RunStore, claim_one: Any, context: Any
) -> None:
    claim = claim_one()
    ending = await play(claim, context(ScriptedEnv([*[going()] * 29, done()]), **ROOM))
    assert ending.stop_reason is StopReason.DONE
    assert len(store.reads.trajectory(claim.episode_id).turns) == 30


class Asking(agentrl.ToolEnv):
    """One tool, and what it knows of how the turn ended."""

    blocking = False
    seen: tuple[bool, ...] = ()

    def prompt(self, task: Any) -> str:
        return "go"

    @agentrl.tool
    def look(self, where: str) -> str:
        """Look."""
        return f"nothing {where}"

    def after_turn(self, results: Any) -> None:
        self.seen = (*self.seen, self.action_cut)


async def test_an_environment_knows_that_a_turn_was_cut_and_the_policy_reads_it(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer
) -> None:
    env = Asking()
    whole = env.call("look", where="here")
    claim = claim_one()
    engine = saying(renderer, env.call("look", where="x" * 200), whole)
    await play(claim, context(env, engine, max_turns=2, max_context=10_000, max_tokens_per_turn=len(whole) + 2))
    assert env.seen == (True, False)
    turns = store.reads.trajectory(claim.episode_id).turns
    assert [turn.finish for turn in turns] == ["length", "stop"]
    cut, read = (turn.step.observation[0]["content"] for turn in turns if turn.step)
    assert "your turn was cut at its limit of tokens: write less at once" in cut
    assert read == "nothing here"
