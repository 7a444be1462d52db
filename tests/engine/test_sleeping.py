"""Engines that give their memory back while a learner has the GPU, and go on with every token they had."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest
import trio
from safetensors.torch import load_file
from trio.testing import MockClock

from agentrl.engine.client import EngineClient
from agentrl.engine.embedded.model import read_weights
from agentrl.engine.router.router import Fleet
from agentrl.engine.sleep import Level, sleep, wake
from agentrl.engine.weight_sync.file_transport import push
from agentrl.engine.weight_sync.weight_lock import hold
from agentrl.errors import EngineError, EngineTimeout, WeightSyncError
from agentrl.records import Generation
from tests.parts.vllm_server import FakeVLLM

from .conftest import Server
from .oracle import reference_logprobs
from .test_batching import Case, prompt
from .test_failover import ask, assert_whole


@pytest.mark.parametrize("weights", [True, False])
def test_law_1_a_turn_goes_on_exactly_over_a_sleep(weights: bool, model_dir: Path, other_weights: Path) -> None:
    case = Case(model_dir)
    turns = [case.submit(str(seed), prompt(seed, 9), max_tokens=30) for seed in range(3)]
    case.run(steps=9)
    before = [list(turn.tokens) for turn in turns]
    assert all(0 < turn.sampled < 30 for turn in turns)
    batcher = case.batcher
    held = batcher.slots.kv.keys.nbytes
    batcher.rest(weights=weights)
    assert batcher.slots.kv.keys.nbytes == batcher.slots.kv.values.nbytes == 0 < held
    assert batcher.model.loaded != weights
    late = case.submit("late", prompt(7, 9), max_tokens=5)
    if weights:
        batcher.load(read_weights(other_weights), 1)
    batcher.wake()
    case.run()
    for turn, kept in zip(turns, before, strict=True):
        assert turn.tokens[: len(kept)] == kept and turn.sampled == 30
        sampled = len(kept) - turn.prompt_length
        old, new = (reference_logprobs(of, turn.tokens, turn.prompt_length) for of in (model_dir, other_weights))
        assert turn.logprobs == pytest.approx([*old[:sampled], *(new if weights else old)[sampled:]], abs=1e-4)
        assert [span.version for span in turn.spans(0, 30)] == ([0, 1] if weights else [0])
    case.check_logprobs(late.id, other_weights if weights else model_dir)


async def test_requests_park_at_a_sleeping_engine_until_it_has_weights_again(
    server: Server, model_dir: Path, other_weights: Path
) -> None:
    path = other_weights / "model.safetensors"
    async with aclosing(EngineClient(server.url)) as client:
        before = await client.served_version()
        await sleep(client, level=1, deadline_s=60)  # keeps its weights
        assert await client.alive() and await client.paused()
        await wake(client, deadline_s=60)
        assert not await client.paused()
        first = await client.generate(ask("first"))
        await sleep(client, level=2, deadline_s=60)
        found = list[Generation]()

        async def one() -> None:
            found.append(await client.generate(ask("parked")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            while not (await client.metrics())["vllm:num_requests_waiting"]:  # noqa: ASYNC110
                await trio.sleep(0.01)
            with pytest.raises(EngineError, match=r"sleep level 2 dropped the weights: .* send an update first"):
                await wake(client, deadline_s=60)
            with pytest.raises(EngineError, match=r"the engine sleeps \(kv_cache, weights\): call /wake_up"):
                await client.call("POST", "/resume", deadline_s=60)
            assert not found
            await push([client], path, before + 1, asleep=True, deadline_s=60)
        for generation, folder in ((first, model_dir), (found[0], other_weights)):
            expected = reference_logprobs(folder, [0, 1, 2, *generation.token_ids], 3)
            assert generation.logprobs == pytest.approx(expected, abs=1e-4)
        assert {span.version for span in found[0].spans} == {before + 1}
        await push([client], model_dir / "model.safetensors", before + 2, asleep=True, deadline_s=60)
        await client.call("POST", "/resume", deadline_s=60)


async def awake(client: EngineClient) -> None:
    return


async def paused(client: EngineClient) -> None:
    await client.call("POST", "/pause", params={"mode": "keep"}, deadline_s=5)


async def half_way(client: EngineClient) -> None:
    """A learner has died between the weights and the cache."""
    await sleep(client, level=2, deadline_s=5)
    await wake(client, "weights", deadline_s=5)
    await client.call("POST", "/start_weight_update", deadline_s=5)


async def asleep(client: EngineClient, level: Level = 2) -> None:
    await sleep(client, level=level, deadline_s=5)


@pytest.fixture
def file(tmp_path: Path, model_dir: Path) -> Path:
    path = tmp_path / "new.safetensors"
    path.write_bytes((model_dir / "model.safetensors").read_bytes())
    assert load_file(path)
    return path


@pytest.mark.parametrize("state", [awake, paused, asleep, half_way])
async def test_weights_are_taken_in_a_sleep_whatever_the_engine_did(state: Callable[..., object], file: Path) -> None:
    """The fake dies if it is updated, or goes on, without its memory; and vLLM's wake resumes a pause."""
    fake = FakeVLLM(version="4", sleeps=True)
    async with aclosing(EngineClient(fake.url, transport=fake)) as client:
        await state(client)  # type: ignore[misc]
        seen = len(fake.calls)
        await push([client], file, 5, stage=True, asleep=True)
    assert (fake.weights, fake.version, fake.paused, fake.asleep) == (str(file), "5", False, set())
    calls = [call.split("/")[1] for call in fake.calls[seen:]]
    order = ["sleep", "wake_up", "start_weight_update", "update_weights", "finish_weight_update", "wake_up"]
    assert [call for call in calls if call in order] == (
        order if state is not half_way else [*order[:2], "start_weight_update", "finish_weight_update", *order[2:]]
    )


async def test_an_engine_that_cannot_wake_goes_on_with_nothing(file: Path, autojump_clock: MockClock) -> None:
    fake = FakeVLLM(version="4", sleeps=True)
    async with aclosing(EngineClient(fake.url, transport=fake)) as client:
        await asleep(client)
        fake.silent.add("/wake_up")
        with pytest.raises(WeightSyncError, match="did not take version 5 within 30 s"):
            await push([client], file, 5, asleep=True)
        assert fake.paused and fake.asleep and fake.version == "4"
        fake.mend()
        await push([client], file, 5, asleep=True)
    assert not fake.paused and fake.weights == str(file)


async def test_an_engine_that_does_not_sleep_is_said_to(autojump_clock: MockClock) -> None:
    fake = FakeVLLM()
    async with aclosing(EngineClient(fake.url, transport=fake)) as client:
        with pytest.raises(EngineError, match="Sleep mode is not enabled"):
            await asleep(client)
        fake.answers["/sleep"] = 200, b"{}"
        with pytest.raises(EngineError, match="was sent to sleep and is still awake"):
            await asleep(client)
        fake.silent.add("/sleep")
        with pytest.raises(EngineTimeout):
            await asleep(client)


@pytest.mark.parametrize("sleeps", [True, False])
async def test_a_turn_waits_for_a_sleeping_engine_longer_than_for_one_that_is_away(
    sleeps: bool, autojump_clock: MockClock
) -> None:
    fake = FakeVLLM(url="http://engine", version="4", sleeps=True, token_s=1.0)
    fleet = Fleet([EngineClient(fake.url, transport=fake, version=4)], sleeps=sleeps, outage_deadline_s=600.0)
    found = list[Generation]()

    async def turn() -> None:
        found.append(await fleet.generate(ask(deadline_s=30.0)))

    async def learner() -> None:
        async with aclosing(EngineClient(fake.url, transport=fake)) as client:
            await trio.sleep(5.5)
            for _ in range(2):
                await asleep(client, 1)
                await trio.sleep(1000)
                await wake(client, deadline_s=5)
                await trio.sleep(3)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(learner)
        if not sleeps:
            with pytest.raises(EngineTimeout, match=r"engine\.outage_deadline_s"):
                await turn()
            nursery.cancel_scope.cancel()
            return
        await turn()
    assert_whole(found[0])
    assert len(fake.requests) == 1, "the engine kept the turn"


def test_a_lock_is_waited_for_and_goes_with_its_holder(tmp_path: Path) -> None:
    waited = list[int]()
    first = hold(tmp_path, "the GPU", deadline_s=1, waits=lambda: None)
    with pytest.raises(WeightSyncError, match=r"the GPU was somebody else's for 0\.1 s"):
        hold(tmp_path, "the GPU", deadline_s=0.1, waits=lambda: waited.append(1))
    assert waited and first.held
    first.let_go()
    second = hold(tmp_path, "the GPU", deadline_s=0, waits=lambda: None)
    second.let_go()
    second.let_go()
    assert not second.held
