"""A turn's id: one word for it, from before its environment sees it until long after its episode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.errors import PolicyFault
from agentrl.records import StopReason, Trajectory, turn_id
from agentrl.rollout.episode import play
from agentrl.run.reporting.report import transcript
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
        known.append(ids(store.reads.trajectory(claim.episode_id)))
        return going()

    judged: list[Trajectory] = []

    def rewarder(trajectory: Trajectory) -> float:
        judged.append(trajectory)
        return 1.0

    await play(claim, context(ScriptedEnv([looks, looks, done()]), rewarder=rewarder))
    first, second, third = ids(store.reads.trajectory(claim.episode_id))
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
    before = ids(store.reads.trajectory(first.episode_id))
    second = next(c for c in store.leases.claim("second", 2, lease_s=10, now=11.0) if c.episode_id == first.episode_id)
    with pytest.raises(Killed):
        await play(second, context(ScriptedEnv([going(), going(), Killed()])))
    resumed = ids(store.reads.trajectory(first.episode_id))
    assert (len(before), resumed[:2], len(resumed)) == (2, before, 3)

    third = next(c for c in store.leases.claim("third", 2, lease_s=10, now=22.0) if c.episode_id == first.episode_id)
    await play(third, context(ScriptedEnv([done()], start="it begins otherwise")))
    (anew,) = ids(store.reads.trajectory(first.episode_id))
    assert anew not in resumed
    (restart,) = store.reads.restarts(first.episode_id)
    assert [turn.id for turn in restart.turns] == resumed


def test_a_turn_is_not_journaled_under_an_id_that_is_not_its_own(store: RunStore, claim_one: Any) -> None:
    claim = claim_one()
    store.journal.begin(claim.episode_id, claim.fence, ())
    stranger = replace(turn(0, 1), id=turn_id(claim.episode_id + 1, 0, 0))
    with pytest.raises(StoreError, match=r"its id is '\d+\.0\.0', not '\d+\.0\.0'"):
        store.journal.journal_turn(claim.episode_id, claim.fence, stranger)


class Working(ScriptedEnv):
    """Declares its work; `work` maps the number of actions so far to files, or raises."""

    def __init__(self, answers: Any, work: Any) -> None:
        super().__init__(answers)
        self.work = work

    async def artifacts(self) -> Any:
        return self.work(len(self.actions))


async def test_the_work_of_each_turn_is_kept_before_its_answer_if_a_source_tests_it(
    store: RunStore, claim_one: Any, context: Any
) -> None:
    def work(turns: int) -> dict[str, bytes]:
        assert store.reads.trajectory(1).turns[-1].step is None, "a turn that waits for a score has its work"
        return {"module.py": b"x" * turns}

    await play(claim_one(), replace(context(Working([going(), done()], work)), artifacts=True))
    assert [store.journal.artifacts(f"1.0.{turn}") for turn in (0, 1)] == [{"module.py": b"x"}, {"module.py": b"xx"}]


@pytest.mark.parametrize(
    "spoilt",
    [
        PolicyFault("it is a folder now"),
        {"module.py": b"x" * (2 << 20)},
        {f"{n}.py": b"" for n in range(1001)},
        {"x" * (2 << 20): b""},
    ],
    ids=["folder", "bytes", "files", "paths"],
)
async def test_work_that_the_policy_made_unreadable_is_empty_and_the_episode_stays(
    store: RunStore, claim_one: Any, context: Any, spoilt: Any
) -> None:
    def work(_: int) -> Any:
        if isinstance(spoilt, Exception):
            raise spoilt
        return spoilt

    await play(claim_one(), replace(context(Working([done()], work)), artifacts=True))
    assert store.journal.artifacts("1.0.0") == {} and store.reads.trajectory(1).scored


async def test_work_that_is_no_bytes_is_the_environments_failure(store: RunStore, claim_one: Any, context: Any) -> None:
    await play(claim_one(), replace(context(Working([done()], lambda _: {"module.py": "text"})), artifacts=True))
    assert store.reads.trajectory(1).stop_reason is StopReason.ENV_FAILED


async def test_without_such_a_source_nobody_asks_for_the_work(store: RunStore, claim_one: Any, context: Any) -> None:
    await play(claim_one(), context(Working([done()], lambda _: 1 / 0)))
    assert store.journal.artifacts("1.0.0") is None and store.reads.trajectory(1).scored
