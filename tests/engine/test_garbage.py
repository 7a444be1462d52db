"""An engine that answers 200 with anything at all: the caller gets an EngineError, which every caller knows."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from each_case import each_case

from agentrl.engine.client import EngineClient
from agentrl.engine.vllm.capabilities import Need, probe
from agentrl.engine.weight_sync import adapters, canary, file_transport, gpu_transport
from agentrl.engine.weight_sync.canary import Canary
from agentrl.errors import CanaryMismatch, EngineError, UsageError
from tests.parts.vllm_server import FakeVLLM

PROBE = Canary(version=3, token_ids=(1, 2, 3), logprobs=(-1.0, -1.0), fingerprints={"a": "1"})
Call = Callable[[EngineClient, Path], Awaitable[object]]


@pytest.fixture
def server() -> FakeVLLM:
    return FakeVLLM(url="http://elsewhere", version="3")


@pytest.fixture
async def client(server: FakeVLLM) -> AsyncIterator[EngineClient]:
    found = EngineClient(server.url, transport=server)
    yield found
    await found.aclose()


async def check(client: EngineClient, _: Path) -> object:
    return await canary.check([client], PROBE)


async def untaken(client: EngineClient, _: Path) -> object:
    return await canary.untaken(client, {"path": "x"}, deadline_s=1.0)


async def stage(client: EngineClient, folder: Path) -> object:
    return await file_transport.push([client], folder / "file", 4, sha256="0", stage=True)


async def send(client: EngineClient, folder: Path) -> object:
    return await adapters.load([client], folder, 4)


@each_case("call", [check, untaken, stage, send])
@each_case("results", [{}, {"results": None}, {"results": []}, {"results": [7]}, {"results": [{}]}])
async def test_what_workers_say_may_be_anything(
    call: Call, results: dict[str, Any], server: FakeVLLM, client: EngineClient, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"weights")
    server.answers["/collective_rpc"] = (200, json.dumps(results).encode())
    with pytest.raises(EngineError, match=r"workers|names no folder"):
        await call(client, tmp_path)


@pytest.mark.parametrize("fields", [{"dtype": 7, "fingerprints": {}}, {"dtype": "float32", "fingerprints": "none"}])
async def test_fingerprints_may_be_anything(fields: dict[str, Any], server: FakeVLLM, client: EngineClient) -> None:
    server.answers["/collective_rpc"] = (200, json.dumps({"results": [fields]}).encode())
    with pytest.raises(EngineError, match="workers"):
        await check(client, Path())


async def test_a_swap_without_its_pause_is_no_crash(server: FakeVLLM, client: EngineClient, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"weights")
    said = {"ready": True, "error": None, "second": True, "swapped": True}
    server.answers["/collective_rpc"] = (200, json.dumps({"results": [said]}).encode())
    with pytest.raises(EngineError, match=r"http://elsewhere did not take version 4: .*pause"):
        await stage(client, tmp_path)


@pytest.mark.parametrize("line", [b'vllm:lora_requests_info{running_lora_adapters="policy-1"} half', b"\xff 1"])
async def test_metrics_may_be_anything(line: bytes, server: FakeVLLM, client: EngineClient) -> None:
    server.adapters["policy-1"] = "folder"
    server.answers["/metrics"] = (200, line)
    if b"half" not in line:
        assert await adapters.retire([client], keep=()) == frozenset()
        return
    with pytest.raises(EngineError, match=r"http://elsewhere did not unload .* no number in its metrics: .*half"):
        await adapters.retire([client], keep=())


@each_case("version", ["9" * 5000, 10**20, -1, True, None])
async def test_a_version_may_be_any_number(version: object, server: FakeVLLM, client: EngineClient) -> None:
    """The store has no room for more than 63 bits, and Python reads no more than 4,300 digits."""
    server.answers["/version"] = (200, json.dumps({"weight_version": version}).encode())
    with pytest.raises(EngineError, match="weight version"):
        await client.served_version()


async def test_an_adapter_may_have_any_number(server: FakeVLLM, client: EngineClient) -> None:
    server.adapters |= {"policy-" + "9" * 5000: "a", "policy-100000000000000000000": "b", "policy-7": "c"}
    assert await adapters.loaded(client) == {7}


@each_case("scored", [7, True, {"0": 1}, [None, {"2": {"logprob": "x"}}, {}]])
async def test_scores_may_be_anything(scored: object, server: FakeVLLM, client: EngineClient) -> None:
    server.answers["/inference/v1/generate"] = (200, json.dumps({"prompt_logprobs": scored}).encode())
    with pytest.raises(EngineError, match="prompt"):
        await client.score((1, 2, 3), deadline_s=1.0)


@pytest.mark.parametrize("place", [0, 1])
async def test_a_score_that_is_nan_is_beyond_every_tolerance_wherever_it_stands(
    place: int, server: FakeVLLM, client: EngineClient
) -> None:
    server.lacks.add("plugin")
    server.logprob = lambda _weights, at, _token: math.nan if at == place + 1 else -1.0
    with pytest.raises(CanaryMismatch, match="is nan nats from the learner's"):
        await check(client, Path())


@each_case("size", [{}, {"world_size": None}, {"world_size": "2"}, {"world_size": 0}])
async def test_a_world_may_have_any_size(size: dict[str, Any], server: FakeVLLM, client: EngineClient) -> None:
    server.answers["/get_world_size"] = (200, json.dumps(size).encode())
    with pytest.raises(EngineError, match="world_size"):
        await gpu_transport._workers(client, 1.0)


@each_case("models", [None, [], [7], [{"id": "m"}], {}])
async def test_a_server_that_names_no_model_is_no_vllm(models: object, server: FakeVLLM, client: EngineClient) -> None:
    server.answers["/v1/models"] = (200, json.dumps({"data": models}).encode())
    with pytest.raises(UsageError, match="http://elsewhere is no vLLM server"):
        await probe(client)


@each_case("choices", [None, [], [7], [{"logprobs": {"content": []}}]])
async def test_a_server_that_samples_nothing_readable_is_no_vllm(
    choices: object, server: FakeVLLM, client: EngineClient
) -> None:
    server.answers["/inference/v1/generate"] = (200, json.dumps({"choices": choices}).encode())
    with pytest.raises(UsageError, match="http://elsewhere is no vLLM server"):
        await probe(client)


async def test_workers_that_say_no_facts_have_no_plugin(server: FakeVLLM, client: EngineClient) -> None:
    server.answers["/collective_rpc"] = (200, b'{"results": [{}]}')
    assert Need.PLUGIN not in (await probe(client)).has
