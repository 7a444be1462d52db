"""A connection to PostgreSQL that waits for no answer forever, and statements of a transaction that go out together.

Owns how statements travel: prepared, in libpq's pipeline mode, many to a packet. psycopg's own pipeline asks the socket
after each statement, which costs a small one more than all its work. A process hears of writes on a connection of its
own (`Notices`). Never knows what a statement says.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.adapt import PyFormat, Transformer
from psycopg.generators import fetch_many, send
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult

from agentrl.store.databases.driver import PAUSE_S, Row
from agentrl.store.databases.postgres.sql import ARRAYS, array, translated

ANSWER_S = 70.0
"""How long a call waits for the server to say anything, seconds. The server ends a statement before that
(`statement_timeout`), so whoever waits longer waits for a server, or a network, that hangs."""

_PREPARED = 400  # statements that a session keeps prepared
# Results that nobody reads fill the buffers on the way. Then the server stops reading statements, the client stops
# sending them, and both wait for each other: PostgreSQL's page on pipeline mode warns of it.
_UNREAD = 512  # statements whose results may wait unread
_FAILED = (ExecStatus.FATAL_ERROR, ExecStatus.PIPELINE_ABORTED)

_T = TypeVar("_T")


class DeadlineConnection(psycopg.Connection[Any]):
    """A connection whose waits end after `ANSWER_S`; then it is closed, and OperationalError raised."""

    def wait(self, gen: Generator[Any, Any, _T], *arguments: Any, **named: Any) -> _T:
        try:
            return super().wait(_bounded(gen, time.monotonic() + ANSWER_S), *arguments, **named)
        except TimeoutError:
            # The answer may still come, and would be taken for that of the next statement. After a missed deadline the
            # connection is of no use but to be replaced.
            self.pgconn.finish()
            raise psycopg.OperationalError(f"it has not answered for {ANSWER_S:g} s") from None


def _bounded(gen: Generator[Any, Any, _T], until: float) -> Generator[Any, Any, _T]:
    """Run `gen`, and raise TimeoutError once the time `until` has passed. psycopg looks in ten times a second, also if
    nothing came."""
    ready_events: Any = None
    while True:
        try:
            awaited_events = gen.send(ready_events)
        except StopIteration as done:
            return done.value
        ready_events = yield awaited_events
        if not ready_events and time.monotonic() > until:
            gen.close()
            raise TimeoutError


class Sent:
    """A statement that was sent: its rows, and how many it wrote, once somebody asks for them."""

    __slots__ = ("_pipeline", "_prepares", "result")

    def __init__(self, pipeline: Pipeline, prepares: tuple[bytes, Any] | None = None) -> None:
        self._pipeline, self._prepares = pipeline, prepares
        self.result: PGresult | None = None

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._pipeline.rows(self))

    @property
    def rowcount(self) -> int:
        return self._pipeline.result(self).command_tuples or 0

    @property
    def prepares(self) -> tuple[bytes, Any] | None:
        """The statement that this prepares, if it is no other."""
        return self._prepares


class Pipeline:
    """The statements of a session's write transactions. Between `enter` and `leave` nothing else may use the session.

    Errors of a statement are raised by whatever asks the server next, and `leave` asks it for all."""

    def __init__(self, session: DeadlineConnection) -> None:
        self._session, self._wire = session, session.pgconn
        self._adapter = Transformer(session)
        self._names: dict[tuple[bytes, Any], bytes] = {}
        self._sent = deque[Sent]()
        self.entered = False

    def enter(self) -> None:
        self._wire.enter_pipeline_mode()
        self.entered = True

    def send(self, sql: bytes, parameters: Sequence[Any]) -> Sent:
        """Send a statement, with `$1` for its first parameter, and do not wait."""
        dumped_values = self._adapter.dump_sequence(parameters, [PyFormat.AUTO] * len(parameters))
        return self._send(sql, dumped_values, self._adapter.types, self._adapter.formats)

    def send_arrays(self, sql: bytes, types: Sequence[int], columns: Sequence[Sequence[Any]]) -> Sent:
        """Send a statement whose parameters are arrays of values of these types, and do not wait."""
        packed_arrays = [array(type_oid, column_values) for type_oid, column_values in zip(types, columns, strict=True)]
        return self._send(
            sql, packed_arrays, tuple(ARRAYS[type_oid] for type_oid in types), [Format.BINARY] * len(packed_arrays)
        )

    def send_once(self, sql: bytes) -> Sent:
        """Send a statement that no later one resembles, and do not wait."""
        self._wire.send_query_params(sql, None)
        self._sent.append(sent_statement := Sent(self))
        return sent_statement

    def _send(self, sql: bytes, values: Sequence[Any], types: Any, formats: Any) -> Sent:
        prepared_name = self._names.get((sql, types))
        sent_statement = Sent(self)
        # A server keeps each prepared statement until the session ends. Statements whose text varies, with a list of
        # ids of any length for instance, would fill its memory over a long run.
        if prepared_name is None and len(self._names) >= _PREPARED:
            self._wire.send_query_params(sql, values, types, formats)
        else:
            if prepared_name is None:
                prepared_name = self._names[sql, types] = b"agentrl_%d" % len(self._names)
                self._wire.send_prepare(prepared_name, sql, types)
                self._sent.append(Sent(self, (sql, types)))
            self._wire.send_query_prepared(prepared_name, values, formats)
        self._sent.append(sent_statement)
        if len(self._sent) > _UNREAD:
            self.result(sent_statement)
        return sent_statement

    def result(self, sent: Sent) -> PGresult:
        """The result of a statement. Raises psycopg.Error if it, or one before it, failed."""
        if sent.result is None:
            self._session.wait(self._receive(sent))
        assert sent.result is not None
        return sent.result

    def rows(self, sent: Sent) -> list[tuple[Any, ...]]:
        """The rows of a statement. Raises as `result`."""
        statement_result = self.result(sent)
        self._adapter.set_pgresult(statement_result)
        return self._adapter.load_rows(0, statement_result.ntuples, tuple)

    def leave(self) -> None:
        """Wait for all that was sent, and let others use the session again. Raises psycopg.Error for the first
        statement that failed and whose error was not raised yet."""
        if not self.entered:
            return
        self.entered = False
        try:
            self._wire.pipeline_sync()
            self._sent.append(Sent(self))
            self._session.wait(self._receive_all())
        finally:
            self._sent.clear()
            with suppress(psycopg.Error):
                self._wire.exit_pipeline_mode()

    def _receive(self, until: Sent) -> Generator[Any, Any, None]:
        self._wire.send_flush_request()
        yield from send(self._wire)
        while until.result is None:
            statement_results = yield from fetch_many(self._wire)
            self._take(statement_results)

    def _receive_all(self) -> Generator[Any, Any, None]:
        yield from send(self._wire)
        first_error: psycopg.Error | None = None
        while self._sent:
            statement_results = yield from fetch_many(self._wire)
            try:
                self._take(statement_results)
            except psycopg.Error as error:
                first_error = first_error or error
        # After a failed statement the server answers all later ones with "aborted". The first real error is the one to
        # raise; that a pipeline was aborted was raised already by whoever asked for that result.
        if first_error is not None and not isinstance(first_error, errors.PipelineAborted):
            raise first_error

    def _take(self, results: list[PGresult]) -> None:
        sent_statement, statement_result = self._sent.popleft(), results[0]
        sent_statement.result = statement_result
        if statement_result.status not in _FAILED:
            return
        if sent_statement.prepares is not None:
            # The server did not keep it, for want of a table for example. If the name stayed here, every later use
            # would fail with "prepared statement does not exist" and hide the first error.
            self._names.pop(sent_statement.prepares, None)
        if statement_result.status == ExecStatus.PIPELINE_ABORTED:
            raise errors.PipelineAborted("a statement before it failed")
        raise errors.error_from_result(statement_result)


_LOOK_S = 1.0  # the longest that a lost notification delays anybody


class Notices:
    """Every commit that somebody waits for notifies a `channel`; a connection of its own, which `dial` opens, listens.
    If it was lost, something may have been written meanwhile; and a notification may be lost without a word, so once in
    `_LOOK_S` something may have been, too."""

    def __init__(self, dial: Callable[[], DeadlineConnection], channel: str) -> None:
        self._dial, self._channel = dial, channel
        self._connection: DeadlineConnection | None = None
        self._dialled_s = self._reported_s = -math.inf

    @property
    def wakes(self) -> int | None:
        """The socket on which notifications come."""
        with suppress(psycopg.Error):  # another thread may close it just now
            return None if self._connection is None or self._connection.closed else self._connection.fileno()
        return None

    def written(self) -> bool:
        """Whether anybody has committed since the last call; also if that is not known."""
        # A notification is lost without an error if a proxy drops an idle connection and keeps the socket open. A look
        # a second bounds what that costs (law 4) and is cheap beside a run's other traffic.
        has_commits = self._notified() or time.monotonic() > self._reported_s + _LOOK_S
        if has_commits:
            self._reported_s = time.monotonic()
        return has_commits

    def _notified(self) -> bool:
        try:
            if self._connection is None or self._connection.closed:
                # While the server is away, every look would dial it. "Written" is the safe answer meanwhile: the caller
                # reads the store, and that call knows how to wait for a server.
                if time.monotonic() < self._dialled_s + PAUSE_S:
                    return True
                self._dialled_s = time.monotonic()
                self._connection = self._dial()
                self._connection.execute(f"LISTEN {self._channel}".encode())
                return True
            return bool(list(self._connection.notifies(timeout=0)))
        except psycopg.Error:
            return True  # whoever reads the store next waits for it, or hears why not

    def row(self, sql: str) -> Row | None:
        """The row that a statement returns."""
        try:
            if self._connection is None:
                return None
            return self._connection.execute(translated(sql)).fetchone()
        except psycopg.Error:
            return (time.monotonic(),)  # unlike any other

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
