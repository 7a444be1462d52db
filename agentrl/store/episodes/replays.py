"""Tasks whose group was lost to infrastructure: they are played again, a bounded number of times.

A replay is a group of its own that names the group it replaces; the schema allows one replay per group. There is no
queue: the rows tell which tasks are to be played again, whichever process was killed and when. Never knows more about a
failure than the group's reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.store.codec import pack_identity, unpack_task
from agentrl.store.databases.database import Database, StorePart

# Word for word the condition of the index `groups_lost`: infrastructure ended the group, so its task taught nothing,
# and it was not played again.
_LOST = (
    "purpose = 'train' AND state IN ('expired', 'failed')"
    " AND reason IN ('engine_failed', 'sandbox_failed', 'env_failed', 'deadline') AND played_again = 0"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replays:
    """Counts of tasks lost to infrastructure: `played` again, `waiting` for it, and `given_up`."""

    played: int
    waiting: int
    given_up: int


class ReplayCounts(StorePart):
    """Count replays."""

    def replays(self, max_replays: int) -> Replays:
        """Count replays, past and to come, with at most `max_replays` per task. A quarantined task is given up."""
        with self._db.read():
            played = self._db.row("SELECT COUNT(*) FROM groups WHERE replay_of IS NOT NULL")
            lost = self._db.row(f"SELECT COUNT(*) FROM groups INDEXED BY groups_lost WHERE {_LOST}")
            waiting = len(lost_groups(self._db, max_replays))
        assert played is not None and lost is not None
        return Replays(played=played[0], waiting=waiting, given_up=lost[0] - waiting)


def quarantined(db: Database) -> set[str]:
    """The identities of the tasks in quarantine. Inside a transaction."""
    return {task for (task,) in db.rows("SELECT task FROM quarantine")}


def lost_groups(db: Database, max_replays: int) -> list[int]:
    """Groups whose task is to be played again, oldest first, without tasks in quarantine. Inside a transaction."""
    if not max_replays:
        return []
    rows = db.rows(
        f"SELECT id, task FROM groups INDEXED BY groups_lost WHERE {_LOST} AND replays < ? ORDER BY id",
        (max_replays,),
    )
    known = quarantined(db) if rows else set[str]()
    return [id for id, task in rows if not known or pack_identity(unpack_task(task)) not in known]
