"""The start and end of groups: admission of new ones, and state and record of one that closes.

Owns the task counter, so that a restart goes on with the next task, and the record that a closed group leaves; never
knows a token, a worker or the learner, nor when a group closes (see `closing`).

A task whose group was lost to infrastructure is played again, a bounded number of times. A replay is a group of its own
that names the group it replaces; the schema allows one replay per group. There is no queue: the rows tell which tasks
are to be played again, whichever process was killed and when.

A fork goes on from a turn of a journaled episode: a new group of siblings, with a baseline of its own. Each member
begins with copies of the turns before that one. They do not learn: the tokens are context here, and train in the origin
alone (law 2). A member whose environment cannot be brought to that turn fails with the reason; it never begins anew, as
its siblings begin there. Never knows how an environment is restored, or which turns are worth it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from agentrl.errors import NotInStore, UsageError
from agentrl.records import UNKNOWN, GroupState, MemberRecord, StopReason, Task, member_record
from agentrl.store.buffer.admission import AdmissionBounds, Load, Room, admissible_groups
from agentrl.store.codec import pack_identity, pack_record, pack_task, unpack_task
from agentrl.store.databases.database import Database, StorePart, retried
from agentrl.store.databases.driver import Query, Row
from agentrl.store.reads import WEIGHTS
from agentrl.store.run_values import NEXT_TASK
from agentrl.store.schema import SET_META
from agentrl.store.versions import latest_confirmed

# Word for word the condition of the index `groups_lost`: infrastructure ended the group, so its task taught nothing,
# and it was not played again.
LOST_REASONS = "('engine_failed', 'sandbox_failed', 'env_failed', 'deadline')"
"""In SQL: the reasons of groups that infrastructure ended."""
LOST = f"purpose = 'train' AND state IN ('expired', 'failed') AND reason IN {LOST_REASONS} AND played_again = 0"


def quarantined(db: Database) -> set[str]:
    """The identities of the tasks in quarantine. Inside a transaction."""
    return {task for (task,) in db.rows("SELECT task FROM quarantine")}


def lost_groups(db: Database, max_replays: int) -> list[int]:
    """Groups whose task is to be played again, oldest first, without tasks in quarantine. Inside a transaction."""
    if not max_replays:
        return []
    rows = db.rows(
        f"SELECT id, task FROM groups INDEXED BY groups_lost WHERE {LOST} AND replays < ? ORDER BY id",
        (max_replays,),
    )
    quarantined_tasks = quarantined(db) if rows else set[str]()
    return [
        id for id, task in rows if not quarantined_tasks or pack_identity(unpack_task(task)) not in quarantined_tasks
    ]


TRAIN = "train"
"""The purpose of training groups; any other names an evaluation, which is claimed first and never trained."""

DURING = ":during@"
"""In the purpose of an evaluation during training."""

LATE = "late = 1 AND taken_step IS NULL AND dropped IS NULL"
"""In SQL, of an episode: its group closed before it ended, and it has not left the buffer. Word for word the condition
of the index `episodes_late`."""

OPEN = (
    "(SELECT id FROM groups WHERE state = 'running'"
    f" UNION ALL SELECT group_id FROM episodes WHERE {LATE} AND state IN ('waiting', 'running'))"
)
"""In SQL: the ids of groups with open members; more than once for a group with several late ones."""

_ACCEPTED = (GroupState.SCORED, GroupState.TAKEN, GroupState.TRAINED)
_RUNNING = (GroupState.WAITING, GroupState.RUNNING)


class Groups(StorePart):
    """Start groups and count them."""

    @retried
    def admissible(self, bounds: AdmissionBounds, *, limit: int) -> Room:
        """How many training groups may start now, at most `limit`, and which. None while no weight version is
        confirmed. Prepare that many tasks, then `admit` them."""
        with self._db.read():
            return self._room(bounds, limit)[0]

    @retried
    def admit(
        self, tasks: Sequence[Task], *, first: int, bounds: AdmissionBounds, limit: int, skipped: Collection[int] = ()
    ) -> int:
        """Start training groups as `admissible` allows now: first those of tasks that infrastructure lost, in the order
        of the lost groups, then those of `tasks`, whose indices begin at `first`. Returns how many it started.

        A quarantined task is passed over, as is one whose index is in `skipped`. If the next task of the run is not
        `first`, somebody else admitted meanwhile: nothing is started."""
        # The room is counted again, in the transaction that fills it. Tasks are made before, as that may be the user's
        # code and take long; by then somebody else may have used the place in the source, and `first` shows it.
        with self._db.write():
            room, step = self._room(bounds, limit)
            if room.first != first:
                return 0
            again = lost_groups(self._db, bounds.max_replays)[: room.replays]
            for group_id in again:
                create_again(self._db, group_id, bounds.group_size, step)
            new = tasks[: room.groups - room.replays]
            playable = without(quarantined(self._db), new, skipped) if new else []
            for task in playable:
                create_group(self._db, task, bounds.group_size, TRAIN, step)
            # In the transaction that starts the groups. Written before, a crash would skip tasks; written after, it
            # would play them twice. Tasks that were passed over count as used, or the same ones would be prepared at
            # every look.
            self._db.execute(SET_META, (NEXT_TASK.key, NEXT_TASK.text(first + len(new))))
        return len(again) + len(playable)

    def _room(self, bounds: AdmissionBounds, limit: int) -> tuple[Room, int]:
        """The room, and the step of the weights that sample now. Inside a transaction."""
        version, first = latest_confirmed(self._db), next_task(self._db)
        if version is None:
            return Room(0, 0, first), 0
        free = admissible_groups(load_of(self._db, bounds), bounds, step=version.step)
        groups = max(0, min(free, limit))
        replays = min(groups, len(lost_groups(self._db, bounds.max_replays))) if groups else 0
        return Room(groups, replays, first), version.step

    @retried
    def add_groups(self, tasks: Iterable[Task], *, size: int, purpose: str, step: int | None = None) -> list[int]:
        """Start a group of `size` episodes for each task, outside admission; returns their ids. For evaluation: give
        each evaluation its own purpose, such as "eval:held_out@20"; `step` is that of the weights that it measures
        (None: those that sample now)."""
        with self._db.write():
            version = latest_confirmed(self._db)
            step = (0 if version is None else version.step) if step is None else step
            return [create_group(self._db, task, size, purpose, step) for task in tasks]

    @retried
    def rename_purpose(self, purpose: str, new: str) -> None:
        """Give the groups of an evaluation another purpose."""
        with self._db.write():
            self._db.execute("UPDATE groups SET purpose = ? WHERE purpose = ?", (new, purpose))

    @retried
    def tasks_started(self) -> int:
        """The index of the next training task: the position in the task source."""
        with self._db.read():
            return next_task(self._db)

    @retried
    def counts(self, purpose: str = TRAIN) -> dict[GroupState, int]:
        """How many groups of a purpose are in each state; states without any are left out. Constant time."""
        with self._db.read():
            return count_states(self._db, purpose)

    @retried
    def purposes(self) -> list[str]:
        """Every purpose that has groups."""
        with self._db.read():
            return [purpose for (purpose,) in self._db.rows("SELECT DISTINCT purpose FROM group_counts ORDER BY 1")]

    @retried
    def fork(self, episode_id: int, *, turn: int, k: int) -> int:
        """Start a training group of `k` continuations of an episode, ended or not, whose turns from `turn` (counted
        from 0) on are played anew; returns the group's id. They are played as soon as workers have room.

        Raises StoreError for an unknown episode, UsageError if it has no such turn, an evaluation played it, or its
        tokens were dropped."""
        if not 2 <= k <= _MOST:
            words = f"{k} continuation{'s' * (k != 1)}"
            hint = f"ask for at most {_MOST}" if k > _MOST else "has no sibling to be compared with: ask for 2 or more"
            raise UsageError(f"{words} {hint}" if k < 2 else f"{words}: {hint}")
        with self._db.write():
            task, start, tools, trial = self._origin(episode_id, turn)
            version = latest_confirmed(self._db)
            group_id = create_group(self._db, unpack_task(task), k, TRAIN, 0 if version is None else version.step)
            self._db.execute(
                "UPDATE groups SET fork_of = ?, fork_trial = ?, fork_turn = ?, played_again = 1 WHERE id = ?",
                (episode_id, trial, turn, group_id),
            )
            self._db.execute("UPDATE episodes SET start = ?, tools = ? WHERE group_id = ?", (start, tools, group_id))
            for (member,) in self._db.rows("SELECT id FROM episodes WHERE group_id = ? ORDER BY member", (group_id,)):
                self._begin(member, episode_id, trial, turn)
        return group_id

    @retried
    def forked(self) -> frozenset[int]:
        """The groups of which a member was forked."""
        with self._db.read():
            origins = "SELECT fork_of FROM groups WHERE fork_of IS NOT NULL"
            rows = self._db.rows(f"SELECT DISTINCT group_id FROM episodes WHERE id IN ({origins})")
        return frozenset(id for (id,) in rows)

    @retried
    def fork_states(self, limit: int) -> list[GroupState]:
        """The states of the latest forks that closed, the latest first."""
        with self._db.read():
            rows = self._db.rows(
                "SELECT state FROM groups WHERE fork_turn IS NOT NULL AND state NOT IN ('waiting', 'running')"
                " ORDER BY id DESC LIMIT ?",
                (limit,),
            )
        return [GroupState(state) for (state,) in rows]

    def _origin(self, episode_id: int, turn: int) -> tuple[str, str, str | None, int]:
        """The task, first observation, tools and trial of an episode that can be forked at `turn`."""
        row = self._db.row(
            "SELECT g.purpose, g.task, e.start, e.tools, e.trial FROM episodes e JOIN groups g ON g.id = e.group_id"
            " WHERE e.id = ?",
            (episode_id,),
        )
        if row is None:
            raise NotInStore(f"no episode {episode_id} in {self._db.path}: its table episodes lists them")
        purpose, task, start, tools, trial = row
        if purpose != TRAIN:
            raise UsageError(f"episode {episode_id} is of {purpose}, which is never trained: fork one of training")
        turns = self._db.rows(
            "SELECT s.terminated = 1 OR s.truncated = 1, k.turn_id IS NOT NULL"
            " FROM turns t JOIN steps s ON s.turn_id = t.id"
            " LEFT JOIN tokens k ON k.turn_id = t.id WHERE t.episode_id = ? AND t.trial = ? ORDER BY t.idx",
            (episode_id, trial),
        )
        if not turns:
            raise UsageError(f"episode {episode_id} has no turn yet that its environment has answered")
        if turn < 1:
            raise UsageError(f"turn {turn} begins the episode: a fork starts at turn 1 or later")
        most = len(turns) - bool(turns[-1][0])
        if turn > most:
            how = "and its last one ended it" if turns[-1][0] else "as far as it was played"
            raise UsageError(f"episode {episode_id} has {len(turns)} turns, {how}: a fork starts at turn 1 to {most}")
        if not all(is_kept for _, is_kept in turns[:turn]):
            raise UsageError(f"retention has dropped the tokens of episode {episode_id}: fork a younger one")
        return task, start, tools, trial

    def _begin(self, member: int, origin: int, trial: int, turn: int) -> None:
        """Copy the turns before `turn`, and a snapshot of their state if there is one."""
        db = self._db
        for (id,) in db.rows(
            "SELECT id FROM turns WHERE episode_id = ? AND trial = ? AND idx < ? ORDER BY idx", (origin, trial, turn)
        ):
            # Copies, not references to the turns of the origin. Retention may drop the origin's tokens while the fork
            # still trains; and a reader of turns, of which there are many, needs no rule for episodes that begin in
            # another one. The copies do not learn (`learns` is 0), so no token is in two losses (law 2):
            # `tests/store/test_forks.py`.
            copy = db.insert(
                "INSERT INTO turns (episode_id, trial, idx, parent, role, learns, finish, text, spans, n_prompt,"
                " n_tokens, oldest_step, state, started_s, ended_s) SELECT ?, 0, idx, parent, role, 0, finish, text,"
                " spans, n_prompt, n_tokens, NULL, state, started_s, ended_s FROM turns WHERE id = ?",
                (member, id),
            )
            for table in ("tokens", "experts"):
                db.execute(f"INSERT INTO {table} SELECT ?, data FROM {table} WHERE turn_id = ?", (copy, id))
            columns = "observation, reward, terminated, truncated, info"
            db.execute(f"INSERT INTO steps SELECT ?, {columns} FROM steps WHERE turn_id = ?", (copy, id))
        state: tuple[Any, ...] = (member, origin, turn)
        db.execute(
            "INSERT INTO snapshots SELECT ?, turn, seconds, data FROM snapshots WHERE episode_id = ? AND turn < ?",
            state,
        )


def next_task(db: Database) -> int:
    """The index of the next training task. Inside a transaction."""
    return NEXT_TASK.within(db)


def count_states(db: Database, purpose: str) -> dict[GroupState, int]:
    rows = db.rows("SELECT state, n FROM group_counts WHERE purpose = ? AND n > 0", (purpose,))
    return {GroupState(state): n for state, n in rows}


def without(quarantined: Collection[str], tasks: Sequence[Task], skipped: Collection[int] = ()) -> list[Task]:
    """The tasks that are not in quarantine, and whose index is not `skipped`."""
    return [
        task
        for task in tasks
        if task.index not in skipped and (not quarantined or pack_identity(task) not in quarantined)
    ]


def load_of(db: Database, bounds: AdmissionBounds) -> Load:
    """The work under way. Tokens in the buffer are counted only if they are bounded, since that takes a look at every
    member in it. Inside a transaction."""
    counts = count_states(db, TRAIN)
    # Two counts and not one with `state IN`: each has an index that holds only such episodes, and together they are a
    # handful of rows in a store of a million.
    waiting = db.row("SELECT COUNT(*) FROM episodes WHERE state = 'waiting' AND evaluation = 0")
    running = db.row(  # an episode that waits for reward sources has no holder and takes no place
        "SELECT COUNT(*) FROM episodes WHERE state = 'running' AND evaluation = 0 AND holder IS NOT NULL"
    )
    assert waiting is not None and running is not None
    return Load(
        running_episodes=waiting[0] + running[0],
        running_groups=sum(counts.get(state, 0) for state in _RUNNING),
        accepted_groups=sum(counts.get(state, 0) for state in _ACCEPTED),
        buffered_tokens=0 if bounds.max_tokens is None else _buffered_tokens(db),
    )


def _buffered_tokens(db: Database) -> int:
    """Sampled tokens of ended members of groups that are not taken, and of late members that are not."""
    row = db.row(
        "SELECT (SELECT COALESCE(SUM(e.n_tokens), 0) FROM groups g JOIN episodes e ON e.group_id = g.id"
        "  WHERE g.purpose = 'train' AND g.state IN ('running', 'scored') AND e.stop_reason IS NOT NULL)"
        f" + (SELECT COALESCE(SUM(e.n_tokens), 0) FROM (SELECT * FROM episodes WHERE {LATE}) e"
        "  JOIN groups g ON g.id = e.group_id WHERE g.state <> 'scored' AND e.stop_reason IS NOT NULL)"
    )
    assert row is not None
    return row[0]


def create_group(db: Database, task: Task, size: int, purpose: str, step: int) -> int:
    """Start a group and its waiting members; its id. `step` is that of the weights that sample now."""
    group_id = db.insert(
        "INSERT INTO groups (purpose, task, size, state, started_step, admitted_s) VALUES (?, ?, ?, 'waiting', ?, ?)",
        (purpose, pack_task(task), size, step, db.clock()),
    )
    db.execute_many(
        "INSERT INTO episodes (group_id, member, evaluation) VALUES (?, ?, ?)",
        # `evaluation` repeats the group's purpose in each member, so that the index of waiting episodes can be ordered
        # by it: a claim reads the first rows of one index and joins nothing.
        [(group_id, member, int(purpose != TRAIN)) for member in range(size)],
    )
    return group_id


def create_again(db: Database, lost: int, size: int, step: int) -> int:
    """Start a group that plays the task of a lost one again; its id."""
    row = db.row("SELECT task, replays FROM groups WHERE id = ?", (lost,))
    assert row is not None
    task, replays = row
    group_id = create_group(db, unpack_task(task), size, TRAIN, step)
    db.execute("UPDATE groups SET replay_of = ?, replays = ? WHERE id = ?", (lost, replays + 1, group_id))
    return group_id


def close_if_ended(db: Database, group_id: int, now: float) -> None:
    """Close an open group if all its members have ended."""
    row = db.row(
        "SELECT state IN ('waiting', 'running') AND NOT EXISTS"
        " (SELECT 1 FROM episodes WHERE group_id = ?1 AND state IN ('waiting', 'running')) FROM groups WHERE id = ?1",
        (group_id,),
    )
    if row is not None and row[0]:
        close(db, [group_id], now)


def close(db: Database, group_ids: Sequence[int], now: float) -> None:
    """Close groups with the members that have ended. An evaluation group becomes scored. A training group becomes
    scored if at least min(2, size) members are scored, else failed, with the most common failure as its reason. A
    scored training group gets its record, in the order in which its members ended, which never changes; open members
    are late from now on."""
    # All queries of all groups in one go. A hundred episodes may end in one transaction and close a dozen groups, and
    # nobody else writes until it is over.
    weights, *tables = db.all_rows((WEIGHTS, ()), *chain(*map(_closing, group_ids)))
    for place, group_id in enumerate(group_ids):
        ((purpose, size),), ended, turns, scores = tables[4 * place : 4 * place + 4]
        state, reason, packed = GroupState.SCORED, None, None
        if purpose == TRAIN:
            record = {
                member: _record(id, outcome, outcomes, turns, scores, weights)
                for id, member, stop_reason, outcome, outcomes in ended
                if scored(stop_reason, outcome)
            }
            packed = pack_record(record)
            if len(record) < enough(size):
                by_member = sorted(ended, key=lambda row: row[1])  # of two reasons as common, that of the first member
                state, reason, packed = GroupState.FAILED, _failure([stop for _, _, stop, *_ in by_member]), None
        db.execute(
            "UPDATE groups SET state = ?, reason = ?, record = ?, closed_s = ? WHERE id = ?",
            (state, reason, packed, now, group_id),
        )
        # From here on the record is fixed and the open members are judged against it. They are not ended: a slow
        # episode is not a worse one, and to drop it would train short episodes alone (law 5).
        db.execute("UPDATE episodes SET late = 1 WHERE group_id = ? AND state IN ('waiting', 'running')", (group_id,))


def _closing(group_id: int) -> tuple[Query, ...]:
    """The queries that a closing needs of its group."""
    return (
        ("SELECT purpose, size FROM groups WHERE id = ?", (group_id,)),
        (
            "SELECT id, member, stop_reason, outcome, outcomes FROM episodes WHERE group_id = ?"
            " AND stop_reason IS NOT NULL ORDER BY ended_s, member",
            (group_id,),
        ),
        *_earned("e.group_id = ?", group_id),
    )


def forget_starts(db: Database, first: float = 0, purpose: str | None = None) -> None:
    """Reset the start time of groups (of `purpose`) with open members, from id `first` on; the next claim sets it."""
    db.execute(
        # `+id` is no use of an index to SQLite: it should begin with the few open groups, and not with all groups from
        # `first` on.
        f"UPDATE groups SET started_s = NULL WHERE +id >= ?1 AND purpose = COALESCE(?2, purpose) AND id IN {OPEN}",
        (first, purpose),
    )


def shift_starts(db: Database, by_s: float) -> None:
    """Move the start times of groups with open members."""
    db.execute(f"UPDATE groups SET started_s = started_s + ? WHERE id IN {OPEN}", (by_s,))


def enough(size: int) -> int:
    """The least number of scored members with which a group of `size` can be judged."""
    return min(2, size)


def record_of(db: Database, episode_id: int, outcome: float, outcomes: str) -> MemberRecord:
    """The record of a scored member, from its last trial."""
    turns, scores, weights = db.all_rows(*_earned("e.id = ?", episode_id), (WEIGHTS, ()))
    return _record(episode_id, outcome, outcomes, turns, scores, weights)


def _earned(where: str, id: int) -> tuple[Query, Query]:
    """Return two queries for what the episodes (`e`) that `where` selects have earned in their last trials: each turn
    with the rewards of its step, and the scores of reward sources. `id` fills the placeholder in `where`."""
    turns = "CROSS JOIN turns t ON t.episode_id = e.id AND t.trial = e.trial"
    return (
        (
            "SELECT e.id, t.idx, t.role, t.state, COALESCE(s.reward, 0.0),"
            " COALESCE(json_extract(s.info, '$.rewards'), '{}')"
            f" FROM episodes e {turns} LEFT JOIN steps s ON s.turn_id = t.id WHERE {where} ORDER BY e.id, t.idx",
            (id,),
        ),
        # Sources first, in an order that CROSS JOIN fixes: a run without reward sources then looks at no turn.
        (
            f"SELECT e.id, t.idx, r.source, r.value FROM sources c CROSS JOIN episodes e ON {where} {turns}"
            " CROSS JOIN rewards r ON r.turn_id = t.id AND r.source = c.source AND r.counts = 1",
            (id,),
        ),
    )


def _record(
    id: int, outcome: float, outcomes: str, turns: Iterable[Row], scores: Iterable[Row], weights: Iterable[Row]
) -> MemberRecord:
    """The record of a scored member, whose turns and scores are among these."""
    by_turn: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for episode_id, index, source, value in scores:
        if episode_id == id:
            by_turn[index][source] = value
    return member_record(
        outcome,
        json.loads(outcomes),
        [
            (role, reward, json.loads(others), by_turn.get(index, {}), UNKNOWN if state is None else state)
            for episode_id, index, role, state, reward, others in turns
            if episode_id == id
        ],
        dict(weights),
    )


def scored(stop_reason: str, outcome: float | None) -> bool:
    """Whether an ended episode may enter loss and baseline, by the same rule as `Trajectory.scored`."""
    return StopReason(stop_reason).by_policy and outcome is not None


def _failure(stop_reasons: list[str]) -> str:
    """The most common failure of members; "no_outcome" if none failed but too few were scored."""
    failures = Counter(reason for reason in stop_reasons if not StopReason(reason).by_policy)
    return failures.most_common(1)[0][0] if failures else "no_outcome"


_MOST = 1024  # continuations of one turn
