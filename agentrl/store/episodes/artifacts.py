"""The declared files of an agent's work as they stood after a turn, for reward sources that test them.

Written before the turn's answer, so that a turn which waits for a score has them. Never knows what a test is.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.store.codec import pack_files, unpack_files
from agentrl.store.databases.database import StorePart
from agentrl.store.episodes.leases import check_fence
from agentrl.store.episodes.scores import turn_row


class Artifacts(StorePart):
    """Keep the artifacts of turns."""

    def keep_artifacts(self, episode_id: int, fence: int, turn: str, files: Mapping[str, bytes]) -> None:
        """Write the files of a journaled turn, by path; those written before are replaced. Raises LeaseLost if the
        episode is no longer held under `fence`, StoreError for an unknown turn."""
        data = pack_files(files)
        with self._db.write(shared=True):
            check_fence(self._db, episode_id, fence)
            row_id, _ = turn_row(self._db, turn)
            self._db.execute(
                "INSERT INTO artifacts VALUES (?, ?) ON CONFLICT (turn_id) DO UPDATE SET data = excluded.data",
                (row_id, data),
            )

    def artifacts(self, turn: str) -> dict[str, bytes] | None:
        """The files of a turn by path; None if none were written, or retention dropped them. Raises StoreError for an
        unknown turn."""
        with self._db.read():
            row_id, _ = turn_row(self._db, turn)
            row = self._db.row("SELECT data FROM artifacts WHERE turn_id = ?", (row_id,))
        return None if row is None else unpack_files(row[0])
