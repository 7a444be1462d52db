"""Continuations of an episode from a turn: the environment is brought there, or the fork fails with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.records import GroupState, StopReason
from agentrl.rollout.episode import play
from agentrl.store import Claim, EnvSnapshot, RunStore
from agentrl.store.audit import audit
from tests.parts.fake_engine import FakeEngine
from tests.parts.outside_audit import OutsideAuditor

from .conftest import ScriptedEnv, done, going
from .test_snapshots import ANSWERS, Saving
from .writing import instead


@pytest.fixture
async def forked(store: RunStore, claim_one: Callable[..., Claim], context: Any) -> Callable[..., list[Claim]]:
    """An episode of five turns, and claims of its forks."""
    origin = claim_one()
    await play(origin, context(ScriptedEnv(ANSWERS)))
    await play(claim_one(), context(ScriptedEnv(ANSWERS)))

    def fork(turn: int, k: int = 2) -> list[Claim]:
        store.groups.fork(origin.episode_id, turn=turn, k=k)
        return store.leases.claim("w", k, lease_s=10)

    return fork


async def test_a_fork_goes_on_from_its_turn_in_an_environment_that_was_replayed(
    store: RunStore, context: Any, forked: Any
) -> None:
    for n, claim in enumerate(forked(2)):
        env, engine = ScriptedEnv([*ANSWERS[:2], done(float(n))]), FakeEngine(version=1)
        assert (await play(claim, context(env, engine))).stop_reason is StopReason.DONE
        episode = store.reads.trajectory(claim.episode_id)
        assert [turn.learns for turn in episode.turns] == [False, False, True] and len(engine.requests) == 1
        whole = [*episode.turns[0].prompt_ids, *episode.turns[0].token_ids]
        assert list(engine.requests[0].token_ids[: len(whole)]) == whole, "its prompt is the journaled tokens"
        assert env.actions[:2] == [turn.text for turn in episode.turns[:2]] and episode.outcome == float(n)
    assert store.reads.group(claim.group_id).state is GroupState.SCORED
    assert audit(store).violations == [] and OutsideAuditor(store.path).look(ended=True) == []


async def test_law_3_a_fork_that_cannot_be_brought_to_its_turn_fails_with_the_reason(
    store: RunStore, context: Any, forked: Any
) -> None:
    class Once(ScriptedEnv):
        replayable = False

    other = ScriptedEnv([going("another"), *ANSWERS[1:]])
    for claim, env, words in zip(
        forked(2),
        (other, Once(ANSWERS)),
        ("turn 0 was answered differently: observation", "test/Env does not promise to be replayable"),
        strict=True,
    ):
        engine = FakeEngine(version=1)
        ending = await play(claim, context(env, engine))
        assert ending.stop_reason is StopReason.ENV_FAILED and engine.requests == []
        assert ending.detail == f"a fork cannot be brought to turn 2: {words}"
    assert store.reads.group(claim.group_id).state is GroupState.FAILED and store.reads.restarts(claim.episode_id) == []
    assert audit(store).violations == []


async def test_a_fork_whose_worker_dies_goes_on_like_any_episode(
    store: RunStore, context: Any, forked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    claim = forked(2)[0]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        instead(patch, store, "journal_step", killed)
        await play(claim, context(ScriptedEnv(ANSWERS)))
    (again,) = [one for one in store.leases.claim("v", 9, lease_s=10, now=1e12) if one.episode_id == claim.episode_id]
    assert len(again.turns) == 3 and again.turns[2].learns
    assert (await play(again, context(ScriptedEnv(ANSWERS)))).stop_reason is StopReason.DONE
    assert len(store.reads.trajectory(claim.episode_id).turns) == 5 and audit(store).violations == []


async def test_a_fork_of_a_running_episode_is_restored_from_its_snapshot(
    store: RunStore, context: Any, claim_one: Callable[..., Claim]
) -> None:
    origin, env = claim_one(), Saving()
    await play(origin, context(env))
    group = store.groups.fork(origin.episode_id, turn=2, k=2)
    texts = [turn.text for turn in store.reads.trajectory(origin.episode_id).turns[:2]]
    claims = [one for one in store.leases.claim("w", 9, lease_s=10) if one.group_id == group]
    for claim in claims:
        store.journal.keep_snapshot(claim.episode_id, claim.fence, EnvSnapshot(turn=1, data=json.dumps(texts).encode()))
        own = Saving()
        assert (await play(claim, context(own))).stop_reason is StopReason.DONE
        assert own.calls[0] == "restore" and len(own.stepped) == 3
