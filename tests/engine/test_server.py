"""The embedded engine as a process: the API's subset over HTTP, hostile input, weights in flight, its end."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
import trio
from descriptors import readable
from each_case import each_case
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from agentrl.config import EngineSettings
from agentrl.engine.client import EngineClient
from agentrl.engine.embedded.engine import Engine
from agentrl.engine.embedded.vllm_server import VllmServer
from agentrl.engine.embedded_process import launch_embedded
from agentrl.engine.weight_sync.file_transport import push
from agentrl.engine.weight_sync.weight_sources import Sources
from agentrl.errors import EngineError, EngineUnavailable, UsageError, WeightSyncError
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import SamplingParams
from agentrl.tokens import sampling_mask

from .conftest import VOCAB, Server, make_model
from .oracle import reference_logits, reference_logprobs
from .test_batching import Case

GENERATE = "/inference/v1/generate"
ENDLESS = 8000  # tokens: more than an engine can sample before a test that was held up for seconds goes on


@pytest.fixture
async def client(server: Server) -> AsyncIterator[EngineClient]:
    client = EngineClient(server.url)
    yield client
    await client.aclose()


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves the same weights with room for ENDLESS turns: what is to meet one in its midst aborts it afterwards."""
    folder = tmp_path_factory.mktemp("long")
    model = make_model(folder / "model", tie_word_embeddings=True, max_position_embeddings=ENDLESS + 100)
    running = Server(model, folder, "--stream-tokens", "4", "--max-batch", "4", "--kv-cache-mb", "64")
    yield running
    running.close()


@pytest.fixture
async def long_client(long_server: Server) -> AsyncIterator[EngineClient]:
    client = EngineClient(long_server.url)
    yield client
    await client.aclose()


def ask(id: str, tokens: tuple[int, ...] = (5, 6, 7), max_tokens: int = 10, **sampling: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # pyright: ignore[reportArgumentType]
    return GenerateRequest(request_id=id, session=id, token_ids=tokens, sampling=params, deadline_s=120)


async def abort(client: EngineClient, id: str) -> None:
    body = {"request_ids": [f"generate-tokens-{id}"]}
    await client.call("POST", "/abort_requests", json=body, deadline_s=60)


async def until(client: EngineClient, name: str, value: float) -> None:
    """Ask for metrics until one has a value; each answer lets the engine do a few passes."""
    with trio.fail_after(60):
        while (await client.metrics())[name] != value:
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"top_k": 5, "min_p": 0.05}, {"top_k": 1000}])
async def test_each_token_comes_with_the_set_it_was_drawn_from(
    cut: dict[str, float], client: EngineClient, model_dir: Path
) -> None:
    asked = replace(ask("cut", temperature=1.3, **cut), kept=True)
    generation = await client.generate(asked)
    sets = sampling_mask.decode(generation.columns["kept"])
    logits_TV = reference_logits(model_dir, [5, 6, 7, *generation.token_ids])[2:-1] / 1.3
    assert len(sets) == len(generation.token_ids) == 10
    for token, logprob, ids, logits_V in zip(generation.token_ids, generation.logprobs, sets, logits_TV, strict=True):
        others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(ids), False)
        assert not others.any() or float(logits_V[~others].min()) >= float(logits_V[others].max()) - 1e-4
        expected = logits_V.log_softmax(-1)[list(ids)]
        assert logprob == pytest.approx(float((expected - expected.logsumexp(0))[ids.index(token)]), abs=1e-4)
        if "top_p" in cut:  # the fewest that reach it
            assert float(expected.exp().sum()) >= 0.7 - 1e-4
            assert float(expected.exp().sum() - expected.exp().min()) < 0.7 + 1e-4
        assert len(ids) <= min(cut.get("top_k", VOCAB), VOCAB)


async def test_streamed_and_whole_answers_have_exact_logprobs(client: EngineClient, model_dir: Path) -> None:
    chunks = [chunk async for chunk in client.stream(ask("streamed"))]
    assert [len(chunk.token_ids) for chunk in chunks] == [4, 4, 2]  # --stream-tokens 4
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    assert logprobs == pytest.approx(reference_logprobs(model_dir, [5, 6, 7, *tokens], 3), abs=1e-4)
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 10, "logprobs": 0}}
    answer = json.loads(await client.call("POST", GENERATE, json=body, deadline_s=60))
    (choice,) = answer["choices"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprobs == pytest.approx(reference_logprobs(model_dir, [5, 6, 7, *choice["token_ids"]], 3), abs=1e-4)
    assert choice["finish_reason"] == "length"
    assert [(span["start"], span["end"]) for span in choice["weight_versions"]] == [(0, 10)]


async def test_prompts_are_scored_exactly(client: EngineClient, model_dir: Path) -> None:
    tokens = [(7 * i) % VOCAB for i in range(250)]
    await client.generate(ask("cached", tokens=tuple(tokens[:100])))
    scores = await client.score(tokens, deadline_s=60)
    assert list(scores) == pytest.approx(reference_logprobs(model_dir, tokens, 1), abs=1e-4)


async def test_more_requests_than_run_at_once_all_finish(client: EngineClient) -> None:
    finished: list[str] = []

    async def one(id: str) -> None:
        generation = await client.generate(ask(id, max_tokens=12))
        assert len(generation.token_ids) == 12
        finished.append(id)

    async with trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(one, f"many-{number}")
    assert len(finished) == 30


async def test_what_the_server_says_of_itself(client: EngineClient, model_dir: Path) -> None:
    assert await client.healthy()
    models = json.loads(await client.call("GET", "/v1/models", deadline_s=60))
    assert models["data"][0]["id"] == str(model_dir) and models["data"][0]["max_model_len"] == 256
    before = await client.metrics()
    await client.generate(ask("counted", tokens=tuple(range(2, 60)), max_tokens=7))
    await client.generate(ask("again", tokens=tuple(range(2, 60)), max_tokens=7))
    after = await client.metrics()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["vllm:generation_tokens_total"] == 14
    assert grown["vllm:prefix_cache_queries_total"] == 116
    assert grown["vllm:prefix_cache_hits_total"] == 57
    assert grown["vllm:time_to_first_token_seconds_count"] == 2
    assert grown["vllm:inter_token_latency_seconds_count"] == 14


@pytest.mark.medium
@each_case(
    ("body", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "JSON object"),
        (b"{}", "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, VOCAB]}, f"from 0 to {VOCAB - 1}"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": ["1"]}, "token_ids"),
        ({"token_ids": [1] * 256}, "the context holds 256"),
        ({"token_ids": [1], "sampling_params": []}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 1.5}}, "max_tokens"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature"),
        (b'{"token_ids": [1], "sampling_params": {"temperature": NaN}}', "temperature"),
        ({"token_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"token_ids": [1], "sampling_params": {"stop_token_ids": [VOCAB]}}, "stop_token_ids"),
        ({"token_ids": [1], "sampling_params": {"stop_token_ids": 5}}, "stop_token_ids"),
        ({"token_ids": [1], "sampling_params": {"stop": "x"}}, "sampling_params.stop: must be a list"),
        ({"token_ids": [1], "sampling_params": {"stop": [""]}}, "sampling_params.stop: must be a list"),
        (
            {"token_ids": [1], "sampling_params": {"stop": ["x"]}},
            "sampling_params.stop: the model's folder has no token",
        ),
        ({"token_ids": [1], "sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"token_ids": [1], "sampling_params": {"min_p": 1.1}}, "min_p"),
        ({"token_ids": [1], "sampling_params": {"prompt_logprobs": 5}}, "prompt_logprobs"),
        ({"token_ids": [1], "request_id": ""}, "request_id"),
        ({"token_ids": [1], "request_id": 7}, "request_id"),
    ],
)
async def test_a_bad_request_gets_400_and_says_why(server: Server, body: object, words: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        answer = await http.post(GENERATE, content=content)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.medium
async def test_a_stop_text_ends_a_turn_where_the_folder_has_a_tokenizer(model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "with_tokenizer")
    words = Tokenizer(models.WordLevel({f"w{id}": id for id in range(VOCAB)}, unk_token="w0"))
    words.save(str(folder / "tokenizer.json"))
    async with launch_embedded(folder, EngineSettings(kv_cache_mb=16), max_context=200) as engine:
        client = EngineClient(engine.url)
        whole = (await client.generate(ask("whole", temperature=0))).token_ids
        stop = f"w{whole[2]} w{whole[3]}"
        stopped = await client.generate(ask("stopped", temperature=0, stop=(stop,)))
        await client.aclose()
    text = " ".join(f"w{id}" for id in whole)
    assert stopped.token_ids == whole[: text[: text.index(stop) + len(stop)].count("w")]
    assert stopped.finish == "stop"


@pytest.mark.medium
async def test_a_request_id_that_is_running_is_refused(long_client: EngineClient) -> None:
    stream = long_client.stream(ask("twin", max_tokens=ENDLESS))
    await anext(stream)
    with pytest.raises(EngineError, match="already running"):
        await long_client.generate(ask("twin"))
    await stream.aclose()
    await until(long_client, "vllm:num_requests_running", 0)


async def test_leaving_a_stream_frees_the_request(long_client: EngineClient) -> None:
    stream = long_client.stream(ask("leaver", max_tokens=ENDLESS))
    await anext(stream)
    await stream.aclose()
    await until(long_client, "vllm:num_requests_running", 0)


async def test_a_pause_holds_requests_and_abort_ends_them_with_what_they_have(long_client: EngineClient) -> None:
    async def call(path: str, **params: str) -> None:
        await long_client.call("POST", path, params=params, deadline_s=60)

    chunks: list[Chunk] = []
    begun = trio.Event()

    async def one() -> None:
        async for chunk in long_client.stream(ask("held", max_tokens=ENDLESS)):
            chunks.append(chunk)
            begun.set()

    await call("/pause", mode="keep")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        await until(long_client, "vllm:num_requests_waiting", 1)
        assert json.loads(await long_client.call("GET", "/is_paused", deadline_s=60)) == {"is_paused": True}
        await call("/resume")
        await begun.wait()
        await call("/pause", mode="keep")
        await abort(long_client, "held")
    assert chunks[-1].finish == "abort" and 0 < sum(len(chunk.token_ids) for chunk in chunks) < ENDLESS
    await call("/resume")


@pytest.mark.parametrize("clear_cache", [True, False])
async def test_new_weights_arrive_in_flight_and_every_token_has_its_version(
    long_server: Server, long_client: EngineClient, model_dir: Path, other_weights: Path, clear_cache: bool
) -> None:
    before = await long_client.served_version()
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    first, enough = trio.Event(), trio.Event()

    async def one() -> None:
        async for chunk in long_client.stream(ask("flying", max_tokens=ENDLESS)):
            tokens.extend(chunk.token_ids)
            logprobs.extend(chunk.logprobs)
            versions.extend(span.version for span in chunk.spans for _ in range(span.start, span.end))
            first.set()
            if versions.count(before + 5) >= 100:
                enough.set()

    path = other_weights / "model.safetensors"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        await first.wait()
        report = await push([long_server.url], path, before + 5, deadline_s=60, clear_cache=clear_cache)
        await enough.wait()
        await abort(long_client, "flying")
    assert report.bytes == path.stat().st_size and 0 < report.pause_s <= report.total_s
    assert sorted(set(versions)) == [before, before + 5] and versions == sorted(versions)
    assert len(versions) == len(tokens) < ENDLESS
    old, new = (reference_logprobs(folder, [5, 6, 7, *tokens], 3) for folder in (model_dir, other_weights))
    at = versions.index(before + 5)
    assert logprobs[:at] == pytest.approx(old[:at], abs=1e-4)
    assert (logprobs[at:] == pytest.approx(new[at:], abs=1e-4)) == clear_cache  # kept keys are the old weights'
    again = await long_client.generate(ask("after"))
    assert {span.version for span in again.spans} == {before + 5}
    await push([long_client], path, before + 5, deadline_s=60)  # saying it twice does no harm
    assert await long_client.served_version() == before + 5
    await push([long_client], model_dir / "model.safetensors", before + 6, deadline_s=60)


async def test_weights_are_read_while_the_old_ones_sample(client: EngineClient, other_weights: Path) -> None:
    before = await client.served_version()
    path = other_weights / "model.safetensors"
    info = {"update_info": {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}}
    await client.call("POST", "/start_weight_update", deadline_s=60)
    await client.call("POST", "/update_weights", json=info, deadline_s=60)
    assert (await client.generate(ask("beside"))).spans[0].version == before
    with pytest.raises(EngineError, match="the engine is running"):
        await client.call("POST", "/finish_weight_update", json={"weight_version": str(before + 1)}, deadline_s=60)
    assert await client.served_version() == before


async def test_weights_that_do_not_arrive_whole_are_refused_and_the_old_ones_go_on(
    server: Server, client: EngineClient, model_dir: Path, tmp_path: Path
) -> None:
    before = await client.served_version()
    good, torn = model_dir / "model.safetensors", tmp_path / "torn.safetensors"
    torn.write_bytes(good.read_bytes()[:-100])
    for path, digest, words in (
        (torn, None, "not a safetensors file"),
        (good, "0" * 64, "there is not one with SHA-256 000000000000…"),
        (tmp_path / "nothing", None, "cannot read"),
    ):
        with pytest.raises(WeightSyncError, match=words):
            await push([server.url], path, before + 1, sha256=digest, deadline_s=60)
    with pytest.raises(EngineError, match="decimal"):
        await client.call("POST", "/finish_weight_update", json={"weight_version": "five"}, deadline_s=60)
    await client.call("POST", "/resume", deadline_s=60)
    assert (await client.generate(ask("on"))).spans[0].version == before
    await push([server.url], good, before + 1, deadline_s=60)  # and the next push mends it
    assert await client.served_version() == before + 1


async def test_a_push_to_a_dead_engine_names_it(server: Server, other_weights: Path) -> None:
    with socket.socket() as held:  # nobody listens, and nobody else can
        held.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(WeightSyncError, match=dead):
            await push([dead], other_weights / "model.safetensors", 1, deadline_s=60)


def test_a_port_in_use_is_one_line_and_exit_code_2(model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = [
            sys.executable,
            "-m",
            "agentrl.engine.embedded",
            "--no-key",
            "--model",
            str(model_dir),
            "--port",
            str(port),
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr == f"error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port\n"


@pytest.mark.medium
def test_it_ends_when_its_owner_is_killed(model_dir: Path, tmp_path: Path) -> None:
    """SIGKILL gives the owner no chance to clean up; the engine sees its standard input end."""
    ready = tmp_path / "ready.json"
    argv = [
        "-m",
        "agentrl.engine.embedded",
        "--no-key",
        "--model",
        str(model_dir),
        "--ready-file",
        str(ready),
        "--lifeline",
    ]
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print('up', flush=True)\n"
        "child.wait()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    owner.stdout.readline()
    said = json.loads(ready.read_text())
    port, engine = int(said["url"].rpartition(":")[2]), os.pidfd_open(said["pid"])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""  # the engine's end closes it, the listening socket maybe later
    with os.fdopen(engine):
        assert readable(engine, 60), "the engine lives on"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=60)


@pytest.mark.medium
async def test_launched_it_serves_and_ends_with_its_block(model_dir: Path) -> None:
    settings = EngineSettings(kv_cache_mb=16, max_batch=4)
    async with launch_embedded(model_dir, settings, version=11, max_context=64) as engine:
        client = EngineClient(engine.url)
        assert await client.served_version() == 11
        generation = await client.generate(ask("full", max_tokens=100))
        assert len(generation.token_ids) == 61 and generation.finish == "length"
        await client.aclose()
    assert engine.process.returncode == 0
    client = EngineClient(engine.url)
    with pytest.raises(EngineUnavailable):
        await client.generate(ask("late"))
    await client.aclose()


async def test_launching_what_cannot_be_served_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        async with launch_embedded(tmp_path):
            raise AssertionError("it cannot be up")


@pytest.mark.medium
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc keeps less, or none")
async def test_weights_that_were_replaced_leave_the_process(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    model = make_model(tmp_path / "model", tie_word_embeddings=True, **sizes)
    file = model / "model.safetensors"
    weights_mb = file.stat().st_size >> 20

    def held_mb() -> int:
        return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    server = Server(model, tmp_path, "--kv-cache-mb", "1", "--max-model-len", "64", "--dtype", "bfloat16")
    client = EngineClient(server.url)
    try:
        await client.generate(ask("first", max_tokens=2))
        began_mb = held_mb()
        for version in (1, 2, 3):
            await push([client], file, version, deadline_s=60)
        await client.generate(ask("last", max_tokens=2))
        with trio.fail_after(60):
            while held_mb() > began_mb + weights_mb / 4:
                await client.call("GET", "/health", deadline_s=60)
    finally:
        await client.aclose()
        server.close()


def test_new_weights_are_packed_before_the_pause_which_only_swaps_them(
    model_dir: Path, other_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher, file = Case(model_dir).batcher, other_weights / "model.safetensors"
    server = VllmServer(Engine(batcher, name="m", sources=Sources([str(other_weights)])))
    packs, pack = list[bool](), batcher.model.pack

    def told(file: Path) -> dict[str, object]:
        return {"update_info": {"path": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}}

    async def update(info: dict[str, object]) -> list[int]:
        answers: list[int] = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://engine") as client:
            paused: list[bool] = []
            monkeypatch.setattr(batcher.model, "pack", lambda weights: (packs.append(bool(paused)), pack(weights))[1])
            for path, body in (
                ("/start_weight_update", {}),
                ("/update_weights", info),
                ("/pause?mode=keep", {}),
                ("/finish_weight_update", {"weight_version": "7"}),
                ("/resume", {}),
            ):
                paused += [True] if path.startswith("/pause") else []
                answers.append((await client.post(path, json=body)).status_code)
        return answers

    assert asyncio.run(update(told(file))) == [200] * 5
    assert packs == [False] and batcher.version == 7
    expected = reference_logprobs(other_weights, [5, 6, 7, 8], 1)
    assert batcher.score([5, 6, 7, 8]) == pytest.approx(expected, abs=1e-4)
    half = other_weights / "half.safetensors"
    with safe_open(file, framework="pt") as weights:
        save_file({name: weights.get_tensor(name) for name in list(weights.keys())[:3]}, half)
    assert asyncio.run(update(told(half))) == [200, 200, 200, 400, 200], "what is missing is said at the end"
    assert batcher.version == 7 and batcher.score([5, 6, 7, 8]) == pytest.approx(expected, abs=1e-4)
