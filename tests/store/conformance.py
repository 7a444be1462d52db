"""What every implementation of the run store keeps, role by role. Knows protocols and plain data, and no database.

An implementation gives `Offer`: one handle for each role, on the same new store. Import `*` into a test module with a
fixture `offer`, see `test_conformance`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from agentrl.env.image_parts import png
from agentrl.env.tasks import Seeds
from agentrl.errors import LeaseLost, StoreError
from agentrl.records import GroupState, Message, StopReason
from agentrl.rollout.admitter import Admitter
from agentrl.store import FULL, Claim, Ending, EnvSnapshot, EpisodeFilter, Quorum, Requeued, RunStore, Source
from agentrl.store.interfaces import RewardStore, RolloutStore
from agentrl.store.recovery import Saved
from agentrl.tokens import images

from .play import START, answer, bounds, part, turn

__all__ = [
    "test_a_claim_is_one_workers_until_its_lease_ends_and_its_fence_protects_it",
    "test_a_group_at_the_lag_bound_is_waited_for_and_closes",
    "test_a_late_member_is_trained_later_against_its_groups_record",
    "test_a_learner_that_another_has_followed_changes_nothing_any_more",
    "test_a_lost_task_is_played_again_before_new_ones",
    "test_a_rollback_puts_back_what_came_after_it_and_no_more",
    "test_a_sample_of_many_steps_has_the_first_the_last_some_between_and_those_that_are_asked_for",
    "test_a_snapshot_and_a_part_of_a_turn_are_there_for_the_next_worker",
    "test_an_episode_waits_for_its_sources_and_each_score_counts_once",
    "test_each_member_is_trained_once",
    "test_episodes_are_found_by_what_they_have_in_common_and_by_their_texts",
    "test_episodes_that_a_checkpoint_trained_and_the_store_lost_give_their_numbers_to_no_other",
    "test_failures_are_played_again_once_they_are_asked_for",
    "test_images_are_kept_once_and_come_back_with_the_messages",
    "test_waiting_ends_when_there_is_work",
]


@dataclass(frozen=True, slots=True)
class Offer:
    """A store as each role holds it; weights of step 0 are served, as version 1."""

    rollout: RolloutStore
    rewards: RewardStore
    learner: RunStore
    control: RunStore
    read: RunStore


Again = Callable[[], AbstractContextManager[RunStore]]
"""The fixture `store_again`: one more handle of the same store, as another learner's process holds it."""


def admit(offer: Offer, n: int, **changes: Any) -> int:
    return Admitter(offer.control, Seeds("test/Env"), bounds(**changes)).admit(n)


async def claim(offer: Offer, n: int = 99, worker: str = "w", **how: Any) -> list[Claim]:
    return await offer.rollout.claim(worker, n, **{"lease_s": 30.0, **how})


def members(offer: Offer, *groups: int) -> list[int]:
    """The ids of the episodes of groups, as the store numbers them."""
    return sorted(row.id for group in groups for row in offer.read.reads.episodes(group_id=group))


async def play(offer: Offer, one: Claim, *, stop: StopReason = StopReason.DONE, outcome: float | None = 1.0) -> None:
    store, id, fence = offer.rollout, one.episode_id, one.fence
    if one.start is None:
        await store.begin(id, fence, START)
    for index in range(len(one.turns), 2):
        await store.journal_turn(id, fence, turn(index, 1))
        await store.journal_step(id, fence, index, answer(index, last=index == 1))
    await store.finish(id, fence, Ending(stop_reason=stop, outcome=outcome, success=None))


async def test_a_claim_is_one_workers_until_its_lease_ends_and_its_fence_protects_it(offer: Offer) -> None:
    admit(offer, 1)
    first = await claim(offer, now=0.0)
    assert len(first) == 2
    assert await claim(offer, worker="other", now=29.0) == [], "somebody has them"
    assert await offer.rollout.renew("w", lease_s=30.0, now=20.0) == {one.episode_id for one in first}
    assert await claim(offer, worker="other", now=49.0) == []
    second = await claim(offer, worker="other", now=51.0)
    assert [one.episode_id for one in second] == [one.episode_id for one in first]
    with pytest.raises(LeaseLost):
        await play(offer, first[0])
    await play(offer, second[0])
    with pytest.raises(LeaseLost):
        await play(offer, second[0])
    assert await offer.rollout.hand_back("other") == 1
    (third,) = await claim(offer, worker="third", now=51.0)
    assert third.episode_id == second[1].episode_id


async def test_a_snapshot_and_a_part_of_a_turn_are_there_for_the_next_worker(offer: Offer) -> None:
    admit(offer, 1)
    one = (await claim(offer, 1))[0]
    store, id, fence = offer.rollout, one.episode_id, one.fence
    await store.begin(id, fence, START)
    await store.journal_turn(id, fence, turn(0, 1, step=answer(0)))
    await store.keep_snapshot(id, fence, EnvSnapshot(turn=0, data=b"state", seconds=1.5))
    whole = turn(1, 1, 5)
    for at in (0, 2):
        store.post_partial(id, fence, part(whole, at, 2))
    await store.hand_back("w")
    again = next(other for other in await claim(offer, worker="next") if other.episode_id == id)
    assert (len(again.turns), again.start) == (1, START)
    assert again.partial is not None
    assert again.partial.token_ids == whole.token_ids[:4]
    assert await store.snapshot(id) == EnvSnapshot(turn=0, data=b"state", seconds=1.5)
    with pytest.raises(StoreError, match="cannot follow turn"):
        await store.journal_turn(id, again.fence, turn(2, 1))
    await play(offer, again)
    assert await store.snapshot(id) is None
    assert len(offer.read.reads.trajectory(id).turns) == 2


async def test_images_are_kept_once_and_come_back_with_the_messages(offer: Offer) -> None:
    admit(offer, 1)
    one, other = await claim(offer, 2)
    red, blue = (images.read(png(np.full((3, 5, 3), shade, dtype=np.uint8))) for shade in (7, 9))
    start = (Message(role="user", content="Look: ", images=[{"at": 6, "url": red.url}, {"at": 0, "url": blue.url}]),)
    seen = replace(answer(0), observation=start, history=(*start, *START))
    for member in (one, other):
        await offer.rollout.begin(member.episode_id, member.fence, start)
        await offer.rollout.journal_turn(member.episode_id, member.fence, turn(0, 1))
        await offer.rollout.journal_step(member.episode_id, member.fence, 0, seen)
    await offer.rollout.hand_back("w")
    for member in await claim(offer, worker="next"):
        assert (member.start, [turn.step for turn in member.turns]) == (start, [seen])
    assert offer.read.reads.trajectory(one.episode_id).start == start
    assert offer.read.reads.image(red.digest) == red.data
    with pytest.raises(StoreError, match="no image"):
        offer.read.reads.image("0" * 64)
    broken = replace(answer(1), observation=({**start[0], "images": [{"at": 0, "url": "data:image/png;base64,AAAA"}]},))
    with pytest.raises(StoreError, match="observation: data that begin with"):
        await offer.rollout.journal_turn(one.episode_id, one.fence + 1, turn(1, 1, step=broken))


async def test_each_member_is_trained_once(offer: Offer) -> None:
    admit(offer, 3)
    for one in await claim(offer):
        await play(offer, one)
    first = offer.learner.buffer.take(1, 2, max_lag=1) or []
    assert [group.id for group in first] == [1, 2]
    assert offer.learner.buffer.take(2, 2, max_lag=1) is None, "one group is left"
    second = offer.learner.buffer.take(2, 1, max_lag=1) or []
    assert [group.id for group in second] == [3]
    trained = [offer.read.lineage.episodes_of(step) for step in (1, 2)]
    assert trained == [members(offer, 1, 2), members(offer, 3)]
    with pytest.raises(StoreError, match="roll back first"):
        offer.learner.buffer.take(2, 1, max_lag=1)


async def test_episodes_are_found_by_what_they_have_in_common_and_by_their_texts(offer: Offer) -> None:
    admit(offer, 3)
    claims = await claim(offer)
    ids = [one.episode_id for one in claims]
    for one, outcome in zip(claims[:5], (0.5, 0.0, 1.0, 1.0, 0.25), strict=True):
        await play(offer, one, outcome=outcome)
    await offer.rollout.begin(claims[5].episode_id, claims[5].fence, ({"role": "user", "content": 'say "100%"'},))
    offer.learner.buffer.take(1, 1, max_lag=1)
    offer.learner.lineage.checkpoint(1, 1, "there")
    read = offer.read

    def found(by: Any = "episode", *, descending: bool = False, offset: int = 0, limit: int = 9, **what: Any) -> Any:
        rows = read.search.find_episodes(
            EpisodeFilter(**what), by=by, descending=descending, offset=offset, limit=limit
        )
        return [ids.index(row.id) for row in rows]

    assert found("outcome") == [1, 4, 0, 2, 3, 5], "the one without an outcome is last"
    assert found("outcome", descending=True, offset=1, limit=4) == [2, 0, 4, 1]
    assert found("tokens", descending=True, least=0.25, most=0.5) == [4, 0]
    assert found(step=1) == [0, 1] == found(group=1) and found(step=2) == []
    assert found(state="running") == [5] and found(stop_reason=StopReason.DONE) == [0, 1, 2, 3, 4]
    assert found(env="test/Env") == [0, 1, 2, 3, 4, 5] and found(env="test_Env") == [] == found(purpose="eval")
    assert (
        found(least_turns=2, most_turns=2, late=False, dropped=False) == [0, 1, 2, 3, 4] and found(dropped=True) == []
    )
    assert found(role="policy") == [0, 1, 2, 3, 4] and found(role="critic") == [] and read.search.roles() == ["policy"]
    assert found(from_weights=0, to_weights=0) == [0, 1, 2, 3, 4], "weights of step 0 sampled them"
    assert found(from_weights=1) == [] == found(from_weights=0, to_weights=-1)
    assert read.search.outcomes(EpisodeFilter()) == {None: 1, 0.0: 1, 0.25: 1, 0.5: 1, 1.0: 2}
    assert read.lineage.checkpoint_steps() == [1]

    def texts(text: str) -> Any:
        return [ids.index(id) for id in read.search.search_texts(text).ids]

    assert texts("action 1") == texts("Seen 1") == [4, 3, 2, 1, 0] and texts("action 2") == texts("seen _") == []
    assert texts('"100%"') == [5], "what it was asked, with characters that patterns and JSON write otherwise"
    assert [ids.index(id) for id in read.search.search_texts("action", before=ids[2]).ids] == [1, 0]
    late = read.search.search_texts("action", limit=2, budget_s=0.0)
    assert (len(late.ids), late.back_to) == (2, None), "all fit into one look"


async def test_lengths_times_and_relatives_of_an_episode_are_read(offer: Offer) -> None:
    admit(offer, 1)
    first, second = await claim(offer)
    await play(offer, first)
    await offer.rollout.begin(second.episode_id, second.fence, START)
    read = offer.read
    sizes = read.search.turn_sizes(first.episode_id)
    assert [(one.index, one.prompt_tokens, one.tokens, one.versions) for one in sizes] == [
        (index, 3, 3, (1,)) for index in (0, 1)
    ]
    found = read.metrics.activity(1)
    assert found.turns == [(11.0, 11.5, 3)], "the newest turn alone"
    assert sorted(ended is None for _, ended in found.episodes) == [False, True], "one goes on"
    assert read.search.family(first.episode_id) == []
    group = offer.control.groups.fork(first.episode_id, turn=1, k=2)
    forked = members(offer, group)
    again = offer.control.groups.fork(forked[0], turn=1, k=2)
    for id in (first.episode_id, *forked, *members(offer, again)):
        family = read.search.family(id)
        assert [(one.group_id, one.of, one.trial, one.turn) for one in family] == [
            (group, first.episode_id, 0, 1),
            (again, forked[0], 0, 1),
        ]
        assert [list(one.members) for one in family] == [forked, members(offer, again)]


async def test_a_late_member_is_trained_later_against_its_groups_record(offer: Offer) -> None:
    admit(offer, 1, group_size=3)
    fast, other, slow = await claim(offer, now=1000.0)
    for outcome, one in ((0.0, fast), (1.0, other)):
        await play(offer, one, outcome=outcome)
    assert offer.control.buffer.expire(1e10, 1e12, close_policy=FULL).closed == ()
    assert offer.control.buffer.expire(1e10, 1e12, close_policy=Quorum(2, 0.0)).closed == (1,)
    (group,) = offer.learner.buffer.take(1, 1, max_lag=1) or []
    assert [one.member for one in group.trajectories] == [0, 1]
    record = group.record
    assert record is not None
    await play(offer, slow, outcome=7.0)
    (late,) = offer.learner.buffer.take(2, 0, max_lag=1) or []
    assert [one.member for one in late.trajectories] == [2]
    assert late.record == record, "it changes nothing for the others"


async def test_a_group_at_the_lag_bound_is_waited_for_and_closes(offer: Offer) -> None:
    """Weights of step 0 and max_lag 1: step 2 is the last to train them."""
    admit(offer, 1, group_size=3)
    fast, other, hangs = await claim(offer)
    await play(offer, fast)
    await offer.rollout.begin(hangs.episode_id, hangs.fence, START)
    await offer.rollout.journal_turn(hangs.episode_id, hangs.fence, turn(0, 1))
    assert offer.learner.buffer.at_bound(1, max_lag=1, quorum=2) == (0, 0)
    assert offer.learner.buffer.at_bound(2, max_lag=1, quorum=2) == (2, 0)
    await play(offer, other)
    assert offer.learner.buffer.at_bound(2, max_lag=1, quorum=2) == (1, 1), "an action that hangs"
    assert offer.learner.buffer.at_bound(2, max_lag=1, quorum=None) == (1, 0)
    assert offer.learner.buffer.take(1, 1, max_lag=1, close_at_bound=2) is None
    (group,) = offer.learner.buffer.take(2, 1, max_lag=1, close_at_bound=2) or []
    assert [one.member for one in group.trajectories] == [0, 1]
    assert offer.learner.buffer.at_bound(2, max_lag=1, quorum=2) == (1, 0), "it is late, and waited for"


async def test_a_lost_task_is_played_again_before_new_ones(offer: Offer) -> None:
    admit(offer, 1, max_replays=1)
    for one in await claim(offer):
        await play(offer, one, stop=StopReason.ENGINE_FAILED, outcome=None)
    assert offer.read.groups.counts() == {GroupState.FAILED: 1}
    assert admit(offer, 2, max_replays=1) == 2
    rows = sorted(offer.read.reads.episodes("train"), key=lambda row: row.group_id)
    assert [row.task.seed for row in rows][::2] == [0, 0, 1]
    assert offer.read.replays.counts(1).played == 1


async def test_an_episode_waits_for_its_sources_and_each_score_counts_once(offer: Offer) -> None:
    offer.control.scores.declare_sources([Source(name="prm", deadline_s=60.0)])
    admit(offer, 1)
    for one in await claim(offer):
        await play(offer, one)
    assert offer.read.buffer.ready_count() == 0
    turns = await offer.rewards.awaiting("prm", 99)
    assert sorted(turns) == [f"{id}.0.{index}" for id in members(offer, 1) for index in range(2)]
    for id in turns:
        assert await offer.rewards.score(id, "prm", 0.5, took_s=0.1, cost=1.0)
        assert not await offer.rewards.score(id, "prm", 9.0, took_s=0.1, cost=1.0)
    assert offer.read.buffer.ready_count() == 1
    assert [one.value for one in offer.read.scores.recorded("prm")] == [0.5] * 4


async def test_a_learner_that_another_has_followed_changes_nothing_any_more(offer: Offer, store_again: Again) -> None:
    """It was cut off, the next one went on from the last checkpoint, and then it comes back."""
    admit(offer, 2)
    for one in await claim(offer):
        await play(offer, one)
    first, version = offer.learner, offer.learner.versions.current_version()
    first.lineage.lead()
    assert first.buffer.take(1, 1, max_lag=9)
    with store_again() as second:
        second.lineage.lead()
        second.lineage.rollback(0)
        for call in (
            lambda: first.buffer.take(1, 1, max_lag=9),
            lambda: first.buffer.take(1, 9, max_lag=9),  # it waits for more
            lambda: first.versions.mint_version(1),
            lambda: first.versions.confirm_version(version),
            lambda: first.lineage.checkpoint(1, version, "/checkpoints/1"),
            lambda: first.lineage.rollback(0),
            lambda: first.set_meta("max_lag", "9"),
            lambda: first.swap_meta("max_lag", "", "9"),
            lambda: first.metrics.record("step", 1, {}),
            first.lineage.still_leads,
        ):
            with pytest.raises(LeaseLost, match="another learner has begun"):
                call()
        second.lineage.still_leads()
        assert second.buffer.take(1, 2, max_lag=9)
        with pytest.raises(LeaseLost, match="another learner has begun"):
            first.buffer.take(1, 1, max_lag=9)
        second.lineage.checkpoint(1, second.versions.mint_version(1), "/checkpoints/1")
        assert offer.read.lineage.episodes_of(1) == members(offer, 1, 2)


async def test_a_rollback_puts_back_what_came_after_it_and_no_more(offer: Offer) -> None:
    admit(offer, 2)
    for one in await claim(offer):
        await play(offer, one)
    for step in (1, 2):
        assert offer.learner.buffer.take(step, 1, max_lag=9)
        offer.learner.versions.confirm_version(offer.learner.versions.mint_version(step))
        if step == 1:
            offer.learner.lineage.checkpoint(1, offer.learner.versions.current_version(), "/checkpoints/1")
    assert offer.learner.lineage.stands_beyond(1)
    assert offer.learner.lineage.rollback(1) == 2
    assert offer.read.groups.counts() == {GroupState.TRAINED: 1, GroupState.SCORED: 1}
    assert (offer.read.lineage.episodes_of(1), offer.read.lineage.episodes_of(2)) == (members(offer, 1), [])
    assert offer.read.versions.current_version().step == 1
    assert offer.learner.buffer.take(2, 1, max_lag=9)


async def test_episodes_that_a_checkpoint_trained_and_the_store_lost_give_their_numbers_to_no_other(
    offer: Offer,
) -> None:
    """As where an older copy of the store was put back."""
    lost = set(range(1, 25))
    saved = [Saved(previous_step=0, episodes=(tuple(sorted(lost)),))]
    assert offer.learner.recovery.reconcile(saved, max_lag=4) == len(lost)
    assert offer.learner.recovery.reconcile(saved, max_lag=4) == 0, "they are noted"
    assert admit(offer, 6, max_lag=4) == 6
    assert not {one.episode_id for one in await claim(offer)} & lost
    assert offer.learner.versions.mint_version(1).version > 1000, "weights of lost steps had numbers, too"


async def test_waiting_ends_when_there_is_work(offer: Offer) -> None:
    await offer.rollout.wait_for_work("rollout", 60.0)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(offer.rollout.wait_for_work, "rollout", 3600.0)
            await trio.testing.wait_all_tasks_blocked()
            admit(offer, 1)
    assert len(await claim(offer)) == 2


async def test_failures_are_played_again_once_they_are_asked_for(offer: Offer) -> None:
    """A member of an open group, one of a closed group that no step took, and a lost group."""
    admit(offer, 3, groups_per_step=3, group_size=3)
    fails = {(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)}
    for one in await claim(offer):
        failed = (one.group_id, one.member) in fails
        if (one.group_id, one.member) != (1, 2):  # it goes on, so group 1 stays open
            reason, outcome = (StopReason.ENGINE_FAILED, None) if failed else (StopReason.DONE, 1.0)
            await play(offer, one, stop=reason, outcome=outcome)
    first = {group: members(offer, group)[0] for group in (1, 2)}
    found = offer.control.replays.requeue(bounds=bounds())
    assert (found.members, found.late, found.groups, found.left) == ((first[1],), (first[2],), (3,), {})
    left = {"a group of which nothing failed": 2}
    assert offer.control.replays.requeue([1, 2], bounds=bounds()) == Requeued(left=left), "once"
    again = [(one.group_id, one.member, one.trial) for one in await claim(offer, worker="next")]
    assert sorted(again) == [(1, 0, 1), (2, 0, 1), (4, 0, 0), (4, 1, 0), (4, 2, 0)]
    assert offer.read.metrics.endings() == {StopReason.DONE: 3, StopReason.ENGINE_FAILED: 3}


async def test_a_sample_of_many_steps_has_the_first_the_last_some_between_and_those_that_are_asked_for(
    offer: Offer,
) -> None:
    """More rows than one statement reads."""
    written, read = offer.learner.metrics, offer.read.metrics
    for step in range(1, 601):
        written.record("step", step, {"n": step})
    written.record("other", 3, {"n": -1})
    assert read.sample("step", 600) == read.values("step")
    found = [row.step for row in read.sample("step", 80, near=[333, 477], reach=2)]
    assert all(row.values == {"n": row.step} for row in read.sample("step", 80))
    assert found == sorted(set(found)) and len(found) <= 80 + 20
    assert {*range(1, 21), *range(561, 601), *range(331, 336), *range(475, 480)} <= set(found)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert max(gaps) <= 27
    assert [row.step for row in read.sample("step", 1)] and not read.sample("none", 5)
    offer.learner.versions.confirm_version(offer.learner.versions.mint_version(1))
    offer.learner.lineage.checkpoint(1, offer.learner.versions.current_version(), "/checkpoints/1")
    offer.learner.lineage.rollback(1)
    written.record("step", 2, {"n": -2})
    assert [row.values for row in read.sample("step", 80)] == [{"n": 1}, {"n": -2}], "undone steps are none"
