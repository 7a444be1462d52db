"""The door of a training server: the routes of the Tinker API, its key, and futures that clients wait for.

A request whose call cannot be numbered is refused with a status of HTTP; what is wrong with a call itself is the answer
of its future, so that the calls after it go on.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import trio
from pydantic import Field

from agentrl.errors import ConfigError, StoreError, UsageError
from agentrl.http.http_server import Answer, Typed
from agentrl.run.training_server.call_log import CallAnswer, CallLog
from agentrl.run.training_server.client_records import ModelRecord, SamplerRecord
from agentrl.run.training_server.sampling_calls import SAMPLE, SamplingCalls
from agentrl.run.training_server.sessions import SessionGone, Sessions
from agentrl.run.training_server.tinker_messages import (
    MOST_NUMBER,
    CreateModel,
    CreateSampler,
    ForwardBackwardRequest,
    LoadWeights,
    SampleRequest,
    TinkerRequest,
    cut,
    parse,
)
from agentrl.run.training_server.trained_adapters import FORWARD_BACKWARD
from agentrl.run.training_server.training_calls import TrainingCalls, model_id, sampler_id

_WAIT_S = 30.0  # for an answer, before a client has to come again; it waits for 45
_WARNING = "this server trains no adapter on the unembedding: train_unembed has no effect"
_FIXED: Mapping[str, Mapping[str, object]] = {  # answers that depend on nothing
    "client/config": {"use_pyqwest_transport": False},
    "client/dynamic_config": {},
    "telemetry": {"status": "accepted"},
}
_TYPES = {"json": "application/json", "failed": "application/json", "protobuf": "application/x-protobuf"}


class HttpRefusal(Exception):
    """A request that has this status for an answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Numbered(TinkerRequest):
    model_id: str
    seq_id: int = Field(ge=1, le=MOST_NUMBER)


class _SampleNumber(TinkerRequest):
    sampling_session_id: str
    seq_id: int = Field(ge=0, le=MOST_NUMBER)


class _Named(TinkerRequest):
    request_id: str


class _OfModel(TinkerRequest):
    model_id: str


class _OfSession(TinkerRequest):
    session_id: str


class _OfPath(TinkerRequest):
    tinker_path: str


class Futures:
    """Answers of calls that clients wait for."""

    def __init__(self, log: CallLog) -> None:
        self._log = log
        self._waiters: defaultdict[str, set[trio.Event]] = defaultdict(set)

    def answered(self, call: str) -> None:
        """Wake all who wait for a call that has its answer now."""
        for answer_event in self._waiters.pop(call, ()):
            answer_event.set()

    async def wait(self, call: str) -> CallAnswer | Literal["pending", "unknown"]:
        """The answer of a call; "pending" if it has none after `_WAIT_S`."""
        answer_event = trio.Event()
        # Registered before the log is read: an answer that is written between the read and the wait would otherwise
        # wake nobody, and the client would come back 30 seconds later.
        self._waiters[call].add(answer_event)
        try:
            call_answer = await trio.to_thread.run_sync(self._log.answer_of, call)
            if call_answer == "pending":
                with trio.move_on_after(_WAIT_S):
                    await answer_event.wait()
                    call_answer = await trio.to_thread.run_sync(self._log.answer_of, call)
            return call_answer
        finally:
            if call in self._waiters:
                self._waiters[call].discard(answer_event)
                if not self._waiters[call]:
                    del self._waiters[call]


class TinkerApi:
    """`http_server.Handler`. `name` is the base model's, `tokenizer` where clients on this machine find its
    tokenizer."""

    def __init__(
        self,
        log: CallLog,
        *,
        sessions: Sessions,
        training: TrainingCalls,
        sampling: SamplingCalls,
        futures: Futures,
        key: str | None,
        name: str,
        tokenizer: str,
        max_context: int,
    ) -> None:
        self._log, self._key, self._name, self._tokenizer = log, key, name, tokenizer
        self._sessions, self._training, self._sampling, self._futures = sessions, training, sampling, futures
        self._max_context = max_context
        self._posts: dict[str, Callable[[bytes, Mapping[str, str]], Awaitable[Answer]]] = {
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._info,
            "forward_backward": self._forward_backward,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "weights_info": self._weights_info,
        }

    def refuses(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes | Typed] | None:
        """The answer to a request without the key, whose body is not read."""
        if self._key is None or path == "/api/v1/healthz":
            return None
        request_key = headers.get("x-api-key", "")
        # In constant time: a comparison that stops at the first difference can be measured from outside, character by
        # character.
        if hmac.compare_digest(request_key.encode(), self._key.encode()):
            return None
        correction = "give the key that the server printed: ServiceClient(api_key=...), or export TINKER_API_KEY=..."
        return _json(401, error=f"this server has another API key: {correction}")

    async def answer(self, method: str, path: str, query: str, headers: Mapping[str, str], content: bytes) -> Answer:
        """See `http_server.Handler`."""
        route = path.removeprefix("/api/v1/")
        try:
            if method == "GET":
                return self._get(route)
            if method != "POST":
                raise HttpRefusal(404, "")
            if route in _FIXED:
                return _json(200, **_FIXED[route])
            if (handler := self._posts.get(route)) is not None:
                return await handler(content, headers)
            if route in ("optim_step", "save_weights", "save_weights_for_sampler", "unload_model"):
                return await self._numbered(route, content)
            route_parts = route.split("/")
            if route_parts[0] == "sessions" and route_parts[2:] == ["finish"]:
                return await self._finish(route_parts[1])
            raise HttpRefusal(404, f"agentrl's training server has no POST {path}")
        except HttpRefusal as refusal:
            return _refused(refusal.status, refusal)
        except SessionGone as error:
            return _refused(410 if error.known else 404, error)
        except UsageError as error:
            return _refused(422, error)
        except StoreError as error:
            return _refused(503, error)

    def _get(self, route: str) -> Answer:
        route_parts = route.split("/")
        if route == "healthz":
            return _json(200, status="ok")
        if route == "get_server_capabilities":
            model_facts = {
                "model_name": self._name,
                "max_context_length": self._max_context,
                "trainable": True,
                "sampleable": True,
            }
            return _json(200, supported_models=[model_facts])
        if route_parts[0] == "samplers" and len(route_parts) == 2:
            sampler_record = self._sampler(route_parts[1])
            return _json(200, sampler_id=sampler_record.id, base_model=self._name, model_path=sampler_record.path)
        raise HttpRefusal(404, f"agentrl's training server has no GET /api/v1/{route}")

    # --- sessions -------------------------------------------------------------------------------------------------

    async def _create_session(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        idempotency_key = headers.get("x-idempotency-key") or secrets.token_hex(16)
        session_id = await trio.to_thread.run_sync(self._log.clients.begin_session, idempotency_key)
        return _json(200, type="create_session", session_id=session_id, warning_message=_WARNING)

    async def _heartbeat(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        request: _OfSession = parse(_OfSession, body)
        self._sessions.hear(request.session_id)
        return _json(200, type="session_heartbeat")

    async def _finish(self, session: str) -> Answer:
        await self._sessions.finish(session)
        return _json(200)

    # --- training clients -----------------------------------------------------------------------------------------

    async def _create_model(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        request: CreateModel = parse(CreateModel, body)
        self._sessions.hear(request.session_id)
        self._check_base(request.base_model)
        new_model_id = model_id(request.session_id, request.model_seq_id)
        return await self._accept(request.session_id, new_model_id, 0, "create_model", body, model=new_model_id)

    async def _load_weights(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        request: LoadWeights = parse(LoadWeights, body)
        if request.weights_access_token is not None:
            raise ConfigError("weights_access_token", "...", "this server has one account: leave it out")
        if request.session_id is None:
            return await self._numbered("load_weights", body)
        if request.model_seq_id is None:
            raise ConfigError("model_seq_id", None, "give the number of the training client in its session")
        self._sessions.hear(request.session_id)
        if request.base_model is not None:
            self._check_base(request.base_model)
        new_model_id = model_id(request.session_id, request.model_seq_id)
        return await self._accept(request.session_id, new_model_id, 0, "load_weights", body, model=new_model_id)

    async def _forward_backward(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        if headers.get("content-type", "").partition(";")[0].strip() != "application/x-protobuf":
            raise HttpRefusal(415, "forward_backward is a protobuf message here: use the tinker client 0.38 or newer")
        request = await trio.to_thread.run_sync(ForwardBackwardRequest.read, body)
        if request.seq_id < 1:
            raise ConfigError("seq_id", request.seq_id, "calls are numbered from 1")
        model_record = self._model(request.model_id)
        call_kind = "forward" if request.forward_only else FORWARD_BACKWARD
        return await self._accept(model_record.session, model_record.id, request.seq_id, call_kind, body)

    async def _numbered(self, kind: str, body: bytes) -> Answer:
        request: _Numbered = parse(_Numbered, body)
        model_record = self._model(request.model_id)
        return await self._accept(model_record.session, model_record.id, request.seq_id, kind, body)

    async def _accept(
        self, session: str, owner: str, place: int, kind: str, body: bytes, model: str | None = None
    ) -> Answer:
        self._sessions.hear(session)

        def accept() -> tuple[str, bool]:
            return self._log.accept(session=session, owner=owner, place=place, kind=kind, body=body, model=model)

        call_id, is_new = await trio.to_thread.run_sync(accept)
        if is_new:
            self._training.came(owner)
        return _json(200, request_id=call_id, model_id=owner)

    async def _info(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        request: _OfModel = parse(_OfModel, body)
        model_record = self._model(request.model_id)
        model_data = {"arch": None, "model_name": self._name, "tokenizer_id": self._tokenizer}
        return _json(
            200,
            type="get_info",
            model_data=model_data,
            model_id=model_record.id,
            is_lora=True,
            lora_rank=model_record.rank,
            model_name=self._name,
        )

    async def _weights_info(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        request: _OfPath = parse(_OfPath, body)
        weights_record = self._log.clients.weights(request.tinker_path)
        if weights_record is None:
            raise HttpRefusal(404, f"this server has no weights at {request.tinker_path!r}")
        return _json(
            200,
            base_model=self._name,
            is_lora=True,
            lora_rank=weights_record.rank,
            train_unembed=False,
            train_mlp=weights_record.mlp,
            train_attn=weights_record.attention,
        )

    def _model(self, id: str) -> ModelRecord:
        model_record = self._log.clients.model(id)
        if model_record is None:
            raise HttpRefusal(404, f"there is no training client {id!r}: make it with create_lora_training_client")
        return model_record

    def _check_base(self, name: str) -> None:
        if name != self._name:
            raise ConfigError("base_model", name, f"this server has {self._name!r}")

    # --- sampling clients -----------------------------------------------------------------------------------------

    async def _create_sampler(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        request: CreateSampler = parse(CreateSampler, body)
        self._sessions.hear(request.session_id)
        if request.base_model is not None:
            self._check_base(request.base_model)
        if request.model_path is not None:
            weights_record = self._log.clients.weights(request.model_path)
            if weights_record is None or weights_record.kind != "sampler_weights":
                correction = "this server has no such weights of save_weights_for_sampler"
                raise ConfigError("model_path", request.model_path, correction)
        new_sampler_id = sampler_id(request.session_id, request.sampling_session_seq_id)
        sampler_record = SamplerRecord(new_sampler_id, request.session_id, request.model_path)
        await trio.to_thread.run_sync(self._log.clients.add_sampler, sampler_record)
        return _json(200, type="create_sampling_session", sampling_session_id=new_sampler_id)

    async def _sample(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        sample_number: _SampleNumber = parse(_SampleNumber, body)
        request: SampleRequest = parse(SampleRequest, body)
        sampler_record = self._sampler(sample_number.sampling_session_id)
        self._sessions.hear(sampler_record.session)

        def accept() -> tuple[str, bool]:
            return self._log.accept(
                session=sampler_record.session,
                owner=sampler_record.id,
                place=sample_number.seq_id,
                kind=SAMPLE,
                body=body,
            )

        call_id, is_new = await trio.to_thread.run_sync(accept)
        if is_new:
            new_call = await trio.to_thread.run_sync(self._log.call, call_id)
            self._sampling.came(new_call)
        return _json(
            200,
            request_id=call_id,
            sample_sequence_ids=[f"{call_id}:{sample_index}" for sample_index in range(request.num_samples)],
        )

    def _sampler(self, id: str) -> SamplerRecord:
        sampler_record = self._log.clients.sampler(id)
        if sampler_record is None:
            raise HttpRefusal(404, f"there is no sampling client {id!r}")
        return sampler_record

    # --- futures --------------------------------------------------------------------------------------------------

    async def _retrieve(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        request: _Named = parse(_Named, body)
        call_answer = await self._futures.wait(request.request_id)
        if isinstance(call_answer, CallAnswer):
            return 200, Typed(_TYPES[call_answer.form], call_answer.data)
        if call_answer == "unknown":
            raise HttpRefusal(404, f"there is no future {request.request_id!r}")
        # A status that makes the client ask again, instead of a connection that is held open for as long as a step
        # takes: proxies cut such connections.
        return _json(408, type="try_again", request_id=request.request_id, queue_state="active")


def _refused(status: int, error: Exception) -> tuple[int, Typed]:
    """An answer that says why. It may quote what was sent, which may be as long as a body."""
    return _json(status, error=cut(str(error)))


def _json(status: int, /, **fields: Any) -> tuple[int, Typed]:
    return status, Typed("application/json", json.dumps(fields).encode())
