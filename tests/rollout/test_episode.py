"""One episode against the real store, a fake engine and scripted environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from agentrl.engine.rendering.renderer import Renderer
from agentrl.errors import EngineUnavailable, LeaseLost, PolicyFault, SandboxError, ScoreError, ToolError, split_place
from agentrl.records import RoutedExperts, StopReason, Trajectory, Turn, context_ids
from agentrl.rollout.episode import play
from agentrl.rollout.routed_experts import first_without_experts
from agentrl.store import Claim, Ending, RunStore
from agentrl.store.journal_writer import JournalWriter
from tests.parts.fake_engine import Failure, FakeEngine

from .conftest import ScriptedEnv, done, going, said
from .writing import instead, written


async def test_a_turn_reads_nothing_of_the_store(store: RunStore, claim_one: Any, context: Any) -> None:
    """A claim has all that its episode needs: on a server, each read would be a wait."""

    class Unread:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"a turn asked for {name}")

    claim, scene = claim_one(), context(ScriptedEnv([going(), going(), done()]))
    unread: Any = Unread()
    await play(claim, replace(scene, store=JournalWriter(store, unread, inline=True)))
    assert len(store.reads.trajectory(claim.episode_id).turns) == 3


async def test_an_episode_is_journaled_turn_by_turn(store: RunStore, claim_one: Any, context: Any) -> None:
    env = ScriptedEnv([going("more", 0.25), done(0.75)])
    claim = claim_one()
    ending = await play(claim, context(env))
    assert ending.stop_reason is StopReason.DONE
    trajectory = store.reads.trajectory(claim.episode_id)
    assert [turn.text for turn in trajectory.turns] == env.actions
    assert trajectory.rewards == (0.25, 0.0)
    assert (trajectory.outcome, trajectory.success, trajectory.stop_reason) == (0.75, True, StopReason.DONE)
    assert env.charged == [len(turn.token_ids) for turn in trajectory.turns]
    assert env.closed == 1


async def test_law_1_prompts_extend_the_sampled_tokens_verbatim(store: RunStore, claim_one: Any, context: Any) -> None:
    engine = FakeEngine(version=1)
    claim = claim_one()
    await play(claim, context(ScriptedEnv([going(), going("again"), done()]), engine))
    turns = store.reads.trajectory(claim.episode_id).turns
    for index, request in enumerate(engine.requests):
        assert request.token_ids == context_ids(turns, index)
    for before, after, turn in zip(engine.requests, engine.requests[1:], turns, strict=False):
        assert after.token_ids[: len(before.token_ids) + len(turn.token_ids)] == before.token_ids + turn.token_ids


async def test_law_1_a_rewritten_history_is_a_fork(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer
) -> None:
    history = [{"role": "user", "content": "summary"}]
    claim = claim_one()
    await play(claim, context(ScriptedEnv([going(history=history), done()])))
    turns = store.reads.trajectory(claim.episode_id).turns
    assert turns[1].parent is None
    assert turns[1].prompt_ids == renderer.start(said("summary"))


async def test_the_experts_of_a_chain_join_without_a_gap(store: RunStore, claim_one: Any, context: Any) -> None:
    history = [{"role": "user", "content": "summary"}]
    claim = claim_one()
    env = ScriptedEnv([going(), going("again"), going(history=history), done()])
    await play(claim, replace(context(env), experts=True))
    turns = store.reads.trajectory(claim.episode_id).turns
    assert [turn.parent for turn in turns] == [None, 0, 1, None]
    for chain in (turns[:3], turns[3:]):
        told = [turn.experts for turn in chain]
        tokens = context_ids(turns, chain[-1].index) + chain[-1].token_ids
        assert told[0].start == 0
        assert [one.start for one in told[1:]] == [one.end for one in told[:-1]]
        assert b"".join(one.data for one in told) == bytes(token % 256 for token in tokens[:-1])


def test_a_turn_asks_for_the_experts_that_its_parent_does_not_tell() -> None:
    """The parent had all its tokens when its request broke off: no engine was asked again."""
    told = RoutedExperts(start=0, layers=1, per_token=1, width=1, data=bytes(7))
    none = {"prompt_ids": (), "token_ids": (), "logprobs": (), "spans": (), "text": ""}
    turns = [
        Turn(index=index, parent=parent, finish="stop", experts=experts, **none)  # pyright: ignore[reportArgumentType]
        for index, (parent, experts) in enumerate([(None, told), (0, None), (1, None), (None, None)])
    ]
    assert [first_without_experts(turns, parent) for parent in (None, 0, 1, 2, 3)] == [0, 7, 7, 7, 0]


@pytest.mark.parametrize(
    ("failing", "reason", "detail"),
    [
        (SandboxError("no space for boxes"), StopReason.SANDBOX_FAILED, "no space for boxes"),
        (ZeroDivisionError("by zero"), StopReason.ENV_FAILED, "test/Env: step raised ZeroDivisionError: by zero"),
    ],
)
async def test_law_3_what_the_policy_could_not_cause_is_not_scored(
    store: RunStore, claim_one: Any, context: Any, failing: Exception, reason: StopReason, detail: str
) -> None:
    claim = claim_one()
    ending = await play(claim, context(ScriptedEnv([failing])))
    assert (ending.stop_reason, split_place(ending.detail)[0]) == (reason, detail)
    trajectory = store.reads.trajectory(claim.episode_id)
    assert trajectory.outcome is None
    assert not trajectory.scored
    assert store.metrics.failures().detail == ending.detail


@pytest.mark.parametrize(
    ("failing", "reason"),
    [(ToolError("bad"), StopReason.POLICY_FAULT), (SandboxError("no space"), StopReason.SANDBOX_FAILED)],
)
async def test_law_3_a_failure_in_an_environments_nursery_has_the_name_that_it_has_alone(
    claim_one: Any, context: Any, failing: Exception, reason: StopReason
) -> None:
    async def step() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.lowlevel.checkpoint()
            raise failing

    ending = await play(claim_one(), context(ScriptedEnv([step])))
    assert ending.stop_reason is reason


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (None, "test/Env: step of turn 0 returned a NoneType: return (messages, reward, terminated, truncated, info)"),
        (
            done(note=object()),
            "test/Env: step of turn 0: info is not JSON-safe: Object of type object is not JSON serializable",
        ),
        (done(float("nan")), "test/Env: step of turn 0: info['outcome'] = nan: give a finite number"),
        (
            done(note=float("nan")),
            "test/Env: step of turn 0: info is not JSON-safe: Out of range float values are not JSON compliant",
        ),
    ],
)
async def test_law_3_an_answer_that_is_none_costs_the_episode_not_the_worker(
    store: RunStore, claim_one: Any, context: Any, answer: Any, detail: str
) -> None:
    claim = claim_one()
    ending = await play(claim, context(ScriptedEnv([answer])))
    assert (ending.stop_reason, ending.detail) == (StopReason.ENV_FAILED, detail)
    assert not store.reads.trajectory(claim.episode_id).scored


@pytest.mark.parametrize("method", ["aclose", "tool_schemas", "astep"])
@pytest.mark.parametrize(
    "error", [KeyError("handle"), SystemExit("handle"), asyncio.CancelledError("handle")], ids=repr
)
async def test_law_3_what_else_an_environment_raises_costs_the_episode_too(
    claim_one: Any, context: Any, method: str, error: BaseException
) -> None:
    def raising(*_: Any) -> None:
        raise error

    env = ScriptedEnv([done()])
    setattr(env, method, raising)
    ending = await play(claim_one(), context(env))
    what = {"aclose": "close", "astep": "step"}.get(method, method)
    assert ending.stop_reason is StopReason.ENV_FAILED
    assert split_place(ending.detail)[0] == f"test/Env: {what} raised {type(error).__name__}: {error}"


async def test_law_3_a_dead_engine_is_not_the_policys_doing(store: RunStore, claim_one: Any, context: Any) -> None:
    engine = FakeEngine(version=1, failures=[Failure(request=0, error=EngineUnavailable("gone"))])
    claim = claim_one()
    assert (await play(claim, context(ScriptedEnv([done()]), engine))).stop_reason is StopReason.ENGINE_FAILED
    assert not store.reads.trajectory(claim.episode_id).scored


async def test_law_4_a_hanging_step_meets_its_deadline(claim_one: Any, context: Any, autojump_clock: MockClock) -> None:
    env = ScriptedEnv([trio.sleep_forever])
    ending = await play(claim_one(), context(env, step_deadline_s=7, episode_deadline_s=100))
    assert (ending.stop_reason, ending.detail) == (StopReason.ENV_FAILED, "test/Env: step took over 7 s")
    assert trio.current_time() >= 7
    assert env.closed == 1


async def test_law_4_an_episode_has_a_deadline_and_the_environment_may_judge(
    store: RunStore, claim_one: Any, context: Any, autojump_clock: MockClock
) -> None:
    async def slowly() -> Any:
        await trio.sleep(30)
        return going()

    env = ScriptedEnv([slowly] * 10, end={"outcome": 0.5, "success": False})
    claim = claim_one()
    ending = await play(claim, context(env, step_deadline_s=40, episode_deadline_s=100))
    assert ending.stop_reason is StopReason.TIME_LIMIT
    assert env.ended is StopReason.TIME_LIMIT
    assert store.reads.trajectory(claim.episode_id).outcome == 0.5


async def test_limits_of_the_run_end_an_episode(store: RunStore, claim_one: Any, context: Any) -> None:
    env = ScriptedEnv([going()] * 9, end={"outcome": 1.0})
    claim = claim_one()
    assert (await play(claim, context(env, max_turns=2))).stop_reason is StopReason.TURN_LIMIT
    assert len(store.reads.trajectory(claim.episode_id).turns) == 2
    env = ScriptedEnv([going("x" * 50)] * 9)
    claim = claim_one()
    ending = await play(claim, context(env, max_turns=9, max_context=100, max_tokens_per_turn=16))
    assert ending.stop_reason is StopReason.CONTEXT_LIMIT
    turns = store.reads.trajectory(claim.episode_id).turns
    assert all(len(context_ids(turns, turn.index)) + len(turn.token_ids) <= 100 for turn in turns)


async def test_an_environment_names_its_own_stop_reason(claim_one: Any, context: Any) -> None:
    answer = ((), 0.0, False, True, {"stop_reason": "parse_failure", "outcome": 0.0})
    assert (await play(claim_one(), context(ScriptedEnv([answer])))).stop_reason is StopReason.PARSE_FAILURE


async def test_a_rewarder_scores_where_there_is_one(store: RunStore, claim_one: Any, context: Any) -> None:
    claim = claim_one()
    await play(
        claim, context(ScriptedEnv([going(), done(0.1)]), rewarder=lambda trajectory: len(trajectory.turns) * 2.0)
    )
    assert store.reads.trajectory(claim.episode_id).outcome == 4.0


async def test_a_rewarder_reads_the_verdict_of_the_environment(store: RunStore, claim_one: Any, context: Any) -> None:
    """The outcome less a penalty, at the environment's own end and at a limit of the run."""
    judged: list[Any] = []

    def less(trajectory: Any) -> float:
        judged.append(trajectory)
        return trajectory.outcome - 0.25 * trajectory.turns[-1].step.info["shots"]

    for env, settings, ended in (
        (ScriptedEnv([going(), done(0.5, shots=1)]), {}, ("done", True)),
        (
            ScriptedEnv([going(shots=1)], end={"outcome": 0.5, "success": False}),
            {"max_turns": 1},
            ("turn_limit", False),
        ),
    ):
        claim = claim_one()
        await play(claim, context(env, rewarder=less, **settings))
        seen = judged[-1]
        assert (seen.stop_reason.value, seen.success, seen.outcome) == (*ended, 0.5)
        assert (store.reads.trajectory(claim.episode_id).outcome, store.reads.trajectory(claim.episode_id).success) == (
            0.25,
            ended[1],
        )


async def test_a_rewarder_may_take_its_time(store: RunStore, claim_one: Any, context: Any) -> None:
    async def later(trajectory: Trajectory) -> float:
        await trio.lowlevel.checkpoint()
        return len(trajectory.turns) * 3.0

    claim = claim_one()
    await play(claim, context(ScriptedEnv([going(), done(0.1)]), rewarder=later))
    assert store.reads.trajectory(claim.episode_id).outcome == 6.0


@pytest.mark.parametrize(
    ("failure", "reason", "detail"),
    [
        (ScoreError("no verdict"), StopReason.ENGINE_FAILED, "no verdict"),
        (SandboxError("host gone"), StopReason.SANDBOX_FAILED, "host gone"),
        (ZeroDivisionError("by zero"), StopReason.ENV_FAILED, "test/Env: reward raised ZeroDivisionError: by zero"),
        (PolicyFault("bad"), StopReason.ENV_FAILED, "test/Env: reward raised PolicyFault: bad"),
        (None, StopReason.ENV_FAILED, "test/Env: reward took over 5 s"),
    ],
)
async def test_law_3_a_reward_that_cannot_be_had_is_no_reward(
    failure: Exception | None,
    reason: StopReason,
    detail: str,
    store: RunStore,
    claim_one: Any,
    context: Any,
    autojump_clock: MockClock,
) -> None:
    async def failing(trajectory: Trajectory) -> float:
        if failure is not None:
            raise failure
        await trio.sleep(60)
        return 1.0

    claim = claim_one()
    ending = await play(claim, context(ScriptedEnv([done(0.1)]), rewarder=failing, step_deadline_s=5))
    assert (ending.stop_reason, split_place(ending.detail)[0]) == (reason, detail)
    trajectory = store.reads.trajectory(claim.episode_id)
    assert (trajectory.stop_reason, trajectory.outcome, trajectory.scored) == (reason, None, False)


@pytest.mark.parametrize("given", [float("nan"), float("inf"), 1e300])
async def test_law_3_a_reward_that_is_not_finite_is_no_reward(claim_one: Any, context: Any, given: float) -> None:
    """Nor one so large that a sum of two may not be finite."""
    ending = await play(claim_one(), context(ScriptedEnv([done()]), rewarder=lambda trajectory: given))
    assert ending.stop_reason is StopReason.ENV_FAILED
    assert ending.detail == f"test/Env: reward gave {given}: give a number within 1e+30 of 0"


@pytest.mark.parametrize("given", [{"outcome": float("inf")}, {"outcomes": {"a": 1e300}}])
async def test_law_3_an_outcome_that_is_not_finite_is_refused_with_its_turn(
    claim_one: Any, context: Any, given: dict[str, Any]
) -> None:
    """It would end the learner: no mean nor deviation can be taken of it."""
    ending = await play(claim_one(), context(ScriptedEnv([going(), ((), 0.0, True, False, given)])))
    assert ending.stop_reason is StopReason.ENV_FAILED
    assert ending.detail.startswith("test/Env: step of turn 1: info['outcome")


async def test_what_failed_before_is_not_put_to_the_rewarder(claim_one: Any, context: Any) -> None:
    asked: list[Trajectory] = []
    env = ScriptedEnv([SandboxError("host gone")])
    await play(claim_one(), context(env, rewarder=lambda trajectory: asked.append(trajectory) or 1.0))
    assert asked == []


async def test_step_rewards_alone_are_a_signal(store: RunStore, claim_one: Any, context: Any) -> None:
    claim = claim_one()
    await play(claim, context(ScriptedEnv([((), 0.5, True, False, {})])))
    trajectory = store.reads.trajectory(claim.episode_id)
    assert (trajectory.outcome, trajectory.success, trajectory.rewards) == (0.0, None, (0.5,))


async def crash_after(claim: Claim, context: Any, answers: list[Any], stage: str, store: RunStore) -> None:
    """Play until the third turn's `stage` call, and die there as a killed process would."""

    class Killed(BaseException):
        pass

    calls = 0
    journal = written(store, stage)

    def dying(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Killed
        journal(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        instead(patch, store, stage, dying)
        await play(claim, context(ScriptedEnv(answers)))


@pytest.mark.parametrize("stage", ["journal_turn", "journal_step"])
async def test_law_2_another_worker_goes_on_from_the_last_journaled_token(
    store: RunStore, claim_one: Callable[..., Claim], context: Any, stage: str
) -> None:
    answers = [going("a", 0.1), going("b", 0.2), going("c", 0.3), done(1.0)]
    first = claim_one("first", now=0.0)
    await crash_after(first, context, answers, stage, store)
    journaled = store.reads.trajectory(first.episode_id).turns
    second = next(c for c in store.leases.claim("second", 2, lease_s=10, now=11.0) if c.episode_id == first.episode_id)
    engine, env = FakeEngine(version=1), ScriptedEnv(answers)
    assert (await play(second, context(env, engine))).stop_reason is StopReason.DONE
    turns = store.reads.trajectory(first.episode_id).turns
    assert [t.token_ids for t in turns[: len(journaled)]] == [t.token_ids for t in journaled]
    assert len(engine.requests) == 4 - len(journaled), "only what was never journaled is sampled"
    assert store.reads.trajectory(first.episode_id).rewards == (0.1, 0.2, 0.3, 0.0)
    assert env.actions == [turn.text for turn in turns]
    with pytest.raises(LeaseLost):
        store.journal.finish(
            first.episode_id, first.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
        )


async def test_law_2_an_episode_that_cannot_be_restored_starts_anew_and_says_so(
    store: RunStore, claim_one: Callable[..., Claim], context: Any
) -> None:
    first = claim_one("first", now=0.0)
    await crash_after(first, context, [going("a"), going("b"), going("c")], "journal_turn", store)
    second = next(c for c in store.leases.claim("second", 2, lease_s=10, now=11.0) if c.episode_id == first.episode_id)
    env = ScriptedEnv([going("other"), done()])
    assert (await play(second, context(env))).stop_reason is StopReason.DONE
    assert len(store.reads.trajectory(first.episode_id).turns) == 2
    (restart,) = store.reads.restarts(first.episode_id)
    assert restart.reason == "turn 0 was answered differently: observation"
    assert len(restart.turns) == 2


@pytest.mark.parametrize(
    ("recorded", "repeated", "reason"),
    [
        ({"role": "buyer"}, {"role": "seller"}, "turn 0 was answered differently: role"),
        ({"role": "buyer"}, {}, "turn 0 was answered differently: role"),
        ({"history": said("x")}, {"history": said("y")}, "turn 0 was answered differently: history"),
        ({"history": said("x")}, {"role": "seller"}, "turn 0 was answered differently: history and role"),
        ({}, {"history": said("x")}, "turn 0 was answered differently: history"),
    ],
)
async def test_law_2_a_replay_that_gives_the_turn_or_the_conversation_to_another_is_no_replay(
    store: RunStore,
    claim_one: Callable[..., Claim],
    context: Any,
    recorded: dict[str, Any],
    repeated: dict[str, Any],
    reason: str,
) -> None:
    first = claim_one("first", now=0.0)
    await crash_after(first, context, [going("a", **recorded), going("b"), going("c")], "journal_turn", store)
    second = next(c for c in store.leases.claim("second", 2, lease_s=10, now=11.0) if c.episode_id == first.episode_id)
    env = ScriptedEnv([going("a", **repeated), done()])
    assert (await play(second, context(env))).stop_reason is StopReason.DONE
    (restart,) = store.reads.restarts(first.episode_id)
    assert restart.reason == reason


async def test_law_2_a_reset_that_gives_another_role_the_first_turn_is_no_replay(
    store: RunStore, claim_one: Callable[..., Claim], context: Any
) -> None:
    class Seller(ScriptedEnv):
        async def areset(self, **_: Any) -> Any:
            observation, info = await super().areset()
            return observation, {**info, "role": "seller"}

    first = claim_one("first", now=0.0)
    await crash_after(first, context, [going("a"), going("b"), going("c")], "journal_turn", store)
    second = next(c for c in store.leases.claim("second", 2, lease_s=10, now=11.0) if c.episode_id == first.episode_id)
    assert (await play(second, context(Seller([going("a"), done()])))).stop_reason is StopReason.DONE
    (restart,) = store.reads.restarts(first.episode_id)
    assert restart.reason == "reset gave another role the first turn"


async def test_law_2_an_environment_without_the_promise_is_not_replayed(
    store: RunStore, claim_one: Callable[..., Claim], context: Any
) -> None:
    first = claim_one("first", now=0.0)
    await crash_after(first, context, [going("a"), going("b"), going("c")], "journal_turn", store)
    second = next(c for c in store.leases.claim("second", 2, lease_s=10, now=11.0) if c.episode_id == first.episode_id)
    env = ScriptedEnv([done()])
    env.replayable = False
    await play(second, context(env))
    assert "does not promise" in store.reads.restarts(first.episode_id)[0].reason


async def test_a_prompt_beyond_the_context_says_its_length_the_bound_and_the_key(claim_one: Any, context: Any) -> None:
    """A token a byte, and the template's: <|im_start|>, "user\\n", 100 bytes, <|im_end|>, "\\n", <|im_start|>,
    "assistant\\n" are 1 + 5 + 100 + 1 + 1 + 1 + 10."""
    ending = await play(claim_one(), context(ScriptedEnv([], start="x" * 100), max_context=50))
    assert ending.stop_reason is StopReason.CONTEXT_LIMIT
    said = (
        "the first prompt has 119 tokens, and rollout.max_context = 50: raise it to 120 or more, or shorten the prompt"
    )
    assert ending.detail == said
