"""Past selves in an episode: who plays, what is asked of the engine, and what is trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.algos.grpo import GRPO
from agentrl.config.league import LeagueSettings, Member, to_json
from agentrl.learner.data.batch import group_rows
from agentrl.records import Task
from agentrl.rollout.episode import play
from agentrl.rollout.opponents import Opponents
from agentrl.run.league import game
from agentrl.store import RunStore, run_values
from tests.parts.fake_engine import FakeEngine

from .test_roles import Table
from .test_roles import game as game_of

LEAGUE = Opponents(settings=LeagueSettings(rule="latest"), plays={"bob": "league"})


def know(store: RunStore, *versions: int) -> None:
    """Members that joined before any group was admitted."""
    while store.versions.mint_version(0).version < max(versions):
        pass
    store.set_meta(run_values.LEAGUE.key, to_json([Member(version=version, step=-1) for version in (0, *versions)]))


async def test_a_past_self_plays_its_role_and_is_not_trained(store: RunStore, claim_one: Any, context: Any) -> None:
    know(store, 4)
    engine = FakeEngine(version=1)
    for _ in range(2):
        place = replace(context(game_of(), engine), opponents=LEAGUE)
        claim = claim_one()
        await play(claim, place)
    assert [request.version for request in engine.requests] == [None, 4] * 4
    assert all(request.policy is None for request in engine.requests)
    group = store.reads.group(claim.group_id)
    assert [[turn.learns for turn in member.turns] for member in group.trajectories] == [[True, False] * 2] * 2
    assert group.trajectories[0].outcome == 1.0, "the outcome of the one role that learns"
    rows = group_rows(group, GRPO(baseline="none"), step_of=store.versions.step_of, step_now=0, max_lag=0).rows
    assert [len(row.place_S) for row in rows] == [
        sum(len(turn.token_ids) for turn in member.turns if turn.role == "ann") for member in group.trajectories
    ]


async def test_an_episode_keeps_the_past_self_that_it_began_with(store: RunStore, claim_one: Any, context: Any) -> None:
    """Its worker dies; a newer one has joined until another goes on."""

    class Killed(BaseException):
        pass

    async def die() -> Any:
        raise Killed

    know(store, 4)
    answers, engine = game_of().answers, FakeEngine(version=4)
    first = claim_one("first", now=0.0)
    with pytest.raises(Killed):
        place = context(Table([*answers[:2], die], start="ann, begin"), engine)
        await play(first, replace(place, opponents=LEAGUE))
    know(store, 4, 5)
    second = next(c for c in store.leases.claim("second", 2, lease_s=10, now=11.0) if c.episode_id == first.episode_id)
    await play(second, replace(context(game_of(), engine), opponents=LEAGUE))
    assert [request.version for request in engine.requests if request.version is not None] == [4, 4]


async def test_a_group_meets_members_that_were_there_when_it_was_admitted(store: RunStore, claim_one: Any) -> None:
    store.set_meta(run_values.LEAGUE.key, to_json([Member(version=version, step=version) for version in (0, 4, 5)]))
    told, claimed = _Told(store), claim_one()
    for step, expected in ((0, 0), (4, 0), (5, 4), (9, 5)):
        claim = replace(claimed, started_step=step)
        assert await LEAGUE.version(told, claim, "bob", (), None) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("measured", "expected"), [("first", 0), ("latest", 5), ("drawn", 4)])
async def test_evaluation_meets_the_member_that_the_settings_say(
    store: RunStore, claim_one: Any, measured: Any, expected: int
) -> None:
    store.set_meta(run_values.LEAGUE.key, to_json([Member(version=version, step=version) for version in (0, 4, 5)]))
    league = replace(LEAGUE, settings=LeagueSettings(rule=f"{__name__}:second", measured=measured, share=0.001))
    claim = replace(claim_one(), purpose="eval:held_out:after", started_step=9)
    assert await league.version(_Told(store), claim, "bob", (), None) == expected  # type: ignore[arg-type]
    assert await league.version(_Told(store), claim, "ann", (), None) is None  # type: ignore[arg-type]


def second(members: Any) -> list[float]:
    return [0.0, 1.0, *[0.0 for _ in members[2:]]]


async def test_a_role_that_either_plays_learns_in_the_groups_that_draw_it(store: RunStore, context: Any) -> None:
    league = Opponents(settings=LeagueSettings(), plays={"ann": "either", "bob": "either"})
    learned: dict[str, int] = {"ann": 0, "bob": 0}
    store.groups.add_groups([Task(index=at, env="test/any", seed=at) for at in range(16)], size=1, purpose="train")
    for claim in store.leases.claim("w", 16, lease_s=10, now=0.0):
        await play(claim, replace(context(game_of(), FakeEngine(version=1)), opponents=league))
        turns = store.reads.trajectory(claim.episode_id).turns
        (role,) = {turn.role for turn in turns if turn.learns}
        assert league.roles(claim) == {"ann", "bob"} - {role}
        assert store.reads.trajectory(claim.episode_id).outcome == {"ann": 1.0, "bob": -1.0}[role]
        past = {"ann", "bob"} - {role}
        assert game(store.reads.trajectory(claim.episode_id), past, version=7) == (0, float(role == "ann")), (
            "ann has won"
        )
        learned[role] += 1
    assert min(learned.values()) > 0


async def test_a_game_in_which_no_past_self_acted_is_one_against_the_member_that_it_was_to_meet(
    store: RunStore, claim_one: Any, context: Any
) -> None:
    claim = claim_one()
    await play(claim, context(game_of(), FakeEngine(version=1)))
    assert game(store.reads.trajectory(claim.episode_id), {"bob"}, version=7) == (7, 1.0)


class _Told:
    def __init__(self, store: RunStore) -> None:
        self._store = store

    async def meta(self, key: str) -> str | None:
        return self._store.meta(key)
