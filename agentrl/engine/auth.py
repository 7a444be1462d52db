"""Who may ask an engine, and who may change it: keys on the client's side, and the guard before an engine's routes.

A request shows the engine's key (`Authorization: Bearer …`), on every route, `/health` and `/metrics` too. A request
that changes the engine (weights, pauses, sleep, adapters: every one that neither looks nor samples) also carries an
HMAC-SHA256 over its method, path and body. The body of an update names the version and the SHA-256 of the content, and
the version that is finished must be that of each part: weights of somebody else, altered ones, or those of another
version never reach the engine. Both secrets come by environment variable, never by the command line.

A client that sends a challenge gets a proof that the server behind the address has the same key: another server, which
took the port first, cannot give it.

`Guard` is an ASGI application before another: the embedded engine's, and vLLM's (`--middleware`), where this module is
carried to. Imports neither starlette nor vllm.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, cast

from agentrl.records import EngineKey

SIGNATURE = "x-agentrl-signature"
CHALLENGE, PROOF = "x-agentrl-challenge", "x-agentrl-proof"
OPEN = "AGENTRL_ENGINE_OPEN"
"""Environment variable of an engine that anybody may use and change (`agentrl serve --no-key`): its key only proves who
it is."""

# A signed body is held in memory until its digest was checked. 32 MiB holds a whole piece of an upload in base64
# (`weight_sync/uploads.py`), and bounds what a client with the key, but without the signing secret, can make an
# engine hold.
_BODY_BYTES = 32 << 20
_LOOKS = frozenset({"GET", "HEAD"})
# A list of what is harmless, and not of what is dangerous: a route that a new vLLM adds has to be signed until
# somebody has looked at it. The other way round each new route would be open by default.
_SAMPLES = frozenset(
    {
        "/inference/v1/generate",
        "/generate",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/classify",
        "/pooling",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/tokenize",
        "/detokenize",
    }
)
"""Paths whose POST requests change nothing."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AccessRefused(Exception):
    """A request that may not pass; its text says why."""


def bearer(key: EngineKey | None) -> dict[str, str]:
    """The header that shows a key; none without one."""
    return {} if key is None else {"authorization": f"Bearer {key.value}"}


def shows(key: EngineKey, authorization: bytes) -> bool:
    """Whether a header shows this key, compared in a time that does not depend on how much of it is right."""
    return hmac.compare_digest(authorization, f"Bearer {key.value}".encode())


def changes(method: str, path: str) -> bool:
    """Whether a request may change an engine, and has to be signed."""
    return method.upper() not in _LOOKS and path not in _SAMPLES


def signature(key: EngineKey, method: str, target: str, body: bytes) -> str:
    """Sign a request for `target` (the path, with its query). Raises ValueError for a key that cannot sign."""
    if key.signing is None:
        raise ValueError("this key may sample and look; it signs no change of an engine")
    signed_text = f"{method.upper()}\n{target}\n{hashlib.sha256(body).hexdigest()}"
    return hmac.new(key.signing.encode(), signed_text.encode(), hashlib.sha256).hexdigest()


def proof(key: EngineKey, challenge: bytes) -> str:
    """Answer a challenge as only a holder of the key can."""
    # The prefix keeps the two uses of one secret apart: a challenge that looks like a request's text must not yield
    # the signature of that request.
    return hmac.new((key.signing or key.value).encode(), b"engine\n" + challenge, hashlib.sha256).hexdigest()


def folder_digest(folder: Path) -> str:
    """SHA-256 over names and contents of the files in an adapter's folder, those of its subfolders left out. Raises
    OSError."""
    hasher = hashlib.sha256()
    for file_path in sorted(file_path for file_path in folder.iterdir() if file_path.is_file()):
        with file_path.open("rb") as adapter_file:
            hasher.update(f"{file_path.name}\0{hashlib.file_digest(adapter_file, 'sha256').hexdigest()}\n".encode())
    return hasher.hexdigest()


class Guard:
    """Lets through to `app` what shows the key, and changes that are signed as well. Without `key` it is that of the
    environment; if there is none, everything passes."""

    def __init__(self, app: App, key: EngineKey | None = None) -> None:
        self._app, self._key = app, key or EngineKey.of_environment()
        self._open = os.environ.get(OPEN) == "1"
        # The guard remembers the versions between calls, since an update is several requests: each is signed, and yet
        # the parts of version 7 could be finished as version 8 by replaying an older, rightly signed call.
        self._versions: set[object] = set()  # of the parts of the update that is open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._key is None or scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = {name.lower(): value for name, value in scope["headers"]}
        # Before the key is checked: who asks for the proof does not yet know whether it may show its own key here.
        # Another process may have taken the port.
        if (challenge := headers.get(CHALLENGE.encode())) is not None:
            send = _proving(proof(self._key, challenge), send)
        if self._open:
            await self._app(scope, receive, send)
            return
        if not shows(self._key, headers.get(b"authorization", b"")):
            hint = "this engine asks for its key (Authorization: Bearer ...; a run: engine.api_key_env)"
            await _refuse(scope, send, 401, f"Unauthorized: {hint}")
            return
        if scope["type"] == "websocket" or not changes(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            # The signature covers the body, so all of it has to be read before the application sees any of it.
            # `_again` then replays it: ASGI gives a body once only.
            request_body = await _whole(receive)
            await self._check(scope, headers, request_body)
        except AccessRefused as error:
            await _refuse(scope, send, 403, str(error))
            return
        await self._app(scope, _again(request_body, receive), send)

    async def _check(self, scope: Scope, headers: MutableMapping[bytes, bytes], body: bytes) -> None:
        """Raises AccessRefused for a change that is not the key holder's, or not what it says."""
        assert self._key is not None
        request_path = str(scope["path"])
        query_string = cast("bytes", scope.get("query_string", b"")).decode("latin-1")
        # The query is signed as well: `/pause?mode=keep` and `/pause?mode=abort` differ in nothing else, and the
        # second ends every running turn.
        signed_target = f"{request_path}?{query_string}" if query_string else request_path
        expected_signature = signature(self._key, scope["method"], signed_target, body)
        if not hmac.compare_digest(headers.get(SIGNATURE.encode(), b""), expected_signature.encode()):
            raise AccessRefused(f"{request_path}: the change is not signed by the run that has this engine")
        match request_path:
            case "/start_weight_update":
                self._versions.clear()
            case "/update_weights":
                self._versions.add(_version_of(_object(body).get("update_info")))
            case "/finish_weight_update":
                self._same_version(_object(body).get("weight_version"))
            case "/collective_rpc":
                self._check_call(_object(body))
            # Only a path travels in this request, so the signature says nothing about the files there. Their digest
            # is compared here; `test_an_adapter_is_the_one_that_was_signed` changes them in between.
            case "/v1/load_lora_adapter":
                await _check_adapter(_object(body))
            case _:
                pass

    def _check_call(self, body: dict[str, Any]) -> None:
        if body.get("method") in ("agentrl_stage", "agentrl_publish"):
            update_info, *other_args = cast("list[Any]", body.get("args") or [None])
            named_version = _version_of(_object(str(update_info).encode()))
            if body["method"] == "agentrl_publish":
                self._versions = {named_version}
                self._same_version(other_args[0] if other_args else None)

    def _same_version(self, finished: object) -> None:
        # None stands for an update without a file, whose version nobody stated. Without any stated version there is
        # nothing to contradict.
        named_versions = self._versions - {None}
        if named_versions and named_versions != {str(finished)}:
            raise AccessRefused(
                f"weight_version = {finished!r}: the update was of version {', '.join(map(str, named_versions))}"
            )


def _version_of(info: Any) -> object:
    """The version that an update names, with the digest of its content; None of one from memory to memory. Raises
    AccessRefused for a file without either."""
    info_fields = cast("dict[str, Any]", info) if isinstance(info, dict) else {}
    # Weights from memory to memory (`nccl`, `ipc`) have no content that could be hashed before they arrive: the
    # channel itself was joined by signed calls.
    if "path" not in info_fields:
        return None
    if not isinstance(info_fields.get("sha256"), str) or info_fields.get("version") is None:
        raise AccessRefused(
            "update_info: version and sha256 are required of a file: an altered one would not be noticed"
        )
    return str(info_fields["version"])


async def _check_adapter(body: dict[str, Any]) -> None:
    try:
        # On a thread: an adapter may have a gigabyte, and the loop serves tokens meanwhile. asyncio and not trio,
        # since this runs under uvicorn in vLLM's process too.
        files_digest = await asyncio.to_thread(folder_digest, Path(str(body.get("lora_path"))))
    except (OSError, ValueError):
        return  # the engine says that it is not there
    if not hmac.compare_digest(files_digest, str(body.get("sha256"))):
        raise AccessRefused(f"lora_path = {body.get('lora_path')!r}: its files are not those that were signed")


def _object(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body or b"{}")
    except ValueError:
        raise AccessRefused("the body is no JSON") from None
    if not isinstance(document, dict):
        raise AccessRefused("the body is no JSON object")
    return cast("dict[str, Any]", document)


async def _whole(receive: Receive) -> bytes:
    body_parts: list[bytes] = []
    received_bytes = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise AccessRefused("the connection was closed before the body ended")
        body_parts.append(message.get("body", b""))
        received_bytes += len(body_parts[-1])
        if received_bytes > _BODY_BYTES:
            raise AccessRefused(f"the body is larger than {_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return b"".join(body_parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """Gives a body that was read to the application, and then what comes after it."""
    is_sent = False

    async def again() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _proving(proof: str, send: Send) -> Send:
    """Adds the proof to an answer's headers."""

    async def proving(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (PROOF.encode(), proof.encode())]}
        await send(message)

    return proving


async def _refuse(scope: Scope, send: Send, status: int, text: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    error_type = "Unauthorized" if status == 401 else "Forbidden"
    answer_body = json.dumps({"error": {"message": text, "type": error_type, "code": status}}).encode()
    # The rest of its body is not read: the connection ends with the answer.
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer_body)).encode())]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": answer_body})
