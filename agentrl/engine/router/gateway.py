"""The door of engines that several runs share: each tenant sees the engines as if it were alone there.

    http://GATEWAY/TENANT/0 ─┐   namespaces, quotas            ┌─► engine 0
    http://GATEWAY/TENANT/1 ─┴─► fair queue of each engine ────┴─► engine 1

A tenant's URL speaks the engine's own API, so that a run's fleet, canary and publisher work as they do with engines of
its own. Generations wait in a queue that is fair by tokens (`FairQueue`), and pass through byte by byte. An adapter
`policy-7` of tenant `alice` is `alice.policy-7` at the engine: no tenant can name another's. Whatever would change the
engine for the others (weights, pauses, aborts) is refused.

Owns places, queues, names and leases. Never knows runs, nor how engines are started: `SharedEngine.url` says where its
engine is by now. An answer is read as fast as the engine gives it, however slowly its client reads, so that a place is
free when the engine is done.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, TypeVar, cast

import httpx
import trio
from pydantic_core import to_json

from agentrl.config.shared_engines import Tenant
from agentrl.engine import auth
from agentrl.engine.client import Lines
from agentrl.engine.http_client import TrioTransport, socket_of
from agentrl.engine.vllm_api import parse_json
from agentrl.errors import EngineError, boundary
from agentrl.http.http_server import Answer, Cut
from agentrl.records import EngineKey, Json

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Line(Generic[T]):
    """One tenant. `credit` is in tokens, and below 0 where a request took more than was estimated."""

    name: str
    share: float
    max_running: float
    waiting: deque[tuple[T, float]] = field(default_factory=deque[tuple[T, float]])
    running: int = 0
    tokens: float = 0.0
    credit: float = 0.0

    @property
    def ready(self) -> bool:
        return bool(self.waiting) and self.running < self.max_running


class FairQueue(Generic[T]):
    """The requests that wait for one engine. `quantum` is in tokens."""

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum
        self._lines: dict[str, _Line[T]] = {}
        self._ring: deque[_Line[T]] = deque()  # the tenants with waiting requests; the first one is visited
        self._spent: float | None = None  # in this visit; None: it has not begun

    def join(self, tenant: str, *, weight: float = 1.0, max_running: float = inf) -> None:
        """Take requests of a tenant from now on; `max_running` of them may be out at once."""
        self._lines[tenant] = _Line(tenant, self._quantum * weight, max_running)

    def push(self, tenant: str, item: T, tokens: float, *, first: bool = False) -> None:
        """Have a request wait: behind the tenant's others, or before them."""
        line = self._lines[tenant]
        if not line.waiting:
            self._ring.append(line)
        (line.waiting.appendleft if first else line.waiting.append)((item, tokens))
        line.tokens += tokens

    def remove(self, tenant: str, item: T) -> None:
        """Forget a request that waits."""
        line = self._lines[tenant]
        place = next(at for at, (one, _) in enumerate(line.waiting) if one is item)
        line.tokens -= line.waiting[place][1]
        del line.waiting[place]
        self._close(line)

    def pop(self) -> tuple[str, T] | None:
        """The request that goes out now; None if none waits whose tenant may have another one out."""
        if not any(line.ready for line in self._ring):
            return None
        while True:
            line = self._ring[0]
            if line.ready:
                if self._spent is None:
                    self._spent = 0.0
                    line.credit += line.share
                item, tokens = line.waiting[0]
                if tokens <= line.credit and (not self._spent or self._spent + tokens <= 2 * line.share):
                    self._take(line, tokens)
                    return line.name, item
            self._leave()

    def done(self, tenant: str, correction: float = 0.0) -> None:
        """Note that a request has ended, and took `correction` tokens more than estimated (fewer, if below 0)."""
        line = self._lines[tenant]
        line.running -= 1
        line.credit -= correction
        if not line.waiting:
            line.credit = min(line.credit, 0.0)

    def waiting(self, tenant: str) -> tuple[int, float]:
        """How many requests of a tenant wait, and their tokens."""
        return len(self._lines[tenant].waiting), self._lines[tenant].tokens

    def running(self, tenant: str) -> int:
        """How many requests of a tenant are out."""
        return self._lines[tenant].running

    def _take(self, line: _Line[T], tokens: float) -> None:
        assert self._spent is not None
        line.waiting.popleft()
        line.tokens -= tokens
        line.credit -= tokens
        line.running += 1
        self._spent += tokens
        if line.running >= line.max_running:  # it may not go on, so it waits for no one: what it could not spend lapses
            line.credit = min(line.credit, 0.0)
            self._leave()
        self._close(line)

    def _leave(self) -> None:
        """End the visit of the first tenant."""
        self._ring.rotate(-1)
        self._spent = None

    def _close(self, line: _Line[T]) -> None:
        """Leave out a tenant that has no request waiting any more."""
        if line.waiting:
            return
        if self._ring[0] is line:
            self._spent = None
        self._ring.remove(line)
        line.tokens, line.credit = 0.0, min(line.credit, 0.0)


QUANTUM = 256.0
"""Tokens of one visit to a tenant of weight 1. Others wait for a visit: few, and a longer request takes several."""

_GENERATE = "/inference/v1/generate"
_ASKED = ("/health", "/is_paused", "/version", "/weight_info")  # passed on as they are
_METHODS = ("agentrl_facts",)  # of /collective_rpc: they change nothing
_NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)  # of an adapter
_ADAPTERS_LINE = "vllm:lora_requests_info"
_CONNECT_S = 5.0
_ADMIN_S = 30.0
_HEAD_S = 600.0  # from a request's way to the engine until the first byte of the answer
_BUFFER_BYTES = 64 << 20  # of an answer that its client has not read
_LEARNS = 0.1  # weight of the newest answer in the estimate of the next one's tokens


@dataclass(slots=True, eq=False)
class _Request:
    """A generation. `model` is the tenant's name of the adapter; `prompt` and `tokens` count tokens: those of the
    prompt, and the estimate of all."""

    model: str | None
    prompt: int
    tokens: float
    goes: trio.Event = field(default_factory=trio.Event)
    sampled: int = 0
    cached: int = 0
    whole: bool = False

    def heard(self, document: Mapping[str, Json]) -> None:
        """Count the tokens of an answer, or of a part of it; the run's client judges its shape."""
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            self.sampled += sum(len(choice.get("token_ids") or ()) for choice in document.get("choices") or ())
            if usage := document.get("usage"):
                self.cached = int(usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def took(self) -> float:
        """Tokens that the engine has computed for it."""
        return self.prompt - min(self.cached, self.prompt) + self.sampled


@dataclass(slots=True, eq=False)
class _Guest:
    """A tenant at one engine. `folders` has the folder of each adapter that it loaded; `heard` is when it last asked
    for anything; `sampled` the tokens that its requests sample, on average; `served` all tokens computed for it."""

    tenant: Tenant
    heard: float
    away: bool = False  # its adapters were unloaded
    sampled: float | None = None
    served: float = 0.0
    requests: set[_Request] = field(default_factory=set[_Request])
    folders: dict[str, str] = field(default_factory=dict[str, str])
    loading: trio.Lock = field(default_factory=trio.Lock)

    @property
    def prefix(self) -> str:
        return f"{self.tenant.name}."


class SharedEngine:
    """One engine with `places` for requests at once, at `url` (None while it is started). A request waits at most
    `queue_deadline_s` for a place; a tenant that has asked for nothing for `lease_s` loses its adapters."""

    def __init__(
        self,
        tenants: Sequence[Tenant],
        *,
        places: int,
        url: str | None = None,
        key: EngineKey | None = None,
        queue_deadline_s: float = 240.0,
        lease_s: float = 120.0,
        quantum: float = QUANTUM,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._key, self._given = key, transport
        self.url = url
        self._free, self._queue_deadline_s, self._lease_s = places, queue_deadline_s, lease_s
        self._queue: FairQueue[_Request] = FairQueue(quantum)
        self._guests = {tenant.name: _Guest(tenant, -math.inf) for tenant in tenants}
        self._nursery: trio.Nursery | None = None
        for tenant in tenants:
            most = math.inf if tenant.max_running is None else tenant.max_running
            self._queue.join(tenant.name, weight=tenant.weight, max_running=most)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Relay answers and end leases, for ever."""
        try:
            async with trio.open_nursery() as self._nursery:
                for guest in self._guests.values():
                    guest.heard = trio.current_time()
                task_status.started()
                while True:
                    await trio.sleep(self._lease_s / 4)
                    for guest in self._guests.values():
                        await self._end_lease(guest)
        finally:
            with trio.CancelScope(shield=True):  # closes sockets, waits for nothing
                await self._transport.aclose()

    @property
    def url(self) -> str | None:
        return self._url

    @url.setter
    def url(self, url: str | None) -> None:
        self._url, place = url, None if url is None else socket_of(url)
        self._base = "http://localhost" if place else url
        self._transport = self._given or TrioTransport(socket=place)

    async def answer(self, tenant: str, method: str, path: str, content: bytes) -> Answer:
        """The answer to a request of a tenant that may ask."""
        guest = self._guests[tenant]
        guest.heard, guest.away = trio.current_time(), False
        match method, path:
            case "POST", "/inference/v1/generate":
                return await self._generate(guest, parse_json(content))
            case "GET", "/v1/models":
                return await self._models(guest)
            case "GET", "/metrics":
                return await self._metrics(guest)
            case "POST", "/v1/load_lora_adapter":
                return await self._load(guest, parse_json(content))
            case "POST", "/v1/unload_lora_adapter":
                return await self._unload(guest, parse_json(content))
            case "POST", "/collective_rpc" if parse_json(content).get("method") in _METHODS:
                return await self._ask(method, path, content)
            case "GET", _ if path in _ASKED:
                return await self._ask(method, path)
            case _:
                hint = "this engine is shared, and only adapters may change: set engine.shared = true in the run file"
                return refused(403, f"{method} {path}: {hint}")

    def gauges(self) -> Iterable[tuple[str, dict[str, float]]]:
        """Each tenant's requests and tokens."""
        for name, guest in self._guests.items():
            waiting, tokens = self._queue.waiting(name)
            running = float(self._queue.running(name))
            row = {"running": running, "waiting": float(waiting), "waiting_tokens": tokens}
            yield name, row | {"served_tokens_total": guest.served}

    # --- generation ---------------------------------------------------------------------------------------------

    async def _generate(self, guest: _Guest, body: dict[str, Json]) -> Answer:
        tenant = guest.tenant
        request = _estimated(guest, body)
        waiting, tokens = self._queue.waiting(tenant.name)
        if waiting and tokens + request.tokens > tenant.max_queued_tokens:
            most = f"max_queued_tokens = {tenant.max_queued_tokens} in the fleet file"
            return refused(429, f"{waiting} requests of tenant {tenant.name!r} wait with {tokens:.0f} tokens ({most})")
        for key in ("model", "request_id"):
            if isinstance(body.get(key), str):
                body[key] = guest.prefix + body[key]
        streamed, relayed = body.get("stream") is True, False
        guest.requests.add(request)
        self._queue.push(tenant.name, request, request.tokens, first=not streamed)  # those have a short deadline
        self._dispatch()
        try:
            with trio.move_on_after(self._queue_deadline_s):
                await request.goes.wait()
            if not request.goes.is_set():
                return refused(429, f"no place became free within {self._queue_deadline_s:g} s (queue_deadline_s)")
            with trio.move_on_after(_HEAD_S):
                response = await self._send("POST", _GENERATE, to_json(body))
                if response.status_code == 200 and streamed:
                    relay = _Relay(request, response)
                    relayed = True
                    assert self._nursery is not None
                    self._nursery.start_soon(self._relay, guest, relay)
                    return 200, relay
                whole = await _read(response)
                if response.status_code == 200:
                    request.heard(parse_json(whole))
                    request.whole = True
                return response.status_code, whole
            return refused(503, f"the engine was silent for {_HEAD_S:g} s")
        except httpx.ConnectError as error:
            request.prompt = 0  # nothing was computed
            return refused(503, f"the engine is not there: {error}")
        except httpx.TransportError as error:
            return refused(502, f"the engine broke off: {str(error) or type(error).__name__}")
        finally:
            if not relayed:
                self._end(guest, request)

    async def _relay(self, guest: _Guest, relay: _Relay) -> None:
        try:
            await relay.fill()
        finally:
            self._end(guest, relay.request)

    def _dispatch(self) -> None:
        """Let requests go while there are places."""
        while self._free > 0 and (found := self._queue.pop()) is not None:
            self._free -= 1
            found[1].goes.set()

    def _end(self, guest: _Guest, request: _Request) -> None:
        """Give a request's place back, or take it out of the queue."""
        guest.requests.discard(request)
        if not request.goes.is_set():
            self._queue.remove(guest.tenant.name, request)
            return
        self._free += 1
        guest.served += request.took
        if request.whole:
            last = request.sampled if guest.sampled is None else guest.sampled
            guest.sampled = last + _LEARNS * (request.sampled - last)
        self._queue.done(guest.tenant.name, request.took - request.tokens)
        self._dispatch()

    # --- what it says of itself ---------------------------------------------------------------------------------

    async def _models(self, guest: _Guest) -> Answer:
        """The engine's models without the adapters of others."""
        models, _ = await self._listed()
        own: list[dict[str, Json]] = []
        for model in models:
            name = str(model.get("id"))
            if name.startswith(guest.prefix):
                own.append({**model, "id": name.removeprefix(guest.prefix)})
            elif model.get("parent") is None and _tenant_of(name) not in self._guests:
                own.append(model)
        return 200, to_json({"object": "list", "data": own})

    async def _metrics(self, guest: _Guest) -> Answer:
        """The engine's metrics, but of adapters those that this tenant's running and waiting requests use, just now."""
        status, body = await self._ask("GET", "/metrics")
        assert isinstance(body, bytes)
        if status != 200:
            return status, body
        lines = [line for line in body.splitlines() if not line.startswith(_ADAPTERS_LINE.encode())]
        used = ",".join(sorted({request.model for request in guest.requests if request.model is not None}))
        lines.append(f'{_ADAPTERS_LINE}{{running_lora_adapters="{used}"}} {trio.current_time() + 1}'.encode())
        return 200, b"\n".join(lines) + b"\n"

    # --- adapters -----------------------------------------------------------------------------------------------

    async def _load(self, guest: _Guest, body: dict[str, Json]) -> Answer:
        name, folder = body.get("lora_name"), body.get("lora_path")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(folder, str):
            return refused(
                400, "lora_name and lora_path: a name of letters, digits, '.', '-' and a folder are required"
            )
        async with guest.loading:
            _, all_names = await self._listed()
            loaded = {one.removeprefix(guest.prefix) for one in all_names if one.startswith(guest.prefix)}
            if name in loaded and guest.folders.get(name, folder) != folder:
                hint = "two runs use this tenant at once: give each a tenant of its own in the fleet file"
                return refused(409, f"tenant {guest.tenant.name!r} has an adapter {name!r} of another folder: {hint}")
            if name not in loaded and len(loaded) >= guest.tenant.max_adapters:
                most = f"max_adapters = {guest.tenant.max_adapters} in the fleet file"
                return refused(429, f"tenant {guest.tenant.name!r} has {len(loaded)} adapters loaded ({most})")
            asked = to_json({"lora_name": guest.prefix + name, "lora_path": folder, "sha256": body.get("sha256")})
            status, said = await self._ask("POST", "/v1/load_lora_adapter", asked)
            if status == 200:
                guest.folders[name] = folder
            return status, said

    async def _unload(self, guest: _Guest, body: dict[str, Json]) -> Answer:
        name = body.get("lora_name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return refused(400, "lora_name: the name of an adapter is required")
        async with guest.loading:
            guest.folders.pop(name, None)
            return await self._ask("POST", "/v1/unload_lora_adapter", to_json({"lora_name": guest.prefix + name}))

    async def _end_lease(self, guest: _Guest) -> None:
        """Unload the adapters of a tenant that has vanished."""
        if guest.away or guest.requests or trio.current_time() - guest.heard < self._lease_s:
            return
        try:
            _, names = await self._listed()
            for name in names:
                if name.startswith(guest.prefix) and trio.current_time() - guest.heard >= self._lease_s:
                    await self._ask("POST", "/v1/unload_lora_adapter", to_json({"lora_name": name}))
        except EngineError:
            return  # tried again
        guest.folders.clear()
        guest.away = True

    async def _listed(self) -> tuple[list[dict[str, Json]], list[str]]:
        """The engine's models, and the names of all. Raises EngineError."""
        status, body = await self._ask("GET", "/v1/models")
        assert isinstance(body, bytes)
        if status != 200:
            raise EngineError(f"the engine does not name its models: {body[:200]!r}")
        with boundary(EngineError, "the engine names its models in an unknown shape:"):
            models = cast("list[dict[str, Json]]", parse_json(body).get("data") or [])
            return models, [str(model.get("id")) for model in models]

    # --- the engine ---------------------------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, content: bytes = b"") -> Answer:
        """Pass on a request with a short answer."""
        try:
            with trio.fail_after(_ADMIN_S):
                response = await self._send(method, path, content)
                return response.status_code, await _read(response)
        except trio.TooSlowError:
            return refused(504, f"the engine did not answer {path} within {_ADMIN_S:g} s")
        except httpx.TransportError as error:
            return refused(503, f"the engine is not there: {str(error) or type(error).__name__}")

    async def _send(self, method: str, path: str, content: bytes) -> httpx.Response:
        if self._base is None:
            raise httpx.ConnectError("it is being started")
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            **auth.bearer(self._key),
        }
        if self._key is not None and auth.changes(method, path):
            headers[auth.SIGNATURE] = auth.signature(self._key, method, path, content)
        extensions = {"timeout": {"connect": _CONNECT_S}}
        asked = httpx.Request(method, self._base + path, headers=headers, content=content, extensions=extensions)
        return await self._transport.handle_async_request(asked)


class _Relay:
    """An answer on its way: filled from the engine, iterated by the server."""

    def __init__(self, request: _Request, response: httpx.Response) -> None:
        self.request = request
        self._stream = cast("httpx.AsyncByteStream", response.stream)
        self._scope = trio.CancelScope()
        self._put, self._get = trio.open_memory_channel[bytes](math.inf)
        self._unread = 0

    async def fill(self) -> None:
        """Read the engine's answer to its end, or until the client has left."""
        lines = Lines()
        try:
            with self._scope, self._put:
                async for part in self._stream:
                    for event in lines.payloads(part):
                        self.request.heard(parse_json(event))
                    self._unread += len(part)
                    if self._unread > _BUFFER_BYTES:
                        return
                    self._put.send_nowait(part)
                self.request.whole = True
        except (httpx.TransportError, EngineError, trio.BrokenResourceError):
            return  # the client's connection breaks as the engine's has
        finally:
            with trio.CancelScope(shield=True):  # closes a socket, waits for nothing
                await self._stream.aclose()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            part = await self._get.receive()
        except trio.EndOfChannel:
            if self.request.whole:
                raise StopAsyncIteration from None
            raise Cut from None
        self._unread -= len(part)
        return part

    async def aclose(self) -> None:
        self._scope.cancel()
        self._get.close()


class Gateway:
    """`listening.Handler` for engines that tenants share. `keys` are the tenants' own; None of one that is open. Raises
    ConfigError for a tenant whose key is not set."""

    def __init__(self, tenants: Sequence[Tenant], engines: Sequence[SharedEngine]) -> None:
        self.engines = tuple(engines)
        self.keys = {tenant.name: tenant.key() for tenant in tenants}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look after all engines, for ever."""
        async with trio.open_nursery() as nursery:
            for engine in self.engines:
                await nursery.start(engine.run)
            task_status.started()

    def refuses(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes] | None:
        """As `listening.Refuses`: a tenant that there is not, or without its key."""
        shown = headers.get("authorization", "").encode()
        if path == "/metrics":
            if self._shown(shown):
                return None
            return refused(401, "Unauthorized: show the key of a tenant, whose numbers these are then")
        tenant, _, _ = _parts(path)
        if tenant not in self.keys:
            return refused(
                404, "no such tenant: the URL is http://HOST:PORT/TENANT/0, see [[tenants]] of the fleet file"
            )
        key = self.keys[tenant]
        if key is not None and not auth.shows(key, shown):
            return refused(401, f"Unauthorized: tenant {tenant!r} has a key, name its variable in engine.api_key_env")
        return None

    async def answer(self, method: str, path: str, query: str, headers: Mapping[str, str], content: bytes) -> Answer:
        """The answer to a request, by the tenant and the engine that its path begins with."""
        if (no := self.refuses(method, path, headers)) is not None:
            return no
        if path == "/metrics":
            return 200, "".join(self._lines(self._shown(headers.get("authorization", "").encode()))).encode()
        tenant, number, rest = _parts(path)
        if not number.isdecimal() or len(number) > 4 or int(number) >= len(self.engines):
            return refused(404, f"no engine {number!r}: they are /{tenant}/0 to /{tenant}/{len(self.engines) - 1}")
        try:
            return await self.engines[int(number)].answer(tenant, method, f"/{rest}", content)
        except EngineError as error:  # what came in is no JSON, or the engine's answer is none
            return refused(400 if method == "POST" else 502, str(error))
        except Exception as error:  # the door of all tenants: the trouble of one request is its own
            return refused(500, f"{type(error).__name__}: {error}")

    def _shown(self, authorization: bytes) -> set[str]:
        """The tenants whose key a request shows, and those without one."""
        return {name for name, key in self.keys.items() if key is None or auth.shows(key, authorization)}

    def _lines(self, tenants: Collection[str]) -> Iterable[str]:
        for number, engine in enumerate(self.engines):
            for tenant, row in engine.gauges():
                for name, value in row.items() if tenant in tenants else ():
                    yield f'agentrl:tenant_{name}{{tenant="{tenant}",engine="{number}"}} {value:g}\n'


def _parts(path: str) -> tuple[str, str, str]:
    """The tenant, the engine's number and the rest of a path."""
    tenant, number, rest = [*path.removeprefix("/").split("/", 2), "", ""][:3]
    return tenant, number, rest


def refused(status: int, message: str) -> tuple[int, bytes]:
    """An error as engines write it."""
    return status, to_json({"error": {"message": message, "type": "Error", "code": status}})


def _estimated(guest: _Guest, body: Mapping[str, Json]) -> _Request:
    """A request with its tokens: those of the prompt, and as many as this tenant's usually sample, at most as many as
    it may sample. The engine checks the body."""
    ids, params, model = body.get("token_ids"), body.get("sampling_params"), body.get("model")
    prompt = len(cast("list[int]", ids)) if isinstance(ids, list) else 1
    most = cast("dict[str, Any]", params).get("max_tokens") if isinstance(params, dict) else None
    most = float(most) if isinstance(most, int) and most > 0 else 16.0
    sampled = most if guest.sampled is None else min(most, guest.sampled)
    return _Request(model if isinstance(model, str) else None, prompt, prompt + sampled)


def _tenant_of(name: str) -> str:
    return name.partition(".")[0] if "." in name else ""


async def _read(response: httpx.Response) -> bytes:
    """The whole body of an answer."""
    stream = cast("httpx.AsyncByteStream", response.stream)
    try:
        return b"".join([part async for part in stream])
    finally:
        with trio.CancelScope(shield=True):  # closes a socket, waits for nothing
            await stream.aclose()
