"""Several roles in one episode: each a conversation of its own, sampled by the policy that learns or by a given one."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.algos.grpo import GRPO
from agentrl.engine.rendering.renderer import Renderer
from agentrl.errors import PolicyFault, SandboxPathError
from agentrl.learner.data.batch import group_rows
from agentrl.records import StopReason, context_ids
from agentrl.rollout.episode import play
from agentrl.store import RunStore
from agentrl.store.audit import audit
from tests.parts.fake_engine import FakeEngine

from .conftest import ScriptedEnv, going, said


class Table(ScriptedEnv):
    """A scripted environment whose reset says who begins."""

    async def areset(self, *, seed: int | None = None, options: Any = None) -> Any:
        start, _ = await super().areset()
        return start, {"role": "ann"}


def game() -> Table:
    """ann, bob, ann, bob; bob's first move costs ann a point."""
    return Table(
        [
            going("bob, your move", 0.5, acted="ann", role="bob"),
            going("bob moved", 2.0, acted="bob", role="ann", rewards={"ann": -1.0}),
            going("ann moved", acted="ann", role="bob"),
            (said("over"), 0.0, True, False, {"acted": "bob", "outcomes": {"ann": 1.0, "bob": -1.0}, "outcome": 1.0}),
        ],
        start="ann, begin",
    )


async def test_each_role_is_a_conversation_of_its_own(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer
) -> None:
    engine = FakeEngine(version=1)
    claim = claim_one()
    assert (await play(claim, context(game(), engine))).stop_reason is StopReason.DONE
    turns = store.reads.trajectory(claim.episode_id).turns
    assert [(turn.role, turn.parent, turn.learns) for turn in turns] == [
        ("ann", None, True),
        ("bob", None, True),
        ("ann", 0, True),
        ("bob", 1, True),
    ]
    assert turns[1].prompt_ids == renderer.start(said("bob, your move"))
    assert turns[2].prompt_ids == renderer.extend(turns[0].token_ids, said("bob moved"))
    assert turns[3].prompt_ids == renderer.extend(turns[1].token_ids, said("ann moved"))
    assert [request.token_ids for request in engine.requests] == [context_ids(turns, index) for index in range(4)]


async def test_a_given_role_is_played_by_its_own_engine_and_never_trained(
    store: RunStore, claim_one: Any, context: Any
) -> None:
    learning, frozen = FakeEngine(version=1), FakeEngine(version=77)  # 77 was never minted: it is no version of the run
    for _ in range(2):
        place = context(game(), learning)
        object.__setattr__(place, "frozen", {"bob": frozen})
        await play(claim_one(), place)
    (row, *_) = store.reads.episodes("train")
    trajectory = store.reads.trajectory(row.id)
    assert [turn.learns for turn in trajectory.turns] == [True, False, True, False]
    assert trajectory.turns[1].versions == (77,) * len(trajectory.turns[1].token_ids)
    assert (trajectory.outcome, trajectory.success) == (1.0, True), "the outcome of the one role that learns"
    assert trajectory.outcomes == {"ann": 1.0, "bob": -1.0}
    assert (len(learning.requests), len(frozen.requests)) == (4, 4)
    assert audit(store).violations == []
    group = store.reads.group(trajectory.group_id)
    rows = group_rows(group, GRPO(baseline="none"), step_of=store.versions.step_of, step_now=0, max_lag=0).rows
    assert [len(row.place_S) for row in rows] == [
        sum(len(turn.token_ids) for turn in member.turns if turn.role == "ann") for member in group.trajectories
    ]


async def test_a_crashed_game_goes_on_with_the_role_whose_turn_it_was(
    store: RunStore, claim_one: Any, context: Any
) -> None:
    class Killed(BaseException):
        pass

    async def die() -> Any:
        raise Killed

    answers = game().answers
    first = claim_one("first", now=0.0)
    with pytest.raises(Killed):
        await play(first, context(Table([answers[0], die], start="ann, begin")))
    second = next(c for c in store.leases.claim("second", 2, lease_s=10, now=11.0) if c.episode_id == first.episode_id)
    assert (await play(second, context(game()))).stop_reason is StopReason.DONE
    turns = store.reads.trajectory(first.episode_id).turns
    assert [turn.role for turn in turns] == ["ann", "bob", "ann", "bob"]
    assert store.reads.restarts(first.episode_id) == []


async def test_tools_are_asked_for_after_the_reset_and_again_at_a_fork(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def start(messages: Any, tools: Any = ()) -> tuple[int, ...]:
        seen.append([tool["name"] for tool in tools])
        return Renderer.start(renderer, messages)

    class LateTools(ScriptedEnv):
        tools: tuple[str, ...] = ("wrong",)

        async def areset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.tools = ("read",)
            return await super().areset()

        def tool_schemas(self) -> list[dict[str, Any]]:
            return [{"name": name} for name in self.tools]

    env = LateTools([])

    async def fork() -> Any:
        env.tools = ("read", "write")
        return going(history=list(said("anew")))

    env.answers = [fork, ((), 0.0, True, False, {})]
    monkeypatch.setattr(renderer, "start", start)
    await play(claim_one(), context(env))
    assert seen == [["read"], ["read", "write"]]


@pytest.mark.parametrize("fault", [SandboxPathError("main.py is missing"), PolicyFault("it cannot be judged")])
async def test_law_3_a_fault_of_the_policy_that_nobody_answered_is_scored(
    store: RunStore, claim_one: Any, context: Any, fault: PolicyFault
) -> None:
    claim = claim_one()
    ending = await play(claim, context(ScriptedEnv([going("on", 0.25), fault])))
    assert (ending.stop_reason, ending.detail) == (StopReason.POLICY_FAULT, f"{type(fault).__name__}: {fault}")
    trajectory = store.reads.trajectory(claim.episode_id)
    assert trajectory.scored
    assert (trajectory.outcome, trajectory.rewards) == (0.0, (0.25, 0.0))
    assert store.metrics.failures().failed == 0
    assert audit(store).violations == []


async def test_law_3_before_the_first_action_nothing_is_the_policys_doing(
    store: RunStore, claim_one: Any, context: Any
) -> None:
    class Broken(ScriptedEnv):
        async def areset(self, *, seed: int | None = None, options: Any = None) -> Any:
            raise SandboxPathError("the task's own file is missing")

    claim = claim_one()
    assert (await play(claim, context(Broken([])))).stop_reason is StopReason.ENV_FAILED
    assert not store.reads.trajectory(claim.episode_id).scored
