"""Records of a training server's clients: sessions, the adapters they train, saved weights, sampling clients."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

from agentrl.run.training_server.log_file import LogFile

WeightsKind = Literal["weights", "sampler_weights"]


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


class ClientRecords:
    """Sessions and what belongs to them. Calls are short, and may be made in any thread."""

    def __init__(self, file: LogFile) -> None:
        self._file = file

    def begin_session(self, request_key: str) -> str:
        """The id of the session that a client requests under a key of its own: a new one, or the one of before."""
        with self._file.writing():
            # A client that repeats a request whose answer was lost gets the session of its first one. Two sessions for
            # one client would leave one that nobody ends.
            self._file.do("INSERT OR IGNORE INTO sessions (id, asked) VALUES (?, ?)", uuid.uuid4().hex, request_key)
            session_row = self._file.find("SELECT id FROM sessions WHERE asked = ?", request_key)
        assert session_row is not None
        return str(session_row[0])

    def session_is(self, id: str) -> Literal["open", "ended", "unknown"]:
        """Whether a session goes on."""
        session_row = self._file.find("SELECT ended FROM sessions WHERE id = ?", id)
        return "unknown" if session_row is None else "ended" if session_row[0] else "open"

    def end_session(self, id: str) -> None:
        """Note that no call of a session comes any more."""
        with self._file.writing():
            self._file.do("UPDATE sessions SET ended = 1 WHERE id = ?", id)

    def idle_sessions(self) -> list[str]:
        """The sessions that go on and wait for no answer."""
        waiting_query = "SELECT session FROM calls WHERE form IS NULL"
        return [
            str(session_id)
            for (session_id,) in self._file.all(
                f"SELECT id FROM sessions WHERE NOT ended AND id NOT IN ({waiting_query})"
            )
        ]

    def model(self, id: str) -> ModelRecord | None:
        """A model; None if there is none of this id."""
        model_row = self._file.find(f"{_MODEL} WHERE id = ?", id)
        return None if model_row is None else _model(model_row)

    def models_of(self, session: str) -> list[ModelRecord]:
        """The models of a session."""
        return [_model(model_row) for model_row in self._file.all(f"{_MODEL} WHERE session = ?", session)]

    def weights(self, path: str) -> WeightsRecord | None:
        """The weights at a path; None if there are none."""
        weights_row = self._file.find(
            "SELECT number, path, model, kind, rank, attention, mlp, named FROM weights WHERE path = ?", path
        )
        if weights_row is None:
            return None
        number, path, model_id, weights_kind, rank, attention, mlp, is_named = weights_row
        return WeightsRecord(number, path, model_id, weights_kind, rank, bool(attention), bool(mlp), bool(is_named))

    def put_weights(self, weights: WeightsRecord) -> None:
        """Replace the weights at a path, in a transaction of the caller's."""
        self._file.do("DELETE FROM weights WHERE path = ?", weights.path)
        self._file.do("INSERT INTO weights VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *astuple(weights))

    def drop_unnamed(self, session: str) -> list[int]:
        """Forget the weights without a name of a session; returns their numbers."""
        unnamed_query = (
            "SELECT number FROM weights WHERE NOT named AND model IN (SELECT id FROM models WHERE session = ?)"
        )
        with self._file.writing():
            weights_numbers = [int(weights_number) for (weights_number,) in self._file.all(unnamed_query, session)]
            self._file.do(f"DELETE FROM weights WHERE number IN ({unnamed_query})", session)
        return weights_numbers

    def sampler(self, id: str) -> SamplerRecord | None:
        """A sampling client; None if there is none of this id."""
        sampler_row = self._file.find("SELECT id, session, path FROM samplers WHERE id = ?", id)
        return None if sampler_row is None else SamplerRecord(*sampler_row)

    def add_sampler(self, sampler: SamplerRecord) -> None:
        """Add a sampling client; nothing if it is there."""
        with self._file.writing():
            self.put_sampler(sampler)

    def put_sampler(self, sampler: SamplerRecord) -> None:
        """Add a sampling client, in a transaction of the caller's."""
        self._file.do("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?)", *astuple(sampler))


_MODEL = "SELECT number, id, session, rank, attention, mlp, answered, state FROM models"


def _model(row: Sequence[Any]) -> ModelRecord:
    number, model_id, session, rank, attention, mlp, answered, state = row
    return ModelRecord(number, model_id, session, rank, bool(attention), bool(mlp), answered, state)
