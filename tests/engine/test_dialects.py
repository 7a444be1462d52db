"""What every engine keeps, in each dialect that the client speaks: the same cases, on the embedded engine with vLLM's
routes and with SGLang's alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import pytest
import torch
import trio

from agentrl.engine.client import EngineClient
from agentrl.engine.router.router import Fleet
from agentrl.engine.weight_sync.canary import Canary, check, probe_tokens
from agentrl.engine.weight_sync.file_transport import push
from agentrl.errors import EngineError, EngineRefusal, WeightSyncError
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import Generation, SamplingParams
from agentrl.tokens import sampling_mask

from .conftest import VOCAB, Server, make_model
from .oracle import reference_logits, reference_logprobs

Kind = Literal["vllm", "sglang"]
ENDLESS = 8000  # tokens: more than an engine samples before a test that was held up for seconds goes on
ABORT = {
    "vllm": ("/abort_requests", "request_ids", lambda id: [f"generate-tokens-{id}"]),
    "sglang": ("/abort_request", "rid", lambda id: f"{id}$"),
}


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def endless_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endless") / "model"
    return make_model(folder, tie_word_embeddings=True, max_position_embeddings=ENDLESS + 100)


@pytest.fixture(scope="module")
def spoken(kind: Kind, endless_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--api", kind, "--stream-tokens", "4", "--max-batch", "4", "--kv-cache-mb", "64"]
    running = Server(endless_dir, tmp_path_factory.mktemp("spoken"), *options)
    yield running
    running.close()


@pytest.fixture
async def client(spoken: Server, kind: Kind) -> AsyncIterator[EngineClient]:
    client = EngineClient(spoken.url, kind=kind, vocabulary=VOCAB)
    yield client
    await client.aclose()


def ask(id: str, max_tokens: int = 10, **sampling: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # pyright: ignore[reportArgumentType]
    return GenerateRequest(request_id=id, session=id, token_ids=(5, 6, 7), sampling=params, deadline_s=120)


async def abort(client: EngineClient, kind: Kind, id: str) -> None:
    path, field, named = ABORT[kind]
    await client.call("POST", path, json={field: named(id)}, deadline_s=60)


def versions_of(generation: Generation) -> list[int]:
    return [span.version for span in generation.spans for _ in range(span.start, span.end)]


@pytest.mark.medium
async def test_streamed_tokens_have_exact_logprobs(client: EngineClient, endless_dir: Path) -> None:
    chunks = [chunk async for chunk in client.stream(ask("streamed", temperature=1.3))]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    assert [len(chunk.token_ids) for chunk in chunks] == [4, 4, 2]
    assert logprobs == pytest.approx(reference_logprobs(endless_dir, [5, 6, 7, *tokens], 3, 1.3), abs=1e-4)
    assert chunks[-1].finish == "length"


async def test_a_stop_token_is_kept_and_ends_the_turn(client: EngineClient, endless_dir: Path) -> None:
    greedy = int(reference_logits(endless_dir, [5, 6, 7])[-1].argmax())
    generation = await client.generate(ask("stopped", temperature=0.0, stop_token_ids=(greedy,)))
    assert generation.finish == "stop" and generation.token_ids == (greedy,)


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_k": 20, "top_p": 0.7, "min_p": 0.02}])
async def test_each_token_comes_with_the_set_it_was_drawn_from(
    cut: dict[str, float], client: EngineClient, endless_dir: Path
) -> None:
    generation = await client.generate(replace(ask("cut", 10, **cut), kept=True))
    sets = sampling_mask.decode(generation.columns["kept"])
    logits_TV = reference_logits(endless_dir, [5, 6, 7, *generation.token_ids])[2:-1]
    assert len(sets) == 10
    for token, logprob, ids, logits_V in zip(generation.token_ids, generation.logprobs, sets, logits_TV, strict=True):
        kept = logits_V[list(ids)].log_softmax(-1)
        assert logprob == pytest.approx(float(kept[ids.index(token)]), abs=1e-4) and len(ids) <= cut["top_k"]


async def test_prompts_are_scored_exactly(client: EngineClient, endless_dir: Path) -> None:
    tokens = [(7 * i) % VOCAB for i in range(250)]
    assert list(await client.score(tokens, deadline_s=60)) == pytest.approx(
        reference_logprobs(endless_dir, tokens, 1), abs=1e-4
    )


async def test_a_refusal_is_one_and_says_why(client: EngineClient) -> None:
    with pytest.raises(EngineRefusal, match=f"integer from 0 to {VOCAB - 1}"):
        await client.generate(replace(ask("bad"), token_ids=(VOCAB,)))
    with pytest.raises(EngineError, match="policy-9"):
        await client.generate(replace(ask("no-adapter"), model="policy-9"))


async def test_it_says_what_it_does(client: EngineClient) -> None:
    metrics = await client.metrics()
    assert metrics["vllm:num_requests_running"] == 0 and metrics["vllm:generation_tokens_total"] > 0
    assert await client.alive() and await client.healthy() and not await client.paused()
    assert client.version == 0 and await client.served_version() == 0
    await client.dialect.announce(client, 3, deadline_s=60)
    assert await client.served_version() == 3
    assert {span.version for span in (await client.generate(ask("announced"))).spans} == {3}
    await client.dialect.announce(client, 0, deadline_s=60)


@pytest.mark.parametrize("whole", [True, False], ids=["a model's folder", "a file"])
async def test_weights_change_in_mid_turn_and_every_token_has_its_version(
    whole: bool, client: EngineClient, kind: Kind, endless_dir: Path, other_weights: Path, tmp_path: Path
) -> None:
    await push([client], endless_dir / "model.safetensors", 10, deadline_s=60)
    path = other_weights / "model.safetensors"
    if not whole:
        path = tmp_path / "weights-11"
        path.write_bytes((other_weights / "model.safetensors").read_bytes())
    seen: list[Chunk] = []
    done: list[Generation] = []
    begun, enough = trio.Event(), trio.Event()

    def heard(chunk: Chunk) -> None:
        seen.append(chunk)
        begun.set()
        if sum(len(c.token_ids) for c in seen if c.spans and c.spans[-1].version == 11) >= 100:
            enough.set()

    async def turn() -> None:
        done.append(await client.generate(replace(ask("flying", max_tokens=ENDLESS), on_chunk=heard)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(turn)
        await begun.wait()
        await push([client], path, 11, deadline_s=60, clear_cache=True)
        await enough.wait()
        await abort(client, kind, "flying")
    (generation,) = done
    versions, tokens = versions_of(generation), generation.token_ids
    assert generation.finish == "abort" and versions == sorted(versions) and set(versions) == {10, 11}
    old, new = (reference_logprobs(folder, [5, 6, 7, *tokens], 3) for folder in (endless_dir, other_weights))
    at = versions.index(11)
    assert list(generation.logprobs[:at]) == pytest.approx(old[:at], abs=1e-4)
    assert list(generation.logprobs[at:]) == pytest.approx(new[at:], abs=1e-4)
    # What streamed said the same before the last word came: a turn that is broken off keeps it.
    live = [span.version for c in seen[:-1] for span in c.spans for _ in range(span.start, span.end)]
    assert live == versions[: len(live)]


@pytest.mark.medium
async def test_an_aborted_turn_goes_on_with_the_tokens_it_has(
    client: EngineClient, kind: Kind, endless_dir: Path
) -> None:
    await push([client], endless_dir / "model.safetensors", 20, deadline_s=60)
    fleet, begun, aborted = Fleet([client]), trio.Event(), False

    def heard(chunk: Chunk) -> None:
        begun.set()

    async def break_off() -> None:
        nonlocal aborted
        await begun.wait()
        await abort(client, kind, "resumed")
        aborted = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(break_off)
        generation = await fleet.generate(replace(ask("resumed", max_tokens=2000), on_chunk=heard))
    assert aborted and generation.finish == "length" and len(generation.token_ids) == 2000
    expected = reference_logprobs(endless_dir, [5, 6, 7, *generation.token_ids], 3)
    assert list(generation.logprobs) == pytest.approx(expected, abs=2e-4)
    assert set(versions_of(generation)) == {20}


async def test_the_canary_sings_for_the_right_weights_alone(
    client: EngineClient, endless_dir: Path, other_weights: Path
) -> None:
    tokens = probe_tokens(VOCAB, 64)
    right = Canary(version=30, token_ids=tokens, logprobs=tuple(reference_logprobs(other_weights, tokens, 1)))
    await push([client], other_weights / "model.safetensors", 30, deadline_s=60)
    assert await check([client], right) < 1e-3
    await push([client], endless_dir / "model.safetensors", 31, deadline_s=60)
    with pytest.raises(EngineError, match="nats from the learner"):
        await check([client], replace(right, version=31))


async def test_weights_that_are_not_there_are_refused_and_a_repeat_mends(
    client: EngineClient, endless_dir: Path, other_weights: Path, tmp_path: Path
) -> None:
    await push([client], endless_dir / "model.safetensors", 40, deadline_s=60)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no tensors at all")
    with pytest.raises(WeightSyncError, match="did not take version 41"):
        await push([client], broken, 41, deadline_s=60)
    await push([client], other_weights / "model.safetensors", 41, deadline_s=60)
    generation = await client.generate(ask("mended"))
    expected = reference_logprobs(other_weights, [5, 6, 7, *generation.token_ids], 3)
    assert list(generation.logprobs) == pytest.approx(expected, abs=1e-4) and not await client.paused()


async def test_an_adapter_is_one_model_more(
    client: EngineClient, kind: Kind, endless_dir: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    await push([client], endless_dir / "model.safetensors", 50, deadline_s=60)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_pretrained(endless_dir, dtype=torch.float32)
    adapted = get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    for _ in range(2):  # saying it twice does no harm
        await client.dialect.load_adapter(client, "policy-7", str(tmp_path / "adapter"), "", deadline_s=60)
    models = json.loads(await client.call("GET", "/v1/models", deadline_s=60))["data"]
    assert "policy-7" in [model["id"] for model in models]
    generation = await client.generate(replace(ask("adapted"), model="policy-7"))
    with torch.no_grad():
        logits_TV = adapted(torch.tensor([[5, 6, 7, *generation.token_ids]])).logits[0, 2:-1]
    expected = logits_TV.log_softmax(-1).gather(-1, torch.tensor(generation.token_ids)[:, None])[:, 0]
    assert list(generation.logprobs) == pytest.approx(cast("list[float]", expected.tolist()), abs=1e-4)
    await client.dialect.unload_adapter(client, "policy-7", deadline_s=60)
    with pytest.raises(EngineError, match="does not exist") as gone:
        await client.generate(replace(ask("gone"), model="policy-7"))
    assert gone.value.status == 404
