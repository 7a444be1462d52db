"""The fake vLLM server: our clients find in it what they find in a real one, and each fault is the fault it says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import trio

from agentrl.engine.client import EngineClient
from agentrl.engine.vllm.capabilities import FOR_TRAINING, Need, probe
from agentrl.engine.weight_sync import adapters
from agentrl.engine.weight_sync.adapters import AdapterClient, always
from agentrl.engine.weight_sync.file_transport import push
from agentrl.errors import EngineError, EngineTimeout, EngineUnavailable, UsageError
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import SamplingParams, VersionSpan
from agentrl.testing.http import in_thread, listening
from agentrl.testing.vllm_server import FakeVLLM, made_up_logprob


def ask(id: str = "r", *, max_tokens: int = 6, deadline_s: float = 10.0, **sampling: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # pyright: ignore[reportArgumentType]
    return GenerateRequest(request_id=id, session="s", token_ids=(7, 7, 7), sampling=params, deadline_s=deadline_s)


def client_of(fake: FakeVLLM, **settings: object) -> EngineClient:
    return EngineClient(fake.url, transport=fake, **settings)  # pyright: ignore[reportArgumentType]


async def test_a_turn_is_streamed_with_log_probs_and_versions() -> None:
    fake = FakeVLLM(version="4")
    chunks = [chunk async for chunk in client_of(fake).stream(ask())]
    assert [chunk.token_ids for chunk in chunks] == [(3, 4, 5, 6), (7, 8)]
    assert chunks[0].logprobs == tuple(made_up_logprob("base", place, place) for place in range(3, 7))
    assert chunks[0].spans == (VersionSpan(4, 0, 4),) and chunks[1].finish == "length"


async def test_stop_texts_and_stop_tokens_end_a_turn() -> None:
    client = client_of(FakeVLLM())
    assert (await client.generate(ask(stop=("ef",)))).token_ids == (3, 4, 5)
    assert (await client.generate(ask(stop_token_ids=(5,)))).finish == "stop"


async def test_the_probe_finds_a_server_that_is_fit_for_training() -> None:
    facts = await probe(client_of(FakeVLLM()))
    assert facts.has == frozenset(Need) - {Need.ROUTED_EXPERTS, Need.NCCL, Need.IPC}
    facts.require(FOR_TRAINING)
    bare = FakeVLLM(lacks={"admin", "processed", "plugin", "lora"})
    with pytest.raises(UsageError, match="VLLM_SERVER_DEV_MODE"):
        (await probe(client_of(bare))).require(FOR_TRAINING)


async def test_new_weights_are_taken_and_served_under_their_version(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"")
    fake = FakeVLLM()
    client = client_of(fake)
    assert await client.served_version() == 0
    await push([client], file, 3, sha256="0", stage=True)
    assert (await client.served_version(), fake.weights, fake.paused) == (3, str(file), False)
    assert (await client.score((7, 8, 9), deadline_s=5.0))[0] == made_up_logprob(str(file), 1, 8)
    fake.restart()
    assert await client.served_version() == 0


async def test_adapters_are_loaded_sampled_from_and_unloaded(tmp_path: Path) -> None:
    fake = FakeVLLM()
    client = AdapterClient(fake.url, current=always(2), transport=fake)
    with pytest.raises(EngineUnavailable, match="no adapter 'policy-2'"):
        await client.generate(ask())
    await adapters.load([client], tmp_path, 2)
    assert (await client.generate(ask())).logprobs[0] == made_up_logprob(str(tmp_path), 3, 3)
    await adapters.retire([client], keep=())
    assert not fake.adapters


@pytest.mark.parametrize("kind", ["error_event", "bad_json", "no_logprobs", "null_logprob", "finish_error", "cut"])
async def test_a_fault_breaks_the_stream_behind_the_tokens_before_it(kind: str) -> None:
    fake = FakeVLLM(stream_tokens=2)
    fake.fail(kind, after=2)  # pyright: ignore[reportArgumentType]
    client, got = client_of(fake), list[Chunk]()
    with pytest.raises(EngineError):
        async for chunk in client.stream(ask()):
            got.append(chunk)
    assert got[0].token_ids == (3, 4)
    assert (await client.generate(ask())).finish == "length"  # one generation was to fail


async def test_a_core_that_hangs_or_dies_is_seen_behind_a_front_end_that_answers(
    autojump_clock: trio.testing.MockClock,
) -> None:
    fake = FakeVLLM(core="hung")
    client = client_of(fake)
    assert await client.healthy()
    for path in ("/is_paused", "/weight_info"):
        with pytest.raises(EngineTimeout):
            await client.call("GET", path, deadline_s=5.0)
    fake.core = "dead"
    assert not await client.healthy()
    with pytest.raises(EngineUnavailable, match="EngineCore encountered an issue"):
        await client.call("GET", "/is_paused", deadline_s=5.0)


@pytest.mark.parametrize("kind", ["hang", "hang_before_head"])
async def test_a_generation_hangs_until_the_server_is_restarted(
    kind: str, autojump_clock: trio.testing.MockClock
) -> None:
    fake = FakeVLLM()
    fake.fail(kind, times=math.inf)  # pyright: ignore[reportArgumentType]
    with pytest.raises(EngineTimeout):
        await client_of(fake).generate(ask(deadline_s=60.0))
    async with trio.open_nursery() as nursery:
        with pytest.raises(EngineUnavailable):
            nursery.start_soon(_later, fake.restart)
            await client_of(fake).generate(ask())


async def _later(change: object) -> None:
    await trio.sleep(1)
    change()  # pyright: ignore[reportCallIssue]


async def test_a_socket_carries_the_same_and_a_break_is_a_break() -> None:
    fake = FakeVLLM(version="4")
    async with listening(fake) as url:
        client = EngineClient(url)
        for _ in range(2):
            assert (await client.generate(ask())).token_ids == tuple(range(3, 9))
        assert await client.served_version() == 4
        fake.fail("cut", after=1)
        with pytest.raises(EngineUnavailable):
            await client.generate(ask())
        assert fake.running == 0
        fake.down = True
        assert not await client.healthy()
        await client.aclose()


def test_a_server_in_a_thread_serves_code_that_knows_no_trio() -> None:
    fake = FakeVLLM(version="4")

    async def version(url: str) -> int:
        client = EngineClient(url)
        try:
            return await client.served_version()
        finally:
            await client.aclose()

    with in_thread(fake) as served:
        assert trio.run(version, served.url) == 4
        served.do(fake.restart)
        assert trio.run(version, served.url) == 0
