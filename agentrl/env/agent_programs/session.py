"""One episode's side of an agent program: its requests come in, the policy's replies go out, in order.

It owns the program while it runs and the key under which the HTTP server finds it; it never knows who the policy is.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import secrets
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from agentrl.env.agent_programs import recording_proxy
from agentrl.env.agent_programs.model_apis import Api, Conversation, Reply, UnservedRequest, apis, event_text
from agentrl.host.child_environment import OF_THE_RUN
from agentrl.host.janitor import OwnedFolder, owned_folder
from agentrl.records import Json

Program = Callable[["Session"], Awaitable[Any] | Any]
"""An agent program: an async function, or a plain one (in a thread of its own), given where the model is."""

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


@dataclass(slots=True)
class Pending:
    """A request that waits for the policy."""

    conversation: Conversation
    answered: trio.Event = field(default_factory=trio.Event)
    reply: Reply | None = None

    def answer(self, reply: Reply) -> None:
        self.reply = reply
        self.answered.set()


@dataclass(frozen=True, slots=True)
class Ended:
    """The program is over: with a result, or with its exception."""

    result: Any = None
    error: Exception | None = None


class Running:
    """A program at work. `start`, then `next` until it is `Ended`; `stop` ends it at any time."""

    def __init__(self, program: Program | Sequence[str], task: Mapping[str, Json]) -> None:
        self._program, self._task = program, task
        self._send, self._receive = trio.open_memory_channel[Pending | Ended](math.inf)
        self._key = secrets.token_hex(16)
        self._apis = apis()
        self._scope = trio.CancelScope()
        self._over = trio.Event()
        self._waiting: list[Pending] = []
        self._started = False

    async def start(self) -> None:
        """Run the program in the background of this trio loop."""
        session = Session(await recording_proxy.register(self._key, self._handle), self._key, self._task)
        self._started = True
        trio.lowlevel.spawn_system_task(self._run, session, name="agentrl agent program")

    async def next(self) -> Pending | Ended:
        """The program's next request, or its end."""
        return await self._receive.receive()

    async def stop(self) -> None:
        """End the program and everything it started."""
        self._scope.cancel()
        if self._started:
            await self._over.wait()
        for pending in self._waiting:
            pending.answered.set()
        await recording_proxy.unregister(self._key)

    async def _run(self, session: Session) -> None:
        ended = Ended(error=RuntimeError("the program was stopped"))
        try:
            with self._scope:
                ended = Ended(result=await _execute(self._program, session))
        except Exception as error:  # a boundary: what the program raised is data for whoever waits
            ended = Ended(error=error)
        finally:
            self._send.send_nowait(ended)
            self._over.set()

    async def _handle(self, request: recording_proxy.Request) -> recording_proxy.Response:
        if request.method == "GET" and request.path == "/v1/models":
            return recording_proxy.Response(200, {"object": "list", "data": [{"id": "policy", "object": "model"}]})
        api = self._apis.get(request.path)
        if api is None or request.method != "POST":
            return recording_proxy.Response(
                404, {"error": {"message": f"{request.method} {request.path} is not served"}}
            )
        try:
            conversation = api.read(request.body)
        except UnservedRequest as error:
            return recording_proxy.Response(400, api.error(str(error)))
        pending = Pending(conversation)
        self._waiting.append(pending)
        self._send.send_nowait(pending)
        await pending.answered.wait()
        self._waiting.remove(pending)
        if pending.reply is None:
            return recording_proxy.Response(503, api.error("the episode is over"))
        api.remember(conversation, pending.reply)
        return _response(api, pending.reply, request.body)


def _response(api: Api, reply: Reply, body: Mapping[str, Json]) -> recording_proxy.Response:
    if not body.get("stream"):
        return recording_proxy.Response(200, api.write(reply, body))
    return recording_proxy.Response(
        200, events=tuple((name, event_text(data)) for name, data in api.events(reply, body))
    )


async def _execute(program: Program | Sequence[str], session: Session) -> Any:
    if not callable(program):
        return await _command(program, session)
    if inspect.iscoroutinefunction(program):
        return await program(session)
    limiter = trio.CapacityLimiter(1)  # its own: a program lasts as long as its episode
    return await trio.to_thread.run_sync(program, session, abandon_on_cancel=True, limiter=limiter)


async def _command(argv: Sequence[str], session: Session) -> Exited:
    """A command in a process group of its own; all that it started ends with it, and with this process."""
    async with owned_folder() as owner:
        return await _owned(argv, session, owner)


async def _owned(argv: Sequence[str], session: Session, owner: OwnedFolder) -> Exited:
    ours = {"AGENTRL_TASK": _as_json(session.task), **owner.mark}
    variables = {**OF_THE_RUN.without(os.environ), **session.variables, **ours}
    process = await trio.lowlevel.open_process(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables,
        start_new_session=True,
    )
    output: dict[str, bytes] = {}

    async def drain(name: str, stream: trio.abc.ReceiveStream) -> None:
        kept = bytearray()
        async with stream:
            async for chunk in stream:
                kept += chunk
                del kept[: max(0, len(kept) - OUTPUT_BYTES)]
        output[name] = bytes(kept)

    try:
        async with trio.open_nursery() as nursery:
            assert process.stdout is not None and process.stderr is not None
            nursery.start_soon(drain, "stdout", process.stdout)
            nursery.start_soon(drain, "stderr", process.stderr)
            await process.wait()
            _kill_group(process.pid)
            await trio.to_thread.run_sync(owner.close)  # what left the group may hold the pipes open
    finally:
        _kill_group(process.pid)
        with trio.CancelScope(shield=True):
            await process.wait()
    return Exited(process.returncode or 0, output.get("stdout", b""), output.get("stderr", b""))


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _as_json(task: Mapping[str, Json]) -> str:
    return json.dumps(dict(task))
