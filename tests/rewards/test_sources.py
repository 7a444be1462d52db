"""Reward sources at work: turns are scored as the episode goes on, each call under its deadline and limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import trio
from each_case import each_case
from trio.testing import MockClock

from agentrl.config.sections import RewardSource
from agentrl.errors import ConfigError, ScoreError, UsageError
from agentrl.records import Trajectory
from agentrl.rewards import scorer as sources
from agentrl.rewards.scorer import Scorer, rewarder_of, until
from agentrl.run import reward_services
from agentrl.run.reporting import reward_figures
from agentrl.store import RunStore
from agentrl.store.journal_writer import JournalWriter
from agentrl.testing.scoring import FakeScoring
from tests.rewards.conftest import run_config
from tests.store.play import START, answer, play_all, turn


def settings(**changes: Any) -> RewardSource:
    return RewardSource(**{"source": "prm", "kind": "callable", "call": "tests.rewards.test_sources:length", **changes})


def desk(store: RunStore) -> JournalWriter:
    return JournalWriter(store, inline=True)


def length(seen: Trajectory) -> float:
    """How many turns there are so far, which a source of one's own may well say."""
    return float(len(seen.turns))


async def eventually(holds: Callable[[], bool], *, within_s: float = 60) -> None:
    with trio.fail_after(within_s):
        while True:
            if holds():
                return
            await trio.sleep(0.01)


async def until_scored(store: RunStore) -> None:
    await eventually(lambda: store.buffer.ready_count() == 1)


async def test_turns_are_scored_while_the_episode_goes_on(store: RunStore, autojump_clock: MockClock) -> None:
    seen: list[tuple[int, bool]] = []

    async def ask(trajectory: Trajectory) -> float:
        seen.append((len(trajectory.turns), trajectory.turns[-1].step is not None))
        return 0.5

    claim, other = store.leases.claim("worker", 2, lease_s=30.0)
    store.journal.begin(claim.episode_id, claim.fence, START)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Scorer(settings(), desk(store), ask).serve)
        for index in range(2):
            store.journal.journal_turn(claim.episode_id, claim.fence, turn(index, 1, step=answer(index)))
            await eventually(lambda scored=index + 1: len(store.scores.recorded()) == scored)
        nursery.cancel_scope.cancel()
    assert seen == [(1, True), (2, True)]
    assert store.reads.trajectory(claim.episode_id).stop_reason is None
    assert store.reads.trajectory(other.episode_id).turns == ()


async def test_no_more_calls_run_at_once_than_the_source_takes(store: RunStore, autojump_clock: MockClock) -> None:
    running, most = 0, 0

    async def ask(trajectory: Trajectory) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(5)
        running -= 1
        return trajectory.turns[-1].index + trajectory.member

    play_all(store, turns=4)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Scorer(settings(concurrency=3), desk(store), ask).serve)
        await until_scored(store)
        nursery.cancel_scope.cancel()
    assert most == 3


async def test_a_call_that_hangs_or_fails_is_made_again_and_counted(store: RunStore, autojump_clock: MockClock) -> None:
    calls = 0

    async def ask(_: Trajectory) -> float:
        nonlocal calls
        calls += 1
        if calls == 1:
            await trio.sleep_forever()
        if calls == 2:
            raise ZeroDivisionError("oh")
        return 0.75

    play_all(store)
    scorer = Scorer(settings(call_deadline_s=2.0, retries=2), desk(store), ask)
    id = store.scores.awaiting("prm", 1)[0]
    started = trio.current_time()
    assert await scorer.score(id) == 0.75
    assert trio.current_time() - started == pytest.approx(2.0 + 0.5 + 1.0)
    (one,) = store.scores.recorded()
    assert (one.turn_id, one.value, one.cost, one.counts) == (id, 0.75, 3.0, True)


@pytest.mark.parametrize(
    ("answer", "said"),
    [(float("nan"), "nan is no reward"), (ValueError("what\nnow"), "ValueError: what now"), (None, "within 2 s")],
)
async def test_a_turn_whose_attempts_all_fail_is_left_to_the_deadline_of_its_source(
    store: RunStore, autojump_clock: MockClock, answer: Any, said: str
) -> None:
    asked: list[int] = []

    async def ask(seen: Trajectory) -> float:
        asked.append(seen.episode_id)
        if answer is None:
            await trio.sleep_forever()
        if isinstance(answer, Exception):
            raise answer
        return answer

    play_all(store)
    scorer = Scorer(settings(call_deadline_s=2.0, retries=1, deadline_s=1000.0), desk(store), ask)
    with pytest.raises(ScoreError, match=said):
        await scorer.score("1.0.0")
    with trio.move_on_after(60):
        await scorer.serve()
    assert store.scores.recorded() == []
    assert len(asked) == 2 + 4 * 2, "each turn once, with its retry, and not again for ever"


async def test_the_same_content_is_asked_for_once(store: RunStore, autojump_clock: MockClock) -> None:
    """Both members of the group say the same, turn by turn."""
    calls: list[int] = []

    async def ask(seen: Trajectory) -> float:
        calls.append(len(seen.turns))
        return 1.0

    play_all(store)
    scorer = Scorer(settings(concurrency=1), desk(store), ask)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scorer.serve)
        await until_scored(store)
        nursery.cancel_scope.cancel()
    assert calls == [1, 2]
    assert [one.cost for one in store.scores.recorded()] == [1.0, 1.0, 0.0, 0.0]


async def test_a_blocking_source_runs_in_a_thread_and_a_judge_reads_up_to_the_action(store: RunStore) -> None:
    claim, _ = play_all(store)
    scorer = Scorer(settings(), desk(store), rewarder_of(settings()))
    assert await scorer.score("1.0.1") == 2.0
    seen = until(store.reads.trajectory(claim.episode_id), "1.0.0")
    assert [one.id for one in seen.turns] == ["1.0.0"]
    assert seen.outcome is None, "a source does not know how the episode will end"
    with pytest.raises(LookupError, match=r"has no turn 1\.1\.0 any more"):
        until(seen, "1.1.0")


async def test_a_stored_run_is_scored_again_under_a_version_of_its_own(store: RunStore) -> None:
    config = run_config(settings())
    play_all(store)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reward_services.serve, config, desk(store))
        await until_scored(store)
        nursery.cancel_scope.cancel()
    before = store.reads.trajectory(1).rewards
    assert await reward_services.rescore(config, store, "prm") == (2, 0)
    first, second = reward_figures.reports(store)
    assert (first.version, first.turns, first.counted, first.mean, first.most) == (1, 4, 4, 1.5, 2.0)
    assert (second.version, second.turns, second.counted, second.mean) == (2, 4, 0, 1.5)
    assert store.reads.trajectory(1).rewards == before == (1.0, 2.25)
    with pytest.raises(UsageError, match=r"no reward source 'style'; it has: prm"):
        await reward_services.rescore(config, store, "style")


@each_case(
    ("changes", "said"),
    [
        ({"call": None}, r"rewards\.call"),
        ({"kind": "prm"}, r"rewards\.url"),
        ({"kind": "judge", "url": "http://localhost:1"}, r"rewards\.rubric"),
        ({"source": "env"}, "this is the environment itself"),
    ],
)
def test_a_source_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(**changes)


def test_a_run_does_not_begin_with_a_source_that_cannot_be_asked(store: RunStore) -> None:
    with pytest.raises(UsageError, match=r"has no 'nothing'"):
        reward_services.declare(run_config(settings(call="tests.rewards.test_sources:nothing")), store)
    keyed = settings(kind="prm", url="http://localhost:1", api_key_env="NOT_SET_ANYWHERE")
    with pytest.raises(ConfigError, match="this environment variable is not set: export it"):
        reward_services.declare(run_config(keyed), store)
    assert [one.name for one in store.scores.sources()] == ["prm"]


def test_two_sources_have_two_names() -> None:
    with pytest.raises(ConfigError, match="each source has a name of its own"):
        run_config(settings(), settings(weight=2.0))


def test_a_source_is_waited_for_less_long_than_a_run_may_stand_still() -> None:
    run_config(settings(deadline_s=599.0))
    with pytest.raises(ConfigError, match=r"rewards\.deadline_s = 600\.0: must be below train\.stall_deadline_s = 600"):
        run_config(settings(deadline_s=600.0))


class Server(httpx.AsyncBaseTransport):
    """A scoring server that is in a bad way until it is told otherwise; well, it gives 0.5, or 5 of 10 points."""

    def __init__(self, way: str) -> None:
        self.way, self.asked, self.well = way, 0, FakeScoring(5, outputs=(0.5,))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if self.way == "well":
            return await self.well.handle_async_request(request)
        if self.way == "hangs":
            await trio.sleep_forever()
        if self.way == "breaks":
            return httpx.Response(500, content=b'{"error": {"message": "out of memory"}}')
        return httpx.Response(200, content=self.way.encode())


PRM = {"kind": "prm", "url": "http://scorer"}
JUDGE = {"kind": "judge", "url": "http://scorer", "rubric": "Is it short?"}
NO_VERDICT = '{"choices": [{"message": {"content": "10 of 10!"}}]}'
served = pytest.mark.parametrize("kind", [PRM, JUDGE], ids=["prm", "judge"])
BAD_WAYS = [
    ("hangs", "did not answer /"),
    ("breaks", "answered 500: out of memory"),
    ("<html>", "not JSON"),
    ('{"data": [{"probs": ["high"]}]}', "gave no c"),
    ('{"data": [], "choices": []}', "gave no c"),
]


def scorer_of(server: Server, store: RunStore, **changes: Any) -> Scorer:
    own = settings(**{"call_deadline_s": 2.0, "retries": 1, **changes})
    return Scorer(own, desk(store), rewarder_of(own, transport=server))


@served
async def test_a_model_that_is_served_scores_each_action_before_its_answer(
    kind: dict[str, Any], store: RunStore, autojump_clock: MockClock
) -> None:
    play_all(store)
    server = Server("well")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scorer_of(server, store, concurrency=1, **kind).serve)
        await until_scored(store)
        nursery.cancel_scope.cancel()
    assert [one.value for one in store.scores.recorded()] == [0.5] * 4
    first = str(server.well.requests[0][1])
    assert "action 0" in first and "seen 0" not in first


@served
@pytest.mark.parametrize(("way", "said"), BAD_WAYS)
async def test_a_server_in_a_bad_way_is_named_within_the_calls_deadlines_and_asked_again_once_it_is_well(
    kind: dict[str, Any], way: str, said: str, store: RunStore, autojump_clock: MockClock
) -> None:
    play_all(store)
    server = Server(way)
    scorer = scorer_of(server, store, **kind)
    started = trio.current_time()
    with pytest.raises(ScoreError, match=said):
        await scorer.score("1.0.0")
    assert trio.current_time() - started <= 2 * 2.0 + 0.5
    assert store.scores.recorded() == []
    server.way = "well"
    assert await scorer.score("1.0.0") == 0.5


@served
async def test_a_server_that_comes_back_in_time_costs_no_episode_anything(
    kind: dict[str, Any], store: RunStore, autojump_clock: MockClock
) -> None:
    play_all(store)
    server = Server("breaks")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scorer_of(server, store, call_deadline_s=30.0, **kind).serve)
        await trio.sleep(20)
        assert store.scores.recorded() == []
        server.way = "well"
        await until_scored(store)
        nursery.cancel_scope.cancel()
    assert len(store.scores.recorded()) == 4


async def test_a_judge_without_a_verdict_is_asked_as_often_as_its_source_says(
    store: RunStore, autojump_clock: MockClock
) -> None:
    play_all(store)
    server = Server(NO_VERDICT)
    with pytest.raises(ScoreError, match=r"2 attempts failed, the last one: .* gave no verdict"):
        await scorer_of(server, store, **JUDGE).score("1.0.0")
    assert server.asked == 4, "and after each, of another text, whether that is the work's fault"


async def test_blocking_sources_that_hang_take_no_thread_from_the_environments(store: RunStore) -> None:
    play_all(store)
    release = threading.Event()
    scorer = Scorer(
        settings(concurrency=2, call_deadline_s=0.01, retries=2), desk(store), lambda _: release.wait() * 0.0
    )
    try:
        with pytest.raises(ScoreError, match=r"no answer within 0\.01 s"):
            await scorer.score("1.0.0")
        assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
    finally:
        release.set()


@pytest.mark.parametrize("blocks", [True, False])
async def test_an_async_source_of_ones_own_that_never_answers_holds_up_itself_alone(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, blocks: bool
) -> None:
    release = threading.Event()

    async def endless(_: Trajectory) -> float:
        if blocks:  # the loop that it runs in, as async code must not
            release.wait()
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(sources, "load_reference", lambda _: endless)
    play_all(store)
    own = settings(call_deadline_s=0.05, retries=0)
    scorer = Scorer(own, desk(store), rewarder_of(own))
    try:
        with pytest.raises(ScoreError, match=r"1 attempts failed"):
            await scorer.score("1.0.0")
    finally:
        release.set()
    await eventually(lambda: scorer._threads.borrowed_tokens == 0)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(3)], ids=repr)
@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_source_that_exits_or_is_cancelled_by_asyncio_ends_no_worker(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, error: BaseException
) -> None:
    """A parser of arguments exits; asyncio cancels its own tasks."""

    def leave(_: Trajectory) -> float:
        raise error

    async def leave_later(_: Trajectory) -> float:
        raise error

    monkeypatch.setattr(sources, "load_reference", lambda _: leave_later if asynchronous else leave)
    play_all(store)
    own = settings(retries=0)
    with pytest.raises(ScoreError, match=f"{type(error).__name__}: 3"):
        await Scorer(own, desk(store), rewarder_of(own)).score("1.0.0")
