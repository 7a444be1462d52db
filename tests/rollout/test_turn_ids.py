"""A turn's id: one word for it, from before its environment sees it until long after its episode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.records import Trajectory, turn_id
from agentrl.rollout.episode import play
from agentrl.runtime.report import transcript
from agentrl.store import RunStore, StoreError
from tests.store.play import turn

from .conftest import ScriptedEnv, done, going


def ids(trajectory: Trajectory) -> list[str]:
    return [turn.id for turn in trajectory.turns]


async def test_a_turn_has_its_id_before_the_environment_sees_the_action(
    store: RunStore, claim_one: Any, context: Any
) -> None:
    claim = claim_one()
    known: list[list[str]] = []

    async def looks() -> Any:
        known.append(ids(store.trajectory(claim.episode_id)))
        return going()

    judged: list[Trajectory] = []

    def rewarder(trajectory: Trajectory) -> float:
        judged.append(trajectory)
        return 1.0

    await play(claim, context(ScriptedEnv([looks, looks, done()]), rewarder=rewarder))
    first, second, third = ids(store.trajectory(claim.episode_id))
    assert known == [[first], [first, second]]
    assert ids(judged[0]) == [first, second, third]
    assert (first, third) == (turn_id(claim.episode_id, 0, 0), turn_id(claim.episode_id, 0, 2))
    assert f"turn {second}" in transcript(judged[0])


async def test_ids_are_the_same_after_a_resume_and_others_after_a_new_start(
    store: RunStore, claim_one: Any, context: Any
) -> None:
    class Killed(BaseException):
        pass

    first = claim_one("first", now=0.0)
    with pytest.raises(Killed):
        await play(first, context(ScriptedEnv([going(), Killed()])))
    before = ids(store.trajectory(first.episode_id))
    second = next(c for c in store.claim("second", 2, lease_s=10, now=11.0) if c.episode_id == first.episode_id)
    with pytest.raises(Killed):
        await play(second, context(ScriptedEnv([going(), going(), Killed()])))
    resumed = ids(store.trajectory(first.episode_id))
    assert (len(before), resumed[:2], len(resumed)) == (2, before, 3)

    third = next(c for c in store.claim("third", 2, lease_s=10, now=22.0) if c.episode_id == first.episode_id)
    await play(third, context(ScriptedEnv([done()], start="it begins otherwise")))
    (anew,) = ids(store.trajectory(first.episode_id))
    assert anew not in resumed
    (restart,) = store.restarts(first.episode_id)
    assert [turn.id for turn in restart.turns] == resumed


def test_a_turn_is_not_journaled_under_an_id_that_is_not_its_own(store: RunStore, claim_one: Any) -> None:
    claim = claim_one()
    store.begin(claim.episode_id, claim.fence, ())
    stranger = replace(turn(0, 1), id=turn_id(claim.episode_id + 1, 0, 0))
    with pytest.raises(StoreError, match=r"its id is '\d+\.0\.0', not '\d+\.0\.0'"):
        store.journal_turn(claim.episode_id, claim.fence, stranger)
