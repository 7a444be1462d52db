"""The newest saved state of a running episode's environment: bytes that only the environment understands.

One row per episode, deleted when it ends or starts anew. Never decides when a snapshot is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.store.database import Database, Part
from agentrl.store.leases import check_fence


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of an environment after its answer to turn `turn`; the policy had used `seconds` of its time then."""

    turn: int
    data: bytes
    seconds: float = 0.0


class Snapshots(Part):
    """Keep the newest snapshot of each running episode."""

    def keep_snapshot(self, episode_id: int, fence: int, snapshot: Snapshot) -> None:
        """Replace the episode's snapshot. Raises LeaseLost if it is no longer held under `fence`."""
        with self._db.write():
            check_fence(self._db, episode_id, fence)
            self._db.execute(
                "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)",
                (episode_id, snapshot.turn, snapshot.seconds, snapshot.data),
            )

    def snapshot(self, episode_id: int) -> Snapshot | None:
        """The newest snapshot of an episode that has not ended; None if there is none."""
        with self._db.read():
            row = self._db.row("SELECT turn, seconds, data FROM snapshots WHERE episode_id = ?", (episode_id,))
        return None if row is None else Snapshot(turn=row[0], seconds=row[1], data=row[2])


def drop_snapshot(db: Database, episode_id: int) -> None:
    """Forget an episode's snapshot: it begins anew, or is over."""
    db.execute("DELETE FROM snapshots WHERE episode_id = ?", (episode_id,))
