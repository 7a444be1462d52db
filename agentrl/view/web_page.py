"""The page's routes, and who may ask.

The page's own files hold nothing of a run, and go to everybody. Each answer under `/api/` needs the token in the header
`Authorization`, where no link, no cookie and no script of another origin can put it. `Host` must name this server, so
that a name which an attacker points here (DNS rebinding) gets nothing. Every request only looks, but for those of
`_WRITES`: `POST /api/runs/RUN/notes` keeps tags and a note in the run's folder, `pause`, `resume`, `set` and `requeue`
steer a run under way, unless the page was started without that. They must come from this page itself (`Origin`), and be
JSON, which a form of another page cannot send.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from importlib import resources
from threading import Event
from typing import Any, Final, NamedTuple

import anyio
from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.errors import AgentRLError, NotInStore, UsageError
from agentrl.run.run_folder import RunDir
from agentrl.tokens import images
from agentrl.tokens.images import Image
from agentrl.view import episode_answers, page_steering, run_answers
from agentrl.view.lanes import lanes
from agentrl.view.notes import keep_notes
from agentrl.view.opened_runs import OpenedRun, OpenedRuns

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_DIGEST: Final = re.compile("[0-9a-f]{64}")
_LOOK_S = 1.0  # between two looks for changes
_QUIET_LOOKS = 15  # after so many without any, a line keeps the connection
_MOST_NAMES = 64  # metrics of one answer
_LONGEST_NUMBER = 18  # digits that the store's numbers of 64 bits can have in any case
_WRITES: Final[Mapping[str, Callable[[RunDir, Any], Any]]] = {
    "notes": keep_notes,
    "pause": page_steering.pause,
    "resume": page_steering.resume,
    "set": page_steering.change,
    "requeue": page_steering.requeue,
}
_SENT_BYTES = 1 << 17  # at most, by who writes
_LONGEST_S = 15.0  # that an answer is taken as known
_SHARE = 0.002  # of a core, for each answer that viewers ask for again and again
_SETTLED_LOOKS = 16  # after so many since the last change, all kept answers are newer: the page asks once more
_KNOWN: Final = "x-known-s"  # header: for how long the same question gets the same answer, in seconds
_KEPT_ANSWERS, _KEPT_BYTES = 64, 1 << 20

Query = Mapping[str, str]


class Visitors(NamedTuple):
    """Who gets in: those who show the `token`, by one of the `hosts`; by any host if there are none. Whether they may
    `steer` runs."""

    token: str
    hosts: frozenset[str] = frozenset()
    steer: bool = True

    @property
    def writes(self) -> frozenset[str]:
        """Last words of the paths to which visitors may write, see `_WRITES`."""
        return frozenset(_WRITES if self.steer else {"notes"})


class _Shared:
    """Answers that many viewers ask for at once are made once, and are taken as known for `_LOOK_S`, or for so long
    that making them takes `_SHARE` of a core: looking must not cost the run, however many look."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[object, tuple[float, bytes]] = {}  # until when, and the answer
        self._locks: dict[object, anyio.Lock] = {}
        self.writes = 0  # how often all was forgotten

    def known(self, key: object) -> tuple[bytes, float] | None:
        """The answer, if it is taken as known, and for how many seconds it still is."""
        known_until, answer = self._kept.get(key, (0.0, b""))
        remaining_s = known_until - self._clock()
        return (answer, remaining_s) if remaining_s > 0 else None

    async def __call__(self, key: object, make: Callable[[], Any]) -> bytes:
        """The answer of `make`, which runs in a thread, as JSON."""
        # A lock for each question: the first who asks makes the answer, the others wait for it and take it. Without,
        # ten viewers would run the same query ten times, in ten threads
        # (`tests/view/test_web_page.py::test_ten_viewers_are_answered_once`).
        answer_lock = self._locks.setdefault(key, anyio.Lock())
        try:
            async with answer_lock:
                if (shared_answer := self.known(key)) is not None:
                    return shared_answer[0]
                began_s = self._clock()
                # In a thread, since a store's reads block; encoded there as well, as JSON of a megabyte takes the
                # loop tens of milliseconds, in which nobody else is answered.
                encoded_answer = await to_thread.run_sync(lambda: _encoded(make()))
                took_s = self._clock() - began_s
                # Popped before it is set, so that it is the newest in the dict's order, and what is dropped below is
                # the oldest.
                self._kept.pop(key, None)
                # A long answer is an episode with all its tokens, which one person reads once.
                if len(encoded_answer) <= _KEPT_BYTES:
                    self._kept[key] = self._clock() + max(_LOOK_S, min(_LONGEST_S, took_s / _SHARE)), encoded_answer
                while len(self._kept) > _KEPT_ANSWERS:
                    del self._kept[next(iter(self._kept))]
                return encoded_answer
        finally:
            if not answer_lock.locked():  # nobody waited for it
                self._locks.pop(key, None)

    def forget(self) -> None:
        """Something was written."""
        self._kept.clear()
        self.writes += 1


def page_files() -> dict[str, bytes]:
    """The page's own files by name."""
    return {asset.name: asset.read_bytes() for asset in (resources.files("agentrl.view") / "assets").iterdir()}


def web_page(runs: OpenedRuns, visitors: Visitors) -> ASGIApp:
    """The application that serves a page of `runs`."""
    page_assets = page_files()
    shared_answers = _Shared()

    async def file(request: Request) -> Response:
        file_name = request.path_params.get("name", "index.html")
        if file_name not in page_assets:
            return _problem(404, f"no file {file_name!r}")
        return Response(page_assets[file_name], media_type=_TYPES[file_name.rpartition(".")[2]])

    def summary(run: OpenedRun, _: Query) -> Any:
        return {**run_answers.summary(run), "steers": visitors.steer}

    def answering(answer: Callable[[OpenedRuns, Request], Any]) -> Callable[[Request], Any]:
        return partial(_answered, runs, shared_answers, answer)

    application = Starlette(
        routes=[
            Route("/", file),
            Route("/assets/{name}", file),
            Route("/api/runs", answering(lambda runs, _: _lines(runs))),
            Route("/api/runs/{run}", answering(_of_run(summary))),
            Route("/api/runs/{run}/metrics", answering(_of_run(_metrics))),
            Route("/api/runs/{run}/lanes", answering(_of_run(lambda run, _: lanes(run)))),
            Route("/api/runs/{run}/health", answering(_of_run(lambda run, _: run_answers.health(run)))),
            Route("/api/runs/{run}/episodes", answering(_of_run(episode_answers.listed))),
            Route("/api/runs/{run}/episodes/{id}", answering(_numbered(episode_answers.detail))),
            Route("/api/runs/{run}/groups/{id}", answering(_numbered(episode_answers.group))),
            Route("/api/runs/{run}/steps/{id}", answering(_numbered(episode_answers.step))),
            Route("/api/runs/{run}/images/{digest}", partial(_image, runs)),
            *(
                Route(f"/api/runs/{{run}}/{name}", partial(_written, runs, shared_answers, name), methods=["POST"])
                for name in visitors.writes
            ),
            Route("/api/runs/{run}/events", partial(_events, runs, shared_answers)),
        ]
    )
    # Around everything, files of the page included: a route that is added later cannot forget the check.
    return _Guard(application, visitors, shared_answers)


class _Guard:
    """Lets requests through that may ask, and gives every answer the headers. Viewers ask again and again: an answer
    that is known goes out from here, past all that finds out which one is meant."""

    def __init__(self, app: ASGIApp, visitors: Visitors, shared: _Shared) -> None:
        self._app, self._visitors, self._shared = app, visitors, shared
        self._right = f"Bearer {visitors.token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by a refusal, by an answer that was made for another viewer and still counts as known, or by the
        application."""
        if scope["type"] != "http":
            return

        # At the one place that every answer goes through, refusals and errors of the framework included.
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        refusal = self._refusal(scope)
        shared_answer = (
            self._shared.known(_request_key(scope)) if refusal is None and scope["method"] == "GET" else None
        )
        if shared_answer is None:
            await (refusal or self._app)(scope, receive, with_headers)
            return
        known_answer, remaining_s = shared_answer
        headers = [
            (b"content-length", b"%d" % len(known_answer)),
            (b"content-type", b"application/json"),
            (_KNOWN.encode(), f"{remaining_s:.3f}".encode()),
        ]
        await with_headers({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": known_answer})

    def _refusal(self, scope: Scope) -> Response | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        # Against DNS rebinding: a page of an attacker whose name comes to point here is of the same origin as these
        # answers, in the browser's eyes; only the `Host` header shows the name.
        # `tests/view/test_web_page.py::test_a_name_that_points_here_from_elsewhere_gets_nothing`.
        if self._visitors.hosts and _host(headers.get(b"host", b"").decode("latin-1")) not in self._visitors.hosts:
            return _problem(421, "this page is not served under that name: open the address that the command printed")
        if scope["method"] == "POST" and scope["path"].rpartition("/")[2] in self._visitors.writes:
            if not _from_here(headers):
                return _problem(403, "a run is written to from this page, and from nobody else's")
        elif scope["method"] not in ("GET", "HEAD"):
            return _problem(405, "this page only looks")
        shown_token = headers.get(b"authorization", b"")
        # `compare_digest`, since `==` ends at the first wrong byte, and a neighbour on this machine can measure that.
        if scope["path"].startswith("/api/") and not hmac.compare_digest(shown_token, self._right):
            return _problem(401, "open the address that the command printed: it ends in the token")
        return None


def loopback_hosts(host: str) -> frozenset[str]:
    """The names by which requests may address a server that listens on `host`; none, if it listens beyond this
    machine."""
    try:
        # All addresses of the name: one that listens beyond this machine is enough for others to come in by names
        # that are not known here, and then no list of hosts can be complete.
        is_loopback = all(ipaddress.ip_address(info[4][0]).is_loopback for info in socket.getaddrinfo(host, None))
    except (OSError, ValueError):
        raise UsageError(f"--host {host!r} is no address of this machine: give 127.0.0.1, or one of its own") from None
    return frozenset({"127.0.0.1", "localhost", "[::1]", host}) if is_loopback else frozenset()


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
    hostname, _, port = header.rpartition(":")
    return (hostname if hostname and port.isdigit() else header).lower()


def _from_here(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request that writes comes from the page itself, or from no page at all (a script with the token)."""
    origin, host_header = headers.get(b"origin"), headers.get(b"host", b"")
    is_same_origin = origin is None or origin in (b"http://" + host_header, b"https://" + host_header)
    # Browsers send it and no script of a page can set it. Absent, it is an older browser, for which `Origin` decides,
    # or no browser at all.
    fetch_site = headers.get(b"sec-fetch-site", b"same-origin")
    return is_same_origin and fetch_site == b"same-origin" and headers.get(b"content-type", b"") == b"application/json"


def _request_key(scope: Scope) -> tuple[str, bytes]:
    """Return the key of a request: requests with the same key get the same answer."""
    return scope["path"], scope["query_string"]


async def _answered(
    runs: OpenedRuns, shared: _Shared, answer: Callable[[OpenedRuns, Request], Any], request: Request
) -> Response:
    """Return the answer of a call, made in a thread; its errors become an answer of one line."""
    request_key = _request_key(request.scope)
    try:
        response = _sent(await shared(request_key, lambda: answer(runs, request)))
        if (shared_answer := shared.known(request_key)) is not None:
            response.headers[_KNOWN] = f"{shared_answer[1]:.3f}"
        return response
    except KeyError as error:
        return _problem(404, f"no run {error.args[0]!r} is here")
    except _NoSuchNumber as error:
        return _problem(404, str(error))
    except UsageError as error:
        return _problem(400, str(error))
    except NotInStore as error:
        return _problem(404, str(error))
    except AgentRLError as error:
        return _problem(503, str(error))


def _of_run(answer: Callable[[OpenedRun, Query], Any]) -> Callable[[OpenedRuns, Request], Any]:
    return lambda runs, request: answer(runs[request.path_params["run"]], request.query_params)


class _NoSuchNumber(UsageError):
    """A number in a path that no episode, group or step can have."""


def _numbered(answer: Callable[[OpenedRun, int, Query], Any]) -> Callable[[OpenedRuns, Request], Any]:
    def numbered(runs: OpenedRuns, request: Request) -> Any:
        number_text: str = request.path_params["id"]
        if not number_text.isascii() or not number_text.isdigit() or len(number_text) > _LONGEST_NUMBER:
            raise _NoSuchNumber(f"nothing has the number {number_text[:50]!r}")
        return answer(runs[request.path_params["run"]], int(number_text), request.query_params)

    return numbered


def _lines(runs: OpenedRuns) -> list[Any]:
    """A line for each run; of one that cannot be read, why."""
    run_lines: list[Any] = []
    for opened_run in runs.all():
        try:
            run_lines.append(run_answers.line(opened_run))
        except AgentRLError as error:
            run_lines.append({"id": opened_run.id, "path": str(opened_run.run.path), "error": str(error)})
    return run_lines


def _metrics(run: OpenedRun, query: Query) -> Any:
    metric_names = [metric_name for metric_name in query.get("names", "").split(",") if metric_name]
    if len(metric_names) > _MOST_NAMES:
        raise UsageError(f"names has {len(metric_names)} metrics: ask for {_MOST_NAMES} at most")
    return run_answers.metrics(run, metric_names)


async def _image(runs: OpenedRuns, request: Request) -> Response:
    """An image of a message, by its digest. Its type is what its first bytes say, one of three: never a document."""
    digest = request.path_params["digest"]
    if not _DIGEST.fullmatch(digest):
        return _problem(400, f"{digest[:80]!r} is no SHA-256: give 64 hex digits")

    def read() -> Image:
        with runs[request.path_params["run"]].store() as store:
            return images.read(store.reads.image(digest))

    try:
        image = await to_thread.run_sync(read)
    except KeyError as error:
        return _problem(404, f"no run {error.args[0]!r} is here")
    except (AgentRLError, ValueError) as error:
        return _problem(404, str(error))
    # An attachment: opened by itself, bytes that a policy produced must never be rendered as a document of this
    # origin, where the token is.
    return Response(image.data, media_type=image.media_type, headers={"content-disposition": "attachment"})


async def _written(runs: OpenedRuns, shared: _Shared, name: str, request: Request) -> Response:
    """Do what `name` says in `_WRITES`; what came of it."""
    request_body = bytearray()
    # Counted as it comes: a `content-length` may be missing or wrong.
    async for body_part in request.stream():
        request_body += body_part
        if len(request_body) > _SENT_BYTES:
            return _problem(413, f"{name}: the request has more than {_SENT_BYTES} bytes")

    try:
        document = json.loads(request_body)
    # Deep nesting raises RecursionError in the parser, which is no fault of this server's.
    except (ValueError, RecursionError):
        return _problem(400, f"{name}: the request is no JSON")
    try:
        opened_run = await to_thread.run_sync(runs.__getitem__, request.path_params["run"])
    except KeyError as error:
        return _problem(404, f"no run {error.args[0]!r} is here")
    try:
        write_result = await to_thread.run_sync(_WRITES[name], opened_run.run, document)
    except UsageError as error:
        return _problem(400, str(error))
    except AgentRLError as error:
        return _problem(503, str(error))
    finally:
        # In `finally`: a request that failed may have done its work before it did, and an answer from before it must
        # not be shown either way.
        opened_run.look_anew()
        shared.forget()
    return _sent(_encoded(write_result))


async def _events(runs: OpenedRuns, shared: _Shared, request: Request) -> Response:
    """Server-sent events: one whenever the run's page has something new to show, and one when somebody wrote to a run:
    no answer from before holds then."""
    try:
        opened_run = await to_thread.run_sync(runs.__getitem__, request.path_params["run"])
    except KeyError as error:
        return _problem(404, f"no run {error.args[0]!r} is here")
    return StreamingResponse(_changes(opened_run, shared, runs.closing), media_type="text/event-stream")


async def _changes(opened: OpenedRun, shared: _Shared, closing: Event) -> AsyncIterator[str]:
    last_sent: object = None
    quiet_looks, seen_writes = 0, shared.writes
    # Polled, not signalled: the run is another process, maybe on another machine, and its store has nobody to notify.
    # Through `shared`, one look a second serves all viewers of a run.
    while not closing.is_set():
        if seen_writes != shared.writes:
            seen_writes = shared.writes
            yield "event: written\ndata: again\n\n"
        try:
            current = await shared(("news", opened.id), lambda: run_answers.fingerprint(opened))
        except (AgentRLError, OSError) as error:
            current = _encoded([str(error)])
        if current != last_sent:
            last_sent, quiet_looks = current, 0
            yield f"event: change\ndata: {current.decode()}\n\n"
        # The page may have been answered from before the last change, as answers are taken as known for a while. Once
        # those have run out, it is told to ask again.
        elif (quiet_looks := quiet_looks + 1) == _SETTLED_LOOKS:
            yield "event: change\ndata: again\n\n"
        # A comment of the protocol: proxies close a stream on which nothing comes, and a client that has gone is
        # noticed only by writing.
        elif quiet_looks % _QUIET_LOOKS == 0:
            yield ": nothing new\n\n"
        await anyio.sleep(_LOOK_S)


def _encoded(document: Any) -> bytes:
    """Encode a document as JSON in ASCII, since a text of a policy may hold what UTF-8 cannot."""
    return json.dumps(document, allow_nan=False).encode("ascii")


def _sent(answer: bytes, status: int = 200) -> Response:
    return Response(answer, status_code=status, media_type="application/json")


def _problem(status: int, text: str) -> Response:
    return _sent(_encoded({"error": text}), status)
