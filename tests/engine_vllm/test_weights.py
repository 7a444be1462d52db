"""New weights in a real server while it generates: exact to transformers, stamped right, or refused whole."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import trio
from safetensors.torch import load_file, save_file

from agentrl.engine.client import EngineClient
from agentrl.engine.weight_sync import canary, fingerprints, weight_file
from agentrl.engine.weight_sync.canary import Canary
from agentrl.engine.weight_sync.file_transport import push, update_info
from agentrl.errors import CanaryMismatch, WeightSyncError
from agentrl.protocols import GenerateRequest
from agentrl.records import Generation, Json, SamplingParams

from .conftest import Server
from .policy import VOCAB, Policy
from .test_contract import ask

pytestmark = pytest.mark.vllm

EXACT = 1e-4
ADMIN_S = 60.0
STOPS = (1, 2)


@dataclass
class Progress:
    """Counts tokens as they come; `reach` wakes its caller when there are enough."""

    tokens: int = 0
    _waiting: list[tuple[int, trio.Event]] = field(default_factory=list)

    def add(self, count: int) -> None:
        self.tokens += count
        for goal, event in self._waiting:
            if self.tokens >= goal:
                event.set()

    async def reach(self, goal: int) -> None:
        event = trio.Event()
        self._waiting.append((goal, event))
        if self.tokens < goal:
            await event.wait()


async def turn(
    client: EngineClient, prompt: list[int], max_tokens: int, progress: Progress, *, stops: tuple[int, ...] = ()
) -> Generation:
    """One turn, token counts reported as they come."""
    from agentrl.engine.generation import Stitcher

    request = GenerateRequest(
        request_id=uuid4().hex,
        session="s",
        token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stops),
        deadline_s=120.0,
    )
    stitcher = Stitcher()
    async for chunk in client.stream(request):
        stitcher.add(chunk)
        progress.add(len(chunk.token_ids))
        if chunk.finish is not None:
            return stitcher.generation(chunk.finish)  # pyright: ignore[reportArgumentType]
    raise AssertionError("the stream ended without a finish")


async def episodes(
    client: EngineClient, seed: int, progress: Progress, done: trio.Event
) -> list[tuple[list[int], Generation]]:
    """Episodes of four turns, whose prompts extend what came before, one after the other until `done`, two turns at
    least: (context, generation) of each."""
    rng = random.Random(seed)
    context: list[int] = []
    played: list[tuple[list[int], Generation]] = []
    while len(played) < 2 or not done.is_set():
        if len(played) % 4 == 0:
            context = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(20, 60))]
        generation = await turn(client, context, rng.randrange(24, 72), progress, stops=STOPS)
        played.append((list(context), generation))
        context += [*generation.token_ids, *(rng.randrange(3, VOCAB) for _ in range(8))]
    return played


@pytest.mark.parametrize("clear_cache", [True], ids=["kv recomputed"])
async def test_every_token_is_exact_under_its_own_version(
    client: EngineClient, policy: Policy, clear_cache: bool
) -> None:
    """64 concurrent episodes of several turns over 6 updates in flight."""
    progress, updates, played = Progress(), 6, list[tuple[list[int], Generation]]()
    updated = trio.Event()
    client.version = await client.served_version()
    before = policy.version

    async def play(seed: int) -> None:
        played.extend(await episodes(client, seed, progress, updated))

    async with trio.open_nursery() as nursery:
        for seed in range(64):
            nursery.start_soon(play, seed)
        for _ in range(updates):
            await progress.reach(progress.tokens + 600)
            version, file = policy.update()
            await push(
                [client],
                file.path,
                version,
                sha256=file.sha256,
                clear_cache=clear_cache,
                deadline_s=ADMIN_S,
                stage=True,
            )
        updated.set()
    seen = {span.version for _, generation in played for span in generation.spans}
    assert seen >= set(range(before + 1, before + updates + 1))
    assert sum(len(generation.spans) > 1 for _, generation in played) >= 6  # turns that an update overtook
    assert max(policy.error(context, generation) for context, generation in played) <= EXACT


async def test_kept_kv_is_exact_for_what_it_was_computed_with(client: EngineClient, policy: Policy) -> None:
    """With KV kept, tokens after the swap attend to keys and values of the old weights: not the new model's log-probs,
    and a new request never sees them: its prefix is computed anew."""
    prompts, progress = [[((5 + n) * i) % 120 + 3 for i in range(96)] for n in range(8)], Progress()
    client.version = await client.served_version()
    played: list[tuple[list[int], Generation]] = []
    updated = trio.Event()

    async def one(prompt: list[int]) -> None:
        while not updated.is_set():
            played.append((prompt, await turn(client, prompt, 600, progress)))

    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(one, prompt)
        await progress.reach(8)
        version, file = policy.update()
        await push([client], file.path, version, sha256=file.sha256, clear_cache=False, deadline_s=ADMIN_S)
        updated.set()
    overtaken = [(prompt, generation) for prompt, generation in played if len(generation.spans) == 2]
    assert overtaken
    for prompt, running in overtaken:
        first = Generation(
            token_ids=running.token_ids[: running.spans[0].end],
            logprobs=running.logprobs[: running.spans[0].end],
            spans=running.spans[:1],
            finish="length",
        )
        assert policy.error(prompt, first) <= EXACT
        fresh = await client.generate(ask(tuple(prompt)))
        assert {span.version for span in fresh.spans} == {version}
        assert policy.error(prompt, fresh) <= EXACT
    assert max(policy.error(prompt, running) for prompt, running in overtaken) > EXACT


async def test_a_damaged_file_is_refused_and_the_old_weights_serve_on(client: EngineClient, policy: Policy) -> None:
    version, file = policy.update()
    damaged = bytearray(file.path.read_bytes())
    damaged[-1] ^= 1
    bad = file.path.with_name("damaged.safetensors")
    bad.write_bytes(damaged)
    served = await client.served_version()
    for stage in (True, False):
        with pytest.raises(WeightSyncError, match="SHA-256"):
            await push([client], bad, version, sha256=file.sha256, deadline_s=ADMIN_S, stage=stage)
    await client.call("POST", "/resume", deadline_s=ADMIN_S)
    assert await client.served_version() == served
    old = await client.generate(ask())
    assert policy.error(ask().token_ids, old) <= EXACT
    await push([client], file.path, version, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True)
    assert policy.error(ask().token_ids, await client.generate(ask())) <= EXACT


async def test_an_update_whose_trainer_died_half_way_is_mended_by_the_next(
    client: EngineClient, policy: Policy
) -> None:
    version, file = policy.update()
    await client.call("POST", "/pause", params={"mode": "keep", "clear_cache": "true"}, deadline_s=ADMIN_S)
    await client.call("POST", "/start_weight_update", deadline_s=ADMIN_S)
    info = update_info(file.path, file.sha256)
    await client.call("POST", "/update_weights", json={"update_info": info}, deadline_s=ADMIN_S)
    version, file = policy.update()
    await push([client], file.path, version, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True)
    assert policy.error(ask().token_ids, await client.generate(ask())) <= EXACT


async def staged(client: EngineClient, method: str, *args: Json) -> dict[str, Any]:
    asked: dict[str, Json] = {"method": method, "args": list(args)}
    (state,) = json.loads(await client.call("POST", "/collective_rpc", json=asked, deadline_s=ADMIN_S))["results"]
    return state


@pytest.mark.parametrize("served", ["client", "mixture_client"])
async def test_tokens_sampled_beside_a_second_copy_are_the_old_version_s_until_the_swap(
    served: str, client: EngineClient, policy: Policy, mixture_client: EngineClient, mixture: Policy
) -> None:
    """Tied embeddings, and LoRA around the layers; or packed experts."""
    if served == "mixture_client":
        client, policy = mixture_client, mixture
    before, file = policy.update()
    await push([client], file.path, before, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True)
    version, file = policy.update()
    state = await staged(client, "agentrl_stage", json.dumps(update_info(file.path, file.sha256)), True)
    sampled = [await client.generate(ask())]
    with trio.fail_after(ADMIN_S):
        while not state["ready"]:
            state = await staged(client, "agentrl_staged")
            assert state["error"] is None
            await trio.sleep(0.01)
    assert state["second"], state["why"]
    sampled.append(await client.generate(ask()))
    report = await push(
        [client], file.path, version, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True, stage=True
    )
    assert 0 < report.pause_s < report.total_s
    for version_of, generation in zip((before, before, version), [*sampled, await client.generate(ask())], strict=True):
        assert {span.version for span in generation.spans} == {version_of}
        assert policy.error(ask().token_ids, generation) <= EXACT
    assert await canary.check([client], probe_of(policy, version, marked=True)) <= EXACT
    assert (await canary.untaken(client, update_info(file.path, file.sha256), deadline_s=ADMIN_S)) == []


async def test_a_file_that_lacks_a_shard_is_refused_before_the_swap(client: EngineClient, policy: Policy) -> None:
    served = await client.served_version()
    version, file = policy.update()
    tensors = load_file(file.path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    bad = file.path.with_name("lacking.safetensors")
    save_file(tensors, bad)
    with pytest.raises(WeightSyncError, match=r"staged weights .*layers.1.mlp.up_proj.weight \(not in the file"):
        await push([client], bad, version, deadline_s=ADMIN_S, stage=True)
    bad.unlink()
    assert await client.served_version() == served
    assert policy.error(ask().token_ids, await client.generate(ask())) <= EXACT


async def test_a_delta_is_the_whole_file(client: EngineClient, policy: Policy, tmp_path: Path) -> None:
    version, base = policy.update()
    await push([client], base.path, version, sha256=base.sha256, keep_base=True, deadline_s=ADMIN_S, clear_cache=True)
    for _ in range(2):  # the second is against a result that only the engine ever held
        version, new = policy.update(scale=1e-4)
        delta = tmp_path / f"{version}.delta"
        old, fresh = (weight_file.open_bytes(file.path) for file in (base, new))
        assert weight_file.write_delta(old, fresh, delta, width=4) < new.size_bytes
        await push(
            [client],
            delta,
            version,
            sha256=new.sha256,
            base_sha256=base.sha256,
            deadline_s=ADMIN_S,
            clear_cache=True,
            stage=True,
        )
        generation = await client.generate(ask())
        assert {span.version for span in generation.spans} == {version}
        assert policy.error(ask().token_ids, generation) <= EXACT
        stale, base = base, new
    with pytest.raises(WeightSyncError, match="send a full file first"):
        await push(
            [client], delta, version + 1, sha256=new.sha256, base_sha256=stale.sha256, deadline_s=ADMIN_S, stage=True
        )


def probe_of(policy: Policy, version: int, *, marked: bool = False) -> Canary:
    tokens = canary.probe_tokens(VOCAB)
    logprobs = tuple(policy.logprobs(tokens[:1], tokens[1:], version))
    dtype = "bfloat16" if policy.dtype == torch.bfloat16 else "float32"
    marks = policy.files[version].fingerprints if marked else {}
    return Canary(version=version, token_ids=tokens, logprobs=logprobs, dtype=dtype, fingerprints=marks)


async def mend(client: EngineClient, on: bool) -> None:
    asked = {"method": "agentrl_set_fixes", "args": ["1" if on else "0"]}
    await client.call("POST", "/collective_rpc", json=asked, deadline_s=ADMIN_S)


async def test_the_canary_sees_a_tied_output_layer_left_behind(client: EngineClient, policy: Policy) -> None:
    await _seen_and_mended(client, policy, "lm_head (tied to model.embed_tokens.weight)")


async def test_a_server_knows_the_fingerprints_of_all_its_weights_but_experts(
    client: EngineClient, policy: Policy, mixture_client: EngineClient, mixture: Policy
) -> None:
    for engine, model in ((client, policy), (mixture_client, mixture)):
        version, file = model.update()
        await push([engine], file.path, version, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True)
        asked = {"method": "agentrl_fingerprints"}
        body = await engine.call("POST", "/collective_rpc", json=asked, deadline_s=ADMIN_S)
        (answer,) = json.loads(body)["results"]
        known = {name for name in file.names if ".experts." not in name}
        assert answer["dtype"] == "float32" and answer["fingerprints"].keys() == known | {"lm_head.weight"}
        assert fingerprints.differences(file.fingerprints, answer["fingerprints"]) == []
        assert await canary.check([engine], probe_of(model, version, marked=True)) <= EXACT


def _without(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def _transposed(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name].T.contiguous()


def _swapped(tensors: dict[str, torch.Tensor], first: str, second: str) -> None:
    """All tensors whose names begin so."""
    for name in [name for name in tensors if name.startswith(first)]:
        other = second + name.removeprefix(first)
        tensors[name], tensors[other] = tensors[other], tensors[name]


LAYER, EXPERT = "model.layers.{}.", "model.layers.0.mlp.experts.{}."
DAMAGES: list[tuple[bool, Callable[..., None], tuple[str, ...], str]] = [
    (False, _without, ("model.layers.1.mlp.up_proj.weight",), "model.layers.1.mlp.up_proj.weight"),
    (False, _transposed, ("model.layers.0.self_attn.q_proj.weight",), "self_attn.q_proj.weight (holds its transpose)"),
    (
        False,
        _swapped,
        (LAYER.format(0), LAYER.format(1)),
        "model.layers.0.mlp.down_proj.weight (holds model.layers.1.mlp.down_proj.weight)",
    ),
    (True, _without, (EXPERT.format(3) + "up_proj.weight",), EXPERT.format(3) + "up_proj.weight (not in the file)"),
    (
        True,
        _swapped,
        (EXPERT.format(2), EXPERT.format(5)),
        f"{EXPERT.format(2)}down_proj.weight (holds {EXPERT.format(5)}down_proj.weight)",
    ),
]


@pytest.mark.parametrize(
    ("mixed", "damage", "where", "named"),
    DAMAGES,
    ids=["a tensor missing", "a square transposed", "layers swapped", "an expert missing", "experts swapped"],
)
async def test_what_is_wrong_with_an_update_is_named(
    mixed: bool,
    damage: Callable[..., None],
    where: tuple[str, ...],
    named: str,
    server: Server,
    mixture_server: Server,
    policy: Policy,
    mixture: Policy,
) -> None:
    """Files that vLLM takes without a word, and what the canary says of them."""
    served, policy = (mixture_server, mixture) if mixed else (server, policy)
    client = EngineClient(served.url)
    version, file = policy.update()
    tensors = load_file(file.path)
    damage(tensors, *where)
    bad = file.path.with_name("bad.safetensors")
    save_file(tensors, bad)
    try:
        info = update_info(bad, weight_file.digest(weight_file.open_bytes(bad)))
        await push([client], bad, version, deadline_s=ADMIN_S, clear_cache=True)
        with pytest.raises(CanaryMismatch) as caught:
            await canary.check([client], probe_of(policy, version, marked=True), update_info=info)
        assert named in str(caught.value)
        if damage is _without:  # the engine's own comparison with the file does not fail, and names it, too
            assert f"{where[0]} (not in the file)" in await canary.untaken(client, info, deadline_s=ADMIN_S)
    finally:
        bad.unlink(missing_ok=True)
        await push([client], file.path, version, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True)
    assert await canary.check([client], probe_of(policy, version, marked=True)) <= EXACT
    await client.aclose()


async def test_the_canary_sees_experts_left_behind(mixture_client: EngineClient, mixture: Policy) -> None:
    await _seen_and_mended(mixture_client, mixture, "model.layers.0.mlp.experts")


async def _seen_and_mended(client: EngineClient, policy: Policy, named: str) -> None:
    """The CPU build's silent bugs: every call answers 200, and the weights were not taken."""
    try:
        version, file = policy.update()
        await push([client], file.path, version, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True)
        assert await canary.check([client], probe_of(policy, version)) <= EXACT

        await mend(client, False)
        version, file = policy.update(scale=0.005)  # about what an optimizer step does
        info = update_info(file.path, file.sha256)
        await push([client], file.path, version, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True)
        with pytest.raises(WeightSyncError, match="nats from the learner's") as caught:
            await canary.check([client], probe_of(policy, version), update_info=info)
        assert named in str(caught.value) and f"version {version}" in str(caught.value)

        await mend(client, True)
        await push([client], file.path, version, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True)
        assert await canary.check([client], probe_of(policy, version)) <= EXACT
        assert await canary.untaken(client, info, deadline_s=ADMIN_S) == []
    finally:
        await mend(client, True)
        await client.aclose()


async def test_the_canary_refuses_an_engine_that_serves_another_version(client: EngineClient, policy: Policy) -> None:
    served = await client.served_version()
    with pytest.raises(WeightSyncError, match=f"serves version {served}, not {served + 9}"):
        tokens = canary.probe_tokens(VOCAB, 4)
        await canary.check([client], Canary(version=served + 9, token_ids=tokens, logprobs=(0.0, 0.0, 0.0)))
