"""Turns that are broken off in the middle, and go on elsewhere as if nothing had happened (laws 1 and 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from agentrl.engine.client import EngineClient
from agentrl.engine.router.router import Fleet
from agentrl.errors import DiskFull, LeaseLost
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import POLICY, Generation, StopReason, Turn, VersionSpan
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.episode import play
from agentrl.rollout.worker import Worker
from agentrl.store import Claim, Partial, RunStore
from tests.parts.fake_engine import FakeEngine
from tests.parts.vllm_server import FakeVLLM, spell

from .conftest import ScriptedEnv, done, going
from .writing import instead, written

LENGTH = 24  # tokens of a turn here, unless something ends it before


class Killed(Exception):
    """The worker dies here, at once: nothing of it runs any more."""


class Mortal:
    """An engine whose caller dies at chunk `at` (from 0) of its request number `number` (from 0)."""

    def __init__(
        self, engine: Any, store: RunStore, monkeypatch: pytest.MonkeyPatch, at: int, *, number: int = 0
    ) -> None:
        self.engine, self.store, self.patch, self.left, self.received = engine, store, monkeypatch, at, 0
        self.number = number

    async def generate(self, request: GenerateRequest) -> Generation:
        if self.number:
            self.number -= 1
            return await self.engine.generate(request)

        def dead(*_: Any, **__: Any) -> None:
            raise Killed

        def on_chunk(chunk: Chunk) -> None:
            self.received += len(chunk.token_ids)
            if self.left == 0:
                instead(self.patch, self.store, "journal_partial", dead)
                instead(self.patch, self.store, "journal_turn", dead)
                raise Killed
            self.left -= 1
            if request.on_chunk is not None:
                request.on_chunk(chunk)

        return await self.engine.generate(replace(request, on_chunk=on_chunk))


@pytest.fixture
def fleet(renderer: Any) -> Callable[..., Fleet]:
    """A fleet of servers whose next token is the length of the context: letters, by the tests' tokenizer."""

    def make(*fakes: FakeVLLM) -> Fleet:
        clients = [EngineClient(fake.url, transport=fake, version=int(fake.version)) for fake in fakes]
        return Fleet(clients, decode=renderer.decode)

    return make


def server(version: int = 1, **settings: Any) -> FakeVLLM:
    return FakeVLLM(url=f"http://engine-{version}", version=str(version), **settings)


@pytest.fixture
def at(store: RunStore, context: Any) -> Callable[..., RolloutContext]:
    """A context whose episodes have one turn."""
    store.versions.confirm_version(store.versions.mint_version(1))

    def make(engine: Any, **settings: Any) -> RolloutContext:
        return context(ScriptedEnv([done()]), engine, **{"max_tokens_per_turn": LENGTH, **settings})

    return make


def next_claim(store: RunStore, first: Claim, now: float = 11.0, worker: str = "second") -> Claim:
    return next(one for one in store.leases.claim(worker, 2, lease_s=10, now=now) if one.episode_id == first.episode_id)


def same(turn: Turn) -> tuple[Any, ...]:
    return turn.prompt_ids, turn.token_ids, turn.logprobs, turn.finish, turn.text


async def whole_turn(claim_one: Callable[..., Claim], context: RolloutContext) -> Turn:
    """The same turn, that nothing disturbs."""
    claim = claim_one("undisturbed", now=0.0)
    assert (await play(claim, context)).stop_reason is StopReason.DONE
    (turn,) = (await context.store.trajectory(claim.episode_id)).turns  # type: ignore[attr-defined]
    return turn


@pytest.mark.parametrize("kill", range(12))
@pytest.mark.parametrize(("chunk", "every"), [(1, 1), (2, 4), (2, 7), (3, 64)])
async def test_law_1_a_worker_that_is_killed_at_any_chunk_loses_no_more_than_it_may(
    store: RunStore,
    claim_one: Callable[..., Claim],
    at: Any,
    fleet: Any,
    monkeypatch: pytest.MonkeyPatch,
    kill: int,
    chunk: int,
    every: int,
) -> None:
    settings = {"checkpoint_tokens": every}
    expected = await whole_turn(claim_one, at(fleet(server(stream_tokens=chunk)), **settings))
    first = claim_one("first", now=0.0)
    with monkeypatch.context() as patch:
        mortal = Mortal(fleet(server(stream_tokens=chunk)), store, patch, kill)
        if kill * chunk < LENGTH:
            with pytest.raises(Killed):
                await play(first, at(mortal, **settings))
        else:
            await play(first, at(mortal, **settings))
            return
    second, fake = next_claim(store, first), server(2, stream_tokens=chunk)
    kept = 0 if second.partial is None else len(second.partial.token_ids)
    on_its_way = chunk  # that the engine had made when the worker died, and not yet sent
    assert mortal.received + (on_its_way if mortal.received < LENGTH else 0) - kept <= max(every, 2 * chunk)
    assert (await play(second, at(fleet(fake), **settings))).stop_reason is StopReason.DONE
    (turn,) = store.reads.trajectory(first.episode_id).turns
    assert same(turn) == same(expected)
    spans = (VersionSpan(1, 0, kept), VersionSpan(2, kept, LENGTH, recomputed=kept > 0))
    assert turn.spans == tuple(span for span in spans if span.start < span.end)
    (asked,) = fake.requests
    assert asked["token_ids"] == [*expected.prompt_ids, *expected.token_ids[:kept]]
    assert asked["sampling_params"]["max_tokens"] == LENGTH - kept


class Spelling:
    """The renderer of the servers' own letters."""

    decode = staticmethod(spell)

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)


@pytest.mark.parametrize("kill", range(1, 10))
async def test_law_1_a_stop_text_that_straddles_two_workers_ends_the_turn(
    store: RunStore,
    claim_one: Callable[..., Claim],
    at: Any,
    renderer: Any,
    monkeypatch: pytest.MonkeyPatch,
    kill: int,
) -> None:
    def over(fake: FakeVLLM, **settings: Any) -> RolloutContext:
        client = EngineClient(fake.url, transport=fake, version=int(fake.version))
        return replace(at(Fleet([client], decode=spell), checkpoint_tokens=1, **settings), renderer=Spelling(renderer))

    free = await whole_turn(claim_one, over(server(stream_tokens=1)))
    stop = [free.text[4:10]]
    first = claim_one("first", now=0.0)
    with monkeypatch.context() as patch:
        dying = over(server(stream_tokens=1), stop=stop)
        with pytest.raises(Killed):
            await play(first, replace(dying, engine=Mortal(dying.engine, store, patch, kill)))
    second = next_claim(store, first)
    assert second.partial is not None and len(second.partial.token_ids) == kill
    await play(second, over(server(2, stream_tokens=1), stop=stop))
    (turn,) = store.reads.trajectory(first.episode_id).turns
    assert (turn.text, turn.finish) == (free.text[:10], "stop")
    assert turn.logprobs == free.logprobs[:10]


async def test_law_1_a_turn_that_is_cancelled_keeps_every_token_it_has(
    store: RunStore, claim_one: Callable[..., Claim], at: Any, fleet: Any, autojump_clock: MockClock
) -> None:
    first = claim_one("first", now=0.0)
    with trio.move_on_after(9.5):
        await play(first, at(fleet(server(token_s=1.0, stream_tokens=3)), checkpoint_tokens=1000))
    partial = next_claim(store, first).partial
    assert partial is not None and len(partial.token_ids) == 9


async def test_law_1_what_an_engine_gave_before_it_died_is_kept_at_once(
    store: RunStore, claim_one: Callable[..., Claim], at: Any, fleet: Any, autojump_clock: MockClock
) -> None:
    first = claim_one("first", now=0.0)
    dying, hanging = server(stream_tokens=3), server(2, stream_tokens=3)
    dying.fail("cut", after=6)
    hanging.fail("hang")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(play, first, at(fleet(dying, hanging), checkpoint_tokens=1000))
        await trio.sleep(5)
        partial = next_claim(store, first).partial
        assert partial is not None and len(partial.token_ids) == 6
        nursery.cancel_scope.cancel()


async def test_law_2_of_two_workers_with_one_episode_only_the_second_writes(
    store: RunStore, claim_one: Callable[..., Claim], at: Any, fleet: Any, autojump_clock: MockClock
) -> None:
    settings = {"checkpoint_tokens": 4}
    expected = await whole_turn(claim_one, at(fleet(server(stream_tokens=1)), **settings))
    first = claim_one("first", now=0.0)
    lost = list[bool]()

    async def stalled() -> None:
        with pytest.raises(LeaseLost):
            await play(first, at(fleet(server(token_s=1.0, stream_tokens=1)), **settings))
        lost.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stalled)
        await trio.sleep(7.5)
        second = next_claim(store, first)
        assert second.partial is not None
        kept = len(second.partial.token_ids)
        await trio.sleep(6)
        assert lost, "its next part is refused"
        assert next_claim(store, first, now=30.0, worker="third").partial == second.partial
    third = store.leases.reload(replace(second, fence=second.fence + 1))
    await play(third, at(fleet(server(2)), **settings))
    (turn,) = store.reads.trajectory(first.episode_id).turns
    assert same(turn) == same(expected)
    assert turn.spans == (VersionSpan(1, 0, kept), VersionSpan(2, kept, LENGTH, recomputed=True))


async def test_law_3_a_turn_that_goes_on_elsewhere_has_no_more_time_than_another(
    store: RunStore, claim_one: Callable[..., Claim], at: Any, fleet: Any, autojump_clock: MockClock
) -> None:
    settings = {"checkpoint_tokens": 4, "max_tokens_per_turn": 200, "turn_deadline_s": 30.0}

    def slow() -> Fleet:
        return fleet(server(token_s=1.0, stream_tokens=2))

    expected = await whole_turn(claim_one, at(slow(), **settings))
    assert expected.finish == "length" and 30 <= len(expected.token_ids) <= 36
    claim = claim_one("0", now=0.0)
    for time in range(1, 6):
        with trio.move_on_after(10.5):
            await play(claim, at(slow(), **settings))
            break
        claim = next_claim(store, claim, now=time * 11.0, worker=str(time))
    (turn,) = store.reads.trajectory(claim.episode_id).turns
    assert turn.finish == "length"
    assert len(turn.token_ids) <= 30 + 5 * 4, "each engine's first two chunks tell its pace, and are not counted"


OVER: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": tuple(range(40, 40 + LENGTH))}, "length"),
    ({"token_ids": (40, 41, 1)}, "stop"),  # <|im_end|>
    ({"token_ids": (40, 41, 42)}, "stop"),  # the stop text
    ({"token_ids": (50, 51), "spent_s": 60.0}, "length"),
]


@pytest.mark.parametrize(("of", "finish"), OVER)
async def test_law_1_of_a_turn_that_is_over_already_nothing_more_is_asked(
    store: RunStore, claim_one: Callable[..., Claim], at: Any, renderer: Any, of: dict[str, Any], finish: str
) -> None:
    first, engine = claim_one("first", now=0.0), FakeEngine(version=1)
    context = at(engine, stop=[renderer.decode((41, 42))])
    prompt = renderer.start(({"role": "user", "content": "go"},), [])
    store.journal.begin(first.episode_id, first.fence, ({"role": "user", "content": "go"},))
    n = len(of["token_ids"])
    part = Partial(index=0, parent=None, role=POLICY, prompt_ids=prompt, logprobs=(-1.0,) * n, **of)
    store.journal.journal_partial(first.episode_id, first.fence, replace(part, spans=(VersionSpan(1, 0, n),)))
    assert (await play(next_claim(store, first), context)).stop_reason is StopReason.DONE
    (turn,) = store.reads.trajectory(first.episode_id).turns
    assert (turn.token_ids, turn.finish, turn.logprobs) == (of["token_ids"], finish, (-1.0,) * n)
    assert not engine.requests


async def test_law_1_a_turn_goes_on_after_the_prompt_it_was_sampled_from(
    store: RunStore, claim_one: Callable[..., Claim], at: Any
) -> None:
    """Even where the environment would be rendered otherwise by now."""
    first, engine = claim_one("first", now=0.0), FakeEngine(version=1)
    store.journal.begin(first.episode_id, first.fence, ({"role": "user", "content": "go"},))
    part = Partial(index=0, parent=None, prompt_ids=(5, 6, 7), token_ids=(50,), logprobs=(-1.0,), started_s=3.0)
    store.journal.journal_partial(first.episode_id, first.fence, replace(part, spans=(VersionSpan(1, 0, 1),)))
    await play(next_claim(store, first), at(engine))
    (turn,) = store.reads.trajectory(first.episode_id).turns
    assert (turn.prompt_ids, turn.token_ids[0], turn.started_s) == ((5, 6, 7), 50, 3.0)
    assert engine.requests[0].token_ids == (5, 6, 7, 50)


async def test_a_frozen_roles_turn_keeps_the_versions_of_its_own_engines(
    store: RunStore, claim_one: Callable[..., Claim], at: Any, fleet: Any, autojump_clock: MockClock
) -> None:
    first, settings = claim_one("first", now=0.0), {"checkpoint_tokens": 3}
    context = replace(
        at(FakeEngine(version=1), **settings), frozen={POLICY: fleet(server(70, token_s=1.0, stream_tokens=3))}
    )
    with trio.move_on_after(9.5):
        await play(first, context)
    await play(next_claim(store, first), replace(context, frozen={POLICY: fleet(server(80))}))
    (turn,) = store.reads.trajectory(first.episode_id).turns
    assert turn.spans == (VersionSpan(70, 0, 9), VersionSpan(80, 9, LENGTH, recomputed=True)) and not turn.learns


async def test_a_full_disk_ends_no_turn_that_is_sampled(
    store: RunStore, claim_one: Callable[..., Claim], at: Any, fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, write, fake = [DiskFull("no space left")] * 2, written(store, "journal_partial"), server(stream_tokens=1)
    parts = list[Partial]()

    def journal_partial(episode_id: int, fence: int, part: Partial) -> None:
        if full:
            raise full.pop()
        write(episode_id, fence, part)
        parts.append(part)

    instead(monkeypatch, store, "journal_partial", journal_partial)
    turn = await whole_turn(claim_one, at(fleet(fake), checkpoint_tokens=4))
    assert len(turn.token_ids) == LENGTH and len(fake.requests) == 1
    assert len(parts[0].token_ids) == 5, "the third attempt has what the first two had"


async def test_a_turn_that_a_death_cannot_make_dear_is_written_once(
    store: RunStore, claim_one: Callable[..., Claim], at: Any, fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = list[Partial]()
    instead(monkeypatch, store, "journal_partial", lambda id, fence, part: parts.append(part))
    for every in (LENGTH, 0):
        context = at(fleet(server(stream_tokens=4)), checkpoint_tokens=every)
        claim = claim_one("w", now=0.0)
        await play(claim, context)
        assert len(store.reads.trajectory(claim.episode_id).turns[0].token_ids) == LENGTH
    assert not parts


async def test_an_engine_that_streams_nothing_is_an_engine_too(
    store: RunStore, claim_one: Callable[..., Claim], at: Any
) -> None:
    class Whole(FakeEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            return await super().generate(replace(request, on_chunk=None))

    turn = await whole_turn(claim_one, at(Whole(version=1)))
    assert turn.finish == "stop" and turn.token_ids


async def test_law_1_a_later_turn_goes_on_in_the_conversation_that_it_belongs_to(
    store: RunStore, claim_one: Callable[..., Claim], at: Any, fleet: Any, autojump_clock: MockClock
) -> None:
    settings, answers = {"checkpoint_tokens": 3}, [going("on"), done()]

    def talking(fake: FakeVLLM) -> RolloutContext:
        return replace(at(fleet(fake), **settings), make_env=lambda task: ScriptedEnv(answers))

    whole = claim_one("undisturbed", now=0.0)
    await play(whole, talking(server()))
    first, fake = claim_one("first", now=0.0), server(2, stream_tokens=3)
    with trio.move_on_after(LENGTH + 9.5):
        await play(first, talking(server(token_s=1.0, stream_tokens=3)))
    second = next_claim(store, first)
    assert second.partial is not None and (second.partial.index, second.partial.parent) == (1, 0)
    await play(second, talking(fake))
    turns, expected = (store.reads.trajectory(claim.episode_id).turns for claim in (first, whole))
    assert [same(turn) for turn in turns] == [same(turn) for turn in expected]
    assert len(fake.requests) == 1 and turns[1].spans == (
        VersionSpan(1, 0, 9),
        VersionSpan(2, 9, LENGTH, recomputed=True),
    )


async def test_law_1_a_worker_that_leaves_hands_its_turns_on_with_all_tokens_and_no_lease_is_waited_for(
    store: RunStore, at: Any, fleet: Any, claim_one: Callable[..., Claim], autojump_clock: MockClock
) -> None:
    expected = await whole_turn(claim_one, at(fleet(server(stream_tokens=1))))
    leaver = at(fleet(server(stream_tokens=1, token_s=1.0)))
    worker = Worker("leaver", leaver.store, leaver, now=trio.current_time)
    with trio.fail_after(15):  # far less than the turn takes
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            await trio.sleep(10.5)
            worker.leave()
    (second,) = store.leases.claim("second", 2, lease_s=10, now=trio.current_time())
    assert second.partial is not None
    kept = len(second.partial.token_ids)
    assert 5 <= kept < LENGTH, "it was in the middle of its turn"
    await play(second, at(fleet(server(2))))
    (turn,) = store.reads.trajectory(second.episode_id).turns
    assert same(turn) == same(expected)
    assert turn.spans == (VersionSpan(1, 0, kept), VersionSpan(2, kept, LENGTH, recomputed=True))
    assert store.reads.restarts(second.episode_id) == []
