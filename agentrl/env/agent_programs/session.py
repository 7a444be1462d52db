"""One episode's side of an agent program: its requests come in, the policy's replies go out, in order.

A session owns the program while it runs and the key under which the HTTP server finds it; it never knows who the policy
is. `agentrl.env.agent_programs.open_requests` says which request waits for which reply. The server listens on the
loopback address: one per trio loop, shared by its episodes and closed with the last of them. Sockets and bounds are
those of `agentrl.http.http_server`. Whoever registered the first part of a path, which nobody else can guess, handles
its requests; a request to another path is refused before its body is read.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import secrets
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast
from urllib.parse import urlsplit

import trio
from trio.lowlevel import RunVar

from agentrl.env.agent_programs.model_apis import Reply
from agentrl.env.agent_programs.model_endpoint import (
    MAX_BODY,
    Handler,
    ModelEndpoint,
    Request,
    Response,
    answer_of,
    written,
)
from agentrl.env.agent_programs.open_requests import Pending
from agentrl.env.agent_programs.request_checks import UnservedRequest
from agentrl.errors import matters
from agentrl.host.child_environment import OF_THE_RUN
from agentrl.host.janitor import OwnedFolder, owned_folder
from agentrl.host.platform_checks import kill_group
from agentrl.http.bounds import ServerBounds
from agentrl.http.http_server import Answer, Typed, listen
from agentrl.protocols import Sandbox
from agentrl.records import Json
from agentrl.sandbox.network_policy import forwarded

_GRACE_S: Final = 1.0  # for the connections of a program that has ended to close
_SETTLE_TURNS: Final = 20
"""Turns of the loop from the end of a program to the last look at its requests. One that its client sent and gave up at
once may still lie in a socket: it takes about eight turns to be accepted and read, and it says why a program ended."""

_servers: RunVar[_Server] = RunVar("agentrl_program_server")


@dataclass(slots=True)
class _Server:
    port: int
    scope: trio.CancelScope
    closed: trio.Event = field(default_factory=trio.Event)
    handlers: dict[str, tuple[Handler, int]] = field(default_factory=dict[str, "tuple[Handler, int]"])

    def body_bytes(self, path: str) -> int:
        """The most bytes of a body that the key of `path` allows."""
        _, body_limit = self.handlers.get(_split(path)[0], (None, 0))
        return body_limit

    def refuses(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, Typed] | None:
        """Refuse a request whose key nobody has registered; see `Refuses` in `agentrl.http.http_server`."""
        if _split(path)[0] in self.handlers:
            return None
        return written(Response(404, {"error": {"message": "no such episode", "type": "not_found"}}))

    async def answer(self, method: str, path: str, query: str, headers: Mapping[str, str], content: bytes) -> Answer:
        """Answer a request by the handler of its key; see `Handler` in `agentrl.http.http_server`."""
        episode_key, api_path = _split(path)
        key_handler, _ = self.handlers.get(episode_key, (None, 0))
        if key_handler is None:
            return written(Response(503, {"error": {"message": "the episode is over", "type": "server_error"}}))
        try:
            response = await key_handler(Request(method, api_path, headers, content))
        except UnservedRequest as error:
            response = Response(400, {"error": {"message": str(error), "type": "invalid_request_error"}})
        except Exception as error:  # a connection's boundary: whatever it was, the program gets an answer that says so
            response = Response(500, {"error": {"message": f"{type(error).__name__}: {error}", "type": "server_error"}})
        return answer_of(response)


async def register(key: str, handler: Handler, *, body_bytes: int = MAX_BODY) -> str:
    """Have requests to `http://127.0.0.1:PORT/KEY/…`, of bodies up to `body_bytes`, answered by `handler`. Returns the
    address up to the key.

    The server starts with the first key of a trio loop."""
    try:
        loop_server = _servers.get()
    except LookupError:
        loop_server = None
    if loop_server is None or loop_server.scope.cancel_called:
        loop_server = await _start()
        _servers.set(loop_server)
    loop_server.handlers[key] = (handler, body_bytes)
    return f"http://127.0.0.1:{loop_server.port}/{key}"


async def unregister(key: str) -> None:
    """Forget a key; the server closes with the last one."""
    try:
        loop_server = _servers.get()
    except LookupError:
        return
    loop_server.handlers.pop(key, None)
    if not loop_server.handlers and not loop_server.scope.cancel_called:
        loop_server.scope.cancel()
        # A deadline, as the server waits for its open connections, and a program that was left behind may hold one.
        with trio.move_on_after(5, shield=True):
            await loop_server.closed.wait()


async def _start() -> _Server:
    # One port for all episodes of a loop, and a key in the path: a port for each would use them up, and a port keeps
    # out nobody, since every user of the machine reaches the loopback address.
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    server = _Server(port=listeners[0].socket.getsockname()[1], scope=trio.CancelScope())

    async def serve() -> None:
        with server.scope:
            server_bounds = ServerBounds(body_bytes=MAX_BODY)
            await listen(server, listeners, bounds=server_bounds, refuses=server.refuses, body_bytes=server.body_bytes)
        for listener in listeners:
            with trio.CancelScope(shield=True):
                await listener.aclose()
        server.closed.set()

    # A system task, because the server outlives the episode that happened to start it: in that episode's nursery it
    # would end with it, and take the other episodes' connections along.
    trio.lowlevel.spawn_system_task(serve, name="agentrl program server")
    return server


def _split(path: str) -> tuple[str, str]:
    """The key that a path begins with, and what follows."""
    episode_key, _, path_rest = path.removeprefix("/").partition("/")
    return episode_key, f"/{path_rest}"


Program = Callable[["Session"], Awaitable[Any] | Any]
"""An agent program: an async function, or a plain one (in a thread of its own), called with the address of the
model."""

OUTPUT_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Exited:
    """How a program that is a command ended; its output is cut to the last `OUTPUT_BYTES`."""

    exit_code: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True)
class Session:
    """All that a program gets to know: `base_url` without `/v1`, a key, the model's name, the task."""

    base_url: str
    api_key: str
    task: Mapping[str, Json]
    model: str = "policy"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which common clients find their model."""
        return {
            "OPENAI_BASE_URL": f"{self.base_url}/v1",
            "OPENAI_API_BASE": f"{self.base_url}/v1",
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """The program is over: with a result, or with its exception."""

    result: Any = None
    error: Exception | None = None


# Why a program's request waits for `step`, and does not go to an engine.
#
# A program speaks HTTP to a model, so a proxy would be the short way: pass each request on to an engine, and collect
# the answers. The program would then drive the episode. But limits, deadlines, the journal and the choice of an engine
# lie with the one who drives an episode, and each would have to exist a second time behind the proxy. An engine that
# gets the messages would also render and encode the conversation anew for each request, so that the prompt has tokens
# which nobody sampled (law 1).
#
# So the roles are turned around. The program runs beside the episode, in a task or a process. Its request goes into a
# queue; `next` hands it to the environment, for which it is an observation; the policy's action is the answer that the
# waiting connection gets. To everybody else this is an environment with `reset` and `step`.
#
# The prices: requests that a program makes side by side are answered one after the other. A stream is written when the
# answer is whole. And the program outlives the call that starts it, so it is a system task of the loop and in nobody's
# nursery. `stop` has to end it, and if this process is killed, the mark of its owner and its box do (law 4).
#
# `tests/env/programs/test_program_env.py` plays programs request by request and side by side, and kills their owner
# after each call that makes something
# (`test_law_4_a_command_and_what_left_its_group_end_with_their_owner_at_every_instant`).
class Running:
    """A program at work, in a `box` if it has one. `start`, then `next` and `answer` in turn until it is `Ended`;
    `stop` ends it at any time. Its requests have `body_bytes` at most."""

    def __init__(
        self,
        program: Program | Sequence[str],
        task: Mapping[str, Json],
        box: Sandbox | None = None,
        *,
        body_bytes: int = MAX_BODY,
    ) -> None:
        self._program, self._task, self._box, self._body_bytes = program, task, box, body_bytes
        self._key = secrets.token_hex(16)
        self._scope = trio.CancelScope()
        self._over = trio.Event()
        self._ended: Ended | None = None
        self._started = False
        self._endpoint = ModelEndpoint(shares_box=box is not None)
        self.requests = self._endpoint.requests

    async def start(self) -> None:
        """Run the program in the background of this trio loop."""
        address = await register(self._key, self._endpoint.handle, body_bytes=self._body_bytes)
        self._started = True
        trio.lowlevel.spawn_system_task(
            self._run, Session(address, self._key, self._task), name="agentrl agent program"
        )

    async def next(self) -> Pending | Ended:
        """The program's next request, which waits for `answer`, or its end."""
        while True:
            if self._ended is not None:
                # An end is not the last word: a request that the program sent before it died may still be on its way to
                # the handler, and whether an answer was lost depends on it.
                for _ in range(_SETTLE_TURNS):
                    await trio.lowlevel.checkpoint()
                with trio.move_on_after(_GRACE_S):
                    while self.requests.is_open:
                        await self._endpoint.news()
                self.requests.end(trio.current_time())
                return self._ended
            if (pending := self.requests.next(trio.current_time())) is not None:
                return pending
            await self._endpoint.news()

    async def asks_again(self) -> None:
        """Wait for a client that we were too slow for: until it asks again, or the program does something else."""
        while self.requests.is_lost_by_us and not self.requests.has_next and self._ended is None:
            await self._endpoint.news()

    def answer(self, reply: Reply) -> None:
        """Answer the request that `next` gave."""
        self.requests.answer(reply)

    async def stop(self) -> None:
        """End the program and everything it started."""
        self._scope.cancel()
        if self._started:
            await self._over.wait()
        self.requests.close()
        await unregister(self._key)

    async def _run(self, session: Session) -> None:
        program_end = Ended(error=RuntimeError("the program was stopped"))
        try:
            with self._scope:
                program_end = Ended(result=await _execute(self._program, session, self._box))
        except (Exception, SystemExit, asyncio.CancelledError, BaseExceptionGroup) as error:
            program_end = _ended_by(error)
        finally:
            self._ended = program_end
            self._endpoint.announce()
            self._over.set()


def _ended_by(error: BaseException) -> Ended:
    """The end of a program that raised `error`. A main function ends by `sys.exit`, and asyncio's cancellation may come
    out of a program's own loop: in this task, which is nobody's, either would end the worker with all its episodes."""
    if isinstance(error, Exception):
        return Ended(error=error)
    if isinstance(error, BaseExceptionGroup):
        error_group = cast("BaseExceptionGroup[BaseException]", error)
        if error_group.subgroup((trio.Cancelled, KeyboardInterrupt)) is not None:
            raise error_group  # this loop ends
        error = matters(error_group)
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return Ended()
        return Ended(error=RuntimeError(f"the program called sys.exit({error.code!r})"))
    return Ended(error=RuntimeError(f"the program raised {type(error).__name__}: {error}"))


async def _execute(program: Program | Sequence[str], session: Session, box: Sandbox | None) -> Any:
    if not callable(program):
        return await (_command(program, session) if box is None else _boxed(program, session, box))
    if inspect.iscoroutinefunction(program):
        return await program(session)
    # With the shared limit of threads, as many programs as there are threads would block every environment's plain code
    # until the first of them ends.
    thread_limiter = trio.CapacityLimiter(1)  # its own: a program lasts as long as its episode
    return await trio.to_thread.run_sync(program, session, abandon_on_cancel=True, limiter=thread_limiter)


async def _boxed(argv: Sequence[str], session: Session, box: Sandbox) -> Exited:
    """A command in a box, which reaches its model and nothing else. It ends with the box at the latest."""
    model_url = urlsplit(session.base_url)
    async with forwarded(box, cast("int", model_url.port)) as forwarding:
        boxed_session = replace(session, base_url=forwarding.address + model_url.path)
        # Some programs wait for the end of their input.
        silent_command = ["sh", "-c", 'exec "$@" </dev/null', "sh", *argv]
        process = await box.start(forwarding.argv(silent_command), env=_variables(boxed_session))
        output_tail = bytearray()
        try:
            while output_chunk := await process.receive():
                output_tail += output_chunk
                del output_tail[: max(0, len(output_tail) - OUTPUT_BYTES)]
            await process.wait()
        finally:
            with trio.CancelScope(shield=True):
                await process.kill()
        exec_result = await process.kill()  # idempotent: it says how it ended
    return Exited(exec_result.exit_code, bytes(output_tail), exec_result.stderr[-OUTPUT_BYTES:])


async def _command(argv: Sequence[str], session: Session) -> Exited:
    """A command in a process group of its own; all that it started ends with it, and with this process."""
    async with owned_folder() as owner:
        return await _owned(argv, session, owner)


async def _owned(argv: Sequence[str], session: Session, owner: OwnedFolder) -> Exited:
    variables = {**OF_THE_RUN.without(os.environ), **_variables(session), **owner.mark}
    process = await trio.lowlevel.open_process(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables,
        start_new_session=True,
    )
    output_tails: dict[str, bytes] = {}

    async def drain(name: str, stream: trio.abc.ReceiveStream) -> None:
        output_tail = bytearray()
        async with stream:
            async for output_chunk in stream:
                output_tail += output_chunk
                del output_tail[: max(0, len(output_tail) - OUTPUT_BYTES)]
        output_tails[name] = bytes(output_tail)

    try:
        async with trio.open_nursery() as nursery:
            assert process.stdout is not None and process.stderr is not None
            nursery.start_soon(drain, "stdout", process.stdout)
            nursery.start_soon(drain, "stderr", process.stderr)
            await process.wait()
            kill_group(process.pid)
            # The order matters: first the leader's end, then its group, then whatever left the group and carries the
            # owner's mark. The drains end only when the last holder of the pipes is gone, so this stands inside of
            # their nursery.
            await trio.to_thread.run_sync(owner.close)  # what left the group may hold the pipes open
    finally:
        kill_group(process.pid)
        with trio.CancelScope(shield=True):
            await process.wait()
    return Exited(process.returncode or 0, output_tails.get("stdout", b""), output_tails.get("stderr", b""))


def _variables(session: Session) -> dict[str, str]:
    return {**session.variables, "AGENTRL_TASK": json.dumps(dict(session.task))}
