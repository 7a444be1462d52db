"""A run store of several databases: whole groups are spread over them, so that each journals a share of the turns.

Every database is a run store of its own groups, with all that belongs to them; `shards` says which has which. The first
one is the control store, too: it has what belongs to no group (values, metrics, versions, checkpoints, the fence of the
learner, the next task). Versions, checkpoints, sources and the attempt are written to the others as well, so that what
a database does for its groups needs no other: a journal write, an ending, a claim, a take are transactions of one.

No transaction spans two databases. A call that writes to several is safe to be cut off between any two:

    take        the groups of a step come database by database, and its lineage may be in some of them only. Nothing was
                trained: the learner trains after the last one. Whoever goes on from a checkpoint undoes every later
                step in every database (`stands_beyond` asks all), and each refuses a learner that another followed.
    checkpoint  the control store hears of it last. Until then the run goes on from the folder or from the one before,
                and marks or undoes the step everywhere.
    rollback    the control store is last; until then some database stands beyond the step, and it is done again.
    mint        the control store gives the number; the others have it before anybody is told.
    move in     a group of another run always comes into the same database, in one transaction; its versions were minted
                before, and are known to be the same at the next try.
    admit       a task belongs to database (index modulo n), which notes with the groups up to which task it has come;
                the control store is last, and tasks that are there already are passed over.

A call that needs all databases waits for one that is away (`cluster.store_deadline_s`): claims, takes and admission
do. Episodes whose own database answers go on meanwhile.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from agentrl.errors import StoreAway
from agentrl.records import Group, Task, WeightVersion
from agentrl.store import RunStore
from agentrl.store.buffer.admission import Bounds, Load, Room, admissible_groups
from agentrl.store.buffer.buffer import Expired
from agentrl.store.buffer.closing import FULL, ClosePolicy
from agentrl.store.buffer.group_order import OLDEST, Chosen, TakeOrder, choose
from agentrl.store.buffer.no_signal import Returns
from agentrl.store.databases.database import Database
from agentrl.store.episodes.groups import create_again, create_group, load_of, next_task, without
from agentrl.store.episodes.leases import Claim, Free, to_claim
from agentrl.store.episodes.replays import lost_groups, quarantined
from agentrl.store.episodes.worker_deaths import Released
from agentrl.store.recovery import Saved
from agentrl.store.schema import SET_META
from agentrl.store.sharded.placement import goes_on_at, home, next_id
from agentrl.store.sharded.reads import ATTEMPT, ShardedReads, each, summed
from agentrl.store.transfer import MovedGroup
from agentrl.store.versions import latest_confirmed

_RETURNS = Returns()


class ShardedStore(ShardedReads):
    """A run's store in several databases."""

    def restart_group(self, episode_id: int, fence: int, max_replays: int) -> bool:
        self._keep_pace(home(episode_id, len(self._shards)))
        return self.shard_of(episode_id).restart_group(episode_id, fence, max_replays)

    def fork(self, episode_id: int, *, turn: int, k: int) -> int:
        self._keep_pace(home(episode_id, len(self._shards)))
        return self.shard_of(episode_id).fork(episode_id, turn=turn, k=k)

    def move_in(self, run: str, group: MovedGroup, steps: Mapping[int, int]) -> int | None:
        self.check_in(run, group)
        at = zlib.crc32(f"{run}:{group.id}".encode()) % len(self._shards)  # the same one each time, and so once
        if self._shards[at].came_in(run, group):
            return None
        versions = self._shards[0].versions_here(run, group, steps)
        self._same_versions()
        self._keep_pace(at)
        return self._shards[at].take_in(run, group, versions)

    # --- admission

    def admissible(self, bounds: Bounds, *, limit: int) -> Room:
        return self._room_of_all(bounds, limit)[0]

    def admit(
        self, tasks: Sequence[Task], *, first: int, bounds: Bounds, limit: int, skipped: Collection[int] = ()
    ) -> int:
        room, step, lost = self._room_of_all(bounds, limit)
        if room.first != first:
            return 0
        new, n, started = tasks[: room.groups - room.replays], len(self._shards), 0
        known, there = set[str]().union(*self._ask(quarantined)), self._ask(next_task)
        plan: dict[int, list[tuple[int, int | None, int, Task | None]]] = defaultdict(list)
        group_id, episode_id = self._highest()
        for again in lost:
            group_id = next_id(group_id, shard := home(again, n), n)
            plan[shard].append((group_id, again, 0, None))
        for index, task in enumerate(new, first):
            if index >= there[shard := index % n] and without(known, [task], skipped):
                group_id = next_id(group_id, shard, n)
                plan[shard].append((group_id, None, index, task))
        for shard in [*(shard for shard in sorted(plan, reverse=True) if shard), 0]:
            db = self._shards[shard]._db
            with db.write():
                comes, waiting = next_task(db), set(lost_groups(db, bounds.max_replays))
                goes_on_at(db, "episodes", next_id(episode_id, shard, n), n)
                for id, again, index, task in plan[shard]:
                    if (again not in waiting) if task is None else index < comes:
                        continue  # somebody else has started it
                    goes_on_at(db, "groups", id, n)
                    if task is not None:
                        create_group(db, task, bounds.group_size, "train", step)
                    elif again is not None:
                        create_again(db, again, bounds.group_size, step)
                    started += 1
                db.execute(SET_META, ("next_task", str(max(comes, first + len(new)))))
        return started

    def _room_of_all(self, bounds: Bounds, limit: int) -> tuple[Room, int, list[int]]:
        """The room, the step of the weights that sample now, and the groups to be played again."""
        with self._db.read():
            version, first = latest_confirmed(self._db), next_task(self._db)
        if version is None:
            return Room(0, 0, first), 0, []
        loads = self._ask(lambda db: load_of(db, bounds))
        load = Load(
            running_episodes=sum(one.running_episodes for one in loads),
            running_groups=sum(one.running_groups for one in loads),
            accepted_groups=sum(one.accepted_groups for one in loads),
            buffered_tokens=sum(one.buffered_tokens for one in loads),
        )
        groups = max(0, min(admissible_groups(load, bounds, step=version.step), limit))
        known = set[str]().union(*self._ask(quarantined)) if groups else set[str]()
        lost = self._ask(lambda db: lost_groups(db, bounds.max_replays, known)) if groups else []
        again = sorted(chain(*lost))[:groups]
        return Room(groups, len(again), first), version.step, again

    def _highest(self) -> tuple[int, int]:
        """The highest numbers of a group and of an episode."""
        row = "SELECT (SELECT COALESCE(MAX(id), 0) FROM groups), (SELECT COALESCE(MAX(id), 0) FROM episodes)"
        groups, episodes = zip(*self._ask(lambda db: db.rows(row)[0]), strict=True)
        return max(groups), max(episodes)

    def _keep_pace(self, shard: int) -> None:
        """Let the next group of a database have a higher number than all there are, as the order of numbers is that of
        admission."""
        n, db = len(self._shards), self._shards[shard]._db
        groups, episodes = self._highest()
        with db.write():
            goes_on_at(db, "groups", next_id(groups, shard, n), n)
            goes_on_at(db, "episodes", next_id(episodes, shard, n), n)

    def add_groups(self, tasks: Iterable[Task], *, size: int, purpose: str) -> list[int]:
        shard = zlib.crc32(purpose.encode()) % len(self._shards)  # an evaluation is in one database, and so whole
        self._keep_pace(shard)
        return self._shards[shard].add_groups(tasks, size=size, purpose=purpose)

    rename_purpose = each(RunStore.rename_purpose)

    # --- claims

    def claim(
        self, worker: str, limit: int, *, lease_s: float, now: float | None = None, ahead: int | None = None
    ) -> list[Claim]:
        now, end = self._db.clock() if now is None else now, self._first_too_early(ahead)
        free = to_claim((shard.claimable(worker, limit, now=now, end=end) for shard in self._shards), limit)
        chosen: dict[RunStore, list[Free]] = defaultdict(list)
        for one in free:
            chosen[self.shard_of(one.id)].append(one)
        claims: list[Claim] = []
        for shard, own in chosen.items():
            try:
                claims += shard.claim_of(worker, own, lease_s=lease_s, now=now, end=end)
            except StoreAway:
                if not claims:
                    raise
                break  # those that were claimed are this worker's, who has to know of them
        place = {one.id: at for at, one in enumerate(free)}
        return sorted(claims, key=lambda one: place[one.episode_id])

    def _first_too_early(self, ahead: int | None) -> float:
        """The id of the first training group that is too early to be played (see `claim`)."""
        if ahead is None:
            return math.inf
        with self._db.read():
            version = latest_confirmed(self._db)
        step = 0 if version is None else version.step
        found = sorted(chain(*(shard.next_untrained(step, ahead + 1) for shard in self._shards)))
        return found[ahead] if len(found) > ahead else math.inf

    def renew(self, worker: str, *, lease_s: float, now: float | None = None) -> frozenset[int]:
        return frozenset(chain(*(shard.renew(worker, lease_s=lease_s, now=now) for shard in self._shards)))

    hand_back = summed(RunStore.hand_back)

    def release_worker(self, worker: str, *, max_deaths: int = 3, elsewhere: Sequence[Any] = ()) -> Released:
        aboard = [shard.aboard(worker) for shard in self._shards]
        found: list[Released] = []
        for at, shard in enumerate(self._shards):
            others = [*elsewhere, *chain(*aboard[:at], *aboard[at + 1 :])]
            found.append(shard.release_worker(worker, max_deaths=max_deaths, elsewhere=others))
        if any(one.quarantined for one in found):
            for shard, one in zip(self._shards, found, strict=True):
                if not one.quarantined:
                    shard.clear_suspects()
        return Released(
            episodes=sum(one.episodes for one in found),
            quarantined=tuple(chain(*(one.quarantined for one in found))),
            foretold=any(one.foretold for one in found),
        )

    def release_all(self) -> int:
        found = sum(shard.release_all() for shard in reversed(self._shards))
        self._same_attempt()
        return found

    shift_deadlines = each(RunStore.shift_deadlines)
    clear_suspects = each(RunStore.clear_suspects)

    # --- the learner

    def lead(self) -> None:
        super().lead()
        assert self._db.leads is not None
        for shard in self._shards[1:]:
            shard.follow(self._db.leads)
        self._same_versions()

    def take(
        self,
        step: int,
        n: int,
        *,
        max_lag: int,
        order: TakeOrder = OLDEST,
        returns: Returns = _RETURNS,
        skip_at_most: int = 0,
    ) -> list[Group] | None:
        offers = [shard.offered(step, n, max_lag=max_lag, returns=returns) for shard in self._shards]
        chosen = choose(offers, step, n, order, skip_at_most)
        if chosen is None:
            return None
        found, now, highest = list[Group](), self._db.clock(), max(self._ask(_last_taken))
        for at, shard in enumerate(self._shards):  # numbers of the lineage rise in the order of the step's groups
            picks = chosen.picks and [pick for pick in chosen.picks if self.shard_of(pick.group_id) is shard]
            if picks:
                with shard._db.write():
                    goes_on_at(shard._db, "lineage", next_id(highest, at, len(self._shards)), len(self._shards))
            found += shard.leave(step, Chosen(picks, chosen.skips), max_lag=max_lag, returns=returns, now=now) or []
            highest = max(highest, self._ask_one(shard, _last_taken))
        if chosen.picks is None:
            return None
        return [one for one in found if not one.skipped] + sorted(
            (one for one in found if one.skipped), key=lambda one: one.id
        )

    def reconcile(self, saved: Sequence[Saved], *, max_lag: int) -> int:
        def of(shard: RunStore) -> list[Saved]:
            return [
                replace(
                    one, episodes=tuple(tuple(id for id in ids if self.shard_of(id) is shard) for ids in one.episodes)
                )
                for one in saved
            ]

        return sum(shard.reconcile(of(shard), max_lag=max_lag) for shard in self._shards)

    def checkpoint(self, step: int, version: WeightVersion | int, path: str | Path) -> None:
        self._same_versions()
        for shard in reversed(self._shards):
            shard.checkpoint(step, version, path)

    def stands_beyond(self, step: int) -> bool:
        return any(shard.stands_beyond(step) for shard in self._shards)

    def rollback(self, step: int, *, ahead: int | None = None) -> int:
        self._same_versions()
        self._same_attempt()
        attempt = [shard.rollback(step) for shard in reversed(self._shards)][-1]
        if ahead is not None:
            found = sorted(chain(*(shard.next_untrained(step, ahead + 1) for shard in self._shards)))
            for shard in self._shards if len(found) > ahead else ():
                shard.hold_back(found[ahead])
        return attempt

    def _same_attempt(self) -> None:
        attempts = self._ask(lambda db: db.rows(ATTEMPT)[0][0])
        for shard, own in zip(self._shards, attempts, strict=True):
            if own < max(attempts):
                shard.set_meta("attempt", str(max(attempts)))

    def mint_version(self, step: int, path: str | Path | None = None) -> WeightVersion:
        minted = super().mint_version(step, path)
        self._same_versions()
        return minted

    def confirm_version(self, version: WeightVersion | int) -> None:
        self._same_versions()
        for shard in reversed(self._shards):
            shard.confirm_version(version)

    def _same_versions(self) -> None:
        """Give all databases the versions that the control store has minted."""
        newest = self._ask(lambda db: db.rows("SELECT COALESCE(MAX(version), 0) FROM versions")[0][0])
        for shard, own in zip(self._shards[1:], newest[1:], strict=True):
            if own < newest[0]:
                names = "version, step, path, attempt, minted_s, confirmed_s, undone_attempt"
                with self._db.read():
                    rows = self._db.rows(f"SELECT {names} FROM versions WHERE version > ? ORDER BY version", (own,))
                with shard._db.write(durable=True):
                    sql = f"INSERT INTO versions ({names}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
                    shard._db.execute_many(sql, rows)

    retain = summed(RunStore.retain)
    hold_back = each(RunStore.hold_back)

    # --- deadlines, sources

    def expire(self, now: float, group_deadline_s: float, *, close_policy: ClosePolicy = FULL) -> Expired:
        found = [shard.expire(now, group_deadline_s, close_policy=close_policy) for shard in self._shards]
        return Expired(
            closed=tuple(sorted(id for one in found for id in one.closed)),
            groups=tuple(sorted(id for one in found for id in one.groups)),
            members=tuple(sorted(id for one in found for id in one.members)),
        )

    end_late = summed(RunStore.end_late)
    declare_sources = each(RunStore.declare_sources)

    def expire_sources(self, now: float) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for shard in self._shards:
            for source, ids in shard.expire_sources(now).items():
                found.setdefault(source, []).extend(ids)
        return {source: sorted(ids) for source, ids in found.items()}


def _last_taken(db: Database) -> int:
    return db.rows("SELECT COALESCE(MAX(id), 0) FROM lineage")[0][0]
