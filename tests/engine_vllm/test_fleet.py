"""Two real replicas, one killed under load: nothing lost, nothing sampled twice, and it comes back when it is refit."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
import trio

from agentrl.engine.client import EngineClient
from agentrl.engine.generation import Stitcher
from agentrl.engine.router.router import Fleet, Replica, ReplicaState
from agentrl.engine.weight_sync.file_transport import push
from agentrl.protocols import GenerateRequest
from agentrl.records import Generation, SamplingParams

from .conftest import LORA_RANK, Server, up
from .policy import VOCAB, Policy
from .test_weights import ADMIN_S, EXACT, Progress

pytestmark = pytest.mark.vllm

EPISODES, TURNS = 12, 4


@pytest.fixture(scope="module")
def second(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Another replica of `server`'s model, to be killed. It runs again when a test ends."""
    yield from up(Server(policy.folder, tmp_path_factory.mktemp("second"), lora_rank=LORA_RANK))


@pytest.mark.long
async def test_a_replica_is_killed_under_load_comes_back_and_is_refit(
    server: Server, second: Server, policy: Policy
) -> None:
    version, file = policy.update()
    clients = [EngineClient(server.url), EngineClient(second.url)]
    await push(clients, file.path, version, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True)
    fleet = Fleet(clients, retry_s=0.1)
    progress, played = Progress(), dict[int, list[tuple[list[int], Generation]]]()
    received: dict[str, list[int]] = {}

    async def play(seed: int) -> None:
        rng = random.Random(seed)
        context = [rng.randrange(3, VOCAB) for _ in range(30)]
        for _ in range(TURNS):
            request = GenerateRequest(
                request_id=uuid4().hex,
                session=str(seed),
                token_ids=tuple(context),
                sampling=SamplingParams(max_tokens=100, stop_token_ids=(1, 2)),
                deadline_s=280.0,
            )
            stitcher, seen, finish = Stitcher(), received.setdefault(request.request_id, []), ""
            async for chunk in fleet.stream(request):
                stitcher.add(chunk)
                seen += chunk.token_ids
                progress.add(len(chunk.token_ids))
                finish = chunk.finish
            generation = stitcher.generation(finish)  # pyright: ignore[reportArgumentType]
            assert list(generation.token_ids) == seen  # what was handed out once stays as it was
            played.setdefault(seed, []).append((list(context), generation))
            context += [*generation.token_ids, 7, 8, 9]

    children = [os.pidfd_open(pid) for pid in processes_below(second.pid)]
    async with trio.open_nursery() as nursery:
        for seed in range(EPISODES):
            nursery.start_soon(play, seed)
        await progress.reach(200)
        assert all(replica.running for replica in fleet.replicas)  # both are in the midst of turns
        second.kill()
    assert {seed: len(turns) for seed, turns in played.items()} == dict.fromkeys(range(EPISODES), TURNS)
    turns = [turn for of_episode in played.values() for turn in of_episode]
    assert max(policy.error(context, generation) for context, generation in turns) <= EXACT
    with trio.fail_after(ADMIN_S):
        for child in children:  # the killed front end takes its engine with it
            await trio.lowlevel.wait_readable(child)
            os.close(child)

    dead = fleet.replicas[1]
    assert dead.state is ReplicaState.BROKEN
    second.start()
    await second.ready(1)  # it holds the weights of its folder again: version 1, long overtaken
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(fleet.control, period_s=0.1))
        await _until(fleet, dead, ReplicaState.STALE)
        await push([second.url], file.path, version, sha256=file.sha256, deadline_s=ADMIN_S)  # by another process
        await _until(fleet, dead, ReplicaState.READY)
        nursery.cancel_scope.cancel()
    fleet.drain(server.url)
    again = GenerateRequest(request_id="again", session="0", token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=9))
    generation = await fleet.generate(again)
    assert {span.version for span in generation.spans} == {version}
    assert policy.error([5, 6, 7], generation) <= EXACT
    await fleet.aclose()


async def test_the_core_of_an_engine_is_killed_and_all_its_turns_go_on_elsewhere(
    server: Server, second: Server, policy: Policy
) -> None:
    """Its front end lives on for a moment and answers each running turn with an error event behind the 200."""
    version, file = policy.update()
    clients = [EngineClient(server.url), EngineClient(second.url)]
    await push(clients, file.path, version, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True)
    fleet, played = Fleet(clients), list[tuple[tuple[int, ...], Generation]]()
    fleet.drain(server.url)  # so that all ten run at the one that dies
    (core,) = [pid for pid in processes_below(second.pid) if "EngineCore" in command(pid)]

    killed = False

    async def play(number: int) -> None:
        """One turn after the other; the last one is in its midst when the core dies."""
        prompt, sampling = (5, 6, 7 + number), SamplingParams(max_tokens=600, stop_token_ids=(1, 2))
        while not killed:
            request = GenerateRequest(request_id=uuid4().hex, session="", token_ids=prompt, sampling=sampling)
            played.append((prompt, await fleet.generate(request)))

    sampled = "vllm:generation_tokens_total"
    before = (await clients[1].metrics())[sampled]
    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(play, number)
        with trio.fail_after(ADMIN_S):
            while (await clients[1].metrics())[sampled] < before + 300 or fleet.replicas[1].running < 10:
                pass
        fleet.undrain(server.url)
        killed = True
        os.kill(core, signal.SIGKILL)
    assert fleet.replicas[1].state is ReplicaState.BROKEN
    assert max(policy.error(list(prompt), generation) for prompt, generation in played) <= EXACT
    assert {span.version for _, generation in played for span in generation.spans} == {version}
    await fleet.aclose()


async def _until(fleet: Fleet, replica: Replica, state: ReplicaState) -> None:
    """Play on at the replica that is well until the other one is seen in `state`."""
    request = GenerateRequest(request_id="", session="", token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=4))
    with trio.fail_after(ADMIN_S):
        while replica.state is not state:
            await fleet.generate(replace(request, request_id=uuid4().hex))


def processes_below(pid: int) -> list[int]:
    """All descendants of a process."""
    below: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # a thread may end between two looks
            for child in map(int, (task / "children").read_text().split()):
                below += [child, *processes_below(child)]
    return below


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
