"""Environments that give their state away: an episode goes on elsewhere without repeating what was done (law 2)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from agentrl.records import StopReason, Turn
from agentrl.rollout import take_snapshots
from agentrl.rollout.episode import play
from agentrl.store import Claim, EnvSnapshot, LeaseLost, RunStore
from agentrl.store.audit import audit
from tests.parts.fake_engine import FakeEngine

from .conftest import ScriptedEnv, done, going
from .writing import instead, written


@pytest.fixture(autouse=True)
def small_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(take_snapshots, "MAX_SNAPSHOT_BYTES", 1000)


ANSWERS = [going("a", 0.1), going("b", 0.2), going("c", 0.3), going("d", 0.4), done(1.0)]


class Saving(ScriptedEnv):
    """Its state is the actions so far; `stepped` are those that it was asked to do itself."""

    has_snapshots = True

    def __init__(self, answers: list[Any] = ANSWERS, **settings: Any) -> None:
        super().__init__(answers, **settings)
        self.stepped: list[str] = []
        self.calls: list[str] = []

    async def areset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.calls.append("reset")
        return await super().areset(seed=seed, options=options)

    async def astep(self, action: str) -> Any:
        self.stepped.append(action)
        return await super().astep(action)

    async def snapshot(self) -> bytes:
        self.calls.append("snapshot")
        return json.dumps(self.actions).encode()

    async def restore(self, snapshot: bytes) -> None:
        self.calls.append("restore")
        self.actions = json.loads(snapshot)


class Killed(Exception):
    """The worker dies here."""


@pytest.fixture
def dying(
    store: RunStore, claim_one: Callable[..., Claim], context: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Play an episode in `env` until its worker dies before turn `turn` is journaled, or answered; the next claim."""

    async def die(turn: int, env: ScriptedEnv, *, answered: bool = True, **settings: Any) -> Claim:
        first = claim_one("first", now=0.0)
        stage = "journal_turn" if answered else "journal_step"
        journal = written(store, stage)

        def at(id: int, fence: int, what: Any, *more: Any) -> None:
            if (what.index if isinstance(what, Turn) else what) == turn:
                raise Killed
            journal(id, fence, what, *more)

        with monkeypatch.context() as patch:
            instead(patch, store, stage, at)
            with pytest.raises(Killed):
                await play(first, context(env, **settings))
        return next(
            one for one in store.leases.claim("second", 2, lease_s=10, now=11.0) if one.episode_id == first.episode_id
        )

    return die


def texts(store: RunStore, claim: Claim) -> list[str]:
    return [turn.text for turn in store.reads.trajectory(claim.episode_id).turns]


@pytest.mark.parametrize("turn", [1, 2, 3, 4])
@pytest.mark.parametrize("every", [1, 2, 3])
async def test_law_2_only_what_came_after_the_newest_snapshot_is_repeated(
    store: RunStore, context: Any, dying: Any, turn: int, every: int
) -> None:
    settings = {"snapshot_every_turns": every}
    claim, env = await dying(turn, Saving(), **settings), Saving()
    assert (await play(claim, context(env, **settings))).stop_reason is StopReason.DONE
    kept = turn - turn % every
    all_of_it = texts(store, claim)
    assert env.stepped == all_of_it[kept:] and len(all_of_it) == 5
    assert env.calls[0] == ("restore" if kept else "reset")
    assert store.reads.trajectory(claim.episode_id).rewards == (0.1, 0.2, 0.3, 0.4, 0.0)
    assert store.reads.restarts(claim.episode_id) == []


@pytest.mark.parametrize("turn", [1, 3])
async def test_law_2_an_action_without_its_answer_is_done_once_more_from_the_state_before_it(
    store: RunStore, context: Any, dying: Any, turn: int
) -> None:
    claim, env, engine = await dying(turn, Saving(), answered=False), Saving(), FakeEngine(version=1)
    assert (await play(claim, context(env, engine))).stop_reason is StopReason.DONE
    assert env.stepped == texts(store, claim)[turn:]
    assert len(engine.requests) == 4 - turn, "the action is not sampled again"


async def test_law_2_an_environment_that_cannot_be_replayed_goes_on_from_its_snapshot(
    store: RunStore, context: Any, dying: Any
) -> None:
    class Once(Saving):
        replayable = False

    claim, env = await dying(3, Once()), Once()
    await play(claim, context(env))
    assert env.stepped == texts(store, claim)[3:] and store.reads.restarts(claim.episode_id) == []
    assert len(texts(store, claim)) == 5


async def test_law_2_an_environment_that_cannot_be_replayed_starts_anew_from_an_old_snapshot(
    store: RunStore, context: Any, dying: Any
) -> None:
    class Once(Saving):
        replayable = False

    settings = {"snapshot_every_turns": 2}
    claim, env = await dying(3, Once(), **settings), Once()
    await play(claim, context(env, **settings))
    (restart,) = store.reads.restarts(claim.episode_id)
    assert "does not promise to be replayable; and of its snapshot: " in restart.reason
    assert len(texts(store, claim)) == 5


async def test_law_2_what_is_answered_differently_after_a_snapshot_is_replayed_whole_or_begun_anew(
    store: RunStore, context: Any, dying: Any
) -> None:
    settings = {"snapshot_every_turns": 2}
    claim = await dying(3, Saving(), **settings)
    other = Saving([*ANSWERS[:2], going("other"), done()])
    await play(claim, context(other, **settings))
    (restart,) = store.reads.restarts(claim.episode_id)
    why = "turn 2 was answered differently: observation"
    assert restart.reason == f"{why}; and of its snapshot: {why}"


async def hang(*_: Any) -> Any:
    await trio.sleep_forever()


async def fail(*_: Any) -> Any:
    raise RuntimeError("a bug")


@pytest.mark.parametrize("trouble", [hang, fail])
async def test_a_snapshot_that_cannot_be_restored_is_replaced_by_a_replay_in_a_fresh_environment(
    store: RunStore, context: Any, dying: Any, trouble: Any, autojump_clock: MockClock
) -> None:
    claim, envs = await dying(3, Saving()), [Saving(), Saving()]
    envs[0].restore = trouble
    waiting, place = list(envs), context(Saving(), step_deadline_s=20)
    object.__setattr__(place, "make_env", lambda task: waiting.pop(0))
    assert (await play(claim, place)).stop_reason is StopReason.DONE
    assert [env.closed for env in envs] == [1, 1]
    assert envs[0].stepped == [] and envs[1].stepped == texts(store, claim)
    assert store.reads.restarts(claim.episode_id) == []


async def large(*_: Any) -> Any:
    return b"x" * 1001


async def of_another_kind(*_: Any) -> Any:
    return "text"


@pytest.mark.parametrize("trouble", [hang, fail, large, of_another_kind])
async def test_law_3_an_environment_whose_snapshot_fails_goes_on_and_is_not_asked_again(
    store: RunStore, context: Any, claim_one: Any, trouble: Any, autojump_clock: MockClock
) -> None:
    """The policy may have caused it: it fills the box that is to be packed."""
    env, claim, asked = Saving(), claim_one(), list[int]()

    async def snapshot() -> Any:
        asked.append(1)
        return await trouble()

    env.snapshot = snapshot
    ending = await play(claim, context(env, step_deadline_s=20))
    assert ending.stop_reason is StopReason.DONE and len(asked) == 1
    assert store.reads.trajectory(claim.episode_id).outcome == 1.0


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (hang, "test/Env: snapshot took over 20 s"),
        (fail, f"test/Env: snapshot raised RuntimeError: a bug ({__file__}:{fail.__code__.co_firstlineno + 1})"),
        (large, "it has 1001 bytes, more than 1000"),
        (of_another_kind, "it is a str, not bytes"),
    ],
)
async def test_an_episode_that_cannot_be_saved_nor_replayed_begins_anew_with_both_reasons(
    store: RunStore, context: Any, dying: Any, trouble: Any, words: str, autojump_clock: MockClock
) -> None:
    class Once(Saving):
        replayable = False

    first, settings = Once(), {"step_deadline_s": 20}
    first.snapshot = trouble
    claim = await dying(2, first, **settings)
    assert store.journal.unsaved(claim.episode_id) == f"no snapshot from turn 0 on: {words}"
    await play(claim, context(Once(), **settings))
    (restart,) = store.reads.restarts(claim.episode_id)
    assert restart.reason == f"test/Env does not promise to be replayable; no snapshot from turn 0 on: {words}"
    assert store.journal.unsaved(claim.episode_id) == ""


async def test_an_environment_is_told_before_its_reset_how_large_a_snapshot_may_be(
    context: Any, claim_one: Any
) -> None:
    told = list[int]()

    class Told(Saving):
        snapshot_bytes = -1

        async def areset(self, *, seed: int | None = None, options: Any = None) -> Any:
            told.append(self.snapshot_bytes)
            return await super().areset(seed=seed, options=options)

    await play(claim_one(), context(Told()))
    await play(claim_one(), context(Told(), snapshot_every_turns=0))
    assert told == [1000, 0]


async def test_no_snapshot_is_taken_where_none_is_wanted_or_offered(context: Any, claim_one: Any) -> None:
    never, other = Saving(), Saving()
    other.has_snapshots = False
    await play(claim_one(), context(never, snapshot_every_turns=0))
    await play(claim_one(), context(other))
    assert never.calls == other.calls == ["reset"]


async def test_the_seconds_of_the_policy_are_those_of_the_whole_episode(
    store: RunStore, context: Any, dying: Any, autojump_clock: MockClock
) -> None:
    async def slow() -> Any:
        await trio.sleep(8)
        return going("slow")

    claim = await dying(2, Saving([slow] * 9), episode_deadline_s=20)
    ending = await play(claim, context(Saving([slow] * 9), episode_deadline_s=20))
    assert ending.stop_reason is StopReason.TIME_LIMIT
    assert len(texts(store, claim)) == 3


async def test_law_2_a_snapshot_is_kept_under_the_fence_and_leaves_with_its_episode(
    store: RunStore, context: Any, dying: Any
) -> None:
    claim = await dying(2, Saving())
    assert store.journal.snapshot(claim.episode_id) == EnvSnapshot(
        turn=1, data=json.dumps(texts(store, claim)).encode(), seconds=pytest.approx(0.0, abs=1.0)
    )
    with pytest.raises(LeaseLost):
        store.journal.keep_snapshot(claim.episode_id, claim.fence - 1, EnvSnapshot(turn=2, data=b"of a dead worker"))
    assert store.journal.snapshot(claim.episode_id).turn == 1  # type: ignore[union-attr]
    await play(claim, context(Saving()))
    assert store.journal.snapshot(claim.episode_id) is None
    with sqlite3.connect(store.path) as connection:
        connection.execute("INSERT INTO snapshots VALUES (?, 0, 0.0, x'00')", (claim.episode_id,))
    assert [one.detail for one in audit(store).violations] == ["episode 1 ended with a snapshot"]


@pytest.mark.parametrize("answered", [False, True])
async def test_law_2_an_action_that_another_worker_repeats_bears_the_same_key(
    store: RunStore, context: Any, dying: Any, answered: bool
) -> None:
    """A service that keeps results by key does each action's work once."""
    by_key, worked = dict[str, str](), list[str]()

    class Serviced(ScriptedEnv):
        action_id = ""

        async def astep(self, action: str) -> Any:
            if self.action_id not in by_key:
                by_key[self.action_id] = action
                worked.append(action)
            assert by_key[self.action_id] == action
            return await super().astep(action)

    claim = await dying(2, Serviced(ANSWERS), answered=answered)
    assert len(worked) == 2 + (not answered)
    await play(claim, context(Serviced(ANSWERS)))
    assert worked == texts(store, claim) and len(by_key) == 5
    assert store.reads.restarts(claim.episode_id) == []
