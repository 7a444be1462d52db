"""A worker that stands still and goes on: nothing sampled is lost, and nothing ends meanwhile. In virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from agentrl.engine.client import EngineClient
from agentrl.engine.router.router import Fleet
from agentrl.records import StopReason, Task, VersionSpan
from agentrl.rollout.worker import Worker
from agentrl.store import RunStore
from tests.parts.vllm_server import FakeVLLM

from .conftest import ScriptedEnv, done, going

LENGTH = 24  # tokens of a turn, which comes in chunks of two, at a token a second
LONG_S = 100.0


@pytest.fixture
def server() -> FakeVLLM:
    return FakeVLLM(url="http://engine", version="1", stream_tokens=2, token_s=1.0)


@pytest.fixture
def worker(store: RunStore, renderer: Any, context: Any, server: FakeVLLM) -> Callable[..., Worker]:
    def make(*answers: Any, **settings: Any) -> Worker:
        store.set_meta("phase", "train")
        store.groups.add_groups([Task(index=0, env="test/Env", seed=3)], size=1, purpose="train")
        fleet = Fleet([EngineClient(server.url, transport=server)], decode=renderer.decode)
        limits = {"max_tokens_per_turn": LENGTH, "turn_deadline_s": 40.0, "lease_s": 30.0, **settings}
        place = context(ScriptedEnv(answers), fleet, **limits)
        return Worker("w.1", place.store, place, now=trio.current_time)

    return make


async def test_law_1_a_turn_that_a_pause_breaks_off_goes_on_from_its_tokens(
    store: RunStore, worker: Callable[..., Worker], server: FakeVLLM, autojump_clock: MockClock
) -> None:
    """After ten tokens it stands still for 100 s; what it has to sample then takes 14 s, and its deadline is 40 s."""
    one = worker(done())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        await trio.sleep(11.5)
        one.pause(now=True)
        await trio.sleep(LONG_S)
        (episode,) = store.reads.episodes("train", limit=9)
        assert (episode.stop_reason, server.running, len(server.requests)) == (None, 0, 1)
        assert store.leases.claim("another", 1, lease_s=1, now=trio.current_time()) == [], "its lease is kept"
        one.go_on()
        await trio.sleep(30)
        nursery.cancel_scope.cancel()
    (turn,) = store.reads.trajectory(episode.id).turns
    first, second = server.requests
    kept = len(second["token_ids"]) - len(first["token_ids"])
    assert kept == 10
    assert second["sampling_params"]["max_tokens"] == LENGTH - kept
    assert first["request_id"] != second["request_id"], "the engine may not know yet that the first one is over"
    start = len(turn.prompt_ids)
    assert turn.token_ids == tuple(range(start, start + LENGTH)), "each token is the length of what is before it"
    assert turn.spans == (VersionSpan(1, 0, LENGTH),)
    assert store.reads.trajectory(episode.id).stop_reason is StopReason.DONE


@pytest.mark.parametrize(
    ("now", "settings"), [(False, {}), (True, {"checkpoint_tokens": 0}), (True, {"resume": "turns"})]
)
async def test_a_pause_that_keeps_no_tokens_lets_the_turn_end_and_begins_no_other(
    store: RunStore,
    worker: Callable[..., Worker],
    server: FakeVLLM,
    autojump_clock: MockClock,
    now: bool,
    settings: dict[str, Any],
) -> None:
    one = worker(going(), done(), **settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        await trio.sleep(11.5)
        one.pause(now=now)
        await trio.sleep(LONG_S)
        (turn,) = store.reads.trajectory(1).turns
        assert len(turn.token_ids) == LENGTH and turn.step is not None, "sampled and answered"
        store.groups.add_groups([Task(index=1, env="test/Env", seed=4)], size=1, purpose="train")
        await trio.sleep(LONG_S)
        assert len(server.requests) == 1
        assert store.leases.claim("another", 9, lease_s=1e9, now=trio.current_time()) != [], (
            "the new one: nobody began it"
        )
        one.go_on()
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert [len(turn.token_ids) for turn in store.reads.trajectory(1).turns] == [LENGTH, LENGTH]
    assert store.reads.trajectory(1).stop_reason is StopReason.DONE


async def test_a_worker_that_leaves_while_it_is_paused_hands_its_episodes_back(
    store: RunStore, worker: Callable[..., Worker], autojump_clock: MockClock
) -> None:
    one = worker(done())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        await trio.sleep(11.5)
        one.pause(now=True)
        await trio.sleep(60)
        one.leave()
    (claim,) = store.leases.claim("another", 1, lease_s=1, now=trio.current_time())
    assert claim.partial is not None and len(claim.partial.token_ids) == 10


async def test_a_worker_that_starts_while_its_run_is_paused_begins_nothing(
    worker: Callable[..., Worker], server: FakeVLLM, autojump_clock: MockClock
) -> None:
    one = worker(done())
    one.pause(now=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        await trio.sleep(LONG_S)
        assert server.requests == []
        one.go_on()
        await trio.sleep(0.5)
        assert len(server.requests) == 1
        nursery.cancel_scope.cancel()
