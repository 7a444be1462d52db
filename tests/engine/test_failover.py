"""Turns over engines that fail as real ones do: the fleet over servers that speak vLLM's protocol, in virtual time."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import trio
from each_case import each_case

from agentrl.engine.client import EngineClient
from agentrl.engine.router.router import Fleet, ReplicaState
from agentrl.engine.weight_sync.adapters import AdapterClient, always
from agentrl.errors import EngineError, EngineTimeout, EngineUnavailable
from agentrl.protocols import GenerateRequest
from agentrl.records import Generation, SamplingParams
from tests.parts.vllm_server import FakeVLLM, Kind, made_up_logprob, spell

FAILURES = [kind for kind in get_args(Kind) if kind not in ("hang", "hang_before_head", "status", "abort")]


def ask(id: str = "r", *, max_tokens: int = 12, deadline_s: float = 60.0, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return GenerateRequest(request_id=id, session="s", token_ids=(0, 1, 2), sampling=params, deadline_s=deadline_s)


def servers(count: int = 2, **settings: Any) -> list[FakeVLLM]:
    return [FakeVLLM(url=f"http://engine-{number}", version="4", **settings) for number in range(count)]


def fleet_of(fakes: list[FakeVLLM], **settings: Any) -> Fleet:
    return Fleet([EngineClient(fake.url, transport=fake, version=4) for fake in fakes], decode=spell, **settings)


def assert_whole(generation: Generation, length: int = 12) -> None:
    """Every token once, with the log-prob it was sampled at."""
    assert generation.token_ids == tuple(range(3, 3 + length))
    assert generation.logprobs == tuple(made_up_logprob("base", place, place) for place in range(3, 3 + length))
    assert {span.version for span in generation.spans} == {4}


# --- an engine that fails after it has answered 200 ---------------------------------------------------------------


@each_case("after", [0, 3, 6])
@each_case("kind", FAILURES)
async def test_law_1_whatever_fails_after_a_200_the_turn_goes_on_elsewhere(kind: Kind, after: int) -> None:
    first, second = servers(stream_tokens=3)
    first.fail(kind, after=after)
    fleet = fleet_of([first, second])
    assert_whole(await fleet.generate(ask()))
    assert second.requests[0]["token_ids"] == [0, 1, 2, *range(3, 3 + after)]
    assert fleet.replicas[0].state is ReplicaState.BROKEN


@pytest.mark.parametrize("kind", ["nan_logprob", "null_logprob"])
async def test_of_a_chunk_with_a_bad_log_prob_the_tokens_before_it_are_kept(kind: Kind) -> None:
    first, second = servers()  # four tokens a chunk: two good ones, then the bad one
    first.fail(kind, after=2)
    assert_whole(await fleet_of([first, second]).generate(ask()))
    assert second.requests[0]["token_ids"] == [0, 1, 2, 3, 4]


async def test_all_turns_of_an_engine_whose_core_dies_go_on_elsewhere(autojump_clock: trio.testing.MockClock) -> None:
    first, second = servers(token_s=1.0)
    fleet, turns = fleet_of([first, second]), list[Generation]()

    async def play(number: int) -> None:
        turns.append(await fleet.generate(ask(str(number))))

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(play, number)
        await trio.sleep(5.5)
        assert first.running and second.running
        first.core = "dead"
    assert len(turns) == 10
    for turn in turns:
        assert_whole(turn)
    assert fleet.replicas[0].state is ReplicaState.BROKEN


async def test_an_engine_that_aborts_at_once_is_asked_ever_more_rarely(autojump_clock: trio.testing.MockClock) -> None:
    (fake,) = servers(1)
    fake.fail("abort", times=math.inf)
    with trio.move_on_after(120):
        await fleet_of([fake]).generate(ask(deadline_s=1e9))
    assert 5 < len(fake.requests) < 30


async def test_a_refused_request_is_refused_and_asked_once_of_each_of_two() -> None:
    fakes = servers(3)
    for fake in fakes:
        fake.fail("status", status=400, message="the prompt is too long")
    with pytest.raises(EngineError, match="answered 400: the prompt is too long"):
        await fleet_of(fakes).generate(ask())
    assert [len(fake.requests) for fake in fakes] == [1, 1, 0]


@each_case("finish", ["stop", "length"])
@each_case("after", [0, 6])
async def test_an_end_without_a_token_is_no_answer_unless_the_turn_has_tokens(finish: str, after: int) -> None:
    first, second = servers(stream_tokens=3)
    first.fail("cut", after=after)
    end = {"choices": [{"token_ids": [], "logprobs": {"content": []}, "finish_reason": finish}]}
    second.answers["/inference/v1/generate"] = (200, f"data: {json.dumps(end)}\n\n".encode())
    fleet = fleet_of([first, second])
    generation = await fleet.generate(ask())
    if after:  # the engine before it gave them
        assert generation.token_ids == tuple(range(3, 3 + after)) and generation.finish == finish
    else:
        assert_whole(generation)
        assert "without a token" in fleet.replicas[1].trouble


async def test_a_server_that_lacks_the_path_is_its_own_failure_not_the_requests() -> None:
    first, second = servers()
    first.lacks.add("tokens")
    assert_whole(await fleet_of([first, second]).generate(ask()))


async def test_a_request_that_breaks_every_engine_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    fakes = servers(5)
    for fake in fakes:
        fake.fail("cut", times=math.inf, after=1)
    with pytest.raises(EngineUnavailable, match=r"'r' was taken and failed 4 times; the last time: .* reset"):
        await fleet_of(fakes).generate(ask())
    assert sum(len(fake.requests) for fake in fakes) == 4


async def test_a_replica_that_failed_gets_one_request_until_it_brings_a_token(
    autojump_clock: trio.testing.MockClock,
) -> None:
    sick, well = servers(token_s=1.0)
    sick.fail("nan_logprob")
    fleet = fleet_of([sick, well])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(fleet.control, period_s=0.1))
        assert_whole(await fleet.generate(ask()))
        assert fleet.replicas[0].state is ReplicaState.READY and len(sick.requests) == 1
        async with trio.open_nursery() as turns:
            for number in range(20):
                turns.start_soon(fleet.generate, replace(ask(f"again-{number}"), session=str(number)))
            await trio.sleep(3)  # the first four tokens come together
            assert len(sick.requests) == 2 and len(well.requests) == 20
        nursery.cancel_scope.cancel()
    assert fleet.replicas[0].failures == 0


# --- a stop text over the seam ------------------------------------------------------------------------------------


@each_case("after", [1, 2, 3, 4])
@each_case("stream_tokens", [1, 4])
async def test_law_1_a_stop_text_that_straddles_an_engines_break_ends_the_turn(after: int, stream_tokens: int) -> None:
    """ "efg" are the tokens 4, 5 and 6: the turn is 3 4 5 6."""
    whole = await fleet_of(servers(1)).generate(ask(stop=("xyz", "efg")))
    first, second = servers(stream_tokens=stream_tokens)
    first.fail("cut", after=after)
    generation = await fleet_of([first, second]).generate(ask(stop=("xyz", "efg")))
    assert generation == whole
    assert generation.token_ids == (3, 4, 5, 6) and generation.finish == "stop"


async def test_a_stop_text_is_not_seen_where_there_is_none() -> None:
    first, second = servers()
    first.fail("cut", after=2)
    generation = await fleet_of([first, second]).generate(ask(stop=("eg", "fgi")))
    assert_whole(generation)


# --- whose time it is -----------------------------------------------------------------------------------------------


async def test_law_3_a_turn_that_is_too_long_ends_with_the_tokens_it_has(
    autojump_clock: trio.testing.MockClock,
) -> None:
    (fake,) = servers(1, token_s=1.0)
    generation = await fleet_of([fake]).generate(ask(max_tokens=200, deadline_s=30.0))
    assert generation.finish == "length"
    assert_whole(generation, 40)  # two chunks until the pace is known, then all that come in 30 s, and a chunk
    assert fake.running == 0


Trouble = Callable[[FakeVLLM], Awaitable[None]]


async def queueing(fake: FakeVLLM) -> None:
    fake.first_token_s = 100.0


async def down(fake: FakeVLLM) -> None:
    fake.down = True
    await trio.sleep(100)
    fake.mend()


async def hung(fake: FakeVLLM) -> None:
    await trio.sleep(6)
    fake.core = "hung"
    await trio.sleep(100)
    fake.mend()


async def pausing(fake: FakeVLLM) -> None:
    await trio.sleep(6)
    fake.paused = True
    await trio.sleep(100)
    fake.paused = False
    fake.changed()


@pytest.mark.parametrize("trouble", [queueing, down, hung, pausing])
async def test_law_3_the_engines_time_is_not_the_turns(
    trouble: Trouble, autojump_clock: trio.testing.MockClock
) -> None:
    (fake,) = servers(1, token_s=1.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trouble, fake)
        await trio.testing.wait_all_tasks_blocked()
        generation = await fleet_of([fake]).generate(ask(deadline_s=20.0))
    assert_whole(generation)
    assert trio.current_time() > 100


@pytest.mark.parametrize("kind", ["hang", "hang_before_head"])
async def test_law_4_an_outage_has_a_deadline_of_its_own(kind: Kind, autojump_clock: trio.testing.MockClock) -> None:
    fakes = servers()
    for fake in fakes:
        fake.fail(kind, times=math.inf)
    with pytest.raises(EngineTimeout, match=r"'r' .* 600 s .*engine.outage_deadline_s"):
        await fleet_of(fakes).generate(ask())
    assert trio.current_time() == pytest.approx(600, abs=1)


# --- slow or hung -----------------------------------------------------------------------------------------------------


async def test_a_slow_prefill_is_not_sent_twice(autojump_clock: trio.testing.MockClock) -> None:
    slow, other = servers(first_token_s=200.0)
    assert_whole(await fleet_of([slow, other]).generate(ask()))
    assert (len(slow.requests), len(other.requests)) == (1, 0)
    assert trio.current_time() == pytest.approx(200)


@pytest.mark.parametrize("tokens", [0, 4])
async def test_a_hung_engine_behind_a_front_end_that_answers_is_found(
    tokens: int, autojump_clock: trio.testing.MockClock
) -> None:
    hanging, well = servers(token_s=1.0)
    fleet = fleet_of([hanging, well], stall_s=30.0, probe_s=10.0)
    async with trio.open_nursery() as nursery:
        turn = partial(fleet.generate, ask())
        nursery.start_soon(turn)
        await trio.sleep(tokens + 0.5)
        hanging.core = "hung"
    assert len(well.requests) == 1 and len(well.requests[0]["token_ids"]) == 3 + tokens
    assert fleet.replicas[0].state is ReplicaState.BROKEN
    assert trio.current_time() < 60


async def test_an_engine_that_answers_is_not_asked_by_each_turn(autojump_clock: trio.testing.MockClock) -> None:
    (fake,) = servers(1, first_token_s=100.0)
    fleet = fleet_of([fake], stall_s=30.0)
    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(fleet.generate, ask(str(number)))
    assert fake.calls.count("GET /is_paused") <= 4


# --- an engine that comes back with other weights ------------------------------------------------------------------


async def test_a_server_that_was_restarted_serves_nobody_until_it_is_refit(
    autojump_clock: trio.testing.MockClock,
) -> None:
    (fake,) = servers(1)
    fleet = fleet_of([fake])
    await fleet.generate(ask())
    fake.restart()  # between two turns: nothing broke
    generation: list[Generation] = []

    async def play() -> None:
        generation.append(await fleet.generate(ask("next")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        await trio.sleep(20)
        assert fleet.replicas[0].state is ReplicaState.STALE and not generation
        fake.version = "4"
    assert_whole(generation[0])


async def test_a_server_without_our_plugin_states_its_version_last_and_a_broken_turn_has_it_too() -> None:
    first, second = servers(lacks={"plugin"})
    fleet = Fleet([EngineClient(fake.url, transport=fake) for fake in (first, second)])
    await fleet.generate(ask("first"))
    first.fail("cut", after=5)
    second.fail("cut", after=5)
    assert {span.version for span in (await fleet.generate(ask("second"))).spans} == {4}


def fitting(judge: Callable[[int], bool]) -> Callable[[int], Awaitable[bool]]:
    async def fits(version: int) -> bool:
        return judge(version)

    return fits


async def test_a_version_that_the_run_cannot_train_is_stale(autojump_clock: trio.testing.MockClock) -> None:
    foreign, own = servers()
    foreign.version = "99"
    foreign.fail("cut")
    fleet = fleet_of([foreign, own], fits=fitting(lambda version: version == 4))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.control)
        await fleet.generate(ask())
        await trio.sleep(5)
        assert fleet.replicas[0].state is ReplicaState.STALE
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("late", [False, True])
async def test_law_1_tokens_of_another_runs_weights_are_no_turns(
    late: bool, autojump_clock: trio.testing.MockClock
) -> None:
    shared, own = servers(lacks={"plugin"} if late else set())  # without it the server states versions at the end
    shared.version = "99"
    fleet = fleet_of([shared, own], knows=fitting(lambda version: version == 4))
    if late:
        with pytest.raises(EngineError, match="http://engine-0 samples from version 99, which this run never made"):
            await fleet.generate(ask())
    assert_whole(await fleet.generate(ask()))
    assert len(shared.requests) == 1 and "version 99" in fleet.replicas[0].trouble


async def test_a_replica_that_new_weights_passed_by_serves_nobody_until_it_has_them(
    autojump_clock: trio.testing.MockClock,
) -> None:
    behind, well = servers()
    newest = 4
    fleet = fleet_of([behind, well], fits=fitting(lambda version: version >= newest))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.control)
        await trio.sleep(5)
        newest, well.version = 5, "5"
        await trio.sleep(2)
        assert [replica.state for replica in fleet.replicas] == [ReplicaState.STALE, ReplicaState.READY]
        behind.version = "5"
        await trio.sleep(2)
        assert fleet.replicas[0].state is ReplicaState.READY
        nursery.cancel_scope.cancel()


async def test_an_idle_replica_that_is_gone_is_seen_before_a_turn_goes_there(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gone, well = servers()
    fleet = fleet_of([gone, well])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.control)
        gone.down = True
        await trio.sleep(3)
        await fleet.generate(ask())
        assert not [call for call in gone.calls if "generate" in call]
        assert fleet.replicas[0].state is ReplicaState.BROKEN
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("text", [b"vllm:num_requests_running many\n", b"\xff\xfe 1\n", b"one\n"])
async def test_metrics_that_make_no_sense_do_not_end_the_worker(
    text: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    (fake,) = servers(1)
    fake.answers["/metrics"] = (200, text)
    fleet = fleet_of([fake])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.control)
        await trio.sleep(5)
        assert_whole(await fleet.generate(ask()))
        nursery.cancel_scope.cancel()


async def test_an_engine_that_lost_its_adapter_is_stale_until_it_has_it_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    (fake,) = servers(1)
    fake.adapters["policy-7"] = "folder"
    fleet = Fleet([AdapterClient(fake.url, current=always(7), transport=fake)])
    await fleet.generate(ask())
    fake.restart()
    with trio.move_on_after(20):
        await fleet.generate(ask("next"))
    assert fleet.replicas[0].state is ReplicaState.STALE
    fake.adapters["policy-7"] = "folder"
    generation = await fleet.generate(ask("again"))
    assert {span.version for span in generation.spans} == {7}


# --- new weights in the middle of a turn -------------------------------------------------------------------------


@pytest.mark.parametrize("preempt", [False, True])
async def test_a_preempted_turn_goes_on_under_the_newest_adapter(
    preempt: bool, autojump_clock: trio.testing.MockClock
) -> None:
    (fake,), newest = servers(1, token_s=1.0, stream_tokens=2), 7
    fake.adapters = {"policy-7": "seven"}

    async def current() -> int:
        return newest

    client = AdapterClient(fake.url, current=current, transport=fake)
    fleet = Fleet([client], decode=spell, fits=fitting(lambda version: version >= newest), preempt=preempt)
    generations = list[Generation]()

    async def play() -> None:
        generations.append(await fleet.generate(ask(stop=("kl",))))  # tokens 10 and 11

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        await trio.sleep(6.5)  # tokens 3 to 8 came, and 9 is being made
        fake.adapters["policy-8"] = "eight"
        newest = 8
    (generation,) = generations
    assert generation.token_ids == tuple(range(3, 12)) and generation.finish == "stop"
    spans = [(span.version, span.start, span.end) for span in generation.spans]
    if not preempt:
        assert spans == [(7, 0, 9)] and len(fake.requests) == 1
        return
    # The chunk that shows that its adapter is outdated is kept: the stop text lies over the seam behind it.
    assert spans == [(7, 0, 8), (8, 8, 9)]
    first, second = fake.requests
    assert (first["model"], second["model"]) == ("policy-7", "policy-8")
    assert second["token_ids"] == list(range(11)) and fake.running == 0


async def test_a_preempted_turn_does_not_come_back_to_an_engine_that_is_behind(
    autojump_clock: trio.testing.MockClock,
) -> None:
    behind, well = servers(token_s=1.0, stream_tokens=2)
    newest = 4
    fleet = fleet_of([behind, well], fits=fitting(lambda version: version >= newest), preempt=True)
    generations = list[Generation]()

    async def play() -> None:
        generations.append(await fleet.generate(ask()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        await trio.sleep(6.5)
        newest, well.version = 5, "5"
    (generation,) = generations
    assert generation.token_ids == tuple(range(3, 15))
    assert [span.version for span in generation.spans] == [4, 5]
    assert (len(behind.requests), len(well.requests)) == (1, 1)
    assert fleet.replicas[0].state is ReplicaState.STALE
