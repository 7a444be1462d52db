"""Adapters as versions on a real server: loaded while it generates, exact, retired when nobody uses them."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import trio

from agentrl.engine.client import EngineClient
from agentrl.engine.weight_sync import adapters
from agentrl.engine.weight_sync.adapter_names import adapter_name
from agentrl.engine.weight_sync.adapters import AdapterClient, always
from agentrl.engine.weight_sync.canary import probe_tokens
from agentrl.errors import EngineUnavailable, WeightSyncError
from agentrl.records import Generation

from .conftest import Server
from .policy import VOCAB, Policy
from .test_contract import ask
from .test_weights import ADMIN_S, EXACT, Progress, mend, turn

pytestmark = pytest.mark.vllm


class Current:
    """What a learner would confirm."""

    version: int | None = None

    async def __call__(self) -> int | None:
        return self.version


@pytest.fixture
def current() -> Current:
    return Current()


@pytest.fixture
async def client(server: Server, current: Current) -> AsyncIterator[AdapterClient]:
    client = AdapterClient(server.url, current=current)
    yield client
    with trio.CancelScope(shield=True):
        await adapters.retire([client], keep=(), deadline_s=ADMIN_S)
        await client.aclose()


async def test_adapters_are_loaded_while_others_generate_and_all_are_exact(
    client: AdapterClient, current: Current, policy: Policy
) -> None:
    """Each adapter is loaded when a turn under the one before has been played; episodes go on to the end of that."""
    progress, played = Progress(), list[tuple[list[int], Generation]]()
    versions, turn_under = list[int](), dict[int, trio.Event]()

    async def play(seed: int) -> None:
        prompt = [(seed * 11 + 7 * i) % 120 + 3 for i in range(40)]
        version = 0
        while len(versions) < 3 or version != versions[-1]:
            generation = await turn(client, prompt, 60, progress)
            played.append((list(prompt), generation))
            prompt = [*prompt, *generation.token_ids, 5, 6, 7][-300:]
            version = generation.spans[0].version
            turn_under.setdefault(version, trio.Event()).set()

    async with trio.open_nursery() as nursery:
        for seed in range(6):
            nursery.start_soon(play, seed)
        for _ in range(3):
            await progress.reach(progress.tokens + 100)
            version, folder = policy.adapter()
            report = await adapters.load([client], folder, version, deadline_s=ADMIN_S)
            assert report.pause_s == 0 and report.bytes > 0
            versions.append(version)
            current.version = version
            with trio.fail_after(ADMIN_S):
                await turn_under.setdefault(version, trio.Event()).wait()
    seen = {span.version for _, generation in played for span in generation.spans}
    assert seen == {max(policy.files, default=1), *versions}
    assert all(len(generation.spans) == 1 for _, generation in played)  # each turn kept what it began with
    assert max(policy.error(context, generation) for context, generation in played) <= EXACT


async def test_an_adapter_is_unloaded_when_no_request_uses_it(
    client: AdapterClient, current: Current, policy: Policy
) -> None:
    old, folder = policy.adapter()
    await adapters.load([client], folder, old, deadline_s=ADMIN_S)
    await adapters.load([client], folder, old, deadline_s=ADMIN_S)  # saying it twice does no harm
    current.version = old
    assert await client.served_version(deadline_s=ADMIN_S) == old
    progress, played = Progress(), list[tuple[list[int], Generation]]()
    prompts = [list(range(3 + n, 40)) for n in range(4)]  # one of them may end at once

    async def long(prompt: list[int]) -> None:
        played.append((prompt, await turn(client, prompt, 700, progress)))

    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(long, prompt)
        await progress.reach(8)
        new, folder = policy.adapter()
        await adapters.load([client], folder, new, deadline_s=ADMIN_S)
        current.version = new
        left = await adapters.retire([client], keep=[new], deadline_s=ADMIN_S)
        running = len(played) < len(prompts)
        assert not running or left == {old}  # unless the long turns were over already
    assert max(policy.error(prompt, generation) for prompt, generation in played) <= EXACT
    assert {generation.spans[0].version for _, generation in played} == {old}
    left = frozenset({old})
    while left:
        left = await adapters.retire([client], keep=[new], deadline_s=ADMIN_S)
    assert await adapters.loaded(client) == {new}


async def test_requests_with_and_without_an_adapter_share_a_batch(server: Server, policy: Policy) -> None:
    """The CPU build computes those without one with the last slot's adapter: the third of its silent bugs."""
    errors: dict[int | None, list[float]] = {}

    async def one(version: int | None) -> None:
        client = AdapterClient(server.url, current=always(version))
        generation = await client.generate(ask())
        errors.setdefault(version, []).append(policy.error(ask().token_ids, generation))
        await client.aclose()

    plain = AdapterClient(server.url, current=always(None))
    plain.version = await EngineClient(server.url).served_version(deadline_s=ADMIN_S)
    slots = [policy.adapter() for _ in range(2)]
    for version, folder in slots:
        await adapters.load([plain], folder, version, deadline_s=ADMIN_S)
    for mending in (True, False):
        errors.clear()
        await mend(plain, mending)
        try:
            async with trio.open_nursery() as nursery:
                for version in [None, slots[0][0], slots[1][0]] * 4:
                    nursery.start_soon(one, version)
        finally:
            await mend(plain, True)
        assert max(max(errors[version]) for version, _ in slots) <= EXACT
        assert (max(errors[None]) <= EXACT) == mending
    await adapters.retire([plain], keep=(), deadline_s=ADMIN_S)
    await plain.aclose()


async def test_prompts_are_scored_beside_other_requests(
    client: AdapterClient, current: Current, policy: Policy
) -> None:
    """Unmended, the CPU build dies of it: it gives the rows of one prompt the adapters of all requests."""
    version, folder = policy.adapter()
    await adapters.load([client], folder, version, deadline_s=ADMIN_S)
    below = max(policy.files, default=1)
    errors: list[float] = []

    async def one(version: int | None, length: int) -> None:
        tokens = probe_tokens(VOCAB, length)
        model = None if version is None else adapter_name(version)
        found = await client.score(tokens, model=model, deadline_s=ADMIN_S)
        expected = policy.logprobs(tokens[:1], tokens[1:], version or below)
        errors.append(max(abs(a - b) for a, b in zip(found, expected, strict=True)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(turn, client, list(range(3, 40)), 200, Progress())
        for length in (100, 60, 80):
            nursery.start_soon(one, None, length)
            nursery.start_soon(one, version, length)
    assert len(errors) == 6 and max(errors) <= EXACT


async def test_each_role_samples_from_its_own_adapter_and_a_past_self_stays(
    client: AdapterClient, current: Current, policy: Policy
) -> None:
    """In one batch; the two adapters of a version are loaded and unloaded as one."""
    (ours, folder), (theirs, beside) = policy.adapter(), policy.adapter()
    both = shutil.copytree(folder, policy.scratch / "both")
    shutil.copytree(beside, both / "judge")
    current.version = theirs
    await adapters.load([client], both, theirs, deadline_s=ADMIN_S)
    await adapters.load([client], both, 3, kept=True, deadline_s=ADMIN_S)
    errors: dict[tuple[str | None, int | None], float] = {}

    async def one(role: str | None, version: int | None) -> None:
        generation = await client.generate(replace(ask(), policy=role, version=version, request_id=f"{role}{version}"))
        assert {span.version for span in generation.spans} == {version or theirs}
        weights = theirs if role else ours
        expected = policy.logprobs(ask().token_ids, generation.token_ids, weights)
        pairs = zip(generation.logprobs, expected, strict=True)
        errors[role, version] = max(abs(found - said) for found, said in pairs)

    async with trio.open_nursery() as nursery:
        for role in (None, "judge"):
            for version in (None, 3):
                nursery.start_soon(one, role, version)
    assert len(errors) == 4 and max(errors.values()) <= EXACT
    assert await adapters.loaded(client) == {theirs}
    await adapters.retire([client], keep=(), deadline_s=ADMIN_S)
    await one("judge", 3)
    with pytest.raises(EngineUnavailable, match=f"no adapter 'policy-{theirs}-judge'"):
        await one("judge", None)


async def test_an_unknown_adapter_is_an_engine_that_waits_to_be_refit(
    client: AdapterClient, current: Current, policy: Policy
) -> None:
    current.version = policy.version + 100
    with pytest.raises(EngineUnavailable, match=f"no adapter 'policy-{current.version}'"):
        await client.generate(ask())
    assert await client.served_version(deadline_s=ADMIN_S) < current.version


async def test_a_folder_without_an_adapter_is_refused(client: AdapterClient, policy: Policy) -> None:
    empty = policy.scratch / "empty"
    empty.mkdir(exist_ok=True)
    with pytest.raises(WeightSyncError, match="did not load adapter policy-9"):
        await adapters.load([client], empty, 9, deadline_s=ADMIN_S)
    with pytest.raises(WeightSyncError, match="cannot read adapter"):
        await adapters.load([client], empty / "nothing", 9, deadline_s=ADMIN_S)
