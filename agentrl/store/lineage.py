"""Which step trained which episodes: checkpoints, rollbacks, repair after a loss, and how long token arrays are kept.

The learner's protocol, which makes training exactly once hold across any crash: it writes the checkpoint's files and
syncs them, then calls `checkpoint`; after a crash it loads the files of `latest_checkpoint` and calls `rollback` with
its step before it takes again. Files without such a call are garbage.

A store may lack episodes of a checkpoint, after a loss of power or where an older copy was put back. A checkpoint's
folder lists the episodes that it trained; the list is trusted: they are never trained again (law 2). Never knows where
the folders lie, or which code reads them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import StoreError
from agentrl.records import GroupState, StopReason, WeightVersion
from agentrl.store.databases.database import Database, StorePart
from agentrl.store.episodes.endings import end_episode
from agentrl.store.episodes.groups import LATE, TRAIN, forget_starts, scored
from agentrl.store.episodes.leases import too_early
from agentrl.store.learner_fence import check_lead
from agentrl.store.run_values import ATTEMPT, ATTEMPT_SQL

TOKENS_DROPPED = "tokens_dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A step that the run can go back to: the version of its weights, and the path of its files."""

    step: int
    version: int
    path: str
    attempt: int


class Lineage(StorePart):
    """Checkpoints and rollbacks of the learner, and the retention of what it trained."""

    @property
    def attempt(self) -> int:
        """The run's attempt: 1 at first, one more after each rollback, and each restart after episodes had ended."""
        with self._db.read():
            return _attempt(self._db)

    def checkpoint(self, step: int, version: WeightVersion | int, path: str | Path) -> None:
        """The state after `step` is safe at `path`: mark groups taken up to it as trained. Waits for the disk."""
        number = version if isinstance(version, int) else version.version
        with self._db.write(durable=True):
            check_lead(self._db)
            if self._db.row("SELECT 1 FROM versions WHERE version = ?", (number,)) is None:
                raise StoreError(f"checkpoint of step {step}: weight version {number} was never minted")
            self._db.execute(
                "INSERT INTO checkpoints (step, version, path, attempt, saved_s) VALUES (?, ?, ?, ?, ?)",
                (step, number, str(path), _attempt(self._db), self._db.clock()),
            )
            self._db.execute(
                "UPDATE groups SET state = 'trained' WHERE purpose = 'train' AND state = 'taken' AND taken_step <= ?",
                (step,),
            )

    def latest_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to go on from; None before the first one."""
        with self._db.read():
            row = self._db.row(
                "SELECT step, version, path, attempt FROM checkpoints WHERE undone_attempt IS NULL"
                " ORDER BY step DESC, id DESC LIMIT 1"
            )
        return None if row is None else Checkpoint(step=row[0], version=row[1], path=row[2], attempt=row[3])

    def checkpoint_steps(self) -> list[int]:
        """The steps that have a checkpoint which no rollback undid."""
        with self._db.read():
            rows = self._db.rows("SELECT DISTINCT step FROM checkpoints WHERE undone_attempt IS NULL ORDER BY step")
        return [step for (step,) in rows]

    def rollback(self, step: int, *, ahead: int | None = None) -> int:
        """Go back to checkpoint `step` (0: the weights that the run started with); returns the new attempt.

        All that came after it is undone: its groups, taken or skipped, are scored again, late members wait again, its
        lineage, checkpoints, versions and metrics are flagged with the new attempt, and its evaluations are renamed
        ("undone-2:eval:…"), so that they run anew.
        With `ahead`, groups beyond the first `ahead` yet to be trained (see `claim`) are taken from their workers, and
        go on when their turn comes: played now, they would be stale by then.
        Call it at every resume, also when there is nothing to undo. A group whose tokens were dropped by `retain`
        cannot be trained again and leaves as "tokens_dropped". Raises StoreError if `step` has no valid checkpoint."""
        with self._db.write(durable=True):
            check_lead(self._db)
            known = self._db.row("SELECT 1 FROM checkpoints WHERE step = ? AND undone_attempt IS NULL", (step,))
            if step != 0 and known is None:
                raise StoreError(f"cannot roll back to step {step}: it has no checkpoint")
            attempt = _attempt(self._db) + 1
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'attempt'", (str(attempt),))
            for table in ("lineage", "checkpoints", "versions", "metrics"):
                self._db.execute(
                    f"UPDATE {table} SET undone_attempt = ? WHERE undone_attempt IS NULL AND step > ?", (attempt, step)
                )
            self._db.execute(
                "UPDATE episodes SET taken_step = NULL, dropped ="
                " (SELECT iif(g.tokens_dropped = 1, ?, NULL) FROM groups g WHERE g.id = group_id) WHERE taken_step > ?",
                (TOKENS_DROPPED, step),
            )
            self._db.execute(
                "UPDATE groups SET taken_step = NULL, state = iif(tokens_dropped = 1, 'expired', 'scored'),"
                " reason = iif(tokens_dropped = 1, ?, NULL) WHERE taken_step > ? AND state IN ('taken', 'trained')",
                (TOKENS_DROPPED, step),
            )
            self._db.execute(
                "UPDATE groups SET skipped_step = NULL, state = iif(tokens_dropped = 1, state, 'scored'),"
                " reason = iif(tokens_dropped = 1, reason, NULL) WHERE skipped_step > ?",
                (step,),
            )
            self._undo_evaluations(step, attempt)
            if ahead is not None:
                self._hold_back(too_early(self._db, step, ahead))
        return attempt

    def _hold_back(self, first: float) -> None:
        """Take training groups from id `first` on from their workers."""
        self._db.execute(
            "UPDATE episodes SET state = 'waiting', holder = NULL WHERE state = 'running' AND evaluation = 0"
            " AND holder IS NOT NULL AND group_id >= ?",
            (first,),
        )
        forget_starts(self._db, first, purpose=TRAIN)

    def stands_beyond(self, step: int) -> bool:
        """Whether lineage or versions of a later step stand: then going on from `step` needs a rollback first."""
        with self._db.read():
            row = self._db.row(
                "SELECT 1 FROM lineage WHERE undone_attempt IS NULL AND step > ?1"
                " UNION ALL SELECT 1 FROM versions WHERE undone_attempt IS NULL AND step > ?1 LIMIT 1",
                (step,),
            )
        return row is not None

    def _undo_evaluations(self, step: int, attempt: int) -> None:
        now = self._db.clock()
        of_later = "purpose <> 'train' AND purpose NOT LIKE 'undone-%' AND started_step > ?"
        for (episode_id,) in self._db.rows(
            "SELECT e.id FROM groups g INDEXED BY groups_evaluating CROSS JOIN episodes e ON e.group_id = g.id"
            f" WHERE {of_later} AND e.state IN ('waiting', 'running')",
            (step,),
        ):
            end_episode(self._db, episode_id, "expired", StopReason.EXPIRED, now)
        self._db.execute(
            "UPDATE groups SET purpose = ? || purpose, reason = iif(closed_s IS NULL, 'undone', reason),"
            " state = iif(closed_s IS NULL, 'expired', state), closed_s = COALESCE(closed_s, ?)"
            f" WHERE {of_later}",
            (f"undone-{attempt}:", now, step),
        )

    def lineage(self, step: int) -> list[int]:
        """Ids of the episodes that optimizer step `step` trained, in the order they were taken."""
        with self._db.read():
            rows = self._db.rows(
                "SELECT episode_id FROM lineage WHERE step = ? AND undone_attempt IS NULL ORDER BY id", (step,)
            )
        return [id for (id,) in rows]

    def retain(self, step: int, *, keep_steps: int, keep_sample: float) -> int:
        """Drop token arrays, experts and artifacts of groups that no later step can train; returns of how many.

        A group keeps them if a late member may still be trained, if it is of the last `keep_steps` steps up to `step`,
        or if it is in the share `keep_sample` of the older groups, always the same ones. The step of a trained group is
        that of its training; of an expired, failed or evaluation group, that of its admission. Transcripts, rewards,
        lineage and token counts stay. A file does not shrink, its space is used again; a server gives it back, part by
        part. Never call it with a step beyond the oldest checkpoint that the run might still go back to."""
        oldest = step - keep_steps
        with self._db.read():
            rows = self._db.rows(
                "SELECT id FROM groups INDEXED BY groups_with_tokens WHERE tokens_dropped = 0 AND state = 'trained'"
                " AND taken_step <= ?1 UNION ALL SELECT id FROM groups INDEXED BY groups_with_tokens"
                " WHERE tokens_dropped = 0 AND started_step <= ?1"
                " AND (state IN ('expired', 'failed') OR (state = 'scored' AND purpose <> 'train'))",
                (oldest,),
            )
            dropped = [id for (id,) in rows if _share(id) >= keep_sample and not self._late_after(id, oldest)]
        for at in range(0, len(dropped), _RETAIN_BATCH):
            batch = dropped[at : at + _RETAIN_BATCH]
            with self._db.write():
                self._db.forget(batch)
                self._db.execute_many("UPDATE groups SET tokens_dropped = 1 WHERE id = ?", [(id,) for id in batch])
        self._db.reclaim()
        return len(dropped)

    def _late_after(self, group_id: int, step: int) -> bool:
        """Whether a late member of a group was trained after `step`, or may still be."""
        row = self._db.row(
            "SELECT 1 FROM episodes WHERE group_id = ? AND late = 1"
            " AND COALESCE(taken_step, iif(dropped IS NULL, 9e18, 0)) > ? LIMIT 1",
            (group_id, step),
        )
        return row is not None


_RETAIN_BATCH = 64  # groups a transaction, so that no journal waits long for the write lock


def _share(group_id: int) -> float:
    """A number in [0, 1) that is always the same for a group, spread evenly over groups."""
    return zlib.crc32(group_id.to_bytes(8, "little")) / 2**32


def _attempt(db: Database) -> int:
    return ATTEMPT.within(db)


JOURNAL_LOST = "journal_lost"
"""Why a group, or a late member, left that a checkpoint trained, and whose end the store has lost."""

LINEAGE_LOST = "lineage_lost"
"""Why a group, or a late member, left that may have been trained in steps of which neither the store nor a checkpoint
tells."""

_SPARE = 1000  # ids skipped, as lost rows may have used them


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The lists in a checkpoint's folder: step `previous_step` + 1 + i trained `episodes[i]`; the last of them is
    `step`. `groups` stands there instead, in order, if an older agentrl wrote it, which trained whole groups."""

    step: int
    previous_step: int
    episodes: tuple[tuple[int, ...], ...] = ()
    groups: tuple[int, ...] = ()

    def step_of_group(self, place: int) -> int:
        """The step of the group at `place`: exact where all batches were of one size."""
        return self.previous_step + 1 + place * (self.step - self.previous_step) // len(self.groups)


class Recovery(StorePart):
    """Bring the lineage up to what the checkpoints say."""

    def reconcile(self, saved: Sequence[Saved], *, max_lag: int) -> int:
        """Add to the lineage the episodes that `saved` (the kept checkpoints, oldest first) trained and the store
        lacks. Returns how many episodes, and groups without any row, that were. `max_lag` was the bound of their takes.
        Call it before `checkpoint`.

        A listed episode that is scored and whose group is closed counts as taken. Any other listed one, also without a
        row, is noted as lost, and its id is not used again. If no checkpoint is left of some steps that the store has
        not seen, they may have trained any group or late member that is not in the lineage: those are dropped."""
        with self._db.read():
            if not any(self._unknown(saved)) and not self._gap(saved):
                return 0
        with self._db.write(durable=True):
            unknown, groups = self._unknown(saved)
            for episode_id, step in unknown:
                self._believe(episode_id, step, max_lag)
            now = self._db.clock()
            self._db.execute_many(
                "INSERT INTO lost VALUES (?, ?, ?)", [(group_id, step, now) for group_id, step in groups]
            )
            if self._gap(saved):
                self._give_up()
            self._db.skip_numbers("episodes", max((id for id, _ in unknown), default=0), _SPARE)
            self._db.skip_numbers("groups", max((id for id, _ in groups), default=0), _SPARE)
            self._db.skip_numbers("versions", 0, _SPARE)
        return len(unknown) + len(groups)

    def _unknown(self, saved: Sequence[Saved]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(episode, step) pairs of which the store knows neither a take nor a loss, and (group, step) pairs of groups
        that it does not have."""
        lost = {id for (id,) in self._db.rows("SELECT group_id FROM lost")}
        episodes: list[tuple[int, int]] = []
        groups: list[tuple[int, int]] = []
        for one in saved:
            for step, ids in enumerate(one.episodes, one.previous_step + 1):
                episodes += [(id, step) for id in ids]
            for place, group_id in enumerate(one.groups):
                if group_id in lost:
                    continue
                members = self._db.rows("SELECT id, stop_reason, outcome FROM episodes WHERE group_id = ?", (group_id,))
                if not members:
                    groups.append((group_id, one.step_of_group(place)))
                episodes += [
                    (id, one.step_of_group(place))
                    for id, stop_reason, outcome in members
                    if stop_reason is None or scored(stop_reason, outcome)
                ]
        return [(id, step) for id, step in episodes if not self._knows(id)], groups

    def _knows(self, episode_id: int) -> bool:
        row = self._db.row(
            "SELECT 1 FROM lineage WHERE episode_id = ?1 AND undone_attempt IS NULL"
            " UNION ALL SELECT 1 FROM lost_members WHERE episode_id = ?1 LIMIT 1",
            (episode_id,),
        )
        return row is not None

    def _gap(self, saved: Sequence[Saved]) -> bool:
        """Whether the checkpoints begin after the last one that the store knows."""
        row = self._db.row("SELECT COALESCE(MAX(step), 0) FROM checkpoints WHERE undone_attempt IS NULL")
        return bool(saved) and row is not None and row[0] < saved[0].previous_step

    def _give_up(self) -> None:
        for (group_id,) in self._db.rows(
            "SELECT id FROM groups WHERE purpose = ? AND state IN ('waiting', 'running', 'finished', 'scored')",
            (TRAIN,),
        ):
            self._drop_group(group_id, LINEAGE_LOST)
        for (episode_id,) in self._db.rows(f"SELECT id FROM episodes WHERE {LATE}"):
            self._drop_member(episode_id, LINEAGE_LOST)

    def _believe(self, episode_id: int, step: int, max_lag: int) -> None:
        row = self._db.row(
            "SELECT g.id, g.state, e.stop_reason, e.outcome, e.late, e.dropped FROM episodes e"
            " JOIN groups g ON g.id = e.group_id WHERE e.id = ?",
            (episode_id,),
        )
        group_id, state, stop_reason, outcome, late, dropped = row or (0, None, None, None, 0, None)
        taken = (GroupState.SCORED, GroupState.TAKEN, GroupState.TRAINED)
        closed = state in taken or (state == GroupState.EXPIRED and late)
        if closed and dropped is None and stop_reason is not None and scored(stop_reason, outcome):
            self._db.execute(
                f"INSERT INTO lineage (episode_id, step, attempt, max_lag, taken_s) VALUES (?, ?, {ATTEMPT_SQL}, ?, ?)",
                (episode_id, step, max_lag, self._db.clock()),
            )
            self._db.execute("UPDATE episodes SET taken_step = ? WHERE id = ?", (step, episode_id))
            self._db.execute(
                "UPDATE groups SET state = 'taken', taken_step = ? WHERE id = ? AND state = 'scored'", (step, group_id)
            )
            return
        self._db.execute("INSERT INTO lost_members VALUES (?, ?, ?)", (episode_id, step, self._db.clock()))
        if state in (GroupState.WAITING, GroupState.RUNNING, GroupState.FINISHED):
            self._drop_group(group_id, JOURNAL_LOST)
        elif late and dropped is None:
            self._drop_member(episode_id, JOURNAL_LOST)

    def _drop_group(self, group_id: int, reason: str) -> None:
        now = self._db.clock()
        for (episode_id,) in self._db.rows(
            "SELECT id FROM episodes WHERE group_id = ? AND late = 0 AND state IN ('waiting', 'running')", (group_id,)
        ):
            end_episode(self._db, episode_id, "expired", StopReason.EXPIRED, now)
        self._db.execute(
            "UPDATE groups SET state = 'expired', reason = ?, closed_s = ? WHERE id = ?", (reason, now, group_id)
        )

    def _drop_member(self, episode_id: int, reason: str) -> None:
        """Drop a late member without its group."""
        row = self._db.row("SELECT stop_reason FROM episodes WHERE id = ?", (episode_id,))
        if row is not None and row[0] is None:
            end_episode(self._db, episode_id, "expired", StopReason.EXPIRED, self._db.clock())
        self._db.execute("UPDATE episodes SET dropped = ? WHERE id = ?", (reason, episode_id))
