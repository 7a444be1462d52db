"""What an interrupted episode goes on from, under each `rollout.resume`: what is lost is counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.config import parse
from agentrl.engine.client import EngineClient
from agentrl.engine.router.router import Fleet
from agentrl.errors import ConfigError, LeaseLost
from agentrl.records import StopReason
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.episode import play
from agentrl.store import Claim, RunStore
from agentrl.store.audit import audit
from tests.parts.fake_engine import FakeEngine, counting_script
from tests.parts.outside_audit import OutsideAuditor
from tests.parts.vllm_server import FakeVLLM

from .conftest import ScriptedEnv, done, going
from .test_partial_turns import Killed, Mortal

LENGTH = 24  # tokens of a turn
HELD = 3 * 4  # tokens of the second turn when its worker dies


def engine() -> FakeEngine:
    return FakeEngine(counting_script(length=1000), version=1)


def sound(store: RunStore) -> bool:
    return not audit(store).violations


@pytest.fixture
def at(context: Any) -> Callable[..., RolloutContext]:
    def make(engine: Any, **settings: Any) -> RolloutContext:
        env = ScriptedEnv([going(), done()])
        return context(env, engine, **{"max_tokens_per_turn": LENGTH, "checkpoint_tokens": 1, **settings})

    return make


async def die_in_the_second_turn(
    store: RunStore, claim_one: Any, at: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[Claim, Claim]:
    """Episode 1 ends; the worker of episode 2 dies amid its second turn. Returns episode 2's claim and the next one."""
    ended, first = claim_one("first"), claim_one("first")
    assert (await play(ended, at(engine(), **settings))).stop_reason is StopReason.DONE
    with monkeypatch.context() as patch, pytest.raises(Killed):
        await play(first, at(Mortal(engine(), store, patch, LENGTH // 4 + 3), **settings))
    store.deaths.release_worker("first")
    (second,) = store.leases.claim("second", 9, lease_s=10)
    assert second.partial is not None and len(second.partial.token_ids) == HELD and second.resumed
    return first, second


async def test_by_default_it_goes_on_from_its_last_token_and_nothing_is_lost(
    store: RunStore, claim_one: Any, at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    auditor = OutsideAuditor(store.path)
    first, second = await die_in_the_second_turn(store, claim_one, at, monkeypatch)
    assert auditor.look() == []
    second_engine = engine()
    await play(second, at(second_engine))
    assert [request.sampled for request in second_engine.requests] == [HELD]
    assert auditor.look(ended=True) == [] and auditor.abandoned == 0
    assert store.reads.trajectory(first.episode_id).stop_reason is StopReason.DONE and sound(store)


async def test_the_rewarder_of_a_resumed_episode_reads_the_tools_that_it_began_with(
    store: RunStore, claim_one: Any, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithTool(ScriptedEnv):
        def tool_schemas(self) -> list[dict[str, Any]]:
            return [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

    seen: list[Any] = []

    def rewarder(trajectory: Any) -> float:
        seen.append(trajectory.tools)
        return 1.0

    def at(engine: Any, **settings: Any) -> RolloutContext:
        limits = {"max_tokens_per_turn": LENGTH, "checkpoint_tokens": 1, **settings}
        return context(WithTool([going(), done()]), engine, rewarder=rewarder, **limits)

    _, second = await die_in_the_second_turn(store, claim_one, at, monkeypatch)
    assert (await play(second, at(engine()))).stop_reason is StopReason.DONE
    unbroken, resumed = seen
    assert resumed == unbroken and [schema["function"]["name"] for schema in resumed.schemas] == ["look"]


async def test_from_whole_turns_the_turn_under_way_is_sampled_anew_and_its_tokens_are_counted(
    store: RunStore, claim_one: Any, at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    auditor = OutsideAuditor(store.path)
    _, second = await die_in_the_second_turn(store, claim_one, at, monkeypatch, resume="turns")
    assert auditor.look() == []
    second_engine = engine()
    await play(second, at(second_engine, resume="turns"))
    assert [request.sampled for request in second_engine.requests] == [0], "the first turn is not sampled again"
    assert auditor.look(ended=True) == [] and auditor.abandoned == HELD and sound(store)


async def test_from_the_episodes_start_both_turns_are_counted_and_its_sibling_stays(
    store: RunStore, claim_one: Any, at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    auditor = OutsideAuditor(store.path)
    first, second = await die_in_the_second_turn(store, claim_one, at, monkeypatch, resume="episode")
    assert auditor.look() == []
    await play(second, at(engine(), resume="episode"))
    (restart,) = store.reads.restarts(first.episode_id)
    assert "rollout.resume = 'episode'" in restart.reason
    assert auditor.look(ended=True) == [] and auditor.abandoned == LENGTH + HELD and sound(store)
    assert store.metrics.drops() == {} and store.buffer.ready_count() == 1


async def test_from_the_groups_start_its_ended_sibling_is_lost_too_and_its_task_is_played_again(
    store: RunStore, claim_one: Any, at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    auditor = OutsideAuditor(store.path)
    _, second = await die_in_the_second_turn(store, claim_one, at, monkeypatch, resume="group")
    assert auditor.look() == []
    with pytest.raises(LeaseLost, match="starts anew with its group 1"):
        await play(second, at(engine(), resume="group"))
    assert auditor.look() == [] and auditor.abandoned == 2 * LENGTH + LENGTH + HELD
    assert store.metrics.drops() == {"restarted": 1} and store.buffer.ready_count() == 0
    again = store.leases.claim("second", 9, lease_s=10)
    assert [claim.group_id for claim in again] == [2, 2] and again[0].task == second.task
    for claim in again:
        await play(claim, at(engine(), resume="group"))
    assert store.buffer.ready_count() == 1
    assert auditor.look(ended=True) == [] and sound(store)


async def test_of_a_group_that_was_restarted_often_enough_only_the_interrupted_episode_starts_anew(
    store: RunStore, claim_one: Any, at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"resume": "group", "max_replays": 0}
    _, second = await die_in_the_second_turn(store, claim_one, at, monkeypatch, **settings)
    await play(second, at(engine(), **settings))
    assert store.metrics.drops() == {} and store.buffer.ready_count() == 1 and sound(store)


async def test_deaths_of_a_member_count_on_in_the_group_that_plays_its_task_again(
    store: RunStore, claim_one: Any, at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a task that kills its workers would do so for ever."""
    deaths = 0
    await die_in_the_second_turn(store, claim_one, at, monkeypatch, resume="group")
    store.deaths.release_all()
    while not store.deaths.quarantined():
        deaths += 1
        assert deaths < 9
        for claim in store.leases.claim(f"w{deaths}", 1, lease_s=10):
            if claim.resumed and store.journal.restart_group(claim.episode_id, claim.fence, 99):
                continue
            store.journal.begin(claim.episode_id, claim.fence, ())
        store.deaths.release_worker(f"w{deaths}")
    assert sound(store)


@pytest.mark.parametrize(("resume", "requests", "lost"), [("turns", 2, 6), ("episode", 2, 6), ("group", 1, 6)])
async def test_an_engine_that_dies_amid_a_turn_interrupts_its_episode_likewise(
    store: RunStore, claim_one: Any, at: Any, renderer: Any, resume: str, requests: int, lost: int
) -> None:
    store.versions.confirm_version(store.versions.mint_version(1))
    fakes = [FakeVLLM(url=f"http://engine-{n}", version="1", stream_tokens=3) for n in (1, 2)]
    fakes[0].fail("cut", after=6)
    fleet = Fleet([EngineClient(one.url, transport=one, version=1) for one in fakes], decode=renderer.decode)
    auditor, claim = OutsideAuditor(store.path), claim_one()
    if resume == "group":
        with pytest.raises(LeaseLost):
            await play(claim, at(fleet, resume=resume))
    else:
        assert (await play(claim, at(fleet, resume=resume))).stop_reason is StopReason.DONE
    sampled = [request["sampling_params"]["max_tokens"] for fake in fakes for request in fake.requests]
    assert sampled[:requests] == [LENGTH] * requests, "from the turn's first token"
    assert auditor.look() == [] and auditor.abandoned == lost and sound(store)


async def test_a_turn_that_breaks_every_engine_is_given_up_in_the_end(
    store: RunStore, claim_one: Any, at: Any, renderer: Any, autojump_clock: Any
) -> None:
    store.versions.confirm_version(store.versions.mint_version(1))
    fake = FakeVLLM(url="http://engine", version="1", stream_tokens=3)
    fake.fail("cut", times=math.inf, after=3)
    fleet = Fleet([EngineClient(fake.url, transport=fake, version=1)], decode=renderer.decode)
    assert (await play(claim_one(), at(fleet, resume="turns"))).stop_reason is StopReason.ENGINE_FAILED
    assert len(fake.requests) <= 8


def test_turns_that_are_preempted_need_their_tokens() -> None:
    engine, rollout = {"at_update": "leave"}, {"resume": "group"}
    document = {"model": "m", "env": {"id": "test/Env"}, "rollout": rollout, "engine": engine}
    with pytest.raises(ConfigError, match="preempted turns go on from tokens"):
        parse(document)
