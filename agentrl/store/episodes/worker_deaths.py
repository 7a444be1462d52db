"""Frees the episodes of a dead worker, and finds the episode that killed it.

An episode whose environment kills its own process does so again wherever it is played. So deaths count against
episodes, by the state of the journal: against those whose environment was at work (being made, or in a step without an
answer), and against those still at the turn where a worker died before. Such episodes are claimed last. After a second
death each is played apart from all that are suspected. If its worker dies again, the episode is guilty: it ends as
`env_failed`, its task is quarantined, and other tasks' episodes are no longer suspected. If other environments, not yet
suspected, were at work beside it, each of them may have done it: they are suspected too, and it takes twice as many
deaths. An episode that gets one turn further than before is cleared at any time, so workers killed from outside cost no
episode anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.records import StopReason, Task
from agentrl.store.codec import pack_identity, unpack_task
from agentrl.store.databases.database import StorePart, retried
from agentrl.store.episodes.endings import end_episode
from agentrl.store.episodes.groups import close_if_ended, forget_starts, shift_starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A dead worker's episodes: `episodes` of them may be claimed again, those in `quarantined` not. `foretold`: a
    worker died before at the same turn of one of them, so that episode is to blame, not the worker."""

    episodes: int
    quarantined: tuple[int, ...] = ()
    foretold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A task that is not admitted again, the episode that showed why, and the reason in one line."""

    task: Task
    episode_id: int
    reason: str
    time_s: float


@dataclass(slots=True)
class Aboard:
    """An episode that a dead worker held: where it stands, and the deaths counted against it so far."""

    id: int
    deaths: int
    died_at: int
    turns: int
    in_env: bool

    @property
    def stuck(self) -> bool:
        return self.deaths > 0 and self.turns <= self.died_at


class Deaths(StorePart):
    """Free the episodes of dead workers, and find out which of them killed theirs."""

    @retried
    def release_worker(self, worker: str, *, max_deaths: int = 3) -> Released:
        """Free the episodes of a worker that died, in all its lives: they may be claimed at once. An episode that was
        at the same turn in `max_deaths` deaths, or twice as many if others may have caused the last one, ends as
        `env_failed`, and its task is quarantined."""
        with self._db.write():
            aboard_episodes = self._aboard(worker)
            self._db.execute(
                "UPDATE episodes SET state = 'waiting', holder = NULL WHERE state = 'running'"
                " AND holder IN (SELECT holder FROM leases WHERE worker = ?)",
                (worker,),
            )
            self._db.execute("DELETE FROM leases WHERE worker = ?", (worker,))
            stuck_episodes = [episode for episode in aboard_episodes if episode.stuck]
            other_suspects = [episode for episode in aboard_episodes if episode.in_env and not episode.stuck]
            # If nothing shows who did it, because no environment was at work and nobody has died here before, all share
            # the suspicion. Suspecting nobody would let a task that kills its worker between two turns go on for ever.
            # Those that are innocent are cleared by their next turn.
            blamed_episodes = stuck_episodes + other_suspects or aboard_episodes
            for episode in aboard_episodes:
                death_count = (episode.deaths if episode.stuck else 0) + (episode in blamed_episodes)
                # The furthest turn, not the last: an episode that begins anew each time and dies earlier than before
                # has not got on.
                furthest_turn = max(episode.turns, episode.died_at) if death_count else None
                self._db.execute(
                    "UPDATE episodes SET deaths = ?, died_at = ? WHERE id = ?", (death_count, furthest_turn, episode.id)
                )
            conclusive_deaths = 2 * max_deaths if other_suspects else max_deaths
            deaths_by_guilty = {
                episode.id: episode.deaths + 1
                for episode in aboard_episodes
                if episode.stuck and episode.deaths + 1 >= conclusive_deaths
            }
            for guilty_id, death_count in deaths_by_guilty.items():
                self._quarantine(guilty_id, death_count)
        return Released(
            episodes=len(aboard_episodes) - len(deaths_by_guilty),
            quarantined=tuple(deaths_by_guilty),
            foretold=bool(stuck_episodes),
        )

    @retried
    def release_all(self) -> int:
        """Free all running episodes, as every worker is gone (the whole run was restarted); returns how many there
        were. No death is counted, and their groups' deadlines start anew when they go on. Episodes that wait for reward
        sources were played already: they go on waiting, and their deadlines start anew too. If the last attempt ended
        any episode, a new attempt begins, so that its failures do not count against the new one's budget."""
        with self._db.write():
            self._db.execute(
                "UPDATE meta SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT) WHERE key = 'attempt'"
                " AND EXISTS (SELECT 1 FROM ending_counts WHERE attempt = CAST(value AS INTEGER))"
            )
            self._db.execute("DELETE FROM leases")
            forget_starts(self._db)
            # The time while nobody ran counts against nobody (law 3): a source could not have scored anything while the
            # run was down, and a deadline that went on would drop every episode that waited for it.
            self._db.execute("UPDATE endings SET time_s = ?", (self._db.clock(),))
            episode_update = self._db.execute(
                "UPDATE episodes SET state = 'waiting', holder = NULL WHERE state = 'running' AND holder IS NOT NULL"
            )
        return episode_update.rowcount

    @retried
    def shift_deadlines(self, by_s: float) -> None:
        """Move the starts of open groups, and of waits for reward sources, by `by_s` seconds: the wall clock jumped by
        so much, or nobody could work for so long."""
        with self._db.write():
            shift_starts(self._db, by_s)
            self._db.execute("UPDATE endings SET time_s = time_s + ?", (by_s,))

    @retried
    def quarantined(self) -> list[Quarantined]:
        """The tasks that are not admitted again, in the order of their detection."""
        with self._db.read():
            quarantine_rows = self._db.rows(
                "SELECT g.task, q.episode_id, q.reason, q.time_s FROM quarantine q"
                " JOIN episodes e ON e.id = q.episode_id JOIN groups g ON g.id = e.group_id"
                " ORDER BY q.time_s, q.episode_id"
            )
        return [
            Quarantined(task=unpack_task(packed_task), episode_id=episode_id, reason=reason, time_s=time_s)
            for packed_task, episode_id, reason, time_s in quarantine_rows
        ]

    def _aboard(self, worker: str) -> list[Aboard]:
        episode_rows = self._db.rows(
            "SELECT e.id, e.deaths, COALESCE(e.died_at, 0), COUNT(t.id),"
            " e.start IS NULL OR COUNT(t.id) > COUNT(s.turn_id)"
            " FROM leases l CROSS JOIN episodes e ON e.holder = l.holder"
            " LEFT JOIN turns t ON t.episode_id = e.id AND t.trial = e.trial LEFT JOIN steps s ON s.turn_id = t.id"
            " WHERE l.worker = ? AND e.state = 'running' GROUP BY e.id, e.deaths, e.died_at, e.start ORDER BY e.id",
            (worker,),
        )
        return [
            Aboard(id=episode_id, deaths=death_count, died_at=died_at, turns=turn_count, in_env=bool(is_in_env))
            for episode_id, death_count, died_at, turn_count, is_in_env in episode_rows
        ]

    def _quarantine(self, episode_id: int, deaths: int) -> None:
        """End the episode and keep its task out. Its siblings, which share the task, stay under suspicion."""
        quarantined_s = self._db.clock()
        group_row = self._db.row(
            "SELECT g.id, g.task, e.died_at FROM episodes e JOIN groups g ON g.id = e.group_id WHERE e.id = ?",
            (episode_id,),
        )
        assert group_row is not None
        group_id, packed_task, turn_count = group_row
        guilty_task = unpack_task(packed_task)
        reason = (
            f"{guilty_task.env}, seed {guilty_task.seed}: {deaths} workers in a row died of it after {turn_count} turns"
        )
        end_episode(self._db, episode_id, "finished", StopReason.ENV_FAILED, quarantined_s)
        self._db.execute("UPDATE episodes SET detail = ? WHERE id = ?", (reason, episode_id))
        self._db.execute(
            "INSERT INTO quarantine VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (pack_identity(guilty_task), episode_id, reason, quarantined_s),
        )
        close_if_ended(self._db, group_id, quarantined_s)
        # With the culprit known, the others were only passengers. Their siblings by task stay suspects, since they are
        # about to do the very same thing.
        self._clear(group_id)

    def _clear(self, but: int) -> None:
        self._db.execute(
            "UPDATE episodes SET deaths = 0, died_at = NULL WHERE group_id <> ? AND id IN"
            " (SELECT id FROM episodes WHERE state = 'waiting' AND deaths > 0"
            " UNION ALL SELECT id FROM episodes WHERE state = 'running' AND deaths > 0)",
            (but,),
        )
