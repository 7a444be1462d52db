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
    return {task_identity for (task_identity,) in db.rows("SELECT task FROM quarantine")}


def lost_groups(db: Database, max_replays: int) -> list[int]:
    """Groups whose task is to be played again, oldest first, without tasks in quarantine. Inside a transaction."""
    if not max_replays:
        return []
    group_rows = db.rows(
        f"SELECT id, task FROM groups INDEXED BY groups_lost WHERE {LOST} AND replays < ? ORDER BY id",
        (max_replays,),
    )
    quarantined_tasks = quarantined(db) if group_rows else set[str]()
    return [
        group_id
        for group_id, packed_task in group_rows
        if not quarantined_tasks or pack_identity(unpack_task(packed_task)) not in quarantined_tasks
    ]


TRAIN = "train"
"""The purpose of training groups; any other names an evaluation, which is claimed first and never trained."""

TEXT = "text"
"""The purpose of conversations that were recorded as text: nobody knows their tokens, and they are never trained."""

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
            group_room, sampling_step = self._room(bounds, limit)
            if group_room.first != first:
                return 0
            replayed_groups = lost_groups(self._db, bounds.max_replays)[: group_room.replays]
            for group_id in replayed_groups:
                create_again(self._db, group_id, bounds.group_size, sampling_step)
            new_tasks = tasks[: group_room.groups - group_room.replays]
            playable_tasks = without(quarantined(self._db), new_tasks, skipped) if new_tasks else []
            for task in playable_tasks:
                create_group(self._db, task, bounds.group_size, TRAIN, sampling_step)
            # In the transaction that starts the groups. Written before, a crash would skip tasks; written after, it
            # would play them twice. Tasks that were passed over count as used, or the same ones would be prepared at
            # every look.
            self._db.execute(SET_META, (NEXT_TASK.key, NEXT_TASK.text(first + len(new_tasks))))
        return len(replayed_groups) + len(playable_tasks)

    def _room(self, bounds: AdmissionBounds, limit: int) -> tuple[Room, int]:
        """The room, and the step of the weights that sample now. Inside a transaction."""
        sampling_version, first_index = latest_confirmed(self._db), next_task(self._db)
        if sampling_version is None:
            return Room(0, 0, first_index), 0
        free_groups = admissible_groups(load_of(self._db, bounds), bounds, step=sampling_version.step)
        group_count = max(0, min(free_groups, limit))
        replay_count = min(group_count, len(lost_groups(self._db, bounds.max_replays))) if group_count else 0
        return Room(group_count, replay_count, first_index), sampling_version.step

    @retried
    def add_groups(self, tasks: Iterable[Task], *, size: int, purpose: str, step: int | None = None) -> list[int]:
        """Start a group of `size` episodes for each task, outside admission; returns their ids. For evaluation: give
        each evaluation its own purpose, such as "eval:held_out@20"; `step` is that of the weights that it measures
        (None: those that sample now)."""
        with self._db.write():
            latest_version = latest_confirmed(self._db)
            step = (0 if latest_version is None else latest_version.step) if step is None else step
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
            request_words = f"{k} continuation{'s' * (k != 1)}"
            correction = (
                f"ask for at most {_MOST}" if k > _MOST else "has no sibling to be compared with: ask for 2 or more"
            )
            raise UsageError(f"{request_words} {correction}" if k < 2 else f"{request_words}: {correction}")
        with self._db.write():
            packed_task, packed_start, packed_tools, trial = self._origin(episode_id, turn)
            latest_version = latest_confirmed(self._db)
            group_id = create_group(
                self._db, unpack_task(packed_task), k, TRAIN, 0 if latest_version is None else latest_version.step
            )
            self._db.execute(
                "UPDATE groups SET fork_of = ?, fork_trial = ?, fork_turn = ?, played_again = 1 WHERE id = ?",
                (episode_id, trial, turn, group_id),
            )
            self._db.execute(
                "UPDATE episodes SET start = ?, tools = ? WHERE group_id = ?", (packed_start, packed_tools, group_id)
            )
            for (member_id,) in self._db.rows(
                "SELECT id FROM episodes WHERE group_id = ? ORDER BY member", (group_id,)
            ):
                self._begin(member_id, episode_id, trial, turn)
        return group_id

    @retried
    def forked(self) -> frozenset[int]:
        """The groups of which a member was forked."""
        with self._db.read():
            origins_query = "SELECT fork_of FROM groups WHERE fork_of IS NOT NULL"
            group_rows = self._db.rows(f"SELECT DISTINCT group_id FROM episodes WHERE id IN ({origins_query})")
        return frozenset(group_id for (group_id,) in group_rows)

    @retried
    def fork_states(self, limit: int) -> list[GroupState]:
        """The states of the latest forks that closed, the latest first."""
        with self._db.read():
            state_rows = self._db.rows(
                "SELECT state FROM groups WHERE fork_turn IS NOT NULL AND state NOT IN ('waiting', 'running')"
                " ORDER BY id DESC LIMIT ?",
                (limit,),
            )
        return [GroupState(group_state) for (group_state,) in state_rows]

    def _origin(self, episode_id: int, turn: int) -> tuple[str, str, str | None, int]:
        """The task, first observation, tools and trial of an episode that can be forked at `turn`."""
        origin_row = self._db.row(
            "SELECT g.purpose, g.task, e.start, e.tools, e.trial FROM episodes e JOIN groups g ON g.id = e.group_id"
            " WHERE e.id = ?",
            (episode_id,),
        )
        if origin_row is None:
            raise NotInStore(f"no episode {episode_id} in {self._db.path}: its table episodes lists them")
        purpose, packed_task, packed_start, packed_tools, trial = origin_row
        if purpose != TRAIN:
            raise UsageError(f"episode {episode_id} is of {purpose}, which is never trained: fork one of training")
        turn_rows = self._db.rows(
            "SELECT s.terminated = 1 OR s.truncated = 1, k.turn_id IS NOT NULL"
            " FROM turns t JOIN steps s ON s.turn_id = t.id"
            " LEFT JOIN tokens k ON k.turn_id = t.id WHERE t.episode_id = ? AND t.trial = ? ORDER BY t.idx",
            (episode_id, trial),
        )
        if not turn_rows:
            raise UsageError(f"episode {episode_id} has no turn yet that its environment has answered")
        if turn < 1:
            raise UsageError(f"turn {turn} begins the episode: a fork starts at turn 1 or later")
        last_forkable = len(turn_rows) - bool(turn_rows[-1][0])
        if turn > last_forkable:
            ending_clause = "and its last one ended it" if turn_rows[-1][0] else "as far as it was played"
            turns_played = f"episode {episode_id} has {len(turn_rows)} turns, {ending_clause}"
            raise UsageError(f"{turns_played}: a fork starts at turn 1 to {last_forkable}")
        if not all(is_kept for _, is_kept in turn_rows[:turn]):
            raise UsageError(f"retention has dropped the tokens of episode {episode_id}: fork a younger one")
        return packed_task, packed_start, packed_tools, trial

    def _begin(self, member: int, origin: int, trial: int, turn: int) -> None:
        """Copy the turns before `turn`, and a snapshot of their state if there is one."""
        db = self._db
        for (turn_row_id,) in db.rows(
            "SELECT id FROM turns WHERE episode_id = ? AND trial = ? AND idx < ? ORDER BY idx", (origin, trial, turn)
        ):
            # Copies, not references to the turns of the origin. Retention may drop the origin's tokens while the fork
            # still trains; and a reader of turns, of which there are many, needs no rule for episodes that begin in
            # another one. The copies do not learn (`learns` is 0), so no token is in two losses (law 2):
            # `tests/store/test_forks.py`.
            copied_row_id = db.insert(
                "INSERT INTO turns (episode_id, trial, idx, parent, role, learns, finish, text, spans, n_prompt,"
                " n_tokens, oldest_step, state, started_s, ended_s) SELECT ?, 0, idx, parent, role, 0, finish, text,"
                " spans, n_prompt, n_tokens, NULL, state, started_s, ended_s FROM turns WHERE id = ?",
                (member, turn_row_id),
            )
            for table_name in ("tokens", "experts"):
                db.execute(
                    f"INSERT INTO {table_name} SELECT ?, data FROM {table_name} WHERE turn_id = ?",
                    (copied_row_id, turn_row_id),
                )
            step_columns = "observation, reward, terminated, truncated, info"
            db.execute(
                f"INSERT INTO steps SELECT ?, {step_columns} FROM steps WHERE turn_id = ?", (copied_row_id, turn_row_id)
            )
        snapshot_key: tuple[Any, ...] = (member, origin, turn)
        db.execute(
            "INSERT INTO snapshots SELECT ?, turn, seconds, data FROM snapshots WHERE episode_id = ? AND turn < ?",
            snapshot_key,
        )


def next_task(db: Database) -> int:
    """The index of the next training task. Inside a transaction."""
    return NEXT_TASK.within(db)


def count_states(db: Database, purpose: str) -> dict[GroupState, int]:
    count_rows = db.rows("SELECT state, n FROM group_counts WHERE purpose = ? AND n > 0", (purpose,))
    return {GroupState(group_state): group_count for group_state, group_count in count_rows}


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
    state_counts = count_states(db, TRAIN)
    # Two counts and not one with `state IN`: each has an index that holds only such episodes, and together they are a
    # handful of rows in a store of a million.
    waiting_row = db.row("SELECT COUNT(*) FROM episodes WHERE state = 'waiting' AND evaluation = 0")
    running_row = db.row(  # an episode that waits for reward sources has no holder and takes no place
        "SELECT COUNT(*) FROM episodes WHERE state = 'running' AND evaluation = 0 AND holder IS NOT NULL"
    )
    assert waiting_row is not None and running_row is not None
    return Load(
        running_episodes=waiting_row[0] + running_row[0],
        running_groups=sum(state_counts.get(group_state, 0) for group_state in _RUNNING),
        accepted_groups=sum(state_counts.get(group_state, 0) for group_state in _ACCEPTED),
        buffered_tokens=0 if bounds.max_tokens is None else _buffered_tokens(db),
    )


def _buffered_tokens(db: Database) -> int:
    """Sampled tokens of ended members of groups that are not taken, and of late members that are not."""
    sum_row = db.row(
        "SELECT (SELECT COALESCE(SUM(e.n_tokens), 0) FROM groups g JOIN episodes e ON e.group_id = g.id"
        "  WHERE g.purpose = 'train' AND g.state IN ('running', 'scored') AND e.stop_reason IS NOT NULL)"
        f" + (SELECT COALESCE(SUM(e.n_tokens), 0) FROM (SELECT * FROM episodes WHERE {LATE}) e"
        "  JOIN groups g ON g.id = e.group_id WHERE g.state <> 'scored' AND e.stop_reason IS NOT NULL)"
    )
    assert sum_row is not None
    return sum_row[0]


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
        [(group_id, member_index, int(purpose != TRAIN)) for member_index in range(size)],
    )
    return group_id


def create_again(db: Database, lost: int, size: int, step: int) -> int:
    """Start a group that plays the task of a lost one again; its id."""
    lost_row = db.row("SELECT task, replays FROM groups WHERE id = ?", (lost,))
    assert lost_row is not None
    packed_task, replay_count = lost_row
    group_id = create_group(db, unpack_task(packed_task), size, TRAIN, step)
    db.execute("UPDATE groups SET replay_of = ?, replays = ? WHERE id = ?", (lost, replay_count + 1, group_id))
    return group_id


def close_if_ended(db: Database, group_id: int, now: float) -> None:
    """Close an open group if all its members have ended."""
    ended_row = db.row(
        "SELECT state IN ('waiting', 'running') AND NOT EXISTS"
        " (SELECT 1 FROM episodes WHERE group_id = ?1 AND state IN ('waiting', 'running')) FROM groups WHERE id = ?1",
        (group_id,),
    )
    if ended_row is not None and ended_row[0]:
        close(db, [group_id], now)


def close(db: Database, group_ids: Sequence[int], now: float) -> None:
    """Close groups with the members that have ended. An evaluation group becomes scored. A training group becomes
    scored if at least min(2, size) members are scored, else failed, with the most common failure as its reason. A
    scored training group gets its record, in the order in which its members ended, which never changes; open members
    are late from now on."""
    # All queries of all groups in one go. A hundred episodes may end in one transaction and close a dozen groups, and
    # nobody else writes until it is over.
    weight_rows, *query_results = db.all_rows((WEIGHTS, ()), *chain(*map(_closing, group_ids)))
    for position, group_id in enumerate(group_ids):
        ((purpose, group_size),), ended_rows, turn_rows, score_rows = query_results[4 * position : 4 * position + 4]
        group_state, failure_reason, packed_record = GroupState.SCORED, None, None
        if purpose == TRAIN:
            group_record = {
                member_index: _record(episode_id, outcome, packed_outcomes, turn_rows, score_rows, weight_rows)
                for episode_id, member_index, stop_reason, outcome, packed_outcomes in ended_rows
                if scored(stop_reason, outcome)
            }
            packed_record = pack_record(group_record)
            if len(group_record) < enough(group_size):
                # In the order of the members: of two reasons that are as common, the group takes the first member's.
                ended_by_member = sorted(ended_rows, key=lambda row: row[1])
                failure_reason = _failure([member_reason for _, _, member_reason, *_ in ended_by_member])
                group_state, packed_record = GroupState.FAILED, None
        db.execute(
            "UPDATE groups SET state = ?, reason = ?, record = ?, closed_s = ? WHERE id = ?",
            (group_state, failure_reason, packed_record, now, group_id),
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
    turn_rows, score_rows, weight_rows = db.all_rows(*_earned("e.id = ?", episode_id), (WEIGHTS, ()))
    return _record(episode_id, outcome, outcomes, turn_rows, score_rows, weight_rows)


def _earned(where: str, id: int) -> tuple[Query, Query]:
    """Return two queries for what the episodes (`e`) that `where` selects have earned in their last trials: each turn
    with the rewards of its step, and the scores of reward sources. `id` fills the placeholder in `where`."""
    turns_join = "CROSS JOIN turns t ON t.episode_id = e.id AND t.trial = e.trial"
    return (
        (
            "SELECT e.id, t.idx, t.role, t.state, COALESCE(s.reward, 0.0),"
            " COALESCE(json_extract(s.info, '$.rewards'), '{}')"
            f" FROM episodes e {turns_join} LEFT JOIN steps s ON s.turn_id = t.id WHERE {where} ORDER BY e.id, t.idx",
            (id,),
        ),
        # Sources first, in an order that CROSS JOIN fixes: a run without reward sources then looks at no turn.
        (
            f"SELECT e.id, t.idx, r.source, r.value FROM sources c CROSS JOIN episodes e ON {where} {turns_join}"
            " CROSS JOIN rewards r ON r.turn_id = t.id AND r.source = c.source AND r.counts = 1",
            (id,),
        ),
    )


def _record(
    id: int, outcome: float, outcomes: str, turns: Iterable[Row], scores: Iterable[Row], weights: Iterable[Row]
) -> MemberRecord:
    """The record of a scored member, whose turns and scores are among these."""
    by_turn: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for episode_id, turn_index, source, score_value in scores:
        if episode_id == id:
            by_turn[turn_index][source] = score_value
    return member_record(
        outcome,
        json.loads(outcomes),
        [
            (role, reward, json.loads(others), by_turn.get(turn_index, {}), UNKNOWN if state is None else state)
            for episode_id, turn_index, role, state, reward, others in turns
            if episode_id == id
        ],
        dict(weights),
    )


def scored(stop_reason: str, outcome: float | None) -> bool:
    """Whether an ended episode may enter loss and baseline, by the same rule as `Trajectory.scored`."""
    return StopReason(stop_reason).by_policy and outcome is not None


def _failure(stop_reasons: list[str]) -> str:
    """The most common failure of members; "no_outcome" if none failed but too few were scored."""
    failures = Counter(stop_reason for stop_reason in stop_reasons if not StopReason(stop_reason).by_policy)
    return failures.most_common(1)[0][0] if failures else "no_outcome"


_MOST = 1024  # continuations of one turn
