"""Which step trained which episodes: checkpoints, rollbacks, and how long token arrays are kept.

The learner's protocol, which makes training exactly once hold across any crash: it writes the checkpoint's files and
syncs them, then calls `checkpoint`; after a crash it loads the files of `latest_checkpoint` and calls `rollback` with
its step before it takes again. Files without such a call are garbage.

A handle that says `lead` is the learner's from then on. A learner that was cut off from the store for so long that
another one began would otherwise go on, and its steps would count beside those of the other. Never knows where the
folders of checkpoints lie, or which code reads them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import StoreError
from agentrl.records import StopReason, WeightVersion
from agentrl.store.databases.database import Database, StorePart, retried
from agentrl.store.episodes.endings import end_episode
from agentrl.store.episodes.groups import TRAIN, forget_starts
from agentrl.store.episodes.leases import too_early
from agentrl.store.learner_fence import check_lead
from agentrl.store.run_values import ATTEMPT, LEARNER
from agentrl.store.schema import SET_META

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
    @retried
    def attempt(self) -> int:
        """The run's attempt: 1 at first, one more after each rollback, and each restart after episodes had ended."""
        with self._db.read():
            return _attempt(self._db)

    @retried
    def checkpoint(self, step: int, version: WeightVersion | int, path: str | Path) -> None:
        """The state after `step` is safe at `path`: mark groups taken up to it as trained. Waits for the disk."""
        version_number = version if isinstance(version, int) else version.version
        with self._db.write(durable=True):
            check_lead(self._db)
            if self._db.row("SELECT 1 FROM versions WHERE version = ?", (version_number,)) is None:
                raise StoreError(f"checkpoint of step {step}: weight version {version_number} was never minted")
            self._db.execute(
                # The row comes after the files are synced. In the other order a crash in between would leave a
                # checkpoint to go back to that has no files, and groups marked as trained by weights that are gone. In
                # this order it leaves a folder without a row, which the next start either takes in (`recovery`) or
                # removes.
                "INSERT INTO checkpoints (step, version, path, attempt, saved_s) VALUES (?, ?, ?, ?, ?)",
                (step, version_number, str(path), _attempt(self._db), self._db.clock()),
            )
            self._db.execute(
                "UPDATE groups SET state = 'trained' WHERE purpose = 'train' AND state = 'taken' AND taken_step <= ?",
                (step,),
            )

    @retried
    def latest_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to go on from; None before the first one."""
        with self._db.read():
            newest = self._db.row(
                "SELECT step, version, path, attempt FROM checkpoints WHERE undone_attempt IS NULL"
                " ORDER BY step DESC, id DESC LIMIT 1"
            )
        return (
            None if newest is None else Checkpoint(step=newest[0], version=newest[1], path=newest[2], attempt=newest[3])
        )

    @retried
    def checkpoint_steps(self) -> list[int]:
        """The steps that have a checkpoint which no rollback undid."""
        with self._db.read():
            step_rows = self._db.rows(
                "SELECT DISTINCT step FROM checkpoints WHERE undone_attempt IS NULL ORDER BY step"
            )
        return [step for (step,) in step_rows]

    @retried
    def rollback(self, step: int, *, ahead: int | None = None) -> int:
        """Go back to checkpoint `step` (0: the weights that the run started with); returns the new attempt.

        All that came after it is undone: its groups, taken or skipped, are scored again, late members wait again, its
        lineage, checkpoints, versions and metrics are flagged with the new attempt, and its evaluations are renamed
        ("undone-2:eval:…"), so that they run anew.
        With `ahead`, groups beyond the first `ahead` yet to be trained (see `Leases.claim`) are taken from their
        workers, and go on when their turn comes: played now, they would be stale by then.
        Call it at every resume, also when there is nothing to undo. A group whose tokens were dropped by `retain`
        cannot be trained again and leaves as "tokens_dropped". Raises StoreError if `step` has no valid checkpoint."""
        # Rows are flagged as undone and stay, instead of being deleted: reports show what the run paid, and ids of
        # episodes and versions are never used twice, so a late message about an undone version is not taken for one of
        # the new attempt. Groups go back to scored with their record, since what a member is judged against was
        # recorded when its group closed and does not depend on who trained it. Evaluations of undone steps are played
        # anew under their old name, and so the old ones are renamed.
        with self._db.write(durable=True):
            check_lead(self._db)
            checkpoint = self._db.row("SELECT 1 FROM checkpoints WHERE step = ? AND undone_attempt IS NULL", (step,))
            # Step 0 needs no checkpoint: it is the model that the run file names.
            if step != 0 and checkpoint is None:
                raise StoreError(f"cannot roll back to step {step}: it has no checkpoint")
            new_attempt = _attempt(self._db) + 1
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'attempt'", (str(new_attempt),))
            for table_name in ("lineage", "checkpoints", "versions", "metrics"):
                self._db.execute(
                    f"UPDATE {table_name} SET undone_attempt = ? WHERE undone_attempt IS NULL AND step > ?",
                    (new_attempt, step),
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
            self._undo_evaluations(step, new_attempt)
            # Last, since it counts the groups that the lines above have put back.
            if ahead is not None:
                self._hold_back(too_early(self._db, step, ahead))
        return new_attempt

    def _hold_back(self, first: float) -> None:
        """Let training groups from id `first` on wait again: their episodes leave their workers, and the deadlines of
        the groups begin anew with the next claim. `first` may be infinite, for none."""
        self._db.execute(
            "UPDATE episodes SET state = 'waiting', holder = NULL WHERE state = 'running' AND evaluation = 0"
            " AND holder IS NOT NULL AND group_id >= ?",
            (first,),
        )
        forget_starts(self._db, first, purpose=TRAIN)

    @retried
    def stands_beyond(self, step: int) -> bool:
        """Whether lineage or versions of a later step stand: then going on from `step` needs a rollback first."""
        with self._db.read():
            later_row = self._db.row(
                "SELECT 1 FROM lineage WHERE undone_attempt IS NULL AND step > ?1"
                " UNION ALL SELECT 1 FROM versions WHERE undone_attempt IS NULL AND step > ?1 LIMIT 1",
                (step,),
            )
        return later_row is not None

    def _undo_evaluations(self, step: int, attempt: int) -> None:
        undone_s = self._db.clock()
        later_groups = "purpose <> 'train' AND purpose NOT LIKE 'undone-%' AND started_step > ?"
        for (episode_id,) in self._db.rows(
            "SELECT e.id FROM groups g INDEXED BY groups_evaluating CROSS JOIN episodes e ON e.group_id = g.id"
            f" WHERE {later_groups} AND e.state IN ('waiting', 'running')",
            (step,),
        ):
            end_episode(self._db, episode_id, "expired", StopReason.EXPIRED, undone_s)
        self._db.execute(
            "UPDATE groups SET purpose = ? || purpose, reason = iif(closed_s IS NULL, 'undone', reason),"
            " state = iif(closed_s IS NULL, 'expired', state), closed_s = COALESCE(closed_s, ?)"
            f" WHERE {later_groups}",
            (f"undone-{attempt}:", undone_s, step),
        )

    @retried
    def episodes_of(self, step: int) -> list[int]:
        """Ids of the episodes that optimizer step `step` trained, in the order they were taken."""
        with self._db.read():
            lineage_rows = self._db.rows(
                "SELECT episode_id FROM lineage WHERE step = ? AND undone_attempt IS NULL ORDER BY id", (step,)
            )
        return [episode_id for (episode_id,) in lineage_rows]

    @retried
    def retain(self, step: int, *, keep_steps: int, keep_sample: float) -> int:
        """Drop token arrays, experts and artifacts of groups that no later step can train; returns of how many.

        A group keeps them if a late member may still be trained, if it is of the last `keep_steps` steps up to `step`,
        or if it is in the share `keep_sample` of the older groups, always the same ones. The step of a trained group is
        that of its training; of an expired, failed or evaluation group, that of its admission. Transcripts, rewards,
        lineage and token counts stay. A file does not shrink, its space is used again; a server gives it back, part by
        part. Never call it with a step beyond the oldest checkpoint that the run might still go back to."""
        oldest_step = step - keep_steps
        with self._db.read():
            group_rows = self._db.rows(
                "SELECT id FROM groups INDEXED BY groups_with_tokens WHERE tokens_dropped = 0 AND state = 'trained'"
                " AND taken_step <= ?1 UNION ALL SELECT id FROM groups INDEXED BY groups_with_tokens"
                " WHERE tokens_dropped = 0 AND started_step <= ?1"
                " AND (state IN ('expired', 'failed') OR (state = 'scored' AND purpose <> 'train'))",
                (oldest_step,),
            )
            # Which groups are kept as a sample depends on their id alone. A draw at each call would, call by call, drop
            # every one of them.
            dropped_ids = [
                group_id
                for (group_id,) in group_rows
                if _share(group_id) >= keep_sample and not self._late_after(group_id, oldest_step)
            ]
        for batch_start in range(0, len(dropped_ids), _RETAIN_BATCH):
            group_batch = dropped_ids[batch_start : batch_start + _RETAIN_BATCH]
            with self._db.write():
                self._db.upkeep.forget(group_batch)
                self._db.execute_many(
                    "UPDATE groups SET tokens_dropped = 1 WHERE id = ?", [(group_id,) for group_id in group_batch]
                )
        self._db.reclaim()
        return len(dropped_ids)

    def _late_after(self, group_id: int, step: int) -> bool:
        """Whether a late member of a group was trained after `step`, or may still be."""
        member_row = self._db.row(
            "SELECT 1 FROM episodes WHERE group_id = ? AND late = 1"
            " AND COALESCE(taken_step, iif(dropped IS NULL, 9e18, 0)) > ? LIMIT 1",
            (group_id, step),
        )
        return member_row is not None

    @retried
    def lead(self) -> None:
        """This handle is the learner's from now on: the next call by which an earlier learner's handle would change
        steps, versions or checkpoints raises LeaseLost."""
        with self._db.write(durable=True):
            # A number that only rises, not a lease with a clock: the learner that claimed last is the learner, and an
            # earlier one learns it at its next write. Nothing has to be renewed during a step that takes minutes.
            # `tests/store/test_postgres_faults.py` brings a learner back from a partition.
            self._db.leads = LEARNER.within(self._db) + 1
            self._db.execute(SET_META, (LEARNER.key, LEARNER.text(self._db.leads)))

    @retried
    def still_leads(self) -> None:
        """Raises LeaseLost if this handle was the learner's, and another's is by now."""
        with self._db.read():
            check_lead(self._db)


_RETAIN_BATCH = 64  # groups a transaction, so that no journal waits long for the write lock


def _share(group_id: int) -> float:
    """A number in [0, 1) that is always the same for a group, spread evenly over groups."""
    return zlib.crc32(group_id.to_bytes(8, "little")) / 2**32


def _attempt(db: Database) -> int:
    return ATTEMPT.within(db)
