"""Rows into records: claims, trajectories, groups, and one line per episode. Never writes.

A turn whose tokens retention has dropped comes back with its text, reward and observation, and without token ids,
log-probs and spans.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.errors import NotInStore
from agentrl.records import NO_TOOLS, Group, GroupState, Messages, Step, StopReason, Task, Trajectory, Turn, turn_id
from agentrl.store.codec import (
    unpack_answer,
    unpack_experts,
    unpack_messages,
    unpack_record,
    unpack_spans,
    unpack_task,
    unpack_text,
    unpack_tokens,
    unpack_tools,
    with_images,
)
from agentrl.store.databases.database import Database, StorePart, retried
from agentrl.store.databases.driver import Query, Row
from agentrl.tokens.columns import NONE

EpisodeState = Literal["waiting", "running", "finished", "expired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One line about an episode, for lists: everything but its turns. Lengths are those of its last trial; `late`: its
    group closed before it ended; `admitted_s`: when its group entered the buffer; `taken_step`: the step in which it
    left the buffer, `dropped` why it did so untrained."""

    id: int
    group_id: int
    member: int
    size: int
    purpose: str
    state: EpisodeState
    group_state: GroupState
    group_reason: str | None
    task: Task
    stop_reason: StopReason | None
    outcome: float | None
    success: bool | None
    detail: str
    trial: int
    turns: int
    tokens: int
    admitted_s: float
    started_s: float | None
    ended_s: float | None
    late: bool
    taken_step: int | None
    dropped: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """An earlier trial of an episode: set aside for `reason` because it could not go on."""

    trial: int
    reason: str
    start: Messages
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """The result of a training group: the success rate of the `plays` members that report success or not. Late members
    do not count, so a group's result never changes."""

    id: int
    task: Task
    plays: int
    success: float


class Shown:
    """Messages as the rows of one transaction have them, with their images. The data of each are read once."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._data = dict[str, bytes]()

    def messages(self, text: str) -> Messages:
        """Return the messages of a column. Raises StoreError if the store lacks an image."""
        return self.whole(unpack_messages(text))

    def whole(self, messages: Messages) -> Messages:
        """Messages that name their images by digest, with the images."""
        return with_images(messages, self._of)

    def _of(self, digest: str) -> bytes:
        # Read once and shared: every turn after it shows the image again, and the members of a group begin with the
        # same ones.
        if digest not in self._data:
            self._data[digest] = load_image(self._db, digest)
        return self._data[digest]


def load_image(db: Database, digest: str) -> bytes:
    """The data of an image, inside a transaction. Raises StoreError for one that the store lacks."""
    image_row = db.row("SELECT data FROM images WHERE digest = ?", (digest,))
    if image_row is None:
        raise NotInStore(f"no image {digest[:80]!r} in {db.path}")
    return image_row[0]


class Readers(StorePart):
    """Reads for evaluation, transcripts and the viewer."""

    @retried
    def trajectory(self, episode_id: int) -> Trajectory:
        """One episode as far as it went. Raises StoreError for an unknown id."""
        with self._db.read():
            trajectories = load_trajectories(self._db, "e.id = ?", (episode_id,))
        if not trajectories:
            raise NotInStore(f"no episode {episode_id} in {self._db.path}")
        return trajectories[0]

    def trajectories(self, purpose: str) -> Iterator[Trajectory]:
        """Every episode of a purpose, group by group. Groups that end meanwhile are seen as they stand when reached."""
        with self._db.read():
            group_ids = [
                listed_id
                for (listed_id,) in self._db.rows("SELECT id FROM groups WHERE purpose = ? ORDER BY id", (purpose,))
            ]
        # A transaction for each group. One for all would hold back SQLite's checkpoint of its log for as long as the
        # caller takes over each group, which may be a judge's call over the network.
        for group_id in group_ids:
            with self._db.read():
                trajectories = load_trajectories(self._db, "e.group_id = ?", (group_id,))
            yield from trajectories

    @retried
    def image(self, digest: str) -> bytes:
        """The data of the image with this SHA-256, 64 hex digits. Raises StoreError for one that the store lacks."""
        with self._db.read():
            return load_image(self._db, digest)

    @retried
    def group(self, group_id: int) -> Group:
        """One group with its members. Raises StoreError for an unknown id."""
        with self._db.read():
            return load_group(self._db, group_id)

    @retried
    def results(self, after: int = 0) -> list[GroupResult]:
        """Training groups with ids above `after` in the order of admission, up to the first that is still open; no
        forks. A reader that goes on from its last id sees the same groups in the same order as one that starts
        anew."""
        with self._db.read():
            result_rows = self._db.rows(
                "SELECT g.id, g.task, COUNT(e.success), COALESCE(AVG(e.success), 0.0) FROM groups g"
                " JOIN episodes e ON e.group_id = g.id AND e.late = 0"
                # `|| ''` keeps the index by purpose and state out of it: that index would give all groups of the run
                # and sort them, while the primary key gives those above `after` in their order.
                " WHERE g.purpose || '' = ?1 AND g.fork_turn IS NULL AND g.id > ?2 AND g.id < COALESCE("
                "(SELECT MIN(id) FROM groups WHERE purpose = ?1 AND state IN ('waiting', 'running')), 9e18)"
                " GROUP BY g.id ORDER BY g.id",
                ("train", after),
            )
        return [
            GroupResult(id=group_id, task=unpack_task(packed_task), plays=play_count, success=success_rate)
            for group_id, packed_task, play_count, success_rate in result_rows
        ]

    @retried
    def restarts(self, episode_id: int) -> list[Restart]:
        """The earlier trials of an episode, oldest first."""
        with self._db.read():
            restart_rows = self._db.rows(
                "SELECT trial, reason, start FROM restarts WHERE episode_id = ? ORDER BY trial", (episode_id,)
            )
            shown = Shown(self._db)
            return [
                Restart(
                    trial=trial,
                    reason=reason,
                    start=shown.messages(packed_start or "[]"),
                    turns=tuple(_turns(shown, *self._db.all_rows(scores_query(*trial_key), _turns_query(*trial_key)))),
                )
                for trial, reason, packed_start in restart_rows
                for trial_key in [("t.episode_id = ? AND t.trial = ?", (episode_id, trial))]
            ]

    @retried
    def episodes(
        self, purpose: str | None = None, *, group_id: int | None = None, after: int = 0, limit: int = 1000
    ) -> list[EpisodeRow]:
        """Episodes of a purpose or group by id, at most `limit` with ids above `after`."""
        conditions, parameters = ["e.id > ?"], [after]
        for column_name, filter_value in (("g.purpose", purpose), ("g.id", group_id)):
            if filter_value is not None:
                conditions.append(f"{column_name} = ?")
                parameters.append(filter_value)  # pyright: ignore[reportArgumentType]
        with self._db.read():
            return episode_rows(self._db, " AND ".join(conditions), parameters, limit)


def episode_rows(
    db: Database, where: str, parameters: Sequence[int | str | float], limit: int | None = None
) -> list[EpisodeRow]:
    """The episodes (`e`, of a group `g`) that `where` selects, by id, inside a transaction."""
    selected_rows = db.rows(
        "SELECT e.id, g.id, e.member, g.size, g.purpose, e.state, g.state, g.reason, g.task, e.stop_reason,"
        " e.outcome, e.success, e.detail, e.trial, COUNT(t.id), TOTAL(t.n_tokens), e.started_s, e.ended_s,"
        " e.late, e.taken_step, e.dropped, g.admitted_s FROM episodes e JOIN groups g ON g.id = e.group_id"
        " LEFT JOIN turns t ON t.episode_id = e.id AND t.trial = e.trial"
        f" WHERE {where} GROUP BY e.id, g.id ORDER BY e.id" + (" LIMIT ?" if limit is not None else ""),
        parameters if limit is None else (*parameters, limit),
    )
    return [_episode_row(selected_row) for selected_row in selected_rows]


def _episode_row(row: Row) -> EpisodeRow:
    return EpisodeRow(
        id=row[0],
        group_id=row[1],
        member=row[2],
        size=row[3],
        purpose=row[4],
        state=row[5],
        group_state=GroupState(row[6]),
        group_reason=row[7],
        task=unpack_task(row[8]),
        stop_reason=None if row[9] is None else StopReason(row[9]),
        outcome=row[10],
        success=None if row[11] is None else bool(row[11]),
        detail=row[12],
        trial=row[13],
        turns=row[14],
        tokens=int(row[15]),
        started_s=row[16],
        ended_s=row[17],
        late=bool(row[18]),
        taken_step=row[19],
        dropped=row[20],
        admitted_s=row[21],
    )


def load_group(db: Database, group_id: int, only: Collection[int] | None = None) -> Group:
    """A group with its members, or only those with ids in `only`, inside a transaction. Raises StoreError for an
    unknown id."""
    member_condition = "TRUE" if only is None else f"e.id IN ({', '.join('?' * len(only))})"
    group_rows, episode_rows, weight_rows = db.all_rows(
        ("SELECT task, state, size, started_step, taken_step, record FROM groups WHERE id = ?", (group_id,)),
        (_episodes(f"e.group_id = ? AND {member_condition}"), (group_id, *(only or ()))),
        (WEIGHTS, ()),
    )
    if not group_rows:
        raise NotInStore(f"no group {group_id} in {db.path}")
    ((packed_task, group_state, group_size, started_step, taken_step, packed_record),) = group_rows
    return Group(
        id=group_id,
        task=unpack_task(packed_task),
        state=GroupState(group_state),
        size=group_size,
        trajectories=tuple(_trajectories(db, episode_rows, dict(weight_rows))),
        started_step=started_step,
        taken_step=taken_step,
        record=None if packed_record is None else unpack_record(packed_record),
    )


def load_trajectories(db: Database, where: str, parameters: Sequence[int]) -> list[Trajectory]:
    """The episodes (`e`) that `where` selects, with the turns of their last trial, inside a transaction."""
    episode_rows, weight_rows = db.all_rows((_episodes(where), parameters), (WEIGHTS, ()))
    return _trajectories(db, episode_rows, dict(weight_rows))


def _episodes(where: str) -> str:
    return (
        "SELECT e.id, e.group_id, e.member, g.task, e.start, e.stop_reason, e.outcome, e.success, e.outcomes, s.data"
        " FROM episodes e JOIN groups g ON g.id = e.group_id LEFT JOIN tool_sets s ON s.digest = e.tools"
        f" WHERE {where} ORDER BY e.id"
    )


def _trajectories(db: Database, episodes: Sequence[Row], weights: Mapping[str, float]) -> list[Trajectory]:
    shown_messages = Shown(db)
    turns_by_episode = turns_of(db, [episode_id for episode_id, *_ in episodes], shown_messages)
    return [
        Trajectory(
            episode_id=episode_id,
            group_id=group_id,
            member=member,
            task=unpack_task(task),
            start=() if start is None else shown_messages.messages(start),
            turns=turns_by_episode[episode_id],
            stop_reason=None if stop_reason is None else StopReason(stop_reason),
            outcome=outcome,
            success=None if success is None else bool(success),
            outcomes=json.loads(outcomes),
            weights=weights,
            tools=NO_TOOLS if tools is None else unpack_tools(tools),
        )
        for episode_id, group_id, member, task, start, stop_reason, outcome, success, outcomes, tools in episodes
    ]


def turns_of(db: Database, episodes: Sequence[int], shown: Shown | None = None) -> dict[int, tuple[Turn, ...]]:
    """The turns of each episode's last trial, inside a transaction; `shown` has images that were read before."""
    shown = shown or Shown(db)
    turn_queries = [
        episode_query
        for episode_id in episodes
        for episode_query in (scores_query(LAST_TRIAL, (episode_id,)), _turns_query(LAST_TRIAL, (episode_id,)))
    ]
    query_results = db.all_rows(*turn_queries)
    row_pairs = zip(query_results[::2], query_results[1::2], strict=True)
    return {
        episode_id: tuple(_turns(shown, score_rows, turn_rows))
        for episode_id, (score_rows, turn_rows) in zip(episodes, row_pairs, strict=True)
    }


LAST_TRIAL = "t.episode_id = ?1 AND t.trial = (SELECT trial FROM episodes WHERE id = ?1)"
"""In SQL, of a turn: it is of an episode's last trial."""


def scores_query(where: str, parameters: Sequence[int]) -> Query:
    """Return the query for `scores_by_turn`: the values that count, of the turns (`t`) that `where` selects."""
    return (
        "SELECT t.idx, r.source, r.value, c.weight FROM turns t JOIN rewards r ON r.turn_id = t.id AND r.counts = 1"
        f" JOIN sources c ON c.source = r.source WHERE {where} ORDER BY t.idx, r.source",
        parameters,
    )


def scores_by_turn(rows: Iterable[Row]) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
    """Return, by the index of a turn, the values that count by source, and their weighted sum."""
    turn_scores: defaultdict[int, dict[str, float]] = defaultdict(dict)
    weighted_sums: defaultdict[int, float] = defaultdict(float)
    for turn_index, source_name, score_value, weight in rows:
        turn_scores[turn_index][source_name] = score_value
        weighted_sums[turn_index] += weight * score_value
    return turn_scores, weighted_sums


WEIGHTS = "SELECT source, weight FROM sources ORDER BY source"
"""The weights of the declared sources."""


def _turns_query(where: str, parameters: Sequence[int]) -> Query:
    return (
        "SELECT t.idx, t.parent, t.role, t.learns, t.finish, t.text, t.spans, t.started_s, t.ended_s, k.data, x.data,"
        " s.observation, s.reward, s.terminated, s.truncated, s.info, t.episode_id, t.trial"
        " FROM turns t LEFT JOIN tokens k ON k.turn_id = t.id LEFT JOIN experts x ON x.turn_id = t.id"
        f" LEFT JOIN steps s ON s.turn_id = t.id WHERE {where} ORDER BY t.idx",
        parameters,
    )


def _turns(shown: Shown, scored: Iterable[Row], rows: Iterable[Row]) -> Iterator[Turn]:
    turn_scores, weighted_sums = scores_by_turn(scored)
    for index, parent, role, learns, finish, text, spans, began, ended, blob, experts, *step, episode, trial in rows:
        prompt_ids, token_ids, logprobs, columns = ((), (), (), NONE) if blob is None else unpack_tokens(blob)
        yield Turn(
            id=turn_id(episode, trial, index),
            index=index,
            parent=parent,
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            spans=() if blob is None else unpack_spans(spans),
            finish=finish,
            text=unpack_text(text),
            step=None if step[0] is None else _step(step, shown),
            role=role,
            learns=bool(learns),
            experts=None if experts is None else unpack_experts(experts),
            columns=columns,
            scores=turn_scores.get(index, {}),
            score=weighted_sums.get(index, 0.0),
            started_s=began,
            ended_s=ended,
        )


def _step(row: Sequence[str | float | int], shown: Shown) -> Step:
    observation, reward, terminated, truncated, packed_answer = row
    answer_fields = unpack_answer(str(packed_answer))
    if "history" in answer_fields:
        answer_fields["history"] = shown.whole(answer_fields["history"])
    return Step(
        observation=shown.messages(str(observation)),
        reward=float(reward),
        terminated=bool(terminated),
        truncated=bool(truncated),
        **answer_fields,
    )
