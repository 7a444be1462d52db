"""Log of the calls that a training server accepted, and of its answers: one SQLite file.

A call is one row, known by its owner (a training or sampling client's id) and its number there: asked for twice, it is
the same call. Its answer is written once, in one transaction with what it changed. Never knows what a call computes.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import DiskFull, StoreError, UsageError
from agentrl.host.disk_space import is_full
from agentrl.host.with_block import Closing

_VERSION = 1
_SCHEMA = """
CREATE TABLE sessions (id TEXT PRIMARY KEY, asked TEXT UNIQUE, ended INTEGER NOT NULL DEFAULT 0) STRICT;
CREATE TABLE models (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session TEXT NOT NULL, rank INTEGER,
  attention INTEGER, mlp INTEGER, answered INTEGER NOT NULL DEFAULT -1, state INTEGER) STRICT;
CREATE TABLE samplers (id TEXT PRIMARY KEY, session TEXT NOT NULL, path TEXT) STRICT;
CREATE TABLE weights (number INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, model TEXT NOT NULL, kind TEXT NOT NULL,
  rank INTEGER NOT NULL, attention INTEGER NOT NULL, mlp INTEGER NOT NULL, named INTEGER NOT NULL) STRICT;
CREATE TABLE calls (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session TEXT NOT NULL, owner TEXT NOT NULL,
  place INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB, digest TEXT NOT NULL, form TEXT, answer BLOB,
  UNIQUE (owner, place)) STRICT;
CREATE INDEX unanswered ON calls (owner) WHERE form IS NULL;
"""

Form = Literal["json", "protobuf", "failed"]
WeightsKind = Literal["weights", "sampler_weights"]


@dataclass(frozen=True, slots=True)
class Call:
    """Number `place` of the calls of `owner`. `body` is gone once nothing needs it."""

    number: int
    id: str
    session: str
    owner: str
    place: int
    kind: str
    body: bytes


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """The answer of a call, as it is sent."""

    form: Form
    data: bytes


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """An adapter under training. The calls up to number `answered` are answered; `state` is the call after which its
    file was written, None before it is made. Its shape is known from then on."""

    number: int
    id: str
    session: str
    rank: int
    attention: bool
    mlp: bool
    answered: int
    state: int | None


@dataclass(frozen=True, slots=True)
class WeightsRecord:
    """Saved weights of the model `model`, in a folder named by `number`: for training on, or for sampling. Those that
    are not `named` go with their session."""

    number: int
    path: str
    model: str
    kind: WeightsKind
    rank: int
    attention: bool
    mlp: bool
    named: bool


@dataclass(frozen=True, slots=True)
class SamplerRecord:
    """A sampling client of the weights at `path`, or of the base model."""

    id: str
    session: str
    path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEffects:
    """Changes that a call made, besides its answer: the `shape` of its model (rank, attention, mlp); that its model's
    file is of the state after it (`wrote_state`); new weights, a new sampler."""

    shape: tuple[int, bool, bool] | None = None
    wrote_state: bool = False
    weights: WeightsRecord | None = None
    sampler: SamplerRecord | None = None


class CallChanged(UsageError):
    """A call came again under its number with another content."""


class CallTooLate(UsageError):
    """A call came after the server had given up waiting for it."""


class CallLog(Closing):
    """The log in a folder. Calls are short, and may be made in any thread."""

    def __init__(self, file: Path) -> None:
        """Open the file, or make it. Raises StoreError if it is no log of ours, or of another version."""
        self._lock = threading.Lock()
        try:
            self._database = sqlite3.connect(file, isolation_level=None, check_same_thread=False, timeout=30)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                hint = "give another folder with --state"
                raise StoreError(f"{str(file)!r} was written by another version of agentrl ({version}): {hint}")
            if not version:
                self._database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
        except sqlite3.Error as error:
            raise StoreError(f"cannot use {str(file)!r}: {error}") from error

    def close(self) -> None:
        """Close the file; no call may follow."""
        with self._lock:
            self._database.close()

    # --- sessions, models, samplers, weights ---------------------------------------------------------------------

    def begin_session(self, asked: str) -> str:
        """The id of the session that was `asked` for under this key, a new one or that of before."""
        with self._writing():
            fresh = uuid.uuid4().hex
            self._do("INSERT OR IGNORE INTO sessions (id, asked) VALUES (?, ?)", fresh, asked)
            return str(self._one("SELECT id FROM sessions WHERE asked = ?", asked)[0])

    def session_is(self, id: str) -> Literal["open", "ended", "unknown"]:
        """Whether a session goes on."""
        with self._lock:
            row = self._find("SELECT ended FROM sessions WHERE id = ?", id)
        return "unknown" if row is None else "ended" if row[0] else "open"

    def end_session(self, id: str) -> None:
        """Note that no call of a session comes any more."""
        with self._writing():
            self._do("UPDATE sessions SET ended = 1 WHERE id = ?", id)

    def model(self, id: str) -> ModelRecord | None:
        """A model; None if there is none of this id."""
        with self._lock:
            row = self._find(f"{_MODEL} WHERE id = ?", id)
        return None if row is None else _model(row)

    def weights(self, path: str) -> WeightsRecord | None:
        """The weights at a path; None if there are none."""
        with self._lock:
            row = self._find(
                "SELECT number, path, model, kind, rank, attention, mlp, named FROM weights WHERE path = ?", path
            )
        if row is None:
            return None
        number, path, model, kind, rank, attention, mlp, is_named = row
        return WeightsRecord(number, path, model, kind, rank, bool(attention), bool(mlp), bool(is_named))

    def sampler(self, id: str) -> SamplerRecord | None:
        """A sampling client; None if there is none of this id."""
        with self._lock:
            row = self._find("SELECT id, session, path FROM samplers WHERE id = ?", id)
        return None if row is None else SamplerRecord(*row)

    def add_sampler(self, sampler: SamplerRecord) -> None:
        """Add a sampling client; nothing if it is there."""
        with self._writing():
            self._add_sampler(sampler)

    def idle_sessions(self) -> list[str]:
        """The sessions that go on and wait for no answer."""
        waits = "SELECT session FROM calls WHERE form IS NULL"
        with self._lock:
            rows = self._all(f"SELECT id FROM sessions WHERE NOT ended AND id NOT IN ({waits})")
        return [str(row[0]) for row in rows]

    def models_of(self, session: str) -> list[ModelRecord]:
        """The models of a session."""
        with self._lock:
            return [_model(row) for row in self._all(f"{_MODEL} WHERE session = ?", session)]

    def drop_unnamed(self, session: str) -> list[int]:
        """Forget the weights without a name of a session; returns their numbers."""
        of = "SELECT number FROM weights WHERE NOT named AND model IN (SELECT id FROM models WHERE session = ?)"
        with self._writing():
            numbers = [int(row[0]) for row in self._all(of, session)]
            self._do(f"DELETE FROM weights WHERE number IN ({of})", session)
        return numbers

    # --- calls ----------------------------------------------------------------------------------------------------

    def accept(
        self, *, session: str, owner: str, place: int, kind: str, body: bytes, model: str | None = None
    ) -> tuple[str, bool]:
        """Take a call, also for the new `model` of this id that it makes; returns its id, and whether it is new. Raises
        CallChanged if another one has its number, CallTooLate if a later one of its model has its answer."""
        id, digest = f"{owner}:{place}", hashlib.sha256(kind.encode() + b"\0" + body).hexdigest()
        with self._writing():
            row = self._find("SELECT id, digest FROM calls WHERE owner = ? AND place = ?", owner, place)
            if row is not None:
                if row[1] != digest:
                    raise CallChanged(f"call {place} of {owner} came before with another content: number calls once")
                return str(row[0]), False
            passed = self._find("SELECT answered FROM models WHERE id = ?", owner)
            if passed is not None and place <= passed[0]:
                hint = "it cannot be computed any more: make a new training client"
                raise CallTooLate(f"call {place} of {owner} came after call {passed[0]} had its answer: {hint}")
            if model is not None:
                self._do("INSERT INTO models (id, session) VALUES (?, ?)", model, session)
            self._do(
                "INSERT INTO calls (id, session, owner, place, kind, body, digest) VALUES (?, ?, ?, ?, ?, ?, ?)",
                id,
                session,
                owner,
                place,
                kind,
                body,
                digest,
            )
        return id, True

    def answer_of(self, id: str) -> CallAnswer | Literal["pending", "unknown"]:
        """The answer of a call."""
        with self._lock:
            row = self._find("SELECT form, answer FROM calls WHERE id = ?", id)
        return "unknown" if row is None else "pending" if row[0] is None else CallAnswer(*row)

    def call(self, id: str) -> Call:
        """A call that was accepted."""
        with self._lock:
            return Call(*self._one(f"{_CALL} WHERE id = ?", id))

    def next_of(self, model: str) -> Call | None:
        """The call of a model that comes next; None if it has not come."""
        with self._lock:
            row = self._find(
                f"{_CALL} WHERE owner = ? AND place = (SELECT answered + 1 FROM models WHERE id = owner)", model
            )
        return None if row is None else Call(*row)

    def first_waiting(self, model: str) -> tuple[int, int] | None:
        """Return the number of the next call of a model, which has not come, and of the first call that waits for it.
        None if no call waits."""
        with self._lock:
            row = self._find(_GAP, model)
        return None if row is None else (int(row[0]), int(row[1]))

    def give_up(self, model: str, answer: CallAnswer) -> list[str]:
        """Answer all calls that wait for the next one of a model, if that has not come; returns their ids."""
        with self._writing():
            if self._find(_GAP, model) is None:
                return []
            ids = [str(row[0]) for row in self._all("SELECT id FROM calls WHERE form IS NULL AND owner = ?", model)]
            self._do(
                "UPDATE models SET answered = (SELECT max(place) FROM calls WHERE owner = models.id) WHERE id = ?",
                model,
            )
            self._do(
                "UPDATE calls SET form = ?, answer = ?, body = x'' WHERE form IS NULL AND owner = ?",
                answer.form,
                answer.data,
                model,
            )
        return ids

    def unanswered(self, kind: str) -> list[Call]:
        """The calls of a kind without an answer, in the order in which they came."""
        with self._lock:
            return [Call(*row) for row in self._all(f"{_CALL} WHERE form IS NULL AND kind = ? ORDER BY number", kind)]

    def waiting_models(self) -> list[str]:
        """The models with unanswered calls."""
        with self._lock:
            return [
                str(row[0])
                for row in self._all(
                    "SELECT DISTINCT owner FROM calls WHERE form IS NULL AND owner IN (SELECT id FROM models)"
                )
            ]

    def since_state(self, model: ModelRecord, kind: str) -> list[Call]:
        """The calls of a kind that were answered, and did not fail, after a model's file was written."""
        with self._lock:
            return [
                Call(*row)
                for row in self._all(
                    f"{_CALL} WHERE owner = ? AND kind = ? AND place > ? AND form IS NOT NULL AND form != 'failed' "
                    "ORDER BY place",
                    model.id,
                    kind,
                    model.state,
                )
            ]

    def answer(self, call: Call, answer: CallAnswer, effects: CallEffects | None = None) -> None:
        """Note the answer of a call and what it changed: all of it, or nothing."""
        effects = effects or CallEffects()
        with self._writing():
            self._do(
                "UPDATE calls SET form = ?, answer = ? WHERE number = ? AND form IS NULL",
                answer.form,
                answer.data,
                call.number,
            )
            if call.kind != "forward_backward":
                self._do("UPDATE calls SET body = x'' WHERE number = ?", call.number)
            self._do("UPDATE models SET answered = ? WHERE id = ?", call.place, call.owner)
            if effects.shape is not None:
                self._do("UPDATE models SET rank = ?, attention = ?, mlp = ? WHERE id = ?", *effects.shape, call.owner)
            if effects.wrote_state:
                self._do("UPDATE models SET state = ? WHERE id = ?", call.place, call.owner)
                self._do("UPDATE calls SET body = x'' WHERE owner = ? AND place <= ?", call.owner, call.place)
            if (weights := effects.weights) is not None:
                self._do("DELETE FROM weights WHERE path = ?", weights.path)
                self._do(
                    "INSERT INTO weights (number, path, model, kind, rank, attention, mlp, named) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    *(
                        weights.number,
                        weights.path,
                        weights.model,
                        weights.kind,
                        weights.rank,
                        weights.attention,
                        weights.mlp,
                        weights.named,
                    ),
                )
            if effects.sampler is not None:
                self._add_sampler(effects.sampler)

    # --- statements -----------------------------------------------------------------------------------------------

    def _add_sampler(self, sampler: SamplerRecord) -> None:
        self._do(
            "INSERT OR IGNORE INTO samplers (id, session, path) VALUES (?, ?, ?)",
            sampler.id,
            sampler.session,
            sampler.path,
        )

    @contextmanager
    def _writing(self) -> Generator[None]:
        """A transaction. Raises StoreError if it cannot be written, and nothing is; DiskFull for want of space."""
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                try:
                    yield
                except BaseException:
                    self._database.execute("ROLLBACK")
                    raise
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                kind = DiskFull if is_full(error) else StoreError
                raise kind(f"the log of calls cannot be written: {error}") from error

    def _do(self, statement: str, *values: Any) -> None:
        self._database.execute(statement, values)

    def _find(self, statement: str, *values: Any) -> Sequence[Any] | None:
        return self._database.execute(statement, values).fetchone()

    def _one(self, statement: str, *values: Any) -> Sequence[Any]:
        row = self._find(statement, *values)
        assert row is not None
        return row

    def _all(self, statement: str, *values: Any) -> list[Sequence[Any]]:
        return self._database.execute(statement, values).fetchall()


_CALL = "SELECT number, id, session, owner, place, kind, body FROM calls"
_MODEL = "SELECT number, id, session, rank, attention, mlp, answered, state FROM models"
_GAP = (
    "SELECT answered + 1, min(place) FROM models JOIN calls ON owner = models.id AND form IS NULL WHERE models.id = ? "
    "GROUP BY models.id HAVING min(place) > answered + 1"
)


def _model(row: Sequence[Any]) -> ModelRecord:
    number, id, session, rank, attention, mlp, answered, state = row
    return ModelRecord(number, id, session, rank, bool(attention), bool(mlp), answered, state)
