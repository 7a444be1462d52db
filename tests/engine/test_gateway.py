"""Several tenants at one engine: each sees its own adapters, gets its share, and cannot harm the others."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from agentrl import config as configuration
from agentrl.config.shared_engines import Tenant
from agentrl.engine import auth
from agentrl.engine.client import EngineClient
from agentrl.engine.router.gateway import Gateway, SharedEngine
from agentrl.engine.router.router import Fleet
from agentrl.engine.weight_sync import adapters
from agentrl.engine.weight_sync.adapters import AdapterClient, always
from agentrl.errors import ConfigError, EngineBroke, EngineError, EngineUnavailable
from agentrl.http.http_server import BodyParts, Cut, listen
from agentrl.protocols import GenerateRequest
from agentrl.records import EngineKey, Generation, SamplingParams, WeightVersion
from agentrl.run.processes.engine_process import ServedWeights, attach
from agentrl.testing.vllm_server import FakeVLLM

from .conftest import Server

ALICE, BOB = Tenant(name="alice", open=True), Tenant(name="bob", open=True)
CARRIED_S = 0.05  # real seconds of silence after which the virtual clock jumps where real sockets carry what is said


class Direct(httpx.AsyncBaseTransport):
    """The gateway without a socket, so that virtual time holds."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path, query = request.url.path, request.url.query.decode()
        content = await request.aread()
        status, body = await self._gateway.answer(request.method, path, query, dict(request.headers), content)
        return httpx.Response(status, content=body) if isinstance(body, bytes) else _streamed(status, body)


def _streamed(status: int, body: BodyParts) -> httpx.Response:
    class Stream(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncGenerator[bytes, None]:
            try:
                async for part in body:
                    yield part
            except Cut:
                raise httpx.ReadError("cut") from None

        async def aclose(self) -> None:
            await body.aclose()

    return httpx.Response(status, stream=Stream())


class Shared:
    """A gateway over one fake engine, and its tenants' clients."""

    def __init__(self, fake: FakeVLLM, *tenants: Tenant, **settings: Any) -> None:
        self.engine = SharedEngine(tenants, url=fake.url, transport=fake, **({"places": 4, "lease_s": inf} | settings))
        self.gateway, self.transport = Gateway(tenants, [self.engine]), None
        self.transport = Direct(self.gateway)

    def client(self, tenant: str, **settings: Any) -> EngineClient:
        return EngineClient(f"http://gateway/{tenant}/0", transport=self.transport, **settings)

    def adapted(self, tenant: str, version: int | None) -> AdapterClient:
        return AdapterClient(f"http://gateway/{tenant}/0", current=always(version), transport=self.transport)

    def gauges(self, tenant: str) -> dict[str, float]:
        return dict(self.engine.gauges())[tenant]


@asynccontextmanager
async def shared(fake: FakeVLLM, *tenants: Tenant, **settings: Any) -> AsyncIterator[Shared]:
    found = Shared(fake, *(tenants or (ALICE, BOB)), **settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(found.gateway.run)
        yield found
        nursery.cancel_scope.cancel()


def turn(id: str = "turn", *, prompt: int = 5, tokens: int = 10, temperature: float = 1.0) -> GenerateRequest:
    return GenerateRequest(
        request_id=id,
        session=id,
        token_ids=tuple(range(1, prompt + 1)),
        sampling=SamplingParams(max_tokens=tokens, temperature=temperature),
        deadline_s=10_000.0,
    )


async def test_a_turn_reads_as_it_does_at_the_engine(autojump_clock: MockClock) -> None:
    fake = FakeVLLM()
    async with shared(fake) as there, aclosing(EngineClient(fake.url, transport=fake)) as direct:
        client = there.client("alice")
        assert await client.generate(turn()) == await direct.generate(turn())
        scores = [await one.score((3, 1, 4, 1, 5), deadline_s=5) for one in (client, direct)]
        assert scores[0] == scores[1]
        assert await client.alive() and await client.served_version() == 0
        asked, plain = fake.requests[:2]
        assert asked.pop("request_id") == "alice.turn" and plain.pop("request_id") == "turn"
        assert asked == plain  # each setting of the sampling, to the last bit


async def test_a_turn_of_the_embedded_engine_is_the_same_through_the_gateway(server: Server) -> None:
    engine = SharedEngine([ALICE], places=4, url=server.url)
    gateway = Gateway([ALICE], [engine])
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.run)
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(listen, gateway, [listener])
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/alice/0"
        async with aclosing(EngineClient(url)) as through, aclosing(EngineClient(server.url)) as direct:
            greedy = turn(tokens=20, temperature=0.0)
            await direct.generate(greedy)  # from now on its prompt is in the prefix cache, which computes otherwise
            there, here = await through.generate(greedy), await direct.generate(greedy)
            assert there == here and len(here.token_ids) == 20
            ids = (*greedy.token_ids, *here.token_ids)
            assert await through.score(ids, deadline_s=30) == await direct.score(ids, deadline_s=30)
        nursery.cancel_scope.cancel()


async def test_adapters_are_each_tenants_own(autojump_clock: MockClock, tmp_path: Any) -> None:
    fake = FakeVLLM()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    async with shared(fake) as there:
        alice, bob = there.client("alice"), there.client("bob")
        await adapters.load([alice], tmp_path / "a", 7)
        assert await adapters.loaded(alice) == {7} and await adapters.loaded(bob) == frozenset()
        with pytest.raises(EngineUnavailable, match="no adapter 'policy-7'"):
            await there.adapted("bob", 7).generate(turn())
        await adapters.load([bob], tmp_path / "b", 7)  # the same name, another adapter
        assert fake.adapters == {"alice.policy-7": str(tmp_path / "a"), "bob.policy-7": str(tmp_path / "b")}
        own = await there.adapted("alice", 7).generate(turn())
        assert own.logprobs != (await there.adapted("bob", 7).generate(turn())).logprobs
        assert own.spans[0].version == 7
        await adapters.retire([bob], keep=())
        await adapters.forget([bob])
        assert list(fake.adapters) == ["alice.policy-7"]


async def test_tokens_of_the_shared_weights_have_the_runs_own_first_version(autojump_clock: MockClock) -> None:
    """The engine knows no run's versions, and says 0 of the weights below the adapters: no run minted that."""
    async with shared(FakeVLLM()) as there:
        client = AdapterClient(
            "http://gateway/alice/0", current=always(None), below=always(3), transport=there.transport
        )
        assert {span.version for span in (await client.generate(turn())).spans} == {3}
        assert await client.served_version() == 3
        asked = {"lora_name": "policy-5", "lora_path": "/a"}
        await client.call("POST", "/v1/load_lora_adapter", json=asked, deadline_s=5)
        assert await client.served_version() == 5


@pytest.mark.parametrize("kind", ["embedded", "vllm"])
async def test_a_run_attaches_without_a_change_to_the_engine(autojump_clock: MockClock, kind: str) -> None:
    autojump_clock.autojump_threshold = CARRIED_S
    fake, first = FakeVLLM(), WeightVersion(version=1, step=0)
    fake.adapters |= {"alice.policy-9": "/earlier", "bob.policy-9": "/other"}
    found = Shared(fake, ALICE, BOB)
    async with trio.open_nursery() as nursery:
        await nursery.start(found.gateway.run)
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(listen, found.gateway, [listener])
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/alice/0"
        run = {"model": "m", "env": {"id": "e"}, "train": {"lora_rank": 4}}
        config = configuration.parse({**run, "engine": {"shared": True, "urls": [url], "kind": kind}})
        await attach(url, ServedWeights(model=Path("/nonexistent"), base=first, current=first), config)
        nursery.cancel_scope.cancel()
    assert fake.adapters == {"bob.policy-9": "/other"}
    assert not fake.paused and not [call for call in fake.calls if "update" in call or "init" in call]


@pytest.mark.parametrize("name", ["alice.policy-7", "../alice.policy-7", "..", "a/b", "", "x" * 300, 7, None])
async def test_no_name_reaches_another_tenants_adapter(autojump_clock: MockClock, name: object, tmp_path: Any) -> None:
    fake = FakeVLLM(adapters={"alice.policy-7": "/a"})
    async with shared(fake) as there:
        bob = there.client("bob")
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            asked: dict[str, Any] = {"lora_name": name, "lora_path": str(tmp_path)}
            try:
                await bob.call("POST", path, json=asked, deadline_s=5)
            except EngineError as error:
                assert "answered 40" in str(error)  # others are bob's to use
        request = {"request_id": "x", "token_ids": [1], "sampling_params": {"max_tokens": 1}, "model": name}
        if isinstance(name, str):
            with pytest.raises(EngineError, match="does not exist"):
                await bob.call("POST", "/inference/v1/generate", json=request, deadline_s=5)
        assert fake.adapters["alice.policy-7"] == "/a"
        assert all(one.startswith(("alice.policy-7", "bob.")) for one in fake.adapters)


CHANGES = [
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/abort_requests",
    "/shutdown_weight_transfer_engine",
    "/sleep",
    "/reset_prefix_cache",
    "/v1/completions",
]


async def test_nothing_that_would_change_the_engine_for_others_passes(autojump_clock: MockClock) -> None:
    fake = FakeVLLM()
    async with shared(fake) as there:
        for path in CHANGES:
            with pytest.raises(EngineError, match=r"403.*set engine.shared = true in the run file"):
                await there.client("alice").call("POST", path, json={}, deadline_s=5)
        with pytest.raises(EngineError, match="403"):
            await there.client("alice").call("POST", "/collective_rpc", json={"method": "agentrl_stage"}, deadline_s=5)
        facts = await there.client("alice").call(
            "POST", "/collective_rpc", json={"method": "agentrl_facts"}, deadline_s=5
        )
        assert json.loads(facts)["results"][0]["dtype"] == "float32"
        assert not fake.paused and fake.calls == ["POST /collective_rpc"]


async def test_a_tenant_with_a_key_has_to_send_it(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = Tenant(name="alice", key_env="ALICE_KEY")
    with pytest.raises(ConfigError, match=r"ALICE_KEY.*export it"):
        Gateway([locked], [])
    monkeypatch.setenv("ALICE_KEY", "secret")
    async with shared(FakeVLLM(), locked, BOB) as there:
        await there.client("alice", api_key="secret").generate(turn())
        for key in (None, "other", "secre", "secret2"):
            with pytest.raises(EngineError, match=r"401.*engine.api_key_env"):
                await there.client("alice", api_key=key).generate(turn())
        with pytest.raises(EngineError, match="no such tenant"):
            await there.client("carol").generate(turn())
        with pytest.raises(EngineError, match="no engine '7'"):
            await EngineClient("http://gateway/bob/7", transport=there.transport).generate(turn())
        await there.client("bob").generate(turn())


async def test_a_tenant_has_a_key_of_its_own_if_the_file_names_none(autojump_clock: MockClock) -> None:
    async with shared(FakeVLLM(), Tenant(name="alice"), Tenant(name="carol")) as there:
        keys = there.gateway.keys
        assert keys["alice"] is not None and keys["carol"] is not None and keys["alice"] != keys["carol"]
        for other in (None, keys["carol"]):
            with pytest.raises(EngineError, match="401"):
                await there.client("alice", api_key=other).served_version()
        await there.client("alice", api_key=keys["alice"]).generate(turn())
        # Metrics are a tenant's own.
        status, _ = await there.gateway.answer("GET", "/metrics", "", {}, b"")
        assert status == 401
        shown = {"authorization": f"Bearer {keys['alice'].value}"}
        status, lines = await there.gateway.answer("GET", "/metrics", "", shown, b"")
        assert status == 200 and isinstance(lines, bytes)
        assert b'tenant="alice"' in lines and b"carol" not in lines
    with pytest.raises(ConfigError, match=r"tenants\.open = True: it has a key"):
        Tenant(name="alice", open=True, key_env="ALICE_KEY").key()


async def test_the_gateway_shows_the_engines_key_and_signs(autojump_clock: MockClock) -> None:
    """Its tenants know neither."""
    key, asked = EngineKey.fresh(), list[httpx.Request]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"data": []})

    engine = SharedEngine([ALICE], url="unix:///run/e.sock", key=key, places=1, transport=httpx.MockTransport(answer))
    body = json.dumps({"lora_name": "policy-1", "lora_path": "/a", "sha256": "0"}).encode()
    await engine.answer("alice", "POST", "/v1/load_lora_adapter", body)
    listed, load = asked
    assert {one.headers["authorization"] for one in asked} == {f"Bearer {key.value}"}
    assert auth.SIGNATURE not in listed.headers
    signed = auth.signature(key, "POST", "/v1/load_lora_adapter", load.content)
    assert load.headers[auth.SIGNATURE] == signed
    assert json.loads(load.content) == {"lora_name": "alice.policy-1", "lora_path": "/a", "sha256": "0"}


async def timed(client: EngineClient, request: GenerateRequest, took: list[float]) -> None:
    started = trio.current_time()
    await client.generate(request)
    took.append(trio.current_time() - started)


async def test_a_flood_of_one_tenant_does_not_starve_the_other(autojump_clock: MockClock) -> None:
    """Two places, one second a request: alone the quiet tenant is served at once. Beside 400 requests of the flood it
    waits for a free place, and no longer than the flood's visit takes."""
    fake, quiet = FakeVLLM(token_s=0.1), list[float]()
    async with shared(fake, places=2, quantum=15.0) as there, trio.open_nursery() as nursery:
        for number in range(400):
            nursery.start_soon(there.client("alice").generate, turn(f"flood-{number}"))
        await trio.sleep(3.05)
        for number in range(10):
            await timed(there.client("bob"), turn(f"quiet-{number}"), quiet)
        assert there.gauges("alice")["waiting"] > 300
        nursery.cancel_scope.cancel()
    assert max(quiet) <= 3.0  # a place, a visit, itself; first come, first served would be 200


async def test_each_gets_its_weight_while_both_have_work(autojump_clock: MockClock) -> None:
    tenants = Tenant(name="alice", open=True, weight=3), Tenant(name="bob", open=True, weight=1)
    async with shared(FakeVLLM(token_s=0.1), *tenants, places=4, quantum=30.0) as there:
        async with trio.open_nursery() as nursery:
            for number in range(150):
                for name in ("alice", "bob"):
                    nursery.start_soon(there.client(name).generate, turn(f"{name}-{number}"))
            await trio.sleep(30.05)
            served = [there.gauges(name)["served_tokens_total"] for name in ("alice", "bob")]
            nursery.cancel_scope.cancel()
        assert sum(served) == 4 * 30 * 15  # no place is ever empty
        assert abs(served[0] - 1350) <= 60, "three quarters, but for a turn of each"


async def test_too_long_a_queue_is_answered_429_and_the_runs_fleet_asks_again(autojump_clock: MockClock) -> None:
    """A run whose requests do not all fit gets all of its turns, and none counts as failed by the engine."""
    narrow = Tenant(name="alice", open=True, max_queued_tokens=40, max_running=1)
    async with shared(FakeVLLM(token_s=0.1), narrow, BOB) as there:
        fleet, done = Fleet([there.client("alice")], max_faults=1), list[Generation]()

        async def one(number: int) -> None:
            done.append(await fleet.generate(turn(f"turn-{number}")))

        refused = there.client("alice")
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(one, number)
            await trio.sleep(0.1)
            with pytest.raises(EngineUnavailable, match=r"429.*max_queued_tokens = 40 in the fleet file"):
                await refused.generate(turn("refused", prompt=60))
        assert len(done) == 12 and all(len(one.token_ids) == 10 for one in done)


async def test_no_more_adapters_than_a_tenant_may_have(autojump_clock: MockClock, tmp_path: Any) -> None:
    async with shared(FakeVLLM(), Tenant(name="alice", open=True, max_adapters=2), BOB) as there:
        alice = there.client("alice")
        for version in (1, 2, 2):
            await adapters.load([alice], tmp_path, version)
        with pytest.raises(EngineError, match=r"429.*max_adapters = 2 in the fleet file"):
            await adapters.load([alice], tmp_path, 3)
        await adapters.retire([alice], keep=[2])
        await adapters.load([alice], tmp_path, 3)
        await adapters.load([there.client("bob")], tmp_path, 3)


async def test_two_runs_under_one_tenants_name_are_told_apart(autojump_clock: MockClock, tmp_path: Any) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    async with shared(FakeVLLM()) as there:
        await adapters.load([there.client("alice")], tmp_path / "first", 1)
        with pytest.raises(EngineError, match=r"409.*give each a tenant of its own"):
            await adapters.load([there.client("alice")], tmp_path / "second", 1)


async def test_adapters_in_use_are_those_of_waiting_and_running_turns(autojump_clock: MockClock, tmp_path: Any) -> None:
    async with shared(FakeVLLM(token_s=0.1), places=1) as there, trio.open_nursery() as nursery:
        alice, bob = there.client("alice"), there.client("bob")
        for version in (1, 2, 3):
            await adapters.load([alice], tmp_path, version)
        await adapters.load([bob], tmp_path, 1)
        for version in (1, 2):
            nursery.start_soon(there.adapted("alice", version).generate, turn(f"turn-{version}"))
        await wait_all_tasks_blocked()
        assert there.gauges("alice")["waiting"] == 1
        assert await adapters.in_use(alice) == {1, 2} and await adapters.in_use(bob) == frozenset()
        assert await adapters.retire([alice], keep=[3]) == {1, 2}


@pytest.mark.parametrize("after_s", [0.01, 0.55], ids=["while it waits", "while it is answered"])
async def test_a_client_that_leaves_frees_its_place(autojump_clock: MockClock, after_s: float) -> None:
    fake = FakeVLLM(token_s=0.1)
    async with shared(fake, places=1) as there, trio.open_nursery() as nursery:
        if after_s < 0.1:
            nursery.start_soon(there.client("bob").generate, turn("before"))
            await wait_all_tasks_blocked()
        with trio.move_on_after(after_s):
            await there.client("alice").generate(turn(tokens=1000))
        await wait_all_tasks_blocked()
        assert there.gauges("alice")["running"] == there.gauges("alice")["waiting"] == 0
        assert fake.running == (1 if after_s < 0.1 else 0)
        await there.client("alice").generate(turn("after"))


async def test_a_reader_that_stands_still_holds_no_place(autojump_clock: MockClock) -> None:
    fake = FakeVLLM(token_s=0.01)
    async with shared(fake, places=1) as there, aclosing(there.client("alice").stream(turn(tokens=500))) as chunks:
        await anext(chunks)  # and no further
        await trio.sleep(10)
        assert fake.running == 0 and there.gauges("alice")["running"] == 0
        assert len((await there.client("bob").generate(turn())).token_ids) == 10
        rest = [chunk async for chunk in chunks]
        assert sum(len(chunk.token_ids) for chunk in rest) == 496 and rest[-1].finish == "length"


async def test_a_tenant_that_vanished_loses_its_adapters_and_no_other_does(autojump_clock: MockClock) -> None:
    fake = FakeVLLM()
    async with shared(fake, lease_s=100.0) as there:

        async def load(tenant: str, name: str) -> None:
            asked = {"lora_name": name, "lora_path": "/a"}
            await there.client(tenant).call("POST", "/v1/load_lora_adapter", json=asked, deadline_s=5)

        await load("alice", "policy-1")
        await load("bob", "policy-1")
        for _ in range(30):
            await trio.sleep(10)
            await there.client("bob").alive()  # as a run's watch does
        assert list(fake.adapters) == ["bob.policy-1"]
        await load("alice", "policy-2")  # it comes back
        assert sorted(fake.adapters) == ["alice.policy-2", "bob.policy-1"]


@pytest.mark.parametrize(
    "breaks",
    [
        lambda fake: fake.fail("cut", after=4),
        lambda fake: fake.fail("bad_json", after=4),
        lambda fake: fake.fail("status", status=500),
        lambda fake: fake.answers.update({"/inference/v1/generate": (200, b'{"choices": [7], "usage": 3}')}),
    ],
    ids=["cut", "nonsense", "error", "a strange answer"],
)
async def test_an_engines_failure_reaches_its_turn_alone(
    autojump_clock: MockClock, breaks: Callable[[FakeVLLM], None]
) -> None:
    fake = FakeVLLM(token_s=0.1)
    async with shared(fake, places=1) as there:
        breaks(fake)
        with pytest.raises(EngineBroke):
            await there.client("alice").generate(turn())
        fake.mend()
        assert len((await there.client("bob").generate(turn())).token_ids) == 10
        assert there.gauges("alice")["running"] == 0


async def test_turns_go_on_when_the_engine_is_back_elsewhere(autojump_clock: MockClock) -> None:
    """The engine of all tenants is gone for a while: their fleets park the turns, and complete them."""
    fake = FakeVLLM(token_s=0.1)
    async with shared(fake, places=2) as there, trio.open_nursery() as nursery:
        done = dict[str, int]()

        async def one(name: str) -> None:
            done[name] = len((await Fleet([there.client(name)]).generate(turn(tokens=40))).token_ids)

        for name in ("alice", "bob"):
            nursery.start_soon(one, name)
        await trio.sleep(1.05)
        there.engine.url, fake.down = None, True
        fake.restart()
        fake.down = True
        await trio.sleep(20)
        assert not done
        fake.down, there.engine.url = False, fake.url
        await trio.sleep(20)
        assert done == {"alice": 40, "bob": 40}


async def test_what_is_no_request_is_refused_and_harms_nobody(autojump_clock: MockClock) -> None:
    async with shared(FakeVLLM()) as there:
        ask = partial(there.gateway.answer, "POST", "/alice/0/inference/v1/generate", "", {})
        for content in (b"", b"[1]", b"{", b'{"token_ids": 3, "sampling_params": [1], "model": {}}'):
            with trio.fail_after(60):
                status, _ = await ask(content)
            assert 400 <= status <= 500
        for path in ("/", "//", "/alice", "/alice/x", "/alice/0", "/../0/health", "/alice/99999999999/health"):
            assert (await there.gateway.answer("GET", path, "", {}, b""))[0] in (403, 404)
        assert len((await there.client("bob").generate(turn())).token_ids) == 10


async def test_a_client_on_a_socket_that_never_reads_blocks_nobody(autojump_clock: MockClock) -> None:
    """The answer is larger than the sockets' buffers."""
    autojump_clock.autojump_threshold = CARRIED_S

    async def large() -> AsyncGenerator[bytes, None]:
        for _ in range(128):
            yield b": much\n" * 8192

    fake = FakeVLLM(answers={"/inference/v1/generate": (200, large())})
    found = Shared(fake, ALICE, BOB, places=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(found.gateway.run)
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(listen, found.gateway, [listener])
        stream = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        body = json.dumps({"token_ids": [1], "stream": True})
        head = f"POST /alice/0/inference/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        await stream.send_all((head + body).encode())
        await trio.sleep(50)  # virtual, below the deadline of a write
        assert found.gauges("alice")["served_tokens_total"] == 1
        fake.mend()
        assert len((await found.client("bob").generate(turn())).token_ids) == 10
        await stream.aclose()
        nursery.cancel_scope.cancel()
