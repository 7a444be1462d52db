"""Which sessions of a training server go on: until their client finishes them, or is silent for too long.

A client says every ten seconds that it is there. Never knows what a session holds.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from agentrl.errors import StoreError, UsageError
from agentrl.run.training_server.call_log import CallLog

SILENT_S = 1800.0
SESSION_ENDED = "the session has ended: its client finished it, or was silent for too long; make a new client"
_LOOKS = 20  # for silent sessions, in the time that one may be silent

_log = logging.getLogger(__name__)


class SessionGone(UsageError):
    """No call of this session can be taken."""

    def __init__(self, session: str, *, known: bool) -> None:
        super().__init__(SESSION_ENDED if known else f"there is no session {session!r}")
        self.known = known


class Sessions:
    """A session ends that is silent for `silent_s` and waits for no answer; `ended` frees what it holds."""

    def __init__(self, log: CallLog, *, silent_s: float, ended: Callable[[str], Awaitable[None]]) -> None:
        self._log, self._silent_s, self._ended = log, silent_s, ended
        self._heard = dict[str, float]()  # when; a life of the server counts from its start

    def hear(self, session: str) -> None:
        """A client is there. Raises SessionGone."""
        if (session_state := self._log.clients.session_is(session)) != "open":
            raise SessionGone(session, known=session_state == "ended")
        self._heard[session] = trio.current_time()

    async def finish(self, session: str) -> None:
        """End a session; one that has ended stays so. Raises SessionGone if there was none."""
        if self._log.clients.session_is(session) == "unknown":
            raise SessionGone(session, known=False)
        await trio.to_thread.run_sync(self._log.clients.end_session, session)
        self._heard.pop(session, None)
        await self._ended(session)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """End silent sessions for ever."""
        task_status.started()
        while True:
            try:
                for idle_session in await trio.to_thread.run_sync(self._log.clients.idle_sessions):
                    current_s = trio.current_time()
                    # A session that this life has not heard of counts from now: the server was away, not the client.
                    if current_s - self._heard.setdefault(idle_session, current_s) >= self._silent_s:
                        _log.warning("session %s was silent for %g s: it has ended", idle_session, self._silent_s)
                        await self.finish(idle_session)
            except StoreError as error:
                _log.warning("silent sessions go on: %s", error)
            await trio.sleep(self._silent_s / _LOOKS)
