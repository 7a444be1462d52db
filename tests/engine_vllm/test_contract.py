"""What vLLM answers, field by field: the client's parser and the embedded engine rest on it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from uuid import uuid4

import httpx
import pytest
import trio

from agentrl.engine.client import EngineClient
from agentrl.errors import EngineError
from agentrl.protocols import GenerateRequest
from agentrl.records import SamplingParams

from .conftest import Server
from .policy import VOCAB, Policy, text_of

pytestmark = pytest.mark.vllm

PROMPT = tuple(range(5, 50))


def ask(prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=uuid4().hex,
        session="s",
        token_ids=prompt,
        sampling=SamplingParams(**{"max_tokens": 24, **sampling}),
        deadline_s=60.0,
    )


def body(**changes: Any) -> dict[str, Any]:
    params = {"max_tokens": 9, "temperature": 1.0, "logprobs": 0}
    return {"request_id": uuid4().hex, "token_ids": list(PROMPT), "sampling_params": params, **changes}


async def post(server: Server, **changes: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        return await http.post("/inference/v1/generate", json=body(**changes))


async def test_the_cpu_build_answers_without_compiling_anything(server: Server, client: EngineClient) -> None:
    assert (await client.generate(ask())).token_ids
    assert not list(server.spec.plugin_folder.glob("torchinductor_*"))  # the server's folder for temporary files


async def test_a_whole_answer(server: Server) -> None:
    asked = body()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        answer = (await http.post("/inference/v1/generate", json=asked)).json()
    assert answer["request_id"] == f"generate-tokens-{asked['request_id']}"
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] % 32 == 0
    (choice,) = answer["choices"]
    tokens = choice["token_ids"]
    assert choice["finish_reason"] in ("length", "stop") and 0 < len(tokens) <= 9
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == tokens
    assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
    (span,) = choice["weight_versions"]
    assert span["version"].isdecimal() and (span["start"], span["end"]) == (0, len(tokens))


async def test_a_stream_stamps_every_chunk_with_all_spans_so_far(server: Server) -> None:
    params = {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
    response = await post(server, stream=True, sampling_params=params)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    received = 0
    for line in lines[:-1]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        received += len(choice["token_ids"])
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        assert [(span["start"], span["end"]) for span in choice["weight_versions"]] == [(0, received)]
        assert (choice["finish_reason"] is None) == (line is not lines[-2])
    assert received == 200 and len(lines) > 2  # it came in pieces, of which a slow server may join some


async def test_logprobs_are_those_of_the_sampling_distribution(client: EngineClient, policy: Policy) -> None:
    version = await client.served_version()
    plain = await client.generate(ask())
    assert policy.error(PROMPT, plain) < 1e-4
    hot = await client.generate(ask(temperature=2.0))
    policy.model.load_state_dict(policy.states[version])
    import torch

    with torch.no_grad():
        logits = policy.model(torch.tensor([[*PROMPT, *hot.token_ids]])).logits[0][len(PROMPT) - 1 : -1]
    expected = (logits / 2.0).log_softmax(-1)
    for at, token in enumerate(hot.token_ids):
        assert hot.logprobs[at] == pytest.approx(float(expected[at, token]), abs=1e-4)


async def test_a_stop_text_ends_the_turn_with_the_token_that_completes_it(client: EngineClient) -> None:
    whole = await client.generate(ask(max_tokens=40, temperature=0))
    stop = text_of(whole.token_ids[10:12])
    stopped = await client.generate(ask(max_tokens=40, temperature=0, stop=("never said", stop)))
    n = next(n for n in range(1, 41) if stop in text_of(whole.token_ids[:n]))
    assert stopped.token_ids == whole.token_ids[:n]
    assert stopped.logprobs == pytest.approx(whole.logprobs[:n], abs=1e-4)
    assert (stopped.finish, [(span.start, span.end) for span in stopped.spans]) == ("stop", [(0, n)])


async def test_a_stop_token_ends_the_turn_and_belongs_to_it(client: EngineClient) -> None:
    stops = tuple(range(2, VOCAB, 2))
    generation = await client.generate(ask(max_tokens=200, stop_token_ids=stops))
    assert generation.finish == "stop"
    assert generation.token_ids[-1] in {*stops, 1}
    assert not {*generation.token_ids[:-1]} & {*stops, 1}


@pytest.mark.parametrize(
    ("change", "says"),
    [({"token_ids": (VOCAB + 5,)}, "out of vocabulary"), ({"token_ids": tuple([3] * 3000)}, "maximum model length")],
)
async def test_a_refusal_is_one_line_and_the_engine_lives(
    client: EngineClient, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineError, match=says) as caught:
        await client.generate(replace(ask(), **change))
    assert "\n" not in str(caught.value)
    assert (await client.generate(ask())).token_ids


async def test_leaving_a_stream_frees_the_request(client: EngineClient) -> None:
    async for _ in client.stream(ask(max_tokens=800)):
        break
    with trio.fail_after(60):
        while (await client.metrics())["vllm:num_requests_running"]:  # they follow the scheduler's next look
            await trio.lowlevel.checkpoint()


async def test_turns_of_an_episode_find_their_prefix(server: Server, client: EngineClient) -> None:
    prompt = tuple((7 * i) % 120 + 3 for i in range(100))
    first = await client.generate(ask(prompt))
    answer = (await post(server, token_ids=[*prompt, *first.token_ids, 9, 10, 11])).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 96  # whole blocks of 32 of the first turn
