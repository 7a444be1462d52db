"""The newest saved state of a running episode's environment: bytes that only the environment understands.

One row per episode, deleted when it ends or starts anew. Never decides when a snapshot is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.store.codec import printable
from agentrl.store.databases.database import Database, StorePart
from agentrl.store.episodes.leases import check_fence


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSnapshot:
    """The state of an environment after its answer to turn `turn`; the policy had used `seconds` of its time then."""

    turn: int
    data: bytes
    seconds: float = 0.0


class EnvSnapshots(StorePart):
    """Keep the newest snapshot of each running episode."""

    def keep_snapshot(self, episode_id: int, fence: int, snapshot: EnvSnapshot) -> None:
        """Replace the episode's snapshot. Raises LeaseLost if it is no longer held under `fence`."""
        with self._db.write(shared=True):
            check_fence(self._db, episode_id, fence)
            self._db.execute(
                "INSERT INTO snapshots VALUES (?, ?, ?, ?) ON CONFLICT (episode_id)"
                " DO UPDATE SET turn = excluded.turn, seconds = excluded.seconds, data = excluded.data",
                (episode_id, snapshot.turn, snapshot.seconds, snapshot.data),
            )

    def snapshot(self, episode_id: int) -> EnvSnapshot | None:
        """The newest snapshot of an episode that has not ended; None if there is none."""
        with self._db.read():
            row = self._db.row("SELECT turn, seconds, data FROM snapshots WHERE episode_id = ?", (episode_id,))
        return None if row is None else EnvSnapshot(turn=row[0], seconds=row[1], data=row[2])

    def note_unsaved(self, episode_id: int, fence: int, turn: int, reason: str) -> None:
        """Note that no snapshot can be taken from `turn` on, and why; the one before it stays. Raises LeaseLost if the
        episode is no longer held under `fence`."""
        with self._db.write(shared=True):
            check_fence(self._db, episode_id, fence)
            self._db.execute(
                "INSERT INTO unsaved VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (episode_id, turn, printable(reason))
            )

    def unsaved(self, episode_id: int) -> str:
        """Why no snapshot of a running episode was taken any more; empty if there is no such reason."""
        with self._db.read():
            row = self._db.row("SELECT turn, reason FROM unsaved WHERE episode_id = ?", (episode_id,))
        return "" if row is None else f"no snapshot from turn {row[0]} on: {row[1]}"


def drop_snapshot(db: Database, episode_id: int) -> None:
    """Forget an episode's snapshot: it begins anew, or is over."""
    for table in ("snapshots", "unsaved"):
        db.execute(f"DELETE FROM {table} WHERE episode_id = ?", (episode_id,))
