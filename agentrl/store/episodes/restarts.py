"""Interrupted work that the run gives up on purpose, because of `rollout.resume`: a turn, or a whole group.

By default nothing is given up: an interrupted episode goes on from its tokens. These calls are for comparisons with
runs that go on from less. What they give up stays in the store, is counted and never trained. Never decides when.
"""

from __future__ import annotations

from agentrl.records import StopReason
from agentrl.store.databases.database import StorePart
from agentrl.store.episodes.endings import end_episode
from agentrl.store.episodes.groups import TRAIN, create_again
from agentrl.store.episodes.leases import check_fence
from agentrl.store.episodes.partial_turns import discard_partial
from agentrl.store.versions import latest_confirmed

RESTARTED = "restarted"


class Restarts(StorePart):
    """Give up interrupted work."""

    def discard_turn(self, episode_id: int, fence: int) -> None:
        """Give up the turn under way; it is sampled anew."""
        with self._db.write():
            check_fence(self._db, episode_id, fence)
            discard_partial(self._db, episode_id)

    def restart_group(self, episode_id: int, fence: int, max_replays: int) -> bool:
        """Play the task of the episode's group anew, in a group of its own: this one leaves as "restarted", and its
        ended members with it. Deaths that count against a member go on counting in the new group, and the restart
        counts as a replay of the task. Returns False, and does nothing, for a group that is not of training, has closed
        already, was played again `max_replays` times, or is a fork, whose turns before the fork cannot be repeated."""
        with self._db.write():
            check_fence(self._db, episode_id, fence)
            found = self._db.row(
                "SELECT g.id, g.size FROM episodes e JOIN groups g ON g.id = e.group_id"
                " WHERE e.id = ? AND g.purpose = ? AND g.state = 'running' AND g.fork_turn IS NULL"
                " AND g.replays < ?",
                (episode_id, TRAIN, max_replays),
            )
            if found is None:
                return False
            group_id, size = found
            now, version = self._db.clock(), latest_confirmed(self._db)
            for (member,) in self._db.rows(
                "SELECT id FROM episodes WHERE group_id = ? AND state IN ('waiting', 'running')", (group_id,)
            ):
                discard_partial(self._db, member)
                end_episode(self._db, member, "expired", StopReason.EXPIRED, now)
            self._db.execute(
                "UPDATE groups SET state = 'expired', reason = ?, closed_s = ? WHERE id = ?", (RESTARTED, now, group_id)
            )
            again = create_again(self._db, group_id, size, 0 if version is None else version.step)
            self._db.execute(
                "UPDATE episodes SET (deaths, died_at) = (SELECT old.deaths, old.died_at FROM episodes old"
                " WHERE old.group_id = ? AND old.member = episodes.member) WHERE group_id = ?",
                (group_id, again),
            )
        return True
