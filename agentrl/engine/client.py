"""One engine over HTTP: tokens in, tokens out, with log-probs and weight versions, in the dialect of its kind.

Owns the deadline of each call and the naming of failures: an httpx exception becomes `EngineUnavailable` or
`EngineTimeout` here and nowhere else. Never knows messages, episodes or other engines.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from math import inf
from typing import cast
from uuid import uuid4

import httpx
import trio
from pydantic_core import to_json

from agentrl.engine import auth
from agentrl.engine.dialect import EngineDialect, EngineKind
from agentrl.engine.generation import collect
from agentrl.engine.http_client import TrioTransport, socket_of
from agentrl.engine.sglang.sglang_dialect import SGLangDialect
from agentrl.engine.vllm.vllm_dialect import VLLMDialect
from agentrl.engine.vllm_api import check_sampling, metric, outgrew_context, parse_json, refusal
from agentrl.errors import EngineBroke, EngineError, EngineRefusal, EngineTimeout, EngineUnavailable
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import EngineKey, Generation, Json, SamplingParams, VersionSpan

# Long enough for the closing chunk that follows the last event at once. A server that hangs there costs a connection,
# and never the turn: `test_a_finished_turn_does_not_wait_for_a_connection_that_hangs`.
_DRAIN_S = 1.0
_FAILURES = (trio.TooSlowError, httpx.TransportError)  # a timeout of httpx is one of the latter
_STREAMED = {"content-type": "application/json", "accept": "text/event-stream"}
_NOT_NOW = (408, 429)  # the server is there but cannot answer just now
_REFUSALS = (400, 413, 422)  # the request itself is refused; other statuses concern the server
_DIALECTS: dict[EngineKind, EngineDialect] = {
    "embedded": VLLMDialect(),
    "vllm": VLLMDialect(),
    "sglang": SGLangDialect(),
}


class EngineClient:
    """`protocols.Engine` for one server. `version` is the last known weight version: if a server does not stamp each
    chunk, tokens carry this version until the server names its own.

    `kind` is the server's and decides the dialect. `url` is its root, or `unix://` and the path of its socket; a `/v1`
    at its end is removed. `connect_s` bounds the time to connect; every call also has its own deadline. `api_key` is
    sent to a server that requires one, and signs what changes it (`agentrl.engine.auth`). With `vocabulary`, how many
    tokens the model has, an answer with a token beyond them is a broken one."""

    def __init__(
        self,
        url: str,
        *,
        kind: EngineKind = "vllm",
        connect_s: float = 5.0,
        version: int = 0,
        api_key: str | EngineKey | None = None,
        vocabulary: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url, self.version = url.rstrip("/").removesuffix("/v1"), version
        self._connect_s, self._vocabulary = connect_s, vocabulary
        self.dialect = _DIALECTS[kind]
        socket_path = socket_of(self.url)
        self._transport = transport or TrioTransport(socket=socket_path)
        self._key = EngineKey.of(api_key) if isinstance(api_key, str) else api_key
        key_header, base_url = auth.bearer(self._key), self.url if socket_path is None else "http://localhost"
        self._stream_headers = httpx.Headers(_STREAMED | key_header)
        # No proxies or certificates from the environment: an engine is on this machine or in this cluster, and an
        # HTTP_PROXY meant for downloads would receive the key of every request.
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=key_header, transport=self._transport, trust_env=False
        )
        self._generate_url = httpx.URL(base_url + self.dialect.generate_path)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Sampled tokens as they come; the last chunk has `finish`. Leaving the iteration ends the request. An infinite
        deadline means that the caller itself bounds each wait for a chunk.

        Raises ConfigError for impossible sampling, EngineTimeout at the deadline, EngineUnavailable if the engine is
        not there, EngineBroke if it breaks off or its answer makes no sense, EngineRefusal if it refuses the request,
        EngineError if tokens that were already yielded turn out to be of another version."""
        check_sampling(request.sampling)
        deadline = trio.current_time() + request.deadline_s
        # The version at the start of the request is kept: `self.version` moves with every other request to this
        # engine, and a comparison with the moved one would take a healthy engine for one that went back.
        parser, version_before = self.dialect.parser(self.version, request, self._vocabulary), self.version
        answer: _StreamedBody | None = None
        event_lines = Lines()
        try:
            while True:
                try:
                    with _until(deadline):  # no cancel scope may span a yield: each wait has its own
                        if answer is None:
                            answer = await self._send_generation(request)
                        body_part = await answer.read()
                except _FAILURES as error:
                    raise self._failure(error, request.deadline_s) from error
                if body_part is None:
                    complaint = f"{self.url} closed the stream of {request.request_id!r} before its end"
                    raise EngineBroke(complaint, url=self.url)
                for payload in event_lines.payloads(body_part):
                    # A push may have ended while this stream was silent. A server that stamps no chunk would
                    # otherwise label its next tokens with the version before the push, and they would be corrected
                    # for a staleness that they do not have.
                    parser.version = max(parser.version, self.version)
                    try:
                        chunk = parser.parse(parse_json(payload))
                    except EngineRefusal as error:
                        complaint = f"{self.url} refused {request.request_id!r}: {error}"
                        # The class decides whose fault it is (law 3). A refusal concerns the request, and the router
                        # offers it to one other engine; everything else concerns the engine, which leaves the fleet.
                        raise EngineRefusal(
                            complaint, url=self.url, status=error.status, reason=error.reason
                        ) from error
                    except EngineError as error:
                        complaint = f"{self.url} broke {request.request_id!r} off: {error}"
                        raise EngineBroke(complaint, url=self.url, status=error.status, reason=error.reason) from error
                    if parser.stated:
                        self._heard(parser.stated, version_before)
                    if chunk is None:
                        continue
                    if chunk.finish is not None:
                        await self._drain(answer)
                        yield chunk
                        return
                    if chunk.token_ids:
                        yield chunk
                    # Good tokens before a bad one were yielded above, and only then the engine counts as broken: the
                    # turn goes on elsewhere with all that was sound.
                    # `test_of_a_chunk_with_a_bad_log_prob_the_tokens_before_it_are_kept` holds it.
                    if parser.unsound is not None:
                        complaint = f"{self.url} broke {request.request_id!r} off: {parser.unsound}"
                        raise EngineBroke(complaint, url=self.url)
        finally:
            if answer is not None and not answer.ended:
                with trio.CancelScope(shield=True):  # closes a socket, waits for nothing
                    await answer.aclose()

    def _heard(self, stated: Sequence[VersionSpan], known: int) -> None:
        """Note the versions that the engine `stated`; `known` is its version at the request. An older one means that
        the server was restarted or rolled back: raises, so that the caller asks which weights it has now."""
        older_span = next((span for span in stated if span.version < known), None)
        if older_span is None:
            self.version = max(self.version, stated[-1].version)
            return
        self.version = older_span.version
        # A span with a negative start restates tokens that were already yielded under the newer version. The turn has
        # them with a wrong stamp, so it cannot go on elsewhere; from the start of this chunk on nothing is spoiled
        # yet.
        error_type = EngineBroke if older_span.start >= 0 else EngineError
        raise error_type(
            f"{self.url} serves version {older_span.version}, and served {known} before: was it started anew?"
        )

    async def _drain(self, answer: _StreamedBody) -> None:
        """Read a finished stream to its end, so that its connection can be reused; a failure does no harm."""
        with trio.move_on_after(_DRAIN_S), suppress(EngineError), self._named(_DRAIN_S):
            while await answer.read() is not None:
                pass

    async def generate(self, request: GenerateRequest) -> Generation:
        """The whole turn. Raises as `stream` does; an aborted request comes back with `finish="abort"`."""
        return await collect(self.stream(request), request.on_chunk)

    async def _send_generation(self, request: GenerateRequest) -> _StreamedBody:
        """Send a request; the server-sent events are the answer's body. Raises what `_named` names, and `_failed`.

        The transport is called without httpx's client around it: redirects, cookies and hooks cost more for a turn than
        all the rest. To write the bytes without an `httpx.Request` as well was tried: it saved 65 µs of CPU of a turn's
        1.2 ms, for a second path through this module and the transport."""
        body_bytes = to_json(self.dialect.request_json(request))
        extensions = {"timeout": {"connect": self._connect_s}}
        headers = self._stream_headers
        http_request = httpx.Request(
            "POST", self._generate_url, headers=headers, content=body_bytes, extensions=extensions
        )
        response = await self._transport.handle_async_request(http_request)
        answer = _StreamedBody(response)
        # The body of a refusal says why, so it is read to its end before the connection goes back. An error that is
        # raised first would leave it half read, and the pool would have to close it.
        if response.status_code != 200:
            try:
                body_parts = list[bytes]()
                while (body_part := await answer.read()) is not None:
                    body_parts.append(body_part)
                raise self._failed(response.status_code, b"".join(body_parts))
            finally:
                await answer.aclose()
        return answer

    # --- everything that is not a stream ------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        path: str,
        *,
        deadline_s: float,
        json: Mapping[str, Json] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> bytes:
        """Send a request; returns its whole answer. Raises EngineError (refused), EngineTimeout, EngineUnavailable."""
        with self._named(deadline_s, path), trio.fail_after(deadline_s):
            # httpx's read and write timeouts are for each wait by itself; a server that drips one byte a second would
            # never meet them. trio's scope bounds the call as a whole (law 4), and only connecting has a shorter
            # bound of its own.
            http_timeout = httpx.Timeout(None, connect=self._connect_s)
            http_request = self._http.build_request(method, path, json=json, params=params, timeout=http_timeout)
            if self._key is not None and self._key.signing is not None and auth.changes(method, path):
                query_string = http_request.url.query.decode("latin-1")
                target = f"{path}?{query_string}" if query_string else path
                # From the built request, and not from the arguments: the signature has to cover the bytes that go
                # out, in httpx's own spelling of JSON and query.
                http_request.headers[auth.SIGNATURE] = auth.signature(self._key, method, target, http_request.content)
            response = await self._http.send(http_request)
        if response.status_code >= 400:
            raise self._refused(response.status_code, response.content)
        return response.content

    async def alive(self, *, deadline_s: float = 5.0) -> bool:
        """Whether the engine itself answers, not only its front end. It answers between two forward passes, also while
        it is paused."""
        try:
            await self.dialect.look(self, deadline_s=deadline_s)
        except (EngineUnavailable, EngineTimeout):
            return False
        except EngineError:  # it lacks the path
            return await self.healthy(deadline_s=deadline_s)
        return True

    async def paused(self, *, deadline_s: float = 5.0) -> bool:
        """Whether it was paused and not resumed. False if it does not say. Raises EngineUnavailable, EngineTimeout."""
        try:
            return await self.dialect.paused(self, deadline_s=deadline_s)
        except (EngineUnavailable, EngineTimeout):
            raise
        except EngineError:  # it lacks the path
            return False

    async def healthy(self, *, deadline_s: float = 5.0) -> bool:
        """Whether the server answers and reports no trouble with its engine."""
        try:
            await self.call("GET", self.dialect.health_path, deadline_s=deadline_s)
        except EngineError:
            return False
        return True

    async def proves(self, key: EngineKey, *, deadline_s: float = 5.0) -> bool:
        """Whether a healthy server answers that has this key: it is the one that was started with it, and no other that
        listens at its address."""
        challenge, http_timeout = uuid4().hex, httpx.Timeout(None, connect=self._connect_s)
        try:
            with self._named(deadline_s, "/health"), trio.fail_after(deadline_s):
                headers = {auth.CHALLENGE: challenge}
                health_answer = await self._http.get("/health", headers=headers, timeout=http_timeout)
        except EngineError:
            return False
        return health_answer.is_success and hmac.compare_digest(
            health_answer.headers.get(auth.PROOF, "").encode(),
            auth.proof(key, challenge.encode()).encode(),
        )

    async def score(
        self, token_ids: Sequence[int], *, deadline_s: float, model: str | None = None
    ) -> tuple[float, ...]:
        """Log-probs, in nats at temperature 1, of `token_ids[1:]`, each conditioned on the tokens before it, under
        `model` (default: the engine's only one). The engine's prefix cache is not used. Raises EngineError if the
        engine does not score prompts."""
        score_body = self.dialect.score_json(token_ids, model)
        answer = parse_json(await self.call("POST", self.dialect.generate_path, json=score_body, deadline_s=deadline_s))
        return self.dialect.prompt_logprobs(answer, token_ids)

    async def served_version(self, *, deadline_s: float = 5.0) -> int:
        """The weight version that the engine serves now; also stored in `version`. If the server does not state it, one
        token is requested."""
        stated_version = await self.dialect.stated_version(self, deadline_s=deadline_s)
        if stated_version is not None:
            self.version = stated_version
            return stated_version
        probe_request = GenerateRequest(
            request_id=f"version-probe-{uuid4().hex}",
            session="version-probe",
            token_ids=(0,),
            sampling=SamplingParams(max_tokens=1),
            deadline_s=deadline_s,
        )
        # The probe goes through `stream`, which takes an older version than the known one for a restart and raises.
        # Here going back is the answer that we want.
        self.version = 0  # it may be lower than before
        version_spans = (await self.generate(probe_request)).spans
        if not version_spans:
            complaint = f"{self.url} does not say which weight version it serves: it samples no token"
            raise EngineBroke(complaint, url=self.url)
        return version_spans[-1].version

    async def metrics(self, *, deadline_s: float = 5.0) -> dict[str, float]:
        """The engine's gauges and counters by name, summed over labels, without histogram buckets. Raises EngineError
        if the text holds something else."""
        metrics_text = await self.call("GET", "/metrics", deadline_s=deadline_s)
        metric_values: dict[str, float] = {}
        for metrics_line in metrics_text.decode(errors="replace").splitlines():
            metric_name = metrics_line.rpartition(" ")[0].partition("{")[0]
            # Buckets would be summed over their bounds, each of which already counts all smaller ones: a number
            # without a meaning. Sum and count of a histogram stay.
            if metric_name and not metric_name.startswith("#") and not metric_name.endswith("_bucket"):
                metric_name = self.dialect.metric(metric_name)
                metric_values[metric_name] = metric_values.get(metric_name, 0.0) + metric(metrics_line)[1]
        return metric_values

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    def _failed(self, status: int, body: bytes) -> EngineError:
        """The error for a failed generation's status and body."""
        reason = refusal(body)
        complaint = f"{self.url} answered {status}: {reason}"
        if status in _REFUSALS:
            return EngineRefusal(complaint, url=self.url, status=status, reason=reason)
        # 500 of a generation is `EngineBroke`, unlike in `_refused` below: the engine took the request and failed it,
        # which counts against the request after several engines did the same. Nothing of the kind is true of an admin
        # call.
        error_type = EngineUnavailable if status in (*_NOT_NOW, 503) else EngineBroke
        return error_type(complaint, url=self.url, status=status, reason=reason)

    def _refused(self, status: int, body: bytes) -> EngineError:
        reason, is_too_long = refusal(body), outgrew_context(status, body)
        complaint = f"{self.url} answered {status}: {reason}"
        if status in _REFUSALS or is_too_long:
            return EngineRefusal(complaint, url=self.url, status=status, reason=reason, context_full=is_too_long)
        error_type = EngineUnavailable if status >= 500 or status in _NOT_NOW else EngineError
        return error_type(complaint, url=self.url, status=status, reason=reason)

    @contextmanager
    def _named(self, deadline_s: float, what: str = "a generation") -> Generator[None]:
        try:
            yield
        except _FAILURES as error:
            raise self._failure(error, deadline_s, what) from error

    def _failure(self, error: Exception, deadline_s: float, what: str = "a generation") -> EngineError:
        """The error for one of the transport's, or for the end of a deadline."""
        # First, since it is a kind of `TimeoutException` too. Nobody took the request, so it can go to another engine
        # at once; a timeout after that says nothing about who is at fault.
        if isinstance(error, httpx.ConnectTimeout):
            return EngineUnavailable(f"{self.url} did not accept a connection in {self._connect_s:g} s", url=self.url)
        if isinstance(error, trio.TooSlowError | httpx.TimeoutException):
            return EngineTimeout(f"{self.url} did not finish {what} within {deadline_s:g} s", url=self.url)
        if isinstance(error, httpx.ConnectError):
            return EngineUnavailable(f"{self.url} is not there: {error}", url=self.url)
        return EngineBroke(f"{self.url} broke off: {str(error) or type(error).__name__}", url=self.url)


class _StreamedBody:
    """The body of a response, part by part. `ended`: it was read to its end."""

    def __init__(self, response: httpx.Response) -> None:
        self._stream, self.ended = cast("httpx.AsyncByteStream", response.stream), False
        self._parts = aiter(self._stream)

    async def read(self) -> bytes | None:
        """The next part; None at the end."""
        body_part = await anext(self._parts, None)
        if body_part is None:
            self.ended = True
            await self.aclose()
        return body_part

    async def aclose(self) -> None:
        await self._stream.aclose()


class Lines:
    """Parts of a body to the `data:` payloads of its server-sent events, without the closing `[DONE]`."""

    def __init__(self) -> None:
        self._begun = list[bytes]()  # a line may come in many parts

    def payloads(self, part: bytes) -> list[bytes]:
        # Parts of a body are cut anywhere, in the midst of a character as well, so bytes are joined up to a line end
        # before anything is decoded. `test_events_cut_anywhere_are_put_together` cuts at every place.
        line_end, *next_pieces = part.split(b"\n")
        self._begun.append(line_end)
        payloads = list[bytes]()
        for next_piece in next_pieces:
            whole_line, self._begun = b"".join(self._begun), [next_piece]
            if whole_line.startswith(b"data:") and (payload := whole_line[5:].strip()) != b"[DONE]":
                payloads.append(payload)
        return payloads


def _until(deadline: float) -> AbstractContextManager[object]:
    """A cancel scope for `deadline`, or none if it is infinite: a scope costs more than parsing a chunk."""
    return nullcontext() if deadline == inf else trio.fail_at(deadline)
