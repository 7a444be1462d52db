"""An episode that kills its worker is found, and costs the others nothing (laws 3 and 4)."""

from __future__ import annotations

import pytest

from agentrl.records import GroupState, StopReason, Task
from agentrl.store import Claim, Ending, RunStore
from agentrl.store.audit import audit

from .play import START, admit, answer, play, task, turn

MAX_DEATHS = 3
TURNS = 2


class Died(Exception):
    """What a worker does whose environment kills its process."""


class Workers:
    """One worker after the other, which die of the episodes in `poison` at the step of turn `at` (-1: the reset). All
    that one has claimed advance side by side, a call to the journal at a time."""

    def __init__(self, store: RunStore, poison: set[int], *, at: int = 1, capacity: int = 16) -> None:
        self.store, self.poison, self.at, self.capacity = store, poison, at, capacity
        self.deaths = 0
        self.budget_spent = 0

    def until_all_ended(self) -> None:
        while any(row.stop_reason is None for row in self.store.reads.episodes("train")):
            name = f"worker-0.{self.deaths}"
            try:
                self._live(name)
            except Died:
                self.deaths += 1
                released = self.store.deaths.release_worker(name, max_deaths=MAX_DEATHS)
                self.budget_spent += (not released.foretold) - len(released.quarantined)

    def _live(self, name: str) -> None:
        claims: list[Claim] = []
        while new := self.store.leases.claim(name, self.capacity - len(claims), lease_s=1e6) or claims:
            claims = new if new is claims else claims + new
            claims = [later for claim in claims if (later := self._advance(claim)) is not None]

    def _advance(self, claim: Claim) -> Claim | None:
        id, fence, last = claim.episode_id, claim.fence, len(claim.turns) - 1
        in_env = claim.start is None or (bool(claim.turns) and claim.turns[-1].step is None)
        if id in self.poison and last == self.at and in_env:
            raise Died
        if claim.start is None:
            self.store.journal.begin(id, fence, START)
        elif claim.turns and claim.turns[-1].step is None:
            self.store.journal.journal_step(id, fence, last, answer(last, last=last == TURNS - 1))
        elif len(claim.turns) == TURNS:
            self.store.journal.finish(id, fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True))
            return None
        else:
            self.store.journal.journal_turn(id, fence, turn(last + 1, 1))
        return self.store.leases.reload(claim)


def reasons(store: RunStore) -> dict[int, str | None]:
    return {row.id: row.stop_reason for row in store.reads.episodes("train")}


@pytest.mark.parametrize("at", [-1, 0, 1])
def test_an_episode_that_kills_its_worker_ends_and_the_others_of_that_worker_go_on(store: RunStore, at: int) -> None:
    admit(store, limit=8, max_lag=99)
    workers = Workers(store, {5}, at=at)
    workers.until_all_ended()
    ended = reasons(store)
    assert {id for id, reason in ended.items() if reason == "env_failed"} == {5}
    assert set(ended.values()) == {"env_failed", "done"}
    assert workers.deaths == MAX_DEATHS
    assert workers.budget_spent == 0, "the restart budget is for deaths that no episode explains"
    assert store.groups.counts() == {GroupState.SCORED: 7, GroupState.FAILED: 1}
    assert audit(store).violations == []


@pytest.mark.parametrize("killers", [{2}, {2, 5}, {4, 5, 6}])
def test_law_3_no_episode_is_found_guilty_of_what_another_did_beside_it(store: RunStore, killers: set[int]) -> None:
    """A worker was killed from outside while it made the first one's environment, and the killers come before it."""
    admit(store, limit=3, max_lag=99)
    store.leases.claim("outside", 1, lease_s=1e6)
    store.deaths.release_worker("outside", max_deaths=MAX_DEATHS)
    workers = Workers(store, killers, at=-1)
    workers.until_all_ended()
    assert {id for id, reason in reasons(store).items() if reason == "env_failed"} == killers
    assert workers.deaths <= 2 * MAX_DEATHS * len(killers)
    assert audit(store).violations == []


def test_an_episode_that_is_played_apart_has_nobody_under_suspicion_beside_it(store: RunStore) -> None:
    admit(store, limit=2)
    store.leases.claim("a", 1, lease_s=1e6)
    store.deaths.release_worker("a")
    store.leases.claim("b", 99, lease_s=1e6)
    store.deaths.release_worker("b")  # the second death of 1, the first of 2, 3 and 4
    assert [claim.episode_id for claim in store.leases.claim("c", 99, lease_s=1e6)] == [2, 3, 4]
    assert store.leases.claim("c", 99, lease_s=1e6) == [], "not beside them"
    assert [claim.episode_id for claim in store.leases.claim("d", 99, lease_s=1e6)] == [1], "elsewhere"


def test_a_task_of_which_every_member_kills_ends_with_its_group(store: RunStore) -> None:
    admit(store, limit=3, group_size=4, max_lag=99)
    workers = Workers(store, {5, 6, 7, 8})
    workers.until_all_ended()
    assert {id for id, reason in reasons(store).items() if reason == "env_failed"} == {5, 6, 7, 8}
    assert workers.deaths <= MAX_DEATHS + 3, "the siblings stay under suspicion"
    assert workers.budget_spent <= 1
    assert len(store.deaths.quarantined()) == 1


def test_a_quarantined_task_is_listed_and_not_admitted_again(store: RunStore) -> None:
    """Three tasks over and over, of which that of seed 101 kills."""

    def endless(index: int) -> Task:
        return Task(index=index, env="test/Env-v0", seed=100 + index % 3, options={"level": 2})

    def more(n: int) -> int:
        return admit(store, endless, max_lag=99, max_running=99, limit=n, steps_total=99)

    assert more(3) == 3
    Workers(store, {3, 4}).until_all_ended()
    (found,) = store.deaths.quarantined()
    assert (found.task.seed, found.episode_id) == (101, 3)
    assert found.reason == "test/Env-v0, seed 101: 3 workers in a row died of it after 2 turns"
    assert store.metrics.failures().detail == found.reason
    assert more(4) == 4
    store.close()
    with RunStore.open(store.path) as again:
        assert [row.task.seed for row in again.reads.episodes("train")][6::2] == [100, 102, 100, 102]
        assert len(again.deaths.quarantined()) == 1


def test_where_nothing_but_quarantined_tasks_is_left_nothing_is_admitted(store: RunStore) -> None:
    admit(store, limit=1)
    Workers(store, {1, 2}).until_all_ended()
    assert admit(store, lambda index: task(0), max_lag=99, max_running=99, limit=9, steps_total=99) == 0


def test_it_is_claimed_last_after_a_death(store: RunStore) -> None:
    admit(store, limit=3)
    store.leases.claim("a", 2, lease_s=1e6)
    store.deaths.release_worker("a")
    store.groups.add_groups([task(9)], size=1, purpose="eval")
    assert [claim.episode_id for claim in store.leases.claim("b", 99, lease_s=1e6)] == [7, 3, 4, 5, 6, 1, 2]


def test_law_2_workers_killed_from_outside_cost_no_episode_anything(store: RunStore) -> None:
    """Twenty times, whenever everybody has come a turn further; a long episode sees all of it."""
    admit(store, limit=4)
    for life in range(20):
        claims = store.leases.claim(f"w.{life}", 99, lease_s=1e6)
        assert len(claims) == 8, "all go on at once: nobody is held for guilty"
        for claim in claims:
            if claim.start is None:
                store.journal.begin(claim.episode_id, claim.fence, START)
            elif claim.turns[-1].step is None:
                store.journal.journal_step(claim.episode_id, claim.fence, life - 1, answer(life - 1))
            store.journal.journal_turn(claim.episode_id, claim.fence, turn(life, 1))
        store.deaths.release_worker(f"w.{life}")
    for claim in store.leases.claim("last", 99, lease_s=1e6):
        play(store, claim, turns=21)
    assert set(reasons(store).values()) == {"done"}
    assert store.deaths.quarantined() == []


def test_an_episode_that_starts_anew_each_time_and_dies_is_found_too(store: RunStore) -> None:
    """It cannot be replayed: every life samples its turns again, and comes no further than the one before."""
    admit(store, limit=1)
    for life in range(MAX_DEATHS):
        for claim in store.leases.claim(f"w.{life}", 99, lease_s=1e6):
            if claim.episode_id == 1 and claim.start is not None:
                store.journal.restart_episode(1, claim.fence, "cannot replay")
            if claim.episode_id == 1 or claim.start is None:
                store.journal.begin(claim.episode_id, claim.fence, START)
            for index in range(2 if claim.episode_id == 1 else 0):
                store.journal.journal_turn(1, claim.fence, turn(index, 1, step=None if index else answer(0)))
        store.deaths.release_worker(f"w.{life}", max_deaths=MAX_DEATHS)
    assert [one.episode_id for one in store.deaths.quarantined()] == [1]
    assert audit(store).violations == []


def test_a_stopped_run_holds_nothing_against_its_episodes(store: RunStore) -> None:
    admit(store, limit=1)
    for _ in range(9):
        assert len(store.leases.claim("w", 99, lease_s=1e6)) == 2
        store.deaths.release_all()
    assert store.deaths.quarantined() == []


def test_what_is_known_of_an_episode_outlives_a_resume(store: RunStore) -> None:
    """A run that died of it dies of it once more at most."""
    admit(store, limit=1)
    for life in range(2):
        store.leases.claim(f"w.{life}", 99, lease_s=1e6)
        store.deaths.release_worker(f"w.{life}")
        store.deaths.release_all()
    store.leases.claim("w", 99, lease_s=1e6)
    assert len(store.deaths.release_worker("w").quarantined) == 1


def test_a_worker_that_dies_with_nothing_to_play_spends_its_budget(store: RunStore) -> None:
    released = store.deaths.release_worker("never seen")
    assert (released.episodes, released.quarantined, released.foretold) == (0, (), False)
