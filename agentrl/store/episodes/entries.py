"""The most frequent writes of a worker: turns, their answers, parts of turns; many at once, of any episodes.

Owns their checks and their rows. However many entries there are, their episodes are looked at in one statement, and
each table is written in one: a server takes longer over a statement than over a row. All are packed before the
transaction begins, since others wait for its end. An entry that may not be written leaves the others as they are.
Never knows which entries come together.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from agentrl.errors import StoreAway, StoreError
from agentrl.records import ShownTools, Step, Turn, turn_id
from agentrl.store.codec import (
    pack_answer,
    pack_experts,
    pack_messages,
    pack_spans,
    pack_text,
    pack_tokens,
    pack_tools,
    without_images,
)
from agentrl.store.databases.calls_together import BatchedCall, Result
from agentrl.store.databases.database import Database
from agentrl.store.episodes.leases import check_held
from agentrl.store.episodes.partial_turns import Partial, pack_part

# Per episode: what shows whether it is held, its trial, whether sources score its turns, its last turn and whether that
# is answered, the tokens of the turn under way. However a server plans it, it reads no row but these.
_OWN = "FROM turns t WHERE t.episode_id = e.id AND t.trial = e.trial ORDER BY t.idx DESC LIMIT 1"
_LOOK = f"""
SELECT e.id, e.state, e.fence, e.trial, e.evaluation = 0 AND EXISTS (SELECT 1 FROM sources),
    (SELECT t.idx {_OWN}), (SELECT t.id {_OWN}), (SELECT s.turn_id FROM steps s WHERE s.turn_id = (SELECT t.id {_OWN})),
    (SELECT MAX(p.at + p.n) FROM partials p WHERE p.episode_id = e.id)
FROM json_each(?) i CROSS JOIN episodes e ON e.id = CAST(i.value AS BIGINT)
"""
_TURN = "SELECT t.id, s.turn_id FROM turns t LEFT JOIN steps s ON s.turn_id = t.id"

_TURNS = (
    "INSERT INTO turns (id, episode_id, trial, idx, parent, role, learns, finish, text, spans, n_prompt, n_tokens,"
    " oldest_step, state, started_s, ended_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_DROP = "DELETE FROM partials WHERE episode_id = ?"
_UNSCORED = (
    "INSERT INTO unscored SELECT c.source, ?, e.id FROM sources c, episodes e WHERE e.id = ? AND e.evaluation = 0"
)


@dataclass(slots=True)
class Standing:
    """How far an episode is, what was written before an entry of the same transaction included."""

    trial: int
    is_scored: bool  # sources score its turns
    last: int  # -1: it has no turn
    last_id: int | None
    answered: bool
    under_way: int  # tokens of the turn under way
    kept: bool  # rows of it are in the table


@dataclass(slots=True)
class TurnRows:
    """Rows of turns that a transaction is to write: one statement for each table."""

    turns: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    tokens: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    experts: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    steps: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    unscored: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    over: list[tuple[int]] = field(default_factory=list[tuple[int]])  # episodes whose turn under way is journaled
    parts: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict[int, list[tuple[Any, ...]]])  # by episode
    images: dict[str, bytes] = field(default_factory=dict[str, bytes])  # by digest

    def turn(
        self, id: int, episode_id: int, trial: int, turn: PackedTurn, text: str | bytes, *, is_scored: bool
    ) -> None:
        """Add a turn whose place was checked; `text` is what its column takes. The last argument says whether reward
        sources may score it."""
        sampled_turn = turn.turn
        leading_columns = (
            id,
            episode_id,
            trial,
            sampled_turn.index,
            sampled_turn.parent,
            sampled_turn.role,
            sampled_turn.learns,
            sampled_turn.finish,
            text,
            turn.spans,
        )
        trailing_columns = (
            len(sampled_turn.prompt_ids),
            len(sampled_turn.token_ids),
            turn.oldest,
            sampled_turn.state,
            sampled_turn.started_s,
            sampled_turn.ended_s,
        )
        self.turns.append((*leading_columns, *trailing_columns))
        self.tokens.append((id, turn.tokens))
        if turn.experts is not None:
            self.experts.append((id, turn.experts))
        if turn.answer is not None:
            self.answer(id, turn.answer)
        if is_scored:
            self.unscored.append((id, episode_id))

    def answer(self, id: int, answer: PackedAnswer) -> None:
        """Add the answer to a turn."""
        self.steps.append((id, *answer.columns))
        self.images |= answer.images

    def write(self, db: Database) -> None:
        """Write them, inside a transaction."""
        write_images(db, self.images)
        for statement, statement_rows in (
            (_TURNS, self.turns),
            ("INSERT INTO tokens VALUES (?, ?)", self.tokens),
            ("INSERT INTO experts VALUES (?, ?)", self.experts),
            ("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?)", self.steps),
            (_UNSCORED, self.unscored),
            (_DROP, self.over),
            (
                "INSERT INTO partials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [part_row for episode_parts in self.parts.values() for part_row in episode_parts],
            ),
        ):
            if statement_rows:
                db.execute_many(statement, statement_rows)


def write_images(db: Database, images: Mapping[str, bytes]) -> None:
    """Write the data of images that the store does not have yet, inside a transaction."""
    # In one order, so that two processes cannot wait for each other.
    for image_digest, image_data in sorted(images.items()):
        db.execute("INSERT INTO images VALUES (?, ?) ON CONFLICT DO NOTHING", (image_digest, image_data))


def write_tools(db: Database, episode_id: int, tools: ShownTools) -> None:
    """Note which tools an episode was shown, inside a transaction. Most episodes of a run share one set: its schemas
    stand in the store once."""
    tools_digest, packed_tools = pack_tools(tools)
    if tools_digest:
        db.execute("INSERT INTO tool_sets VALUES (?, ?) ON CONFLICT DO NOTHING", (tools_digest, packed_tools))
        db.execute("UPDATE episodes SET tools = ? WHERE id = ?", (tools_digest, episode_id))


class PackedAnswer(NamedTuple):
    """The columns of a row of `steps`, and the data of the images that it names by digest."""

    columns: tuple[str, float, bool, bool, str]
    images: Mapping[str, bytes]


@dataclass(slots=True)
class PackedTurn:
    """A turn as its rows have it. `oldest` is the step of the oldest version that sampled it, None if it does not
    learn."""

    turn: Turn
    tokens: bytes
    experts: bytes | None
    text: str | bytes
    spans: str
    oldest: int | None
    answer: PackedAnswer | None

    @classmethod
    def of(cls, turn: Turn, where: str, step_of: Callable[[int], int]) -> Self:
        """Pack a turn. Raises StoreError for a number that is no token id or log-prob, an unknown version, or an answer
        that cannot be written, which `where` names."""
        return cls(
            turn=turn,
            tokens=pack_tokens(turn),
            experts=None if turn.experts is None else pack_experts(turn.experts),
            text=pack_text(turn.text),
            spans=pack_spans(turn.spans),
            oldest=min((step_of(span.version) for span in turn.spans), default=None) if turn.learns else None,
            answer=None if turn.step is None else pack_step(where, turn.step),
        )


class EpisodeWrite(BatchedCall):
    """A write of an episode that is held under `fence`."""

    __slots__ = ("db", "episode_id", "fence")

    first = True

    def __init__(self, db: Database, episode_id: int, fence: int) -> None:
        self.db, self.episode_id, self.fence = db, episode_id, fence

    @abstractmethod
    def pack(self) -> None:
        """Bring it into the form of its rows, once, outside a transaction. Raises StoreError."""

    @property
    def numbers(self) -> int:
        """How many turns it adds."""
        return 0

    @abstractmethod
    def add(self, stands: Standing, numbers: Iterator[int], rows: TurnRows) -> None:
        """Add its rows, and to the standing what it changes. Raises StoreError if it may not be written."""

    def __call__(self) -> None:
        self.pack()
        (call_result,) = self.all([self])
        if call_result.error is not None:
            raise call_result.error

    @classmethod
    def all(cls, calls: Sequence[EpisodeWrite]) -> list[Result]:
        """Write entries in their order. Raises StoreError if the database fails, and then all may be half written."""
        refusals = dict[int, Exception]()
        for position, entry in enumerate(calls):
            try:
                entry.pack()
            # StoreAway is a StoreError too, and means the opposite: not that this entry is wrong, but that nothing can
            # be known. It goes up, and all entries are made again when the database answers.
            except StoreAway:
                raise
            except StoreError as error:
                refusals[position] = error
        packed_entries = [(position, entry) for position, entry in enumerate(calls) if position not in refusals]
        if not packed_entries:
            return [Result(error=refusals[position]) for position in range(len(calls))]
        database = packed_entries[0][1].db
        with database.write(shared=True):
            episode_rows = database.execute(
                _LOOK, (json.dumps(sorted({entry.episode_id for _, entry in packed_entries})),)
            )
            turn_count = sum(entry.numbers for _, entry in packed_entries)
            # Numbers for all turns at once, also for entries that will be refused: the numbers have gaps then, which
            # nobody minds, and a server is asked once.
            turn_numbers = iter(database.numbers("turns", turn_count) if turn_count else ())
            rows_by_episode = {episode_id: episode_row for episode_id, *episode_row in episode_rows}
            standings, turn_rows = dict[int, Standing](), TurnRows()
            for position, entry in packed_entries:
                try:
                    standing = _held(entry, rows_by_episode.get(entry.episode_id), standings)
                    entry.add(standing, turn_numbers, turn_rows)
                except StoreError as error:
                    refusals[position] = error
            turn_rows.write(database)
        return [Result(error=refusals.get(position)) for position in range(len(calls))]


def _held(entry: EpisodeWrite, row: list[Any] | None, known: dict[int, Standing]) -> Standing:
    """How far the episode of an entry is. Raises LeaseLost if it is not held."""
    check_held(entry.db, entry.episode_id, entry.fence, row)
    assert row is not None
    if entry.episode_id not in known:
        _, _, trial, is_scored, last_index, last_turn_id, answered_turn_id, under_way = row
        known[entry.episode_id] = Standing(
            trial=trial,
            is_scored=bool(is_scored),
            last=-1 if last_index is None else last_index,
            last_id=last_turn_id,
            answered=answered_turn_id is not None,
            under_way=under_way or 0,
            kept=under_way is not None,
        )
    return known[entry.episode_id]


class TurnEntry(EpisodeWrite):
    """A turn of an episode, see `Journal.journal_turn`. `step_of` gives the step of a version."""

    __slots__ = ("_packed", "_step_of", "_turn")

    def __init__(self, db: Database, episode_id: int, fence: int, turn: Turn, step_of: Callable[[int], int]) -> None:
        super().__init__(db, episode_id, fence)
        self._turn, self._step_of = turn, step_of
        self._packed: PackedTurn | None = None

    @property
    def numbers(self) -> int:
        return 1

    def pack(self) -> None:
        turn_label = f"episode {self.episode_id}, turn {self._turn.index}"
        self._packed = self._packed or PackedTurn.of(self._turn, turn_label, self._step_of)

    def add(self, stands: Standing, numbers: Iterator[int], rows: TurnRows) -> None:
        turn, episode_id = self._turn, self.episode_id
        # The chain of turns is checked where it is written and not where it is read: a gap that gets into the store is
        # a lost token (law 1), and no reader could say which.
        if turn.index != stands.last + 1:
            raise StoreError(f"episode {episode_id}: turn {turn.index} cannot follow turn {stands.last}")
        if turn.id and turn.id != (expected_id := turn_id(episode_id, stands.trial, turn.index)):
            raise StoreError(f"episode {episode_id}: turn {turn.index}: its id is {expected_id!r}, not {turn.id!r}")
        if turn.parent is not None and not 0 <= turn.parent < turn.index:
            raise StoreError(f"episode {episode_id}: turn {turn.index} cannot extend turn {turn.parent}")
        assert self._packed is not None
        turn_row_id = next(numbers)
        stored_text, is_scored = self.db.any_text(self._packed.text), stands.is_scored and turn.learns
        rows.turn(turn_row_id, episode_id, stands.trial, self._packed, stored_text, is_scored=is_scored)
        # Parts of this turn that came in the same batch need never be written: the turn has all their tokens.
        rows.parts.pop(episode_id, None)
        if stands.kept:
            rows.over.append((episode_id,))
        stands.last, stands.last_id, stands.answered = turn.index, turn_row_id, turn.step is not None
        stands.under_way, stands.kept = 0, False


class StepEntry(EpisodeWrite):
    """The answer to a turn, see `Journal.journal_step`."""

    __slots__ = ("_packed", "_step", "_turn_index")

    def __init__(self, db: Database, episode_id: int, fence: int, turn_index: int, step: Step) -> None:
        super().__init__(db, episode_id, fence)
        self._turn_index, self._step = turn_index, step
        self._packed: PackedAnswer | None = None

    def pack(self) -> None:
        self._packed = self._packed or pack_step(f"episode {self.episode_id}, turn {self._turn_index}", self._step)

    def add(self, stands: Standing, numbers: Iterator[int], rows: TurnRows) -> None:
        turn_row_id, is_answered = stands.last_id, stands.answered
        if (turn_index := self._turn_index) != stands.last:
            turn_key = (self.episode_id, stands.trial, turn_index)
            turn_row = self.db.row(f"{_TURN} WHERE t.episode_id = ? AND t.trial = ? AND t.idx = ?", turn_key)
            turn_row_id, is_answered = (None, False) if turn_row is None else (turn_row[0], turn_row[1] is not None)
        if turn_row_id is None:
            raise StoreError(f"episode {self.episode_id}: turn {turn_index} was never journaled")
        if is_answered:
            raise StoreError(f"episode {self.episode_id}: turn {turn_index} is answered already")
        assert self._packed is not None
        rows.answer(turn_row_id, self._packed)
        stands.answered = stands.answered or turn_index == stands.last


class PartEntry(EpisodeWrite):
    """More tokens of the turn under way, see `Journal.journal_partial`."""

    __slots__ = ("_packed", "_part")

    def __init__(self, db: Database, episode_id: int, fence: int, part: Partial) -> None:
        super().__init__(db, episode_id, fence)
        self._part = part
        self._packed: tuple[Any, ...] | None = None

    def pack(self) -> None:
        self._packed = self._packed or pack_part(self.episode_id, self._part)

    def add(self, stands: Standing, numbers: Iterator[int], rows: TurnRows) -> None:
        """Add the part to `rows`. Raises StoreError for a part that does not follow the tokens that are written: of
        another turn than the one under way, or with a gap."""
        turn_part = self._part
        if turn_part.index != stands.last + 1:
            raise StoreError(
                f"episode {self.episode_id}: turn {turn_part.index} cannot be under way after turn {stands.last}"
            )
        if turn_part.at != stands.under_way:
            problem = f"has {stands.under_way} tokens, and more came after {turn_part.at}"
            raise StoreError(f"episode {self.episode_id}: turn {turn_part.index} {problem}")
        assert self._packed is not None
        rows.parts.setdefault(self.episode_id, []).append(self._packed)
        stands.under_way += len(turn_part.token_ids)


def pack_step(where: str, step: Step) -> PackedAnswer:
    """An answer as its row has it. Raises StoreError, which begins with `where`, for one that cannot be written."""
    if not math.isfinite(step.reward):
        raise StoreError(f"{where}: reward {step.reward} is not finite")
    image_data, observation_label = dict[str, bytes](), f"{where}: observation"
    observation = without_images(step.observation, image_data, observation_label)
    if step.history is not None:
        step = replace(step, history=without_images(step.history, image_data, f"{where}: history"))
    step_columns = (
        pack_messages(observation, observation_label),
        float(step.reward),
        bool(step.terminated),
        bool(step.truncated),
        pack_answer(step, where),
    )
    return PackedAnswer(step_columns, image_data)
