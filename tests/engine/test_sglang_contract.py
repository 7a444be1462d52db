"""Every message of the SGLang dialect, held against SGLang's own types (`sglang_types.py` runs them)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from each_case import each_case

from agentrl import config
from agentrl.engine.client import EngineClient
from agentrl.engine.dialect import WeightUpdate
from agentrl.engine.sglang import server_facts
from agentrl.errors import ConfigError, EngineError, EngineRefusal, UsageError
from agentrl.protocols import GenerateRequest
from agentrl.records import SamplingParams, VersionSpan

from .conftest import VOCAB, Server

pytestmark = pytest.mark.sglang
WHEEL = Path(__file__).parents[2] / "build/wheels/sglang"
TYPES = {
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/load_lora_adapter": "LoadLoRAAdapterReqInput",
    "/unload_lora_adapter": "UnloadLoRAAdapterReqInput",
}


def theirs(built: list[list[Any]] | None = None, parsed: list[list[Any]] | None = None) -> list[dict[str, Any]]:
    """Give messages to their types; returns the stream that their code writes."""
    asked = json.dumps({"built": built or [], "parsed": parsed or []})
    script = Path(__file__).with_name("sglang_types.py")
    env = {**os.environ, "PYTHONPATH": str(WHEEL)}
    words = [sys.executable, script]
    done = subprocess.run(words, env=env, input=asked, capture_output=True, text=True, timeout=120, check=True)
    answer = json.loads(done.stdout)
    assert answer["errors"] == []
    return answer["stream"]


class Recorder(httpx.AsyncBaseTransport):
    """Keeps what is asked; answers a generation with `events`, anything else with an empty object."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.events, self.asked = events, list[tuple[str, dict[str, Any]]]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.path, json.loads(await request.aread() or b"{}")))
        if request.url.path == "/generate":
            lines = [f"data: {json.dumps(event)}\n\n" for event in self.events] + ["data: [DONE]\n\n"]
            return httpx.Response(200, stream=httpx.ByteStream("".join(lines).encode()))
        return httpx.Response(200, json={})


def ask(**more: Any) -> GenerateRequest:
    sampling = more.pop("sampling", SamplingParams(max_tokens=5))
    return GenerateRequest(request_id="turn", session="s", token_ids=(1, 2), sampling=sampling, deadline_s=60, **more)


async def test_all_that_is_asked_is_what_their_types_take(tmp_path: Path) -> None:
    recorder = Recorder(theirs())
    client = EngineClient("http://engine", kind="sglang", transport=recorder, version=4)
    everything = SamplingParams(
        max_tokens=5, temperature=0.7, top_p=0.9, top_k=8, min_p=0.1, stop_token_ids=(7,), stop=("end",)
    )
    await client.generate(ask())
    client.version = 4
    await client.generate(ask(sampling=everything, model="policy-3", ignore_eos=True))
    (tmp_path / "weights").write_bytes(b"")
    update = WeightUpdate(
        version=5,
        files=[{"path": str(tmp_path / "weights")}],
        stage=False,
        second=False,
        clear_cache=False,
        asleep=False,
        keep_base=None,
    )
    await client.dialect.take_weights(client, update, deadline_s=60)
    await client.dialect.announce(client, 6, deadline_s=60)
    await client.dialect.load_adapter(client, "policy-3", str(tmp_path), "", deadline_s=60)
    await client.dialect.unload_adapter(client, "policy-3", deadline_s=60)
    bodies = [body for path, body in recorder.asked if path == "/generate"]
    bodies.append(client.dialect.request_json(ask(sampling=everything, kept=True, ignore_eos=True)))
    bodies.append(client.dialect.score_json((1, 2, 3), None))
    io_struct = "sglang.srt.managers.io_struct"
    built = [[io_struct, TYPES[path], body] for path, body in recorder.asked if path in TYPES]
    assert {name for _, name, _ in built} == set(TYPES.values())
    built += [[io_struct, "GenerateReqInput", body] for body in bodies]
    sampled = "sglang.srt.sampling.sampling_params"
    built += [[sampled, "SamplingParams", body["sampling_params"]] for body in bodies]
    theirs(built, [["GenerateRequest", body] for body in bodies])


@pytest.mark.parametrize("cumulative", [False, True], ids=["new tokens alone", "all tokens each time"])
async def test_their_stream_gives_each_token_its_version(cumulative: bool) -> None:
    events = theirs()
    if cumulative:  # the server without --incremental-streaming-output
        for before, event in pairwise(events):
            event["output_ids"] = before["output_ids"] + event["output_ids"]
            logprobs = before["meta_info"]["output_token_logprobs"] + event["meta_info"]["output_token_logprobs"]
            event["meta_info"]["output_token_logprobs"] = logprobs
    client = EngineClient("http://engine", kind="sglang", transport=Recorder(events), version=4)
    generation = await client.generate(ask())
    assert generation.token_ids == (10, 11, 12, 13, 14) and generation.finish == "stop"
    assert generation.logprobs == (-0.625, -0.6875, -0.75, -0.8125, -0.875)
    assert generation.spans == (VersionSpan(4, 0, 3), VersionSpan(5, 3, 5))
    assert client.version == 5


async def test_tokens_of_before_the_pause_are_not_counted_to_the_new_weights() -> None:
    """The second event names version 5, but the request was not put back since the first: an update puts it back."""
    events = theirs()
    for event, retractions in zip(events, (0, 0, 1), strict=True):
        event["meta_info"]["num_retractions"] = retractions
    client = EngineClient("http://engine", kind="sglang", transport=Recorder(events), version=4)
    spans = [chunk.spans async for chunk in client.stream(ask())]
    assert spans[:2] == [(VersionSpan(4, 0, 2),), (VersionSpan(4, 0, 1),)]


async def test_an_abort_that_repeats_the_last_token_adds_none() -> None:
    """As the server writes it for a request that waits: the last token again, all log-probs, and no status."""
    events = theirs()[:2]
    meta = events[1]["meta_info"]
    logprobs = events[0]["meta_info"]["output_token_logprobs"] + meta["output_token_logprobs"]
    spans = [{"version": "4", "start": 0, "end": 3}]
    reason = {"type": "abort", "message": "Abort in waiting queue"}
    ended = meta | {"output_token_logprobs": logprobs, "finish_reason": reason, "weight_versions": spans}
    events.append({"output_ids": [12], "meta_info": ended})
    client = EngineClient("http://engine", kind="sglang", transport=Recorder(events), version=4)
    generation = await client.generate(ask())
    assert generation.token_ids == (10, 11, 12) and generation.finish == "abort"
    assert generation.spans == (VersionSpan(4, 0, 3),)


@each_case(
    ("event", "kind", "words"),
    [
        ({"error": {"message": "too long", "code": 400}}, EngineRefusal, "too long"),
        ({"error": {"message": "no memory", "code": 500}}, EngineError, "no memory"),
        ({"error": {"message": "LoRA adapters are not loaded: p", "code": 400}}, EngineRefusal, "does not exist"),
        ({"output_ids": [1]}, EngineError, "unknown shape"),
        ({"output_ids": [1], "meta_info": {"finish_reason": None, "completion_tokens": 3}}, EngineError, "1 entries"),
    ],
)
async def test_what_fails_is_named(event: dict[str, Any], kind: type[EngineError], words: str) -> None:
    client = EngineClient("http://engine", kind="sglang", transport=Recorder([event]))
    with pytest.raises(kind, match=words):
        await client.generate(ask())


def test_what_cannot_be_sampled_is_refused_with_the_setting() -> None:
    client = EngineClient("http://engine", kind="sglang")
    with pytest.raises(ConfigError, match=r"rollout\.top_k"):
        client.dialect.request_json(ask(kept=True))
    with pytest.raises(ConfigError, match=r"engine\.routed_experts"):
        client.dialect.request_json(ask(experts_from=0))


async def test_a_server_that_lacks_something_is_refused_with_the_command_that_mends_it() -> None:
    info: dict[str, Any] = {"model_path": "/models/my model", "enable_metrics": True}

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 100}]})
        if request.url.path == "/server_info":
            return httpx.Response(200, json=info)
        body = json.loads(request.content)
        if body["stream"]:  # the log-probs of temperature 2 are those of temperature 1
            pairs = [[-0.5, token, None] for token in range(8)]
            meta = {"completion_tokens": 8, "finish_reason": {"type": "length"}, "weight_version": "default"}
            event = {"output_ids": list(range(8)), "meta_info": meta | {"output_token_logprobs": pairs}}
            return httpx.Response(200, stream=httpx.ByteStream(f"data: {json.dumps(event)}\n\n".encode()))
        pairs = [[-0.5, token, None] for token in body["input_ids"]]
        return httpx.Response(200, json={"meta_info": {"input_token_logprobs": pairs}})

    client = EngineClient("http://engine", kind="sglang", transport=httpx.MockTransport(answer))
    with pytest.raises(UsageError) as refused:
        await server_facts.require(client, context=256, adapters=True)
    assert str(refused.value) == (
        "the SGLang server at http://engine lacks contexts of 256 tokens (it has 100), loading LoRA adapters while it "
        "runs, streams that do not repeat their tokens, log-probs of the sampling distribution: start it, beside its "
        "other flags, with: SGLANG_RETURN_ORIGINAL_LOGPROB=0 python -m sglang.launch_server --model-path "
        "'/models/my model' --context-length 256 --enable-lora --max-lora-rank 64 --lora-target-modules all "
        "--incremental-streaming-output"
    )


URLS = ["http://127.0.0.1:30000"]


@each_case(
    ("engine", "field"),
    [
        ({"urls": URLS, "sync": "nccl"}, "engine.sync"),
        ({"urls": URLS, "sync": "adapter"}, "engine.sync"),
        ({"urls": URLS, "colocated": True}, "engine.colocated"),
        ({"urls": URLS, "weights_url": "s3://bucket/x"}, "engine.weights_url"),
    ],
)
def test_a_setting_that_sglang_has_not_is_refused_by_name(engine: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        config.parse({"model": "m", "env": {"id": "agentrl/Blackjack-v0"}, "engine": {"kind": "sglang", **engine}})


@pytest.mark.medium
def test_the_embedded_engine_answers_as_their_types_do(model_dir: Path, tmp_path: Path) -> None:
    server = Server(model_dir, tmp_path, "--api", "sglang", "--stream-tokens", "4")
    try:
        client = EngineClient(server.url, kind="sglang")
        body = client.dialect.request_json(ask())
        lines = httpx.post(f"{server.url}/generate", json=body, timeout=60).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert len(events) == 2 and events[-1]["meta_info"]["weight_versions"] == [
            {"version": "0", "start": 0, "end": 5}
        ]
        scored = httpx.post(f"{server.url}/generate", json=client.dialect.score_json((1, 2, 3), None), timeout=60)
        refused = httpx.post(f"{server.url}/generate", json=body | {"input_ids": [VOCAB]}, timeout=60).text
        failed = json.loads(refused.splitlines()[0][6:])
        info = httpx.get(f"{server.url}/model_info", timeout=60).json()
    finally:
        server.close()
    parsed: list[list[Any]] = [["GenerateResponse", event] for event in [*events, scored.json()]]
    theirs(parsed=[*parsed, ["GenerateStreamError", failed], ["GetModelInfoResponse", info]])
