"""Which worker plays which episode: claims with a fencing token, leases that a living worker renews.

A lease belongs to one life of a worker, not to an episode: one row to renew, however many episodes it plays. Each
handle of the store is a life of its own, so a worker restarted under an old name does not keep its predecessor's leases
alive. An expired lease takes nothing away by itself: the fence rises only when another worker claims the episode, and
from then on the journal refuses the old worker. So a clock that jumps costs work, never correctness.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from agentrl.errors import LeaseLost
from agentrl.records import NO_TOOLS, Messages, ShownTools, Task, Turn
from agentrl.store.codec import unpack_task, unpack_tools
from agentrl.store.databases.database import Database, StorePart, retried
from agentrl.store.databases.driver import Row
from agentrl.store.episodes.partial_turns import Partial, load_partials
from agentrl.store.reads import Shown, turns_of
from agentrl.store.versions import LATEST_CONFIRMED


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An episode to play or to continue. `turns` are those already journaled, the last one perhaps without its step;
    `partial` holds the tokens of the next turn if it was interrupted; `start` is None if the episode has not begun.
    Every journal call takes `fence`. In a fork, turns from `fork_turn` on are its own (see `Groups.fork`). `resumed`:
    another claim began it, or an earlier attempt of this one. `started_step`: the learner's when the group was
    admitted. `tools` are those that its first conversation offers."""

    episode_id: int
    group_id: int
    member: int
    size: int
    task: Task
    purpose: str
    fence: int
    trial: int
    start: Messages | None
    turns: tuple[Turn, ...]
    partial: Partial | None = None
    fork_turn: int | None = None
    resumed: bool = False
    started_step: int = 0
    tools: ShownTools = NO_TOOLS


class Free(NamedTuple):
    """An episode that may be claimed. Sorted, they are in the order in which they are played: those suspected of a
    worker's death last, evaluation first, then episodes of dead workers, then the oldest group's."""

    suspected: bool
    training: bool
    fresh: bool
    group_id: int
    id: int
    deaths: int


# Evaluation first, then episodes of dead workers, then the oldest group's; last, in the same order, those suspected of
# a worker's death. ?1 now, ?2 holder, ?3 limit, ?4 the first training group that is too early, ?5 to ?6 whether
# training (0) and evaluation (1) may be claimed. CROSS JOIN makes SQLite begin with the few leases instead of the many
# running episodes. However many wait, only ?3 of each kind are read out.
_CLAIMABLE = """
SELECT deaths > 0, evaluation, fresh, group_id, id, deaths FROM (
    SELECT * FROM (
        SELECT id, group_id, evaluation, 1 AS fresh, 0 AS deaths FROM episodes WHERE state = 'waiting' AND deaths = 0
            AND evaluation BETWEEN ?5 AND ?6 ORDER BY evaluation DESC, id LIMIT ?3) waiting
    UNION ALL
    SELECT id, group_id, evaluation, 1, deaths FROM episodes WHERE state = 'waiting' AND deaths > 0
    UNION ALL
    SELECT * FROM (
        SELECT e.id, e.group_id, e.evaluation, 0, 0
            FROM leases l CROSS JOIN episodes e ON e.holder = l.holder AND e.state = 'running'
            WHERE l.until_s < ?1 AND l.holder <> ?2 AND e.deaths = 0
                AND (e.evaluation = 1 OR e.group_id < ?4) AND e.evaluation BETWEEN ?5 AND ?6
            ORDER BY e.evaluation DESC, e.id LIMIT ?3) left_behind
    UNION ALL
    SELECT e.id, e.group_id, e.evaluation, 0, e.deaths
        FROM leases l CROSS JOIN episodes e ON e.holder = l.holder AND e.state = 'running'
        WHERE l.until_s < ?1 AND l.holder <> ?2 AND e.deaths > 0
) claimable WHERE (evaluation = 1 OR group_id < ?4) AND evaluation BETWEEN ?5 AND ?6
ORDER BY deaths > 0, evaluation DESC, fresh, id
"""

_LOAD = (
    "SELECT e.group_id, e.member, g.size, g.task, g.purpose, e.fence, e.trial, e.start, g.fork_turn, g.started_step,"
    " s.data FROM episodes e JOIN groups g ON g.id = e.group_id LEFT JOIN tool_sets s ON s.digest = e.tools"
    " WHERE e.id = ?"
)
_AHEAD = (
    "SELECT id FROM (SELECT id FROM groups"
    " WHERE purpose = 'train' AND state IN ('waiting', 'running', 'scored')"
    " UNION ALL SELECT id FROM groups WHERE purpose = 'train' AND state = 'taken' AND taken_step > {step}) ahead"
    " ORDER BY id"
)
# The same with ?4 how many groups may be played ahead; of a server, one statement, so that it waits for one answer.
_STEP = f"COALESCE((SELECT step FROM ({LATEST_CONFIRMED}) latest), 0)"
_CLAIMABLE_AHEAD = f"""
WITH early (id) AS MATERIALIZED (
    SELECT COALESCE(({_AHEAD.format(step=_STEP)} LIMIT 1 OFFSET ?4), 9223372036854775807)
)
{_CLAIMABLE.replace("?4", "(SELECT id FROM early)")}
"""

_APART = 2  # from so many deaths on, an episode is played apart from all that are suspected
_SUSPECTED_HERE = """
SELECT MAX(e.deaths) FROM episodes e WHERE e.holder = ? AND e.state = 'running' AND e.deaths > 0
    AND e.died_at >= (SELECT COUNT(*) FROM turns t WHERE t.episode_id = e.id AND t.trial = e.trial)
"""


class Leases(StorePart):
    """Claim episodes, keep them, give them back."""

    def __init__(self, db: Database) -> None:
        super().__init__(db)
        self._life = uuid.uuid4().hex[:12]

    @retried
    def claim(
        self,
        worker: str,
        limit: int,
        *,
        lease_s: float,
        now: float | None = None,
        ahead: int | None = None,
        evaluation: bool | None = None,
    ) -> list[Claim]:
        """Claim up to `limit` episodes: evaluation first, then those of other workers whose lease expired before `now`
        (seconds since the epoch; default the store's clock), then oldest group first; last those suspected of a
        worker's death (see `worker_deaths`). If there are any, the worker's lease is renewed.

        Training episodes come only from the first `ahead` groups that the learner has yet to train. Admission starts no
        others, but after a rollback more may be open, and an episode played too early grows stale (law 5).
        `evaluation`: only episodes of evaluations, or of training."""
        now = self._db.clock() if now is None else now
        with self._db.read():  # an idle worker asks often: without work it must not take the write lock
            if not self._claimable(worker, 1, now, ahead, evaluation):
                return []
        with self._db.write():
            # The lease is renewed in the transaction that claims. A worker that is stopped between a claim and a
            # renewal would hold episodes under no lease, and no other worker could see it expire.
            lease_holder = self._renew(worker, now + lease_s)
            return self._claim(lease_holder, self._claimable(worker, limit, now, ahead, evaluation), now)

    def _claim(self, holder: str, free: Collection[Free], now: float) -> list[Claim]:
        self._db.execute_many(
            "UPDATE episodes SET state = 'running', holder = ?, fence = fence + 1,"
            " started_s = COALESCE(started_s, ?) WHERE id = ?",
            [(holder, now, free_episode.id) for free_episode in free],
        )
        self._db.execute_many(
            "UPDATE groups SET state = iif(state = 'waiting', 'running', state), started_s = COALESCE(started_s, ?)"
            " WHERE id = ? AND (state = 'waiting' OR started_s IS NULL)",
            [(now, group_id) for group_id in {free_episode.group_id for free_episode in free}],
        )
        return self._load([free_episode.id for free_episode in free])

    @retried
    def reload(self, claim: Claim) -> Claim:
        """Read a claim again, with what was journaled since. Raises LeaseLost if the episode is no longer held."""
        with self._db.read():
            check_fence(self._db, claim.episode_id, claim.fence)
            (loaded_claim,) = self._load([claim.episode_id])
            return replace(loaded_claim, fence=claim.fence, resumed=loaded_claim.start is not None)

    @retried
    def renew(self, worker: str, *, lease_s: float, now: float | None = None) -> frozenset[int]:
        """Renew this worker's lease; returns the ids of the episodes that it still holds."""
        now = self._db.clock() if now is None else now
        with self._db.write(shared=True):
            lease_holder = self._renew(worker, now + lease_s)
            held_rows = self._db.rows("SELECT id FROM episodes WHERE holder = ? AND state = 'running'", (lease_holder,))
        return frozenset(episode_id for (episode_id,) in held_rows)

    @retried
    def hand_back(self, worker: str) -> int:
        """Give back all episodes of this worker, which ends on purpose: they may be claimed at once, and no death
        counts. Returns how many there were."""
        lease_holder = self._holder(worker)
        with self._db.write():
            self._db.execute("DELETE FROM leases WHERE holder = ?", (lease_holder,))
            episode_update = self._db.execute(
                "UPDATE episodes SET state = 'waiting', holder = NULL WHERE state = 'running' AND holder = ?",
                (lease_holder,),
            )
        return episode_update.rowcount

    def _claimable(self, worker: str, limit: int, now: float, ahead: int | None, evaluation: bool | None) -> list[Free]:
        """Return at most `limit` of the episodes that a worker may claim. An episode with two deaths or more is claimed
        by a worker that plays nothing else under suspicion, and after all others: if the worker dies, that episode is
        to blame."""
        lease_holder = self._holder(worker)
        claimable_sql, ahead_bound = (_CLAIMABLE, math.inf) if ahead is None else (_CLAIMABLE_AHEAD, ahead)
        evaluation_bounds = (0, 1) if evaluation is None else (int(evaluation), int(evaluation))
        episode_rows = self._db.rows(claimable_sql, (now, lease_holder, limit, ahead_bound, *evaluation_bounds))
        free_episodes = sorted(
            Free(bool(suspected), not is_evaluation, bool(is_new), *other_columns)
            for suspected, is_evaluation, is_new, *other_columns in episode_rows
        )
        # Who killed a worker is only known if one suspect was aboard. A first death puts an episode last, with others
        # like it; from the second on it plays with no other suspect, so that the third death has one possible cause.
        # Playing each suspect alone from its first death would serialise a run whose workers are killed from outside,
        # and there nobody is guilty.
        if suspected := [episode for episode in free_episodes if episode.suspected]:
            # The deaths of the most suspected episode that this worker plays.
            ((deaths_here,),) = self._db.rows(_SUSPECTED_HERE, (lease_holder,))
            together = (
                []
                if deaths_here is not None and deaths_here >= _APART
                else [episode for episode in suspected if episode.deaths < _APART]
            )
            alone = suspected[:1] if deaths_here is None and not together else []
            free_episodes = [episode for episode in free_episodes if not episode.suspected] + together + alone
        return free_episodes[:limit]

    def _holder(self, worker: str) -> str:
        return f"{worker}/{self._life}"

    def _renew(self, worker: str, until_s: float) -> str:
        lease_holder = self._holder(worker)
        self._db.execute(
            "INSERT INTO leases VALUES (?, ?, ?) ON CONFLICT (holder)"
            " DO UPDATE SET worker = excluded.worker, until_s = excluded.until_s",
            (lease_holder, worker, until_s),
        )
        return lease_holder

    def _load(self, episodes: Sequence[int]) -> list[Claim]:
        query_results = self._db.all_rows(*((_LOAD, (episode_id,)) for episode_id in episodes))
        shown_messages = Shown(self._db)
        begun_ids = [
            episode_id
            for episode_id, ((*_, start, _, _, _),) in zip(episodes, query_results, strict=True)
            if start is not None
        ]
        turns_by_episode = turns_of(self._db, begun_ids, shown_messages)
        partials_by_episode = dict(zip(begun_ids, load_partials(self._db, begun_ids), strict=True))
        loaded_claims: list[Claim] = []
        for episode_id, (claim_row,) in zip(episodes, query_results, strict=True):
            group_id, member, size, task, purpose, fence, trial, start, fork_turn, started_step, packed_tools = (
                claim_row
            )
            loaded_claims.append(
                Claim(
                    episode_id=episode_id,
                    group_id=group_id,
                    member=member,
                    size=size,
                    task=unpack_task(task),
                    purpose=purpose,
                    fence=fence,
                    trial=trial,
                    start=None if start is None else shown_messages.messages(start),
                    turns=turns_by_episode.get(episode_id, ()),
                    partial=partials_by_episode.get(episode_id),
                    fork_turn=fork_turn,
                    # Both: a fork begins with turns although nobody has claimed it before, and an episode whose first
                    # worker died in its reset is claimed twice without having begun.
                    resumed=fence > 1 and start is not None,
                    started_step=started_step,
                    tools=NO_TOOLS if packed_tools is None else unpack_tools(packed_tools),
                )
            )
        return loaded_claims


def too_early(db: Database, step: int, ahead: int) -> float:
    """The id of the first training group after the first `ahead` that a learner at `step` has yet to train; infinity if
    there is none. Inside a transaction."""
    group_row = db.row(f"{_AHEAD.format(step='?1')} LIMIT 1 OFFSET ?2", (step, ahead))
    return math.inf if group_row is None else group_row[0]


def check_fence(db: Database, episode_id: int, fence: int) -> int:
    """The trial of an episode that is held under `fence`, inside a transaction; raises LeaseLost if it is not."""
    return held(db, episode_id, fence, "e.trial")[0]


def held(db: Database, episode_id: int, fence: int, columns: str) -> Row:
    """Columns, in SQL, of the row `e` of an episode that is held under `fence`; raises as `check_fence`. One statement,
    since a server takes a while to answer each."""
    episode_row = db.row(f"SELECT e.state, e.fence, {columns} FROM episodes e WHERE e.id = ?", (episode_id,))
    check_held(db, episode_id, fence, episode_row)
    assert episode_row is not None
    return episode_row[2:]


# Ownership is the fence, not the lease. A lease ends by a clock, and a worker that was stopped for a minute does not
# know that its lease is over: it would write as if nothing had happened. The fence rises with each claim, in the same
# transaction that names the new holder, and every write of an episode compares it. So the later of two workers always
# wins, whatever their clocks say, and what the earlier one still sends changes nothing. The lease only says when others
# may claim; a wrong clock costs an episode played twice from its last turn, and never a turn in the journal.
def check_held(db: Database, episode_id: int, fence: int, row: Sequence[Any] | None) -> None:
    """Raise LeaseLost unless the `row` of an episode, which begins with its state and its fence, is held."""
    if row is None:
        raise LeaseLost(f"episode {episode_id} does not exist in {db.path}")
    episode_state, current_fence = row[:2]
    if episode_state != "running":
        raise LeaseLost(f"episode {episode_id} is {episode_state}, no longer running under fence {fence}")
    if current_fence != fence:
        raise LeaseLost(f"episode {episode_id} was claimed anew: fence {current_fence}, not {fence}")
