"""An engine that is started again when it ends by itself.

Owns its process and the client that speaks to it. Never knows what its requests mean.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing

import trio

from agentrl.engine.client import EngineClient
from agentrl.errors import AgentRLError, EngineUnavailable

_AGAIN_S = (1.0, 60.0)  # between two starts: at first, and at most
_DYING_S = 5.0  # from a connection that broke to a process that has ended
_SILENT_S = 60.0  # an engine that answers nothing for so long is ended

_log = logging.getLogger(__name__)


class KeptEngine:
    """`start` makes an engine for as long as its block runs. Who asks for the engine while there is none waits
    `patience_s`."""

    def __init__(
        self,
        start: Callable[[], AbstractAsyncContextManager[tuple[str, trio.Process]]],
        *,
        vocabulary: int,
        patience_s: float,
    ) -> None:
        self._start, self._vocabulary, self._patience_s = start, vocabulary, patience_s
        self._client: EngineClient | None = None
        self._changed = trio.Event()  # when an engine came or ended
        self.process: trio.Process | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep an engine for ever. Raises as `start` if the first one does not start."""
        # The first start decides whether the server starts at all, so its error is raised. Later ones are retried for
        # ever with growing pauses: clients wait for answers, and their calls are in the log.
        restart_wait_s, has_started = _AGAIN_S[0], False
        while True:
            try:
                async with (
                    self._start() as (engine_url, engine_process),
                    aclosing(EngineClient(engine_url, vocabulary=self._vocabulary)) as engine_client,
                ):
                    self._now(engine_client, engine_process)
                    if not has_started:
                        task_status.started()
                        has_started = True
                    restart_wait_s = _AGAIN_S[0]
                    exit_status = await engine_process.wait()
                    self._now(None, engine_process)
                    _log.warning("the engine ended by itself with exit status %s: another one starts", exit_status)
            except AgentRLError as error:
                if not has_started:
                    raise
                _log.warning("no engine starts (%s): again in %g s", error, restart_wait_s)
            finally:
                self._client = None
            await trio.sleep(restart_wait_s)
            restart_wait_s = min(2 * restart_wait_s, _AGAIN_S[1])

    async def client(self) -> EngineClient:
        """The client of the engine that runs. Raises EngineUnavailable if there is none in time."""
        with trio.move_on_after(self._patience_s):
            while self._client is None:
                await self._changed.wait()
            return self._client
        raise EngineUnavailable(f"the engine ended, and no other one was up within {self._patience_s:g} s")

    async def has_ended(self, client: EngineClient) -> bool:
        """Whether the engine of a client has ended, or does so in a moment; one that no longer answers is ended."""
        # A connection that breaks is seen before the end of the process that broke it. Without this wait a dying engine
        # would be taken for one that refuses, and its calls would fail instead of going to the next.
        await self._another(client)
        if self._client is client and not await client.alive(deadline_s=_SILENT_S):
            if self._client is client and self.process is not None:
                _log.warning("the engine does not answer any more: it is ended")
                self.process.kill()
            await self._another(client)
        return self._client is not client

    async def _another(self, client: EngineClient) -> None:
        with trio.move_on_after(_DYING_S):
            while self._client is client:
                await self._changed.wait()

    def _now(self, client: EngineClient | None, process: trio.Process) -> None:
        self._client, self.process = client, process
        changed_event, self._changed = self._changed, trio.Event()
        changed_event.set()
