"""The buffer between rollout and learner: which members the learner takes, which groups close, and what is dropped.

A member is trained once (law 2): taking it and writing it into the lineage is one transaction, and the schema allows
one live lineage row an episode. A group is taken after it has closed; its record says what its members are judged
against. A member that ends later is taken in a later step. The learner leaves out tokens that are too old for a step
(law 5); a member without any token young enough leaves here as stale, and its outcome stays in its group's record.
Which of the closed groups a step takes is an order's choice (see `group_order`); groups without signal may leave
untrained.

A member's tokens, rewards and the record that it is judged against never change once it was taken, so that a step can
be trained again (`trained_steps`) until retention drops its tokens. Never knows weights, nor what a step made of them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentrl.algos.judging import Returns, strength
from agentrl.errors import StoreError
from agentrl.records import Group, GroupState, StopReason
from agentrl.store.buffer.closing import FULL, ClosePolicy
from agentrl.store.buffer.group_order import OLDEST, Chosen, Offered, Ready, TakeOrder, choose, to_close
from agentrl.store.codec import unpack_record, unpack_task
from agentrl.store.databases.database import Database, StorePart, retried
from agentrl.store.episodes.endings import end_episode
from agentrl.store.episodes.groups import LATE, OPEN, TRAIN, close, close_if_ended, count_states, enough, scored
from agentrl.store.learner_fence import check_lead
from agentrl.store.reads import load_group
from agentrl.store.run_values import ATTEMPT_SQL
from agentrl.tokens import staleness

STALE = "stale"
DEADLINE = "deadline"
NO_SIGNAL = "no_signal"
RUN_OVER = "run_over"


_RETURNS = Returns()

# How many running episodes a step at the lag bound should wait for (law 5). ?1 is the step of the weights whose tokens
# no later step trains, ?2 the quorum.
#
# Two kinds of waiting pay. A group that is too small to close, although a member of it has ended with tokens that go
# stale now: when one more member ends, the group closes and the step takes it. And an episode that samples nothing,
# since its environment or a reward source has yet to answer: its tokens only grow older. An episode that samples is not
# waited for. Its next tokens are young, so a later step trains some of it, and to wait for it would make each step as
# slow as the slowest episode. `tests/store/test_at_bound.py` has a case for each branch.
_WAITED_FOR = f"""
SELECT COUNT(*) FROM groups g JOIN episodes e ON e.group_id = g.id
WHERE g.id IN {OPEN} AND g.purpose = '{TRAIN}' AND g.started_step <= ?1 AND e.state IN ('waiting', 'running') AND (
    (
        g.state = 'running' AND g.n_scored < ?2 AND EXISTS (
            SELECT 1 FROM episodes m WHERE m.group_id = g.id AND m.outcome IS NOT NULL AND m.newest_step <= ?1
        )
    )
    OR (
        (
            EXISTS (SELECT 1 FROM endings k WHERE k.episode_id = e.id)
            OR EXISTS (SELECT 1 FROM turns t LEFT JOIN steps s ON s.turn_id = t.id
                WHERE t.episode_id = e.id AND t.trial = e.trial AND s.turn_id IS NULL)
        )
        AND (SELECT MAX(v.step) FROM turns t CROSS JOIN json_each(t.spans) s
            JOIN versions v ON v.version = CAST(json_extract(s.value, '$[0]') AS INTEGER)
            WHERE t.episode_id = e.id AND t.trial = e.trial AND t.learns = 1) <= ?1
    )
)
"""


class Expired(NamedTuple):
    """The result of `GroupBuffer.expire`, as ids: groups that closed before all members had ended, groups past their
    deadline, late members past theirs."""

    closed: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    members: tuple[int, ...] = ()


class AtBound(NamedTuple):
    """Work that a step would make too old (see `GroupBuffer.at_bound`): how many running episodes the learner may wait
    for, and how many running groups close with the step."""

    episodes: int
    closable: int


@dataclass(frozen=True, slots=True)
class _Ended:
    """An ended member of a closed group; `fresh`: the requested step may train at least one of its tokens."""

    id: int
    group_id: int
    scored: bool
    lag: int
    fresh: bool

    @property
    def trains(self) -> bool:
        return self.scored and self.fresh


class _Offer(NamedTuple):
    """The members that a step may take: groups, oldest admitted first; ids of groups with no member to train; late
    members; ids of groups without signal. `ready` describes `groups` to an order."""

    groups: dict[int, list[_Ended]]
    stale: list[int]
    late: list[_Ended]
    silent: list[int]
    ready: list[Ready]


class GroupBuffer(StorePart):
    """Take members for a learner step; close groups, and expire what waits too long."""

    def __init__(self, db: Database) -> None:
        super().__init__(db)
        # Both are caches of rows that cannot change under their key. A learner that waits looks at every closed group
        # many times a second, and most looks would unpack the same records as the look before.
        self._strengths: dict[tuple[int, Returns], tuple[float, bool]] = {}  # closed groups: their records never change
        self._scored_s: dict[tuple[int, int], list[float]] = {}  # of running groups, by id and number of scored members

    @retried
    def take(
        self,
        step: int,
        n: int,
        *,
        max_lag: int,
        order: TakeOrder = OLDEST,
        returns: Returns = _RETURNS,
        skip_at_most: int = 0,
        close_at_bound: int | None = None,
    ) -> list[Group] | None:
        """Take what optimizer step `step` trains: `n` closed groups that `order` chooses, and all late members of
        earlier groups that have been scored since, which do not count towards `n`. If the order chooses fewer, the
        result is None and nothing is taken. With `n` = 0 only late members are taken; None if there are none.

        Each `Group` holds only the members of this step, and the record that they are judged against. A group whose
        members are all too old for `max_lag` (`agentrl.tokens.staleness`) expires first, whether or not enough groups
        remain. So do, for each step, up to `skip_at_most` groups whose `returns` give no signal: they come with the
        step, marked as skipped, so that their outcomes are reported. Beyond that number such groups are taken as
        any other, so that a run with nothing left to learn still ends. Running groups that
        were admitted so early that no later step trains their first tokens close now, if they have at least
        `close_at_bound` scored members and the step can then be taken (None: they stay open).

        Raises StoreError if members were already taken for this step or a later one: after a crash, `rollback` puts
        them back."""
        # The choice is made outside of the transaction that takes. An order may be the user's own code, and it looks at
        # every closed group; with the write lock held, all episodes of the run would wait for it to journal. Whatever
        # else changes meanwhile only adds: groups close and members end, and no other process takes, since it would
        # have to lead (`check_lead`). So what was chosen is still there.
        offered_groups = self._offered(step, n, max_lag, returns)
        if closing_ids := to_close(offered_groups, n, close_at_bound):
            self._close_early(closing_ids)
            offered_groups = self._offered(step, n, max_lag, returns)
        chosen_groups = choose(offered_groups, step, n, order, skip_at_most)
        return None if chosen_groups is None else self._take(step, chosen_groups, max_lag, returns)

    def _offered(self, step: int, n: int, max_lag: int, returns: Returns) -> Offered:
        """The members that `step` may take. Changes nothing."""
        with self._db.read():  # a waiting learner asks often: without work it must not take the write lock
            check_lead(self._db)  # one that was followed would wait for groups that the other takes
            step_offer = self._offer(step, max_lag, returns)
            return Offered(
                ready=step_offer.ready,
                silent=step_offer.silent,
                under_way=self._under_way() if n else [],
                at_bound=self._at_bound(step, max_lag) if n else {},
                skipped=self._skips(step),
                stale=bool(step_offer.stale),
                late=any(late_member.trains for late_member in step_offer.late),
            )

    def _close_early(self, group_ids: Collection[int]) -> None:
        """Close those of these groups that still run, with the members that have ended."""
        with self._db.write():
            check_lead(self._db)
            running_rows = self._db.rows("SELECT id FROM groups WHERE state = 'running'")
            close(
                self._db, [group_id for (group_id,) in sorted(running_rows) if group_id in group_ids], self._db.clock()
            )

    @retried
    def at_bound(self, step: int, *, max_lag: int, quorum: int | None) -> AtBound:
        """The work that optimizer step `step` would make too old for every later step.

        `episodes` run: those of a group with too few scored members to close (fewer than `quorum`; None: until all have
        ended), one of which has ended with tokens that no later step trains; and those that sample nothing now, since
        their environment or a reward source has yet to answer, and whose newest token is as old. A learner that waits
        for them before the step loses none. `closable`: how many groups `take` closes with `close_at_bound` =
        `quorum`."""
        edge_step = staleness.edge(step, max_lag)
        if edge_step < 0:
            return AtBound(0, 0)
        with self._db.read():
            waited_row = self._db.row(_WAITED_FOR, (edge_step, sys.maxsize if quorum is None else quorum))
            closable_count = sum(
                quorum is not None and scored_count >= quorum for scored_count in self._at_bound(step, max_lag).values()
            )
            return AtBound(0 if waited_row is None else waited_row[0], closable_count)

    def _take(self, step: int, chosen: Chosen, max_lag: int, returns: Returns) -> list[Group] | None:
        """Take the groups that were `chosen` of those offered; None if there were too few."""
        taken_s = self._db.clock()
        with self._db.write(durable=True):  # before it is trained: a checkpoint may survive a loss of power
            check_lead(self._db)
            # What ended since the choice comes along if it is a late member; a group that closed since waits for the
            # next step. To choose again here would need the order inside the transaction.
            step_offer = self._offer(step, max_lag, returns)
            silent_ids = [group_id for group_id in step_offer.silent if group_id in chosen.skips]
            self._expire(step_offer.stale, STALE, taken_s)
            self._expire(silent_ids, NO_SIGNAL, taken_s)
            self._db.execute_many(
                "UPDATE groups SET skipped_step = ? WHERE id = ?", [(step, group_id) for group_id in silent_ids]
            )
            if chosen.picks is None:
                return None
            taken_groups = {pick.group_id: step_offer.groups[pick.group_id] for pick in chosen.picks}
            taken_members = [member for members in taken_groups.values() for member in members] + step_offer.late
            self._leave(taken_members, step, max_lag, taken_s)
            self._db.execute_many(
                "UPDATE groups SET state = 'taken', taken_step = ? WHERE id = ?",
                [(step, group_id) for group_id in taken_groups],
            )
        # Read in a transaction of its own: to unpack a step's tokens takes far longer than to mark its rows, and every
        # journal would wait. A crash in between loses nothing, the rows say what was taken, and the restart rolls back.
        return self._of_step(
            step, [(taken_groups[pick.group_id], pick.weight) for pick in chosen.picks], step_offer.late
        )

    @retried
    def _of_step(
        self, step: int, taken: Sequence[tuple[Sequence[_Ended], float]], late_members: Sequence[_Ended]
    ) -> list[Group]:
        """The groups of a step: those `taken` with their weights, those of late members, those that were skipped."""
        late_by_group: defaultdict[int, list[_Ended]] = defaultdict(list)
        for late_member in late_members:
            late_by_group[late_member.group_id].append(late_member)
        with self._db.read():
            step_groups = [replace(self._taken(group_members), weight=weight) for group_members, weight in taken]
            step_groups += [self._taken(group_members) for group_members in late_by_group.values()]
            step_groups += skipped_for(self._db, step)
        return [step_group for step_group in step_groups if step_group.trajectories or step_group.left_out]

    @retried
    def expire(self, now: float, group_deadline_s: float, *, close_policy: ClosePolicy = FULL) -> Expired:
        """Close running training groups by `close_policy` or by their deadline; expire overdue groups and members.

        A group's deadline is `group_deadline_s` after its first episode was claimed. Then a training group with enough
        scored members closes, and its open members go on as late members for the same time again. One with too few
        waits as long, and expires. An evaluation group closes then with the members that have ended. A member that
        expires ends with `StopReason.EXPIRED`; its worker gets LeaseLost at its next journal call."""
        with self._db.read():
            # Looked at twice: the supervisor asks every moment, and most often nothing is due, so it must not take the
            # write lock that all episodes journal under. What is due is computed again under the lock, as a member may
            # just have ended.
            if not any(self._due(now, group_deadline_s, close_policy)):
                return Expired()
        with self._db.write():
            overdue = self._due(now, group_deadline_s, close_policy)
            close(self._db, overdue.closed, now)
            self._expire(overdue.groups, DEADLINE, now)
            for episode_id in overdue.members:
                end_episode(self._db, episode_id, "expired", StopReason.EXPIRED, now)
                self._db.execute("UPDATE episodes SET dropped = ? WHERE id = ?", (DEADLINE, episode_id))
        return overdue

    @retried
    def end_late(self) -> int:
        """The last step is over: late members that no step took leave untrained, as "run_over"; those that still run
        expire. Returns how many there were."""
        ended_s = self._db.clock()
        with self._db.write():
            late_members = self._db.rows(f"SELECT id, stop_reason FROM episodes WHERE {LATE}")
            for episode_id, stop_reason in late_members:
                if stop_reason is None:
                    end_episode(self._db, episode_id, "expired", StopReason.EXPIRED, ended_s)
            self._db.execute_many(
                "UPDATE episodes SET dropped = ? WHERE id = ?", [(RUN_OVER, late_id) for late_id, _ in late_members]
            )
        return len(late_members)

    def _offer(self, step: int, max_lag: int, returns: Returns) -> _Offer:
        # Staleness is judged by `newest_step`, the youngest token of a member, and only to see whether anything of it
        # can be trained. Which of its tokens are too old is for the learner to say, token by token: an episode that
        # went on over three versions keeps its young turns (`agentrl.learner.data.lag_bound`).
        member_columns = "e.id, e.group_id, e.stop_reason, e.outcome, e.newest_step"
        # Three queries sent together: of a server they cost one answer to wait for, at every look of a waiting learner.
        ((later_step,),), buffered_rows, late_rows = self._db.all_rows(
            ("SELECT MAX(step) FROM lineage WHERE undone_attempt IS NULL AND step >= ?", (step,)),
            (
                f"SELECT {member_columns}, g.closed_s FROM groups g JOIN episodes e ON e.group_id = g.id"
                " WHERE g.purpose = ? AND g.state = 'scored' AND e.stop_reason IS NOT NULL ORDER BY g.id, e.id",
                (TRAIN,),
            ),
            (
                f"SELECT {member_columns} FROM (SELECT * FROM episodes INDEXED BY episodes_late WHERE {LATE}) e"
                " CROSS JOIN groups g ON g.id = e.group_id"
                " WHERE g.state <> 'scored' AND e.stop_reason IS NOT NULL ORDER BY e.id",
                (),
            ),
        )
        # A learner that forgot to roll back after a crash would train a step that has been trained already. It is
        # refused here and not in the caller, so that a loop of a user's own cannot get it wrong (law 2).
        if later_step is not None:
            raise StoreError(f"step {step}: members were taken for step {later_step} already: roll back first")

        def ended(id: int, group_id: int, stop_reason: str, outcome: float | None, newest: int | None) -> _Ended:
            member_lag = staleness.lag_in_step(step, newest)
            return _Ended(id, group_id, scored(stop_reason, outcome), member_lag, staleness.trains(member_lag, max_lag))

        members_by_group: defaultdict[int, list[_Ended]] = defaultdict(list)
        closing_times_s: dict[int, float] = {}
        for *member_row, closed_at_s in buffered_rows:
            members_by_group[member_row[1]].append(ended(*member_row))
            closing_times_s[member_row[1]] = closed_at_s
        trainable_groups = {
            candidate_id: group_members
            for candidate_id, group_members in members_by_group.items()
            if any(member.trains for member in group_members)
        }
        self._weigh(trainable_groups, returns)
        return _Offer(
            groups=trainable_groups,
            stale=[candidate_id for candidate_id in members_by_group if candidate_id not in trainable_groups],
            late=[ended(*member_row) for member_row in late_rows],
            silent=[candidate_id for candidate_id in trainable_groups if self._strengths[candidate_id, returns][1]],
            ready=[
                Ready(
                    group_id=candidate_id,
                    closed_s=closing_times_s[candidate_id],
                    lag=min(member.lag for member in group_members if member.trains),
                    strength=self._strengths[candidate_id, returns][0],
                )
                for candidate_id, group_members in trainable_groups.items()
            ],
        )

    def _weigh(self, groups: Iterable[int], returns: Returns) -> None:
        """Keep the strengths of these groups, and whether they have no signal: of those that are new, from their
        records."""
        # Replaced as a whole, so that groups which were taken leave the cache by themselves.
        previous_strengths = self._strengths
        self._strengths = {
            (group_id, returns): previous_strengths.get((group_id, returns), (1.0, False)) for group_id in groups
        }
        new_ids = [group_id for group_id in groups if (group_id, returns) not in previous_strengths]
        group_rows = self._db.all_rows(
            *(("SELECT record, task FROM groups WHERE id = ?", (group_id,)) for group_id in new_ids)
        )
        for group_id, ((packed_record, packed_task),) in zip(new_ids, group_rows, strict=True):
            env_returns = returns.for_env(unpack_task(packed_task).env)
            group_strength = strength(unpack_record(packed_record), env_returns)
            self._strengths[group_id, returns] = group_strength, env_returns.skips and not group_strength

    def _skips(self, step: int) -> int:
        count_row = self._db.row("SELECT COUNT(*) FROM groups WHERE skipped_step = ?", (step,))
        return 0 if count_row is None else count_row[0]

    def _at_bound(self, step: int, max_lag: int) -> dict[int, int]:
        """Return the running groups at the lag bound, by id with their number of scored members. Their first tokens may
        be so old that no step after `step` can train them. A group with too few scored members to be judged is left
        out."""
        group_rows = self._db.rows(
            "SELECT id, size, n_scored FROM groups INDEXED BY groups_running"
            " WHERE state = 'running' AND purpose = 'train' AND started_step <= ? ORDER BY id",
            (staleness.edge(step, max_lag),),
        )
        return {
            group_id: scored_count
            for group_id, group_size, scored_count in group_rows
            if scored_count >= enough(group_size)
        }

    def _under_way(self) -> list[int]:
        """Ids of the training groups that have not closed, in the order of admission."""
        group_rows = self._db.rows(
            "SELECT id FROM groups WHERE purpose = ? AND state IN ('waiting', 'running') ORDER BY id", (TRAIN,)
        )
        return [group_id for (group_id,) in group_rows]

    def _leave(self, members: Iterable[_Ended], step: int, max_lag: int, now: float) -> None:
        """Move members out with `step`: into its lineage, or as stale. A late one that is not scored is dropped."""
        # A member that is scored and too old leaves with the step too, as taken and stale. Its outcome stays in the
        # record, so its siblings are judged as if it were trained: long episodes are the old ones, and a baseline
        # without them would favour short ones. A rollback of the step brings all of them back together.
        for member in members:
            if member.trains:
                self._db.execute(
                    "INSERT INTO lineage (episode_id, step, attempt, max_lag, taken_s)"
                    f" VALUES (?, ?, {ATTEMPT_SQL}, ?, ?)",
                    (member.id, step, max_lag, now),
                )
            if member.scored:
                drop_reason = None if member.fresh else STALE
                self._db.execute(
                    "UPDATE episodes SET taken_step = ?, dropped = ? WHERE id = ?", (step, drop_reason, member.id)
                )
            else:
                self._db.execute(
                    "UPDATE episodes SET dropped = COALESCE(dropped, stop_reason) WHERE id = ? AND late = 1",
                    (member.id,),
                )

    def _taken(self, members: Sequence[_Ended]) -> Group:
        trained_ids = {member.id for member in members if member.trains}
        return taken_for(self._db, members[0].group_id, [member.id for member in members], trained_ids)

    def _due(self, now: float, deadline_s: float, policy: ClosePolicy) -> Expired:
        # A deadline counts from the first claim of a group, not from its admission: what waits for a worker has not
        # begun to be late. One deadline closes a group that can be judged, and its open members get a second one as
        # late members; a group that cannot be judged yet gets both as one. An evaluation gets one: it reports what it
        # has, and nobody trains its stragglers.
        running_groups = self._db.rows(
            "SELECT id, purpose, size, n_scored, started_s FROM groups INDEXED BY groups_running"
            " WHERE state = 'running' AND started_s < ? ORDER BY id",
            (now - deadline_s,),
        )
        closed_groups = {
            overdue_id
            for overdue_id, purpose, group_size, scored_count, _ in running_groups
            if purpose == TRAIN and scored_count >= enough(group_size)
        }
        overdue_groups = [
            overdue_id
            for overdue_id, purpose, _, _, started_s in running_groups
            if overdue_id not in closed_groups and (purpose != TRAIN or started_s < now - 2 * deadline_s)
        ]
        closable_groups = self._db.rows(
            "SELECT id, n_scored FROM groups WHERE state = 'running' AND purpose = 'train' AND n_scored >= ?",
            (policy.at_least,),
        )
        # Keyed by the number of scored members: the times of a group are read again only after another end. A group
        # that waits out `quorum_after_s` would otherwise be read at every tick.
        self._scored_s = {
            (overdue_id, scored_count): self._scored_s.get((overdue_id, scored_count)) or _ends(self._db, overdue_id)
            for overdue_id, scored_count in closable_groups
        }
        closed_groups |= {
            overdue_id for (overdue_id, _), ended_times_s in self._scored_s.items() if policy.closes(ended_times_s, now)
        }
        late_rows = self._db.rows(
            f"SELECT e.id FROM (SELECT * FROM episodes WHERE {LATE}) e JOIN groups g ON g.id = e.group_id"
            " WHERE e.state IN ('waiting', 'running') AND g.started_s < ?",
            (now - 2 * deadline_s,),
        )
        return Expired(
            tuple(sorted(closed_groups)), tuple(overdue_groups), tuple(overdue_id for (overdue_id,) in late_rows)
        )

    def _expire(self, group_ids: Sequence[int], reason: str, now: float) -> None:
        for group_id in group_ids:
            open_members = self._db.rows(
                "SELECT id FROM episodes WHERE group_id = ? AND late = 0 AND state IN ('waiting', 'running')",
                (group_id,),
            )
            for (episode_id,) in open_members:
                end_episode(self._db, episode_id, "expired", StopReason.EXPIRED, now)
            group_update = self._db.execute(
                "UPDATE groups SET state = ?, reason = ?, closed_s = ? WHERE id = ? AND purpose = ?",
                (GroupState.EXPIRED, reason, now, group_id, TRAIN),
            )
            # The update matches training groups only. An evaluation never expires: it reports the members that ended,
            # since a measurement with a hole is worth more than none.
            if group_update.rowcount == 0:
                close_if_ended(self._db, group_id, now)

    @retried
    def ready_count(self) -> int:
        """How many training groups the learner could take now, stale ones included."""
        with self._db.read():
            return count_states(self._db, TRAIN).get(GroupState.SCORED, 0)

    @retried
    def late_open(self) -> int:
        """How many late members have not ended: their groups closed without them."""
        with self._db.read():
            count_row = self._db.row(f"SELECT COUNT(*) FROM episodes WHERE {LATE} AND state IN ('waiting', 'running')")
        return 0 if count_row is None else count_row[0]


def _ends(db: Database, group_id: int) -> list[float]:
    """When the scored members of a group ended, earliest first."""
    end_rows = db.rows("SELECT ended_s, stop_reason, outcome FROM episodes WHERE group_id = ?", (group_id,))
    return sorted(
        ended_s for ended_s, stop_reason, outcome in end_rows if ended_s is not None and scored(stop_reason, outcome)
    )


def taken_for(db: Database, group_id: int, members: Collection[int], trains: Collection[int]) -> Group:
    """A group as a step takes it: these members, of which it `trains` some. Inside a transaction."""
    loaded_group = load_group(db, group_id, members)
    return replace(
        loaded_group,
        trajectories=tuple(trajectory for trajectory in loaded_group.trajectories if trajectory.episode_id in trains),
        left_out=tuple(trajectory for trajectory in loaded_group.trajectories if trajectory.episode_id not in trains),
    )


def skipped_for(db: Database, step: int) -> list[Group]:
    """The groups that left for a step without signal. Inside a transaction."""
    skipped_groups: list[Group] = []
    for (group_id,) in db.rows("SELECT id FROM groups WHERE skipped_step = ? ORDER BY id", (step,)):
        member_rows = db.rows(
            "SELECT id FROM episodes WHERE group_id = ? AND late = 0 AND stop_reason IS NOT NULL", (group_id,)
        )
        loaded_group = load_group(db, group_id, [episode_id for (episode_id,) in member_rows])
        skipped_groups.append(replace(loaded_group, trajectories=(), left_out=loaded_group.trajectories, skipped=True))
    return skipped_groups
