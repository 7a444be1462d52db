"""Scores of turns by reward sources: values by turn and source, and the episodes that wait for them.

The environment's step reward is stored with its answer. Any other source writes values by turn id, during the episode
or after it. Training episodes wait for the sources that a run declares: one that was played to its end is held until
each source has scored each turn of the learning policy, or until the source's deadline, when its `late` rule applies.
Then it ends as it was played. Owns that join; never knows what a source is or how it is called.

A value counts if an episode waited for it when it came: it is of a declared source, in its declared version, for a turn
of an episode that had not ended. Any other value is kept and shown, and changes nothing in training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.errors import StoreError
from agentrl.host.terminal_text import printable
from agentrl.records import LARGEST, StopReason, turn_id
from agentrl.store.codec import with_columns
from agentrl.store.databases.database import Database, StorePart, retried
from agentrl.store.episodes.endings import Ending, end_as, held_ending
from agentrl.tokens.columns import NONE, Columns

Late = Literal["drop", "neutral", "partial"]

_SETTLED = (
    "EXISTS (SELECT 1 FROM turns n WHERE n.episode_id = t.episode_id AND n.trial = t.trial AND n.idx > t.idx"
    " AND n.role = t.role) OR EXISTS (SELECT 1 FROM endings h WHERE h.episode_id = t.episode_id)"
)
"""In SQL, of a turn: it is known whether its role acts again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A reward source that episodes wait for. `weight` multiplies its value in a turn's process reward. The wait ends
    `deadline_s` after the end of an episode; then `late` applies: `drop` takes the episode out of loss and baseline
    (law 3), `neutral` counts none of the source's values for that episode, `partial` counts those that came."""

    name: str
    version: int = 1
    weight: float = 1.0
    deadline_s: float = 60.0
    late: Late = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One value of a source. `counts`: it is part of the turn's reward. `took_s`: how long the source took for it.
    `cost`: its cost as reported by the source, in the source's own units. `reason`: what the source says of it."""

    turn_id: str
    source: str
    version: int
    value: float
    counts: bool
    time_s: float
    took_s: float
    cost: float
    reason: str


class Scores(StorePart):
    """Declare sources, write their scores, and end the episodes that waited."""

    @retried
    def declare_sources(self, sources: Sequence[Source]) -> None:
        """Set the sources that turns of training episodes wait for from now on. An episode that waits for a source
        which is not declared any more goes on without it."""
        with self._db.write():
            self._db.execute("DELETE FROM sources")
            self._db.execute_many(
                "INSERT INTO sources VALUES (?, ?, ?, ?, ?)",
                [(source.name, source.version, source.weight, source.deadline_s, source.late) for source in sources],
            )
            released_rows = self._db.rows(
                "SELECT DISTINCT episode_id FROM unscored WHERE source NOT IN (SELECT source FROM sources)"
            )
            self._db.execute("DELETE FROM unscored WHERE source NOT IN (SELECT source FROM sources)")
            for (episode_id,) in released_rows:
                self._end_if_scored(episode_id)

    @retried
    def sources(self) -> list[Source]:
        """The declared sources, by name."""
        with self._db.read():
            source_rows = self._db.rows("SELECT source, version, weight, deadline_s, late FROM sources ORDER BY source")
        return [
            Source(name=source_name, version=version, weight=weight, deadline_s=deadline_s, late=late_policy)
            for source_name, version, weight, deadline_s, late_policy in source_rows
        ]

    @retried
    def awaiting(self, source: str, limit: int, *, skip: Iterable[str] = (), settled: bool = False) -> list[str]:
        """At most `limit` ids of turns that `source` has yet to score, oldest first, without those in `skip`. A turn is
        among them as soon as its environment has answered; with `settled`, as soon as its role has acted again, or the
        episode was played to its end."""
        skipped_ids = frozenset(skip)
        with self._db.read():
            turn_keys = self._db.rows(
                "SELECT t.episode_id, t.trial, t.idx FROM unscored u JOIN turns t ON t.id = u.turn_id"
                " JOIN steps s ON s.turn_id = t.id WHERE u.source = ?"
                f" AND ({_SETTLED if settled else 'TRUE'}) ORDER BY u.turn_id LIMIT ?",
                # Filtered here and not in SQL: the ids to skip are those that the source works on now, a few, and a
                # list of another length would be another statement for the server to prepare.
                (source, limit + len(skipped_ids)),
            )
        candidate_ids = (turn_id(*turn_key) for turn_key in turn_keys)
        return [candidate_id for candidate_id in candidate_ids if candidate_id not in skipped_ids][:limit]

    @retried
    def score(
        self,
        turn: str,
        source: str,
        value: float,
        *,
        version: int | None = None,
        took_s: float = 0.0,
        cost: float = 0.0,
        columns: Columns = NONE,
        reason: str = "",
    ) -> bool:
        """Write the value that `source`, in `version` (default: the declared one, else 1), gives the turn with this id.
        If that version has scored it already, the first value stays, and the result is False. `columns` of the turn's
        tokens are kept with them, if the episode waited for this value. `reason` is a text for people, kept without
        control characters.

        The last value that an episode waits for ends it, in the same transaction. Raises StoreError for an unknown turn
        and for a value that is not finite or beyond `LARGEST`."""
        if not math.isfinite(value):
            raise StoreError(f"turn {turn}: {source!r} gave {value}: give a finite number")
        # Finite is not enough: the learner computes in float32, where one value of 1e300 is infinite and the advantages
        # of a whole group become NaN.
        if abs(value) > LARGEST:
            raise StoreError(f"turn {turn}: {source!r} gave {value:g}: give a number within {LARGEST:g} of 0")
        # A judge that quotes the work writes what the work wrote: NUL, which PostgreSQL refuses, and what drives a
        # terminal.
        kept_reason = "\n".join(printable(line) for line in reason.split("\n"))
        with self._db.write():
            turn_row_id, episode_id = turn_row(self._db, turn)
            declared_row = self._db.row("SELECT version FROM sources WHERE source = ?", (source,))
            declared_version = 1 if declared_row is None else declared_row[0]
            version = declared_version if version is None else version
            waiting_row = self._db.row("SELECT 1 FROM unscored WHERE source = ? AND turn_id = ?", (source, turn_row_id))
            is_counted = waiting_row is not None and version == declared_version
            insertion = self._db.execute(
                "INSERT INTO rewards VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (turn_row_id, source, version, float(value), is_counted, self._db.clock(), took_s, cost, kept_reason),
            )
            # A source that timed out and tries again gets False and no error: its first call may have arrived. To take
            # the second value would let a judge that is asked twice choose between two answers.
            if insertion.rowcount == 0:
                return False
            if is_counted:
                if columns:
                    self._annotate(turn_row_id, turn, columns)
                self._db.execute("DELETE FROM unscored WHERE source = ? AND turn_id = ?", (source, turn_row_id))
                self._end_if_scored(episode_id)
        return True

    @retried
    def expire_sources(self, now: float) -> dict[str, list[int]]:
        """Stop waiting for sources whose deadline is past at `now`. Returns, by source, the episodes concerned: they
        end now or still wait for other sources."""
        with self._db.read():
            if not self._late(now):
                return {}
        expired_episodes: dict[str, list[int]] = {}
        with self._db.write():
            # The query puts `drop` first. An episode may be late with several sources, and one that says "drop" must
            # not come after another has already ended the episode as scored (law 3).
            for episode_id, source_name, late_policy, deadline_s in self._late(now):
                if held_ending(self._db, episode_id) is None:
                    continue  # another source has dropped it
                expired_episodes.setdefault(source_name, []).append(episode_id)
                if late_policy == "drop":
                    failure_detail = (
                        f"reward source {source_name!r} did not score all turns within {deadline_s:g} s of the end"
                    )
                    failed_ending = Ending(stop_reason=StopReason.ENV_FAILED, detail=failure_detail)
                    end_as(self._db, episode_id, failed_ending, self._db.clock())
                    continue
                if late_policy == "neutral":
                    self._db.execute(
                        "UPDATE rewards SET counts = 0 WHERE source = ?1 AND turn_id IN (SELECT t.id FROM turns t"
                        " JOIN episodes e ON e.id = t.episode_id AND e.trial = t.trial WHERE e.id = ?2)",
                        (source_name, episode_id),
                    )
                self._db.execute("DELETE FROM unscored WHERE source = ? AND episode_id = ?", (source_name, episode_id))
                self._end_if_scored(episode_id)
        return expired_episodes

    @retried
    def episodes_unscored(self) -> dict[str, int]:
        """How many episodes were played to their end and wait for a source, by its name."""
        with self._db.read():
            count_rows = self._db.rows(
                "SELECT u.source, COUNT(DISTINCT u.episode_id) FROM unscored u"
                " JOIN endings h ON h.episode_id = u.episode_id GROUP BY u.source ORDER BY u.source"
            )
        return dict(count_rows)

    @retried
    def recorded(self, source: str | None = None, *, episode: int | None = None) -> list[Scored]:
        """The scores of one source, or of all, in the order of turns; of all episodes or of one."""
        of_episode = "" if episode is None else " AND t.episode_id = ?"
        with self._db.read():
            score_rows = self._db.rows(
                "SELECT t.episode_id, t.trial, t.idx, r.source, r.version, r.value, r.counts, r.time_s, r.took_s,"
                " r.cost, r.reason FROM rewards r JOIN turns t ON t.id = r.turn_id"
                f" WHERE r.source = COALESCE(?, r.source){of_episode}"
                " ORDER BY t.episode_id, t.trial, t.idx, r.source, r.version",
                (source, *((episode,) if of_episode else ())),
            )
        return [
            Scored(
                turn_id=turn_id(*turn_key),
                source=source_name,
                version=version,
                value=value,
                counts=bool(counts),
                time_s=time_s,
                took_s=took_s,
                cost=cost,
                reason=reason,
            )
            for *turn_key, source_name, version, value, counts, time_s, took_s, cost, reason in score_rows
        ]

    def _annotate(self, row_id: int, turn: str, columns: Columns) -> None:
        """Keep columns with the tokens of a turn; of several under one name, the first stays."""
        token_row = self._db.row("SELECT data FROM tokens WHERE turn_id = ?", (row_id,))
        if token_row is not None:
            annotated_tokens = with_columns(token_row[0], columns, f"turn {turn}")
            self._db.execute("UPDATE tokens SET data = ? WHERE turn_id = ?", (annotated_tokens, row_id))

    def _late(self, now: float) -> list[tuple[int, str, Late, float]]:
        return self._db.rows(  # pyright: ignore[reportReturnType]
            "SELECT h.episode_id, c.source, c.late, c.deadline_s FROM endings h, sources c"
            " WHERE EXISTS (SELECT 1 FROM unscored u WHERE u.episode_id = h.episode_id AND u.source = c.source)"
            " AND h.time_s + c.deadline_s < ? ORDER BY h.episode_id, c.late <> 'drop', c.source",
            (now,),
        )

    def _end_if_scored(self, episode_id: int) -> None:
        """End a held episode as it was played, once it waits for no source."""
        played_ending = held_ending(self._db, episode_id)
        unscored_row = self._db.row("SELECT 1 FROM unscored WHERE episode_id = ? LIMIT 1", (episode_id,))
        if played_ending is not None and unscored_row is None:
            end_as(self._db, episode_id, played_ending, self._db.clock())


def read_turn_id(id: str) -> tuple[int, int, int]:
    """The episode, trial and index of a turn. Raises StoreError."""
    try:
        episode_id, trial, turn_index = map(int, id.split("."))
    except ValueError:
        raise StoreError(f"{id!r} is no turn's id: give one such as '12.0.3'") from None
    return episode_id, trial, turn_index


def turn_row(db: Database, id: str) -> tuple[int, int]:
    """The row id of a turn and the id of its episode, inside a transaction. Raises StoreError."""
    episode_id, trial, turn_index = read_turn_id(id)
    matching_row = db.row(
        "SELECT id FROM turns WHERE episode_id = ? AND trial = ? AND idx = ?", (episode_id, trial, turn_index)
    )
    if matching_row is None:
        raise StoreError(f"{db.path} has no turn {id}")
    return matching_row[0], episode_id
