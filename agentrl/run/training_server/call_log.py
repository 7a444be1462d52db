"""Log of the calls that a training server accepted, and of its answers: one SQLite file.

A call is one row, known by its owner (a training or sampling client's id) and its number there: a repeated request is
the same call. Its answer is written once, in one transaction with what it changed. Never knows what a call computes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.errors import UsageError
from agentrl.host.with_block import Closing
from agentrl.run.training_server.client_records import ClientRecords, ModelRecord, SamplerRecord, WeightsRecord
from agentrl.run.training_server.log_file import LogFile

Form = Literal["json", "protobuf", "failed"]


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
    """A call came after the server had stopped waiting for it."""


class CallLog(Closing):
    """The log in a file; `clients` has the sessions and models that its calls belong to. Calls are short, and may be
    made in any thread."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. Raises StoreError if it is no log of ours, or of another version."""
        self.file = LogFile(path)
        self.clients = ClientRecords(self.file)

    def close(self) -> None:
        """Close the file; no call may follow."""
        self.file.close()

    def accept(
        self, *, session: str, owner: str, place: int, kind: str, body: bytes, model: str | None = None
    ) -> tuple[str, bool]:
        """Take a call, also for the new `model` of this id that it makes; returns its id, and whether it is new. Raises
        CallChanged if another one has its number, CallTooLate if a later one of its model has its answer."""
        call_id, digest = f"{owner}:{place}", hashlib.sha256(kind.encode() + b"\0" + body).hexdigest()
        with self.file.writing():
            earlier_row = self.file.find("SELECT id, digest FROM calls WHERE owner = ? AND place = ?", owner, place)
            if earlier_row is not None:
                # The same number with another content is two calls of a client that lost count. To answer the second
                # with the first one's result would train on data that nobody sent.
                if earlier_row[1] != digest:
                    raise CallChanged(f"call {place} of {owner} came before with another content: number calls once")
                return str(earlier_row[0]), False
            answered_row = self.file.find("SELECT answered FROM models WHERE id = ?", owner)
            # A model's calls change its weights in the order of their numbers. One that comes after a later one was
            # computed cannot be put in between any more.
            if answered_row is not None and place <= answered_row[0]:
                correction = "it cannot be computed any more: make a new training client"
                raise CallTooLate(
                    f"call {place} of {owner} came after call {answered_row[0]} had its answer: {correction}"
                )
            if model is not None:
                self.file.do("INSERT INTO models (id, session) VALUES (?, ?)", model, session)
            self.file.do(
                "INSERT INTO calls (id, session, owner, place, kind, body, digest) VALUES (?, ?, ?, ?, ?, ?, ?)",
                call_id,
                session,
                owner,
                place,
                kind,
                body,
                digest,
            )
        return call_id, True

    def answer_of(self, id: str) -> CallAnswer | Literal["pending", "unknown"]:
        """The answer of a call."""
        answer_row = self.file.find("SELECT form, answer FROM calls WHERE id = ?", id)
        return "unknown" if answer_row is None else "pending" if answer_row[0] is None else CallAnswer(*answer_row)

    def call(self, id: str) -> Call:
        """A call that was accepted."""
        call_row = self.file.find(f"{_CALL} WHERE id = ?", id)
        assert call_row is not None
        return Call(*call_row)

    def next_of(self, model: str) -> Call | None:
        """The call of a model that comes next; None if it has not come."""
        call_row = self.file.find(
            f"{_CALL} WHERE owner = ? AND place = (SELECT answered + 1 FROM models WHERE id = owner)", model
        )
        return None if call_row is None else Call(*call_row)

    def first_waiting(self, model: str) -> tuple[int, int] | None:
        """Return the number of the next call of a model, which has not come, and of the first call that waits for it.
        None if no call waits."""
        gap_row = self.file.find(_GAP, model)
        return None if gap_row is None else (int(gap_row[0]), int(gap_row[1]))

    def give_up(self, model: str, answer: CallAnswer) -> list[str]:
        """Answer all calls that wait for the next one of a model, if that has not come; returns their ids."""
        with self.file.writing():
            if self.file.find(_GAP, model) is None:
                return []
            call_ids = [
                str(call_row[0])
                for call_row in self.file.all("SELECT id FROM calls WHERE form IS NULL AND owner = ?", model)
            ]
            self.file.do(
                "UPDATE models SET answered = (SELECT max(place) FROM calls WHERE owner = models.id) WHERE id = ?",
                model,
            )
            self.file.do(
                "UPDATE calls SET form = ?, answer = ?, body = x'' WHERE form IS NULL AND owner = ?",
                answer.form,
                answer.data,
                model,
            )
        return call_ids

    def unanswered(self, kind: str) -> list[Call]:
        """The calls of a kind without an answer, in the order in which they came."""
        return [
            Call(*call_row)
            for call_row in self.file.all(f"{_CALL} WHERE form IS NULL AND kind = ? ORDER BY number", kind)
        ]

    def waiting_models(self) -> list[str]:
        """The models with unanswered calls."""
        return [
            str(owner_row[0])
            for owner_row in self.file.all(
                "SELECT DISTINCT owner FROM calls WHERE form IS NULL AND owner IN (SELECT id FROM models)"
            )
        ]

    def since_state(self, model: ModelRecord, kind: str) -> list[Call]:
        """The calls of a kind that were answered, and did not fail, after a model's file was written."""
        return [
            Call(*call_row)
            for call_row in self.file.all(
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
        with self.file.writing():
            self.file.do(
                "UPDATE calls SET form = ?, answer = ? WHERE number = ? AND form IS NULL",
                answer.form,
                answer.data,
                call.number,
            )
            # The body of a backward pass stays until the next optimizer step is on disk: the gradients live in memory
            # alone, and after a kill they are computed again from it.
            if call.kind != "forward_backward":
                self.file.do("UPDATE calls SET body = x'' WHERE number = ?", call.number)
            self.file.do("UPDATE models SET answered = ? WHERE id = ?", call.place, call.owner)
            if effects.shape is not None:
                self.file.do(
                    "UPDATE models SET rank = ?, attention = ?, mlp = ? WHERE id = ?", *effects.shape, call.owner
                )
            if effects.wrote_state:
                self.file.do("UPDATE models SET state = ? WHERE id = ?", call.place, call.owner)
                self.file.do("UPDATE calls SET body = x'' WHERE owner = ? AND place <= ?", call.owner, call.place)
            if effects.weights is not None:
                self.clients.put_weights(effects.weights)
            if effects.sampler is not None:
                self.clients.put_sampler(effects.sampler)


_CALL = "SELECT number, id, session, owner, place, kind, body FROM calls"
_GAP = (
    "SELECT answered + 1, min(place) FROM models JOIN calls ON owner = models.id AND form IS NULL WHERE models.id = ? "
    "GROUP BY models.id HAVING min(place) > answered + 1"
)
