"""Differences of a potential: they add up to nothing in every episode, and leave the policy gradient what it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from agentrl.config.sections import RewardSource
from agentrl.errors import ConfigError
from agentrl.records import StopReason, Trajectory
from agentrl.rewards.scorer import Scorer, rewarder_of
from agentrl.rewards.shaping import Shaping
from agentrl.run import reward_services
from agentrl.store import Claim, Ending, RunStore
from agentrl.store.journal_writer import JournalWriter
from tests.algos.test_credit import PATHS, expected_estimate
from tests.algos.test_credit import Path as Actions
from tests.rewards.conftest import episode, run_config
from tests.rewards.conftest import turn as said
from tests.rewards.test_sources import eventually
from tests.store.play import START, answer, play, play_all, turn


def potential(seen: Trajectory) -> float:
    """Some number for each state that is not its length."""
    return random.Random(len(seen.turns)).uniform(-5, 5)


def settings(**changes: Any) -> RewardSource:
    return RewardSource(
        **{"source": "phi", "kind": "shaping", "call": "tests.rewards.test_shaping:potential", **changes}
    )


async def serving(store: RunStore, holds: Callable[[], bool], **changes: Any) -> None:
    """Score turns until something holds."""
    own = settings(**changes)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Scorer(own, JournalWriter(store, inline=True), rewarder_of(own)).serve)
        await eventually(holds)
        nursery.cancel_scope.cancel()


def values(store: RunStore, claim: Claim) -> list[float]:
    return [one.scores["phi"] for one in store.reads.trajectory(claim.episode_id).turns]


async def test_a_turn_earns_what_it_changes_in_the_potential_and_the_end_has_none(store: RunStore) -> None:
    first, second = play_all(store, turns=3)
    asked: list[int] = []

    async def counted(seen: Trajectory) -> float:
        asked.append(len(seen.turns))
        return potential(seen)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(Scorer(settings(concurrency=1), JournalWriter(store, inline=True), Shaping(counted)).serve)
        await eventually(lambda: store.buffer.ready_count() == 1)
        nursery.cancel_scope.cancel()
    phi = [random.Random(n).uniform(-5, 5) for n in range(3)]
    for claim in (first, second):
        assert values(store, claim) == pytest.approx([phi[1] - phi[0], phi[2] - phi[1], phi[0] - phi[2]])
        assert sum(values(store, claim)) == pytest.approx(0.0, abs=1e-12)
    assert sorted(asked) == [0, 1, 2], "each state once, and the end never"


async def test_gamma_discounts_the_state_that_a_turn_leads_to() -> None:
    async def length(seen: Trajectory) -> float:
        return 10.0 * len(seen.turns)

    shaping = Shaping(length, gamma=0.5)
    seen = episode(START, said(0, "a"), said(1, "b"))
    assert await shaping(replace(seen, stop_reason=None)) == 0.5 * 20 - 10
    assert await shaping(seen) == -10


async def test_a_turn_is_scored_once_it_is_known_whether_another_follows(
    store: RunStore, autojump_clock: MockClock
) -> None:
    claim, _ = store.leases.claim("worker", 2, lease_s=30.0)
    store.journal.begin(claim.episode_id, claim.fence, START)
    store.journal.journal_turn(claim.episode_id, claim.fence, turn(0, 1, step=answer(0)))
    assert store.scores.awaiting("phi", 9) == ["1.0.0"] and store.scores.awaiting("phi", 9, settled=True) == []
    store.journal.journal_turn(claim.episode_id, claim.fence, turn(1, 1))
    assert store.scores.awaiting("phi", 9, settled=True) == ["1.0.0"]
    await serving(store, lambda: len(store.scores.recorded()) == 1)


@pytest.mark.parametrize("stop", [StopReason.DONE, StopReason.TURN_LIMIT, StopReason.CONTEXT_LIMIT])
async def test_the_sum_is_nothing_however_the_policys_episode_ends(store: RunStore, stop: StopReason) -> None:
    """Also at a limit that was found only after the last answer, which does not say that it was the last."""
    for claim in store.leases.claim("worker", 2, lease_s=30.0):
        store.journal.begin(claim.episode_id, claim.fence, START)
        for index in range(3):
            store.journal.journal_turn(claim.episode_id, claim.fence, turn(index, 1, step=answer(index)))
        store.journal.finish(claim.episode_id, claim.fence, Ending(stop_reason=stop, outcome=0.0, success=False))
    await serving(store, lambda: store.buffer.ready_count() == 1)
    (group,) = store.buffer.take(1, 1, max_lag=1) or []
    for member in group.trajectories:
        assert sum(one.score for one in member.turns) == pytest.approx(0.0, abs=1e-12)


async def test_the_sum_is_nothing_after_turns_were_set_aside(store: RunStore) -> None:
    claim, other = store.leases.claim("worker", 2, lease_s=30.0)
    store.journal.begin(claim.episode_id, claim.fence, START)
    for index in range(2):
        store.journal.journal_turn(claim.episode_id, claim.fence, turn(index, 1, step=answer(index)))
    await serving(store, lambda: len(store.scores.recorded()) == 1)
    store.journal.restart_episode(claim.episode_id, claim.fence, "its worker died")
    store.journal.begin(claim.episode_id, claim.fence, START)
    play(store, replace(claim, start=START), turns=3)
    play(store, other, turns=1)
    await serving(store, lambda: store.buffer.ready_count() == 1)
    assert len(values(store, claim)) == 3
    for one in (claim, other):
        assert sum(values(store, one)) == pytest.approx(0.0, abs=1e-12)


async def test_of_an_episode_whose_scores_come_too_late_none_count(store: RunStore) -> None:
    reward_services.declare(run_config(settings(late="neutral")), store)
    claim, _ = play_all(store, turns=3)
    scorer = Scorer(settings(late="neutral"), JournalWriter(store, inline=True), rewarder_of(settings()))
    await scorer.score("1.0.1")
    assert values_sum(store, claim) != 0.0
    assert store.scores.expire_sources(9e12).keys() == {"phi"}
    await scorer.score("1.0.2")
    assert values_sum(store, claim) == 0.0
    with pytest.raises(ConfigError, match=r"rewards\.late = 'partial': a part of the differences"):
        settings(late="partial")


def values_sum(store: RunStore, claim: Claim) -> float:
    return sum(one.score for one in store.reads.trajectory(claim.episode_id).turns)


async def test_each_role_has_sums_of_its_own() -> None:
    async def length(seen: Trajectory) -> float:
        return float(len(seen.turns)) ** 2

    turns = [said(at, "x", role=role) for at, role in enumerate(["a", "b", "b", "a", "b"])]
    shaping, sums = Shaping(length), {"a": 0.0, "b": 0.0}
    for at, one in enumerate(turns):
        over = all(later.role != one.role for later in turns[at + 1 :])
        seen = replace(episode(START, *turns[: at + 1]), stop_reason=StopReason.DONE if over else None)
        sums[one.role] += await shaping(seen)
    assert sums == {"a": 0.0, "b": 0.0}


def shaped(path: Actions) -> list[float]:
    """The rewards of the shaping source for an episode of the small decision process, by the source itself."""

    async def phi(seen: Trajectory) -> float:
        return random.Random(str([one.text for one in seen.turns])).uniform(-3, 3)

    async def rewards() -> list[float]:
        whole = episode(START, *(said(t, str(action)) for t, action in enumerate(path)))
        shaping = Shaping(phi)
        last = len(path) - 1
        return [
            await shaping(
                replace(whole, turns=whole.turns[: t + 1], stop_reason=StopReason.DONE if t == last else None)
            )
            for t in range(len(path))
        ]

    return trio.run(rewards)


@pytest.mark.parametrize("members", [2, 3])
def test_the_expected_gradient_with_shaping_is_that_without(members: int) -> None:
    """Exactly, over all groups of episodes whose length the policy decides; a potential of any kind."""
    table = {path: shaped(path) for path in PATHS}
    estimate, _ = expected_estimate(members, "leave_one_out", "none", 0.7, table.__getitem__)
    _, unshaped = expected_estimate(2, "leave_one_out", "none", 0.0)
    torch.testing.assert_close(estimate, unshaped, atol=1e-12, rtol=1e-10)
    assert any(abs(value) > 1 for rewards in table.values() for value in rewards)


def test_rewards_that_are_no_differences_change_the_expected_gradient() -> None:
    """The proof that the test above can fail: without the last turn's, which gives the potential back."""
    table = {path: [*shaped(path)[:-1], 0.0] for path in PATHS}
    estimate, _ = expected_estimate(2, "leave_one_out", "none", 0.7, table.__getitem__)
    _, unshaped = expected_estimate(2, "leave_one_out", "none", 0.0)
    assert (estimate - unshaped).abs().max() > 0.05
