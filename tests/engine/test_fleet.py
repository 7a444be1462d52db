"""Routing, failover and breakers in virtual time, over engines in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.generation import collect
from agentrl.engine.router.concurrency import Aimd
from agentrl.engine.router.router import Fleet, ReplicaState
from agentrl.errors import EngineRefusal, EngineTimeout, EngineUnavailable
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import SamplingParams, VersionSpan
from tests.parts.fake_engine import Failure, FakeEngine

GONE = EngineUnavailable("gone")


def ask(id: str = "r", session: str = "s", max_tokens: int = 8, **changes: object) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(999,))
    request = GenerateRequest(request_id=id, session=session, token_ids=(1, 2, 3), sampling=sampling)
    return replace(request, **changes)  # pyright: ignore[reportArgumentType]


def continuing(request: GenerateRequest) -> list[int]:
    """Each token is the length of the context before it: a turn reads the same wherever it was broken off."""
    start = len(request.token_ids)
    return list(range(start, start + request.sampling.max_tokens))


def engine(name: str, failures: Sequence[Failure] = (), **settings: object) -> FakeEngine:
    return FakeEngine(continuing, url=f"fake://{name}", chunk_tokens=2, failures=failures, **settings)  # pyright: ignore[reportArgumentType]


class Down(FakeEngine):
    """Refuses everything until `up`; then serves `version`."""

    up = False

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if not self.up:
            raise GONE
        async for chunk in super().stream(request):
            yield chunk

    async def served_version(self) -> int:
        if not self.up:
            raise GONE
        return self.version


async def test_a_sessions_turns_go_to_one_replica_and_sessions_spread(autojump_clock: trio.testing.MockClock) -> None:
    engines = [engine(str(i), chunk_s=1.0) for i in range(3)]
    fleet = Fleet(engines)
    for turn in range(3):
        async with trio.open_nursery() as nursery:
            for session in range(6):
                nursery.start_soon(fleet.generate, ask(f"{session}-{turn}", str(session)))
    for one in engines:
        sessions = [request.session for request in one.requests]
        assert len(sessions) == 6 and len(set(sessions)) == 2


async def test_a_session_moves_when_its_replica_is_much_busier(autojump_clock: trio.testing.MockClock) -> None:
    engines = [engine(str(i), chunk_s=1.0) for i in range(2)]
    fleet = Fleet(engines, slack=1.5)
    async with trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(fleet.generate, ask(str(number), "one session"))
    assert {len(one.requests) for one in engines} == {5, 7}  # the home may run 1.5 x (the other's + 4)


@pytest.mark.parametrize("after", range(9))
async def test_law_1_a_broken_turn_goes_on_elsewhere_and_no_token_is_sampled_again(after: int) -> None:
    first = engine("a", [Failure(request=0, error=GONE, after=after)], version=4)
    second = engine("b", version=5)
    generation = await Fleet([first, second]).generate(ask())
    assert generation.token_ids == tuple(range(3, 11))
    assert generation.logprobs == tuple(-0.5 - i / 100 for i in range(8))
    spans = [VersionSpan(4, 0, after), VersionSpan(5, after, 8, recomputed=after > 0)]
    assert generation.spans == tuple(span for span in spans if span.start < span.end)
    assert generation.finish == "length"
    if after < 8:
        (rest,) = second.requests
        assert rest.token_ids == (1, 2, 3, *range(3, 3 + after))
        assert rest.sampling.max_tokens == 8 - after and rest.sampled == after
        assert rest.request_id != "r"
    else:
        assert not second.requests  # it had everything but the word that it was the end


async def test_a_replica_that_breaks_after_the_stop_token_has_stopped() -> None:
    def stopping(request: GenerateRequest) -> list[int]:
        return [7, 999]

    first = FakeEngine(stopping, chunk_tokens=1, failures=[Failure(request=0, error=GONE, after=2)])
    generation = await Fleet([first, engine("b")]).generate(ask())
    assert generation.token_ids == (7, 999) and generation.finish == "stop"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=6))
def test_law_1_any_number_of_failures_loses_nothing(failures: list[int]) -> None:
    async def run() -> None:
        broken = [Failure(request=i, error=GONE, after=after) for i, after in enumerate(failures)]
        fleet = Fleet([engine("a", broken)], retry_s=0.5)
        generation = await fleet.generate(ask(max_tokens=12))
        assert generation.token_ids == tuple(range(3, 15))
        assert [span.end for span in generation.spans][-1] == 12

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_a_hung_replica_loses_its_requests_to_another(autojump_clock: trio.testing.MockClock) -> None:
    class Hung(FakeEngine):
        async def alive(self, *, deadline_s: float = 5.0) -> bool:
            await trio.sleep(deadline_s)
            return False

    hung, well = Hung(chunk_s=1e9, url="fake://hung"), engine("well", chunk_s=0.1)
    fleet = Fleet([hung, well], stall_s=20.0, probe_s=5.0)
    generation = await fleet.generate(ask())
    assert generation.token_ids == tuple(range(3, 11))
    assert 25 <= trio.current_time() < 27
    assert fleet.replicas[0].state is ReplicaState.BROKEN


async def test_an_aborted_turn_goes_on(autojump_clock: trio.testing.MockClock) -> None:
    class Aborting(FakeEngine):
        async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
            self.requests.append(request)
            yield Chunk(token_ids=(3,), logprobs=(-1.0,), spans=(VersionSpan(0, 0, 1),))
            yield Chunk(token_ids=(4,), logprobs=(-1.0,), spans=(VersionSpan(0, 0, 1),), finish="abort")

    aborting = Aborting()
    generation = await Fleet([aborting]).generate(ask(max_tokens=6))
    assert generation.token_ids == (3, 4) * 3 and len(aborting.requests) == 3
    assert generation.finish == "length"


async def test_a_turn_ends_at_its_deadline_and_its_slow_replica_is_not_broken(
    autojump_clock: trio.testing.MockClock,
) -> None:
    slow = engine("slow", chunk_s=3.0)
    fleet = Fleet([slow])
    await fleet.generate(ask("before"))  # its pace is known
    started = trio.current_time()
    generation = await fleet.generate(ask(max_tokens=100, deadline_s=7.0))
    assert trio.current_time() - started == pytest.approx(12.0)  # the first chunk came after 3 s, then 9 s of sampling
    assert generation.finish == "length" and generation.token_ids == tuple(range(3, 11))
    assert fleet.replicas[0].state is ReplicaState.READY and fleet.replicas[0].running == 0


async def test_with_every_replica_down_a_request_waits_as_long_as_an_outage_may_last(
    autojump_clock: trio.testing.MockClock,
) -> None:
    fleet = Fleet([Down(url="fake://a"), Down(url="fake://b")], outage_deadline_s=90.0)
    with pytest.raises(EngineTimeout, match=r"90 s .*fake://a is broken \(gone\), fake://b is broken \(gone\)"):
        await fleet.generate(ask(deadline_s=1.0))
    assert trio.current_time() == pytest.approx(90.0)


async def test_a_replica_that_comes_back_with_the_newest_weights_serves_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    down = Down(continuing, url="fake://a", version=3)
    fleet = Fleet([down])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.generate, ask())
        await trio.sleep(30)
        down.up = True
    assert len(down.requests) == 1 and fleet.replicas[0].state is ReplicaState.READY


async def test_a_restarted_replica_is_stale_until_it_is_refit(autojump_clock: trio.testing.MockClock) -> None:
    old, new = Down(continuing, url="fake://old", version=0), engine("new", version=6, chunk_s=1.0)
    fleet = Fleet([old, new])
    await fleet.generate(ask("first"))  # tries the one that is down, goes on at the other, learns of version 6
    old.up = True
    new.failures = [Failure(request=1, error=GONE)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.generate, ask("second", deadline_s=500.0))
        await trio.sleep(0.4)
        assert fleet.replicas[0].state is not ReplicaState.READY
    assert not old.requests and new.requests[-1].request_id.startswith("second~")
    old.version = 6
    fleet.mark_refit("fake://old", 6)
    await fleet.generate(ask("third", "another session"))
    assert len(old.requests) == 1


async def test_a_drained_replica_gets_nothing_new_and_can_hand_over(autojump_clock: trio.testing.MockClock) -> None:
    first, second = engine("a", chunk_s=1.0), engine("b", chunk_s=1.0)
    fleet = Fleet([first, second])
    results: list[tuple[int, ...]] = []

    async def turn() -> None:
        results.append((await fleet.generate(ask())).token_ids)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(turn)
        await trio.sleep(2.5)
        fleet.drain("fake://a", move=True)
    assert results == [tuple(range(3, 11))]
    assert [request.token_ids for request in second.requests] == [(1, 2, 3, 3, 4, 5, 6)]
    await fleet.generate(ask("again"))
    assert len(first.requests) == 1
    fleet.drain("fake://b")
    fleet.undrain("fake://a")
    await fleet.generate(ask("back"))
    assert len(first.requests) == 2


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_a_request_that_two_engines_refuse_is_refused_and_tours_no_fleet(count: int) -> None:
    engines = [engine(str(at), [Failure(request=0, error=EngineRefusal("too long"))]) for at in range(count)]
    fleet = Fleet(engines)
    with pytest.raises(EngineRefusal, match="too long"):
        await fleet.generate(ask())
    assert sum(len(one.requests) for one in engines) == min(count, 2)
    assert {replica.state for replica in fleet.replicas} == {ReplicaState.READY}


async def test_an_engine_that_refuses_what_others_take_loses_no_turn_and_draws_none(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It answers at once and so has nothing to do: the least busy of all."""
    refuses = [Failure(request=at, error=EngineRefusal("an unknown parameter")) for at in range(320)]
    bad, *good = engine("bad", refuses), *(engine(str(at), chunk_s=1.0) for at in range(3))
    fleet = Fleet([bad, *good])
    lengths = list[int]()

    async def play(slot: int) -> None:
        for turn in range(10):
            name = f"{slot}-{turn}"
            lengths.append(len((await fleet.generate(ask(name, name))).token_ids))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.control)
        async with trio.open_nursery() as slots:
            for slot in range(32):
                slots.start_soon(play, slot)
        assert lengths == [8] * 320
        assert len(bad.requests) < 32 + 10  # the first of each slot, and then one request at a time, ever more rarely
        assert fleet.replicas[0].trouble == "an unknown parameter"
        nursery.cancel_scope.cancel()


async def test_a_refused_request_whose_other_engine_dies_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    refuses, dies = engine("a", [Failure(request=0, error=EngineRefusal("too long"))]), Down(url="fake://b")
    with pytest.raises(EngineRefusal, match="too long"):
        await Fleet([refuses, dies]).generate(ask())
    assert len(refuses.requests) == 1


async def test_with_every_replica_at_its_limit_requests_wait_and_none_is_lost(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engines = [engine(str(i), chunk_s=1.0) for i in range(2)]
    fleet = Fleet(engines)
    most = 0
    async with trio.open_nursery() as outer:
        outer.start_soon(partial(fleet.control, start=Aimd(limit=4, floor=2, step=1)))
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(fleet.generate, ask(str(number), str(number)))
            await trio.sleep(0.5)
            most = max(replica.running for replica in fleet.replicas)
            engines[0].readings = {"vllm:num_preemptions_total": 1.0}
            await trio.sleep(1.0)
            limits, standing = [replica.limit for replica in fleet.replicas], fleet.gauges()
        outer.cancel_scope.cancel()
    assert most == 4
    assert sum(len(one.requests) for one in engines) == 30
    assert limits == [3, 5]  # one preempted, the other had room
    assert standing["limit"] == limits and standing["state"] == ["ready", "ready"]
    assert fleet.gauges()["running"] == [0, 0]
    assert Fleet(engines).gauges()["limit"] == [None, None]  # nothing limits what nobody controls


async def test_a_failed_reading_changes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    class Mute(FakeEngine):
        async def metrics(self) -> dict[str, float]:
            raise GONE

    fleet = Fleet([Mute(continuing)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.control)
        await trio.sleep(5)
        assert len((await fleet.generate(ask())).token_ids) == 8
        nursery.cancel_scope.cancel()


async def test_a_broken_replica_is_looked_after_while_another_serves(autojump_clock: trio.testing.MockClock) -> None:
    """Down, then back with old weights, then refit by another process: no request has to be spared for it."""
    down, well = Down(continuing, url="fake://down", version=3), engine("well", version=4)
    fleet = Fleet([down, well])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.control)
        for number in range(4):  # the least busy of two idle ones is the first
            await fleet.generate(ask(str(number), str(number)))
        assert fleet.replicas[0].state is ReplicaState.BROKEN
        down.up = True
        await trio.sleep(30)
        assert fleet.replicas[0].state is ReplicaState.STALE
        down.version = 4
        await trio.sleep(2)
        assert fleet.replicas[0].state is ReplicaState.READY
        await fleet.generate(ask("new", "new"))
        assert len(down.requests) == 1
        nursery.cancel_scope.cancel()


def test_a_limit_grows_while_it_binds_and_shrinks_under_pressure() -> None:
    rule = Aimd(limit=10, floor=4, ceiling=20, step=8, factor=0.5)
    calm = {"vllm:num_requests_running": 9.0}
    assert rule.look(calm, sent=5) == 10  # not what holds requests back
    assert rule.look(calm, sent=9) == 18
    assert rule.look(calm, sent=18) == 20
    assert rule.look(calm | {"vllm:kv_cache_usage_perc": 1.0}, sent=20) == 20  # full, but nobody waits
    assert rule.look(calm | {"vllm:kv_cache_usage_perc": 1.0, "vllm:num_requests_waiting": 1.0}, sent=20) == 10
    queue = calm | {"vllm:num_requests_waiting": 3.0}
    assert rule.look(queue, sent=9) == 10  # a burst that is being taken in
    assert rule.look(queue, sent=9) == 5
    assert rule.look({"vllm:num_preemptions_total": 1.0}, sent=1) == 4
    assert rule.look({"vllm:num_preemptions_total": 1.0}, sent=1) == 4  # the same one is not counted twice
    assert rule.look({}, sent=4) == 12


async def test_leaving_a_stream_leaves_the_replica() -> None:
    one = engine("a")
    fleet = Fleet([one])
    stream = fleet.stream(ask())
    await anext(stream)
    assert fleet.replicas[0].running == 1
    await stream.aclose()
    assert fleet.replicas[0].running == 0


async def test_fakes_are_engines_too() -> None:
    request = ask(max_tokens=100)
    fake = FakeEngine()
    twice = [await collect(fake.stream(request)) for _ in range(2)]
    assert twice[0] == twice[1] and twice[0].finish == "stop" and twice[0].token_ids[-1] == 999
    await fake.aclose()
    assert fake.closed


async def test_law_1_a_fleet_follows_an_engine_that_moved_and_its_turns_go_on_there(
    autojump_clock: trio.testing.MockClock,
) -> None:
    old, new = engine("old", chunk_s=1.0), engine("new")
    fleet = Fleet([old])
    results: list[tuple[int, ...]] = []

    async def turn() -> None:
        results.append((await fleet.generate(ask())).token_ids)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.control)
        nursery.start_soon(turn)
        await trio.sleep(2.5)
        fleet.follow(["fake://new"], lambda url: new)
        fleet.follow(["fake://new"], lambda url: engine("never asked for"))
        fleet.follow([], lambda url: engine("of a store that names none yet"))
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    assert results == [tuple(range(3, 11))]
    assert [request.token_ids for request in new.requests] == [(1, 2, 3, 3, 4, 5, 6)]
    assert fleet.gauges()["state"] == ["ready"] and len(old.requests) == 1
    assert old.closed and not new.closed
