"""A slow first token: a second engine is asked, the first answer is kept, and the other request ends. Virtual time."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
import trio

from agentrl import config as configuration
from agentrl.engine.router.hedging import Hedges
from agentrl.engine.router.router import Fleet, ReplicaState
from agentrl.errors import ConfigError, EngineBroke, EngineRefusal, EngineUnavailable
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import SamplingParams
from tests.parts.fake_engine import FakeEngine


def ask(id: str = "r", **changes: object) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=8)
    request = GenerateRequest(request_id=id, session="s", token_ids=(1, 2, 3), sampling=sampling)
    return replace(request, **changes)  # pyright: ignore[reportArgumentType]


class Engine(FakeEngine):
    """Its first token takes `first_s`, each other one 0.1 s. Token i of a turn is 100 * `name` + i. `open` counts
    the requests that it has not ended; `given_up` those that were closed before their end."""

    def __init__(self, name: int, first_s: float = 1.0, *, error: Exception | None = None, lives: bool = True) -> None:
        super().__init__(
            lambda request: [100 * name + i for i in range(8)], url=f"fake://{name}", chunk_tokens=1, chunk_s=0.0
        )
        self.first_s, self.error, self.lives = first_s, error, lives
        self.open = self.given_up = 0

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.open += 1
        whole = False
        try:
            await trio.sleep(self.first_s)
            if self.error is not None:
                raise self.error
            async for chunk in super().stream(request):
                whole = chunk.finish is not None
                yield chunk
                await trio.sleep(0.1)
        finally:
            self.open -= 1
            self.given_up += not whole

    async def alive(self, *, deadline_s: float = 5.0) -> bool:
        return self.lives


async def fleet_of(*engines: Engine, after: float | None = 4.0, outage_deadline_s: float = 600.0) -> Fleet:
    """A fleet whose median time to a first token is 1 s; the session's home is the first engine."""
    fleet = Fleet(engines, hedge_after=after, stall_s=30.0, outage_deadline_s=outage_deadline_s)
    for _ in range(20):
        fleet.hedges.took(1.0)
    fleet._choice.move("s", fleet.replicas[0])
    return fleet


def test_the_wait_is_a_multiple_of_the_median_once_that_is_known() -> None:
    hedges = Hedges(4.0)
    for seconds in (1.0, 2.0, 9.0) * 5:
        hedges.took(seconds)
    assert hedges.wait_s == float("inf")
    hedges.took(2.0)
    assert hedges.wait_s == 8.0
    assert Hedges(None).wait_s == float("inf")


async def test_a_slow_engine_loses_the_turn_to_one_that_answers(autojump_clock: trio.testing.MockClock) -> None:
    slow, quick = Engine(1, first_s=100.0), Engine(2)
    fleet = await fleet_of(slow, quick)
    began = trio.current_time()
    generation = await fleet.generate(ask())
    assert generation.token_ids == tuple(range(200, 208)), "all of one request"
    assert trio.current_time() - began == pytest.approx(4 + 1 + 0.7)
    assert (slow.open, slow.given_up, quick.open, quick.given_up) == (0, 1, 0, 0)
    assert slow.requests == [], "it had not begun"
    (request,) = quick.requests
    assert (request.token_ids, request.request_id) == ((1, 2, 3), "r~1")
    assert fleet.gauges()["hedges"] == {"asked": 1, "won": 1}
    assert [one.running for one in fleet.replicas] == [0, 0]
    assert (await fleet.generate(ask("next"))).token_ids[0] == 200, "the session has moved with its prefix"


async def test_the_first_engine_keeps_the_turn_if_it_answers_first(autojump_clock: trio.testing.MockClock) -> None:
    home, other = Engine(1, first_s=5.0), Engine(2, first_s=3.0)
    fleet = await fleet_of(home, other)
    assert (await fleet.generate(ask())).token_ids == tuple(range(100, 108))
    assert (home.open, other.open, other.given_up) == (0, 0, 1)
    assert fleet.gauges()["hedges"] == {"asked": 1, "won": 0}


async def test_a_quick_engine_is_never_hedged(autojump_clock: trio.testing.MockClock) -> None:
    home, other = Engine(1, first_s=3.9), Engine(2)
    fleet = await fleet_of(home, other)
    await fleet.generate(ask())
    assert (other.requests, fleet.hedges.opened) == ([], 0)


async def test_it_is_off_by_default(autojump_clock: trio.testing.MockClock) -> None:
    home, other = Engine(1, first_s=100.0), Engine(2)
    fleet = await fleet_of(home, other, after=None)
    assert (await fleet.generate(ask())).token_ids[0] == 100
    assert other.requests == []


async def test_an_engine_that_dies_in_the_race_leaves_the_turn_to_the_other(
    autojump_clock: trio.testing.MockClock,
) -> None:
    dies, other = Engine(1, first_s=6.0, error=EngineUnavailable("gone")), Engine(2, first_s=10.0)
    fleet = await fleet_of(dies, other)
    began = trio.current_time()
    assert (await fleet.generate(ask())).token_ids == tuple(range(200, 208))
    assert trio.current_time() - began == pytest.approx(4 + 10 + 0.7)
    assert fleet.replicas[0].state is ReplicaState.BROKEN


async def test_a_second_engine_that_dies_leaves_the_turn_to_the_first(autojump_clock: trio.testing.MockClock) -> None:
    home, dies = Engine(1, first_s=10.0), Engine(2, first_s=1.0, error=EngineBroke("broke"))
    fleet = await fleet_of(home, dies)
    assert (await fleet.generate(ask())).token_ids == tuple(range(100, 108))
    assert fleet.replicas[1].state is ReplicaState.BROKEN


async def test_a_second_engine_that_refuses_ends_no_turn(autojump_clock: trio.testing.MockClock) -> None:
    home, refuses = Engine(1, first_s=10.0), Engine(2, first_s=1.0, error=EngineRefusal("too long"))
    fleet = await fleet_of(home, refuses)
    assert (await fleet.generate(ask())).token_ids == tuple(range(100, 108))


async def test_a_request_that_all_refuse_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    engines = [Engine(name, first_s=10.0, error=EngineRefusal("too long")) for name in (1, 2)]
    with pytest.raises(EngineRefusal, match="too long"):
        await (await fleet_of(*engines)).generate(ask())
    assert [one.open for one in engines] == [0, 0]


async def test_both_slow_one_request_each_and_the_first_token_decides(autojump_clock: trio.testing.MockClock) -> None:
    engines = [Engine(1, first_s=50.0), Engine(2, first_s=40.0), Engine(3, first_s=1.0)]
    fleet = await fleet_of(*engines)
    fleet.drain("fake://3")
    began = trio.current_time()
    assert (await fleet.generate(ask())).token_ids == tuple(range(200, 208))
    assert trio.current_time() - began == pytest.approx(4 + 40 + 0.7)
    assert fleet.hedges.opened == 1
    assert [one.open for one in engines] == [0, 0, 0]


async def test_a_hung_second_engine_is_noticed_as_the_first_is(autojump_clock: trio.testing.MockClock) -> None:
    """Both hang. Each is asked after `stall_s` whether it lives and does not answer; the turn goes on at the third."""
    hung = [Engine(name, first_s=10_000.0, lives=False) for name in (1, 2)]
    third = Engine(3)
    fleet = await fleet_of(*hung, third)
    fleet.replicas[2].running = 5  # busier than the second
    assert (await fleet.generate(ask())).token_ids == tuple(range(300, 308))
    assert trio.current_time() < 120
    assert [one.open for one in hung] == [0, 0]


async def test_a_cancelled_turn_leaves_no_request_behind(autojump_clock: trio.testing.MockClock) -> None:
    engines = [Engine(1, first_s=50.0), Engine(2, first_s=50.0)]
    fleet = await fleet_of(*engines)
    with trio.move_on_after(10.0) as scope:
        await fleet.generate(ask())
    assert scope.cancelled_caught
    assert ([one.open for one in engines], [one.running for one in fleet.replicas]) == ([0, 0], [0, 0])
    assert fleet.hedges.running == 0


async def test_when_every_engine_is_slow_few_turns_are_doubled(autojump_clock: trio.testing.MockClock) -> None:
    """Forty turns wait at once; of the requests that then run, no more than a tenth are second ones."""
    engines = [Engine(1, first_s=60.0), Engine(2, first_s=60.0)]
    fleet = await fleet_of(*engines)
    async with trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(fleet.generate, ask(str(number), session=str(number)))
    assert 1 <= fleet.hedges.opened <= 6


async def test_the_waiting_of_both_engines_counts_once(autojump_clock: trio.testing.MockClock) -> None:
    """A turn may wait for engines for 100 s. Two wait 90 s for it side by side: not 180."""
    engines = [Engine(1, first_s=49.0), Engine(2, first_s=49.0, error=EngineUnavailable("gone"))]
    fleet = await fleet_of(*engines, outage_deadline_s=100.0)
    assert (await fleet.generate(ask())).token_ids == tuple(range(100, 108))


def test_an_engine_that_sends_no_first_token_alone_is_refused() -> None:
    document = {"model": "m", "env": {"id": "e"}, "engine": {"hedge_after": 4.0}}
    with pytest.raises(ConfigError, match=r"engine\.hedge_after = 4\.0: .*engine\.stream_tokens = 1"):
        configuration.parse(document)
    document["engine"] = {"hedge_after": 4.0, "stream_tokens": 1}
    assert configuration.parse(document).engine.hedge_after == 4.0
    document["engine"] = {"hedge_after": 4.0, "kind": "vllm"}
    assert configuration.parse(document).engine.hedge_after == 4.0


async def test_until_the_usual_wait_is_known_nobody_else_is_asked(autojump_clock: trio.testing.MockClock) -> None:
    home, other = Engine(1, first_s=20.0), Engine(2)
    fleet = Fleet([home, other], hedge_after=1.0)
    fleet._choice.move("s", fleet.replicas[0])
    assert [(await fleet.generate(ask(str(n)))).token_ids[0] for n in range(16)] == [100] * 16
    assert (other.requests, fleet.hedges.wait_s) == ([], 20.0)
