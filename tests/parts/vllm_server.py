"""A server that speaks vLLM's HTTP protocol without a model, and fails on demand. For tests of engines' callers.

Owns the answers to the clients of `agentrl.engine`: generation, health, pauses, weight updates, adapters, worker calls.
It is a transport of httpx (`EngineClient(fake.url, transport=fake)`: no socket, so virtual time holds), and
`tests.parts.served_vllm` puts it on a socket. Never computes: the next token is the length of its context, so that a
turn reads the same wherever it was broken off, and a log-prob is a function of the weights' name, the place and the
token.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl

import httpx
import trio

from agentrl.http.http_server import Answer, BodyParts, Cut, Typed
from agentrl.records import Json

Kind = Literal[
    "error_event",  # `data: {"error": …}`, as vLLM sends when its engine core dies
    "finish_error",  # finish_reason "error"
    "bad_json",  # an event that is not JSON
    "no_logprobs",  # a chunk whose log-probs are null
    "null_logprob",  # the last log-prob of a chunk is null
    "nan_logprob",  # the last log-prob of a chunk is -9999.0: vLLM's value for a NaN
    "abort",  # finish_reason "abort"
    "cut",  # the connection breaks
    "hang",  # nothing more comes
    "hang_before_head",  # not even the status comes
    "status",  # the answer is `GenerationFault.status`, without a stream
]
Part = Literal["tokens", "admin", "processed", "transfer", "plugin", "lora", "kept"]
_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFault:
    """The fault of one generation once its stream has sent `after` tokens; `status` and `message` are the answer of a
    fault of kind "status"."""

    kind: Kind
    after: int = 0
    status: int = 503
    message: str = "engine trouble"


def spell(token_ids: Sequence[int]) -> str:
    """The text of tokens: one letter each, 0 is "a"."""
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


def made_up_logprob(weights: str, place: int, token: int) -> float:
    """The log-prob of `token` at `place` of its context under the weights of that name, in nats."""
    return -0.5 - zlib.crc32(f"{weights} {place} {token}".encode()) % 1000 / 1000


@dataclass(eq=False, kw_only=True)
class FakeVLLM(httpx.AsyncBaseTransport):
    """One server. `version` is the version that it reports; `weights` names the weights that it computes with: "base",
    then the path of the last update's file, or of an adapter, which it does not open. After setting a field while a
    request waits, call `changed`.

    `core` is the engine behind the front end: if hung, only /health and the like answer; if dead, its answers say so.
    `down` refuses connections. `answers` replaces the answer of a path, `silent` paths never answer, `lacks` names
    parts that the server was started without. `requests` records the generations, `calls` all requests."""

    url: str = "http://engine"
    version: str = "default"
    weights: str = "base"
    vllm: str = "0.32.0"
    model: str = "policy"
    max_model_len: int = 2048
    dtype: str = "float32"
    backend: str = "FileTransferEngine"
    lacks: set[Part] = field(default_factory=set[Part])
    api_key: str | None = None
    script: Callable[[Sequence[int]], int] = len  # context -> next token
    logprob: Callable[[str, int, int], float] = made_up_logprob
    decode: Callable[[Sequence[int]], str] = spell
    stream_tokens: int = 4
    first_token_s: float = 0.0
    token_s: float = 0.0
    takes_updates: bool = True  # if False, it confirms an update and keeps the old weights
    room: bool = True  # for a second copy of the weights, which is swapped in; else they are loaded in a pause
    core: Literal["alive", "hung", "dead"] = "alive"
    down: bool = False
    paused: bool = False
    sleeps: bool = False  # whether it was started to give its memory back on demand
    asleep: set[str] = field(default_factory=set[str])  # what of its memory it has given back, by tag
    running: int = 0
    adapters: dict[str, str] = field(default_factory=dict[str, str])
    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])
    silent: set[str] = field(default_factory=set[str])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    calls: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._faults: list[GenerationFault] = []
        self._always: GenerationFault | None = None
        self._update: list[str] | None = None  # the files of an open update so far
        self._staged: str | None = None  # the file that a second copy of the weights was made of
        self._life = 0
        self._change = trio.Event()

    # --- for tests ----------------------------------------------------------------------------------------------

    def fail(
        self, kind: Kind, *, times: float = 1, after: int = 0, status: int = 503, message: str = "trouble"
    ) -> None:
        """Break the next `times` generations, or all from now on if `times` is infinite."""
        fault = GenerationFault(kind=kind, after=after, status=status, message=message)
        if times == math.inf:
            self._always = fault
        else:
            self._faults += [fault] * int(times)

    def mend(self) -> None:
        """End all faults, hangs and silences."""
        self._faults, self._always, self.core, self.down = [], None, "alive", False
        self.answers.clear()
        self.silent.clear()
        self.changed()

    def restart(self) -> None:
        """Restart as a server without a supervisor does: running generations are cut off, weights and adapters that it
        was sent are gone, its version is "default"."""
        self.version, self.weights, self.paused, self._update, self._staged = "default", "base", False, None, None
        self.asleep.clear()
        self.adapters.clear()
        self._life += 1
        self.mend()

    def changed(self) -> None:
        """Have waiting requests read the fields again."""
        self._change.set()
        self._change = trio.Event()

    # --- the server ---------------------------------------------------------------------------------------------

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer without a socket."""
        if self.down:
            raise httpx.ConnectError("connection refused")
        headers = {name.lower(): value for name, value in request.headers.items()}
        url, content = request.url, await request.aread()
        try:
            status, body = await self.answer(request.method, url.path, url.query.decode(), headers, content)
        except Cut:
            raise httpx.ReadError("connection reset") from None
        if isinstance(body, Typed):
            return httpx.Response(status, content=body.data, headers={"content-type": body.type})
        if isinstance(body, bytes):
            return httpx.Response(status, content=body)
        return httpx.Response(status, stream=_Body(body))

    async def answer(self, method: str, path: str, query: str, headers: Mapping[str, str], content: bytes) -> Answer:
        """Status and body, whole or in parts. Raises Cut if the connection has to break."""
        if self.down:
            raise Cut
        self.calls.append(f"{method} {path}")
        if path in self.silent:
            await trio.sleep_forever()
        if path in self.answers:
            return self.answers[path]
        guarded = self.api_key is not None and path.startswith(("/v1/", "/inference/"))
        if guarded and headers.get("authorization") != f"Bearer {self.api_key}":
            return _refusal(401, "Unauthorized")
        body: dict[str, Any] = json.loads(content or b"{}")
        match path:
            case "/health":
                return (503 if self.core == "dead" else 200), b""
            case "/version":
                return _json({"version": self.vllm})
            case "/metrics":
                values = {"vllm:num_requests_running": float(self.running), **self.metrics}
                if self.sleeps:
                    values['vllm:engine_sleep_state{engine="0",sleep_state="awake"}'] = float(not self.asleep)
                return 200, "".join(f"{name} {value}\n" for name, value in values.items()).encode()
            case "/v1/models":
                models = [{"id": self.model, "max_model_len": self.max_model_len}]
                return _json({"object": "list", "data": [*models, *({"id": name} for name in self.adapters)]})
            case "/v1/load_lora_adapter" | "/v1/unload_lora_adapter" if "lora" not in self.lacks:
                return self._adapter(path, body)
            case "/inference/v1/generate" if "tokens" not in self.lacks:
                return await self._generate(body)
            case _ if path.startswith(("/v1/", "/inference/")) or "admin" in self.lacks:
                return _refusal(404, "Not Found")
            case _:
                return await self._admin(path, body, dict(parse_qsl(query)))

    # --- through the engine core --------------------------------------------------------------------------------

    async def _turn(self, life: int) -> bool:
        """Wait while the core hangs. Returns whether it is alive. Raises Cut if the server was restarted meanwhile."""
        while self.core == "hung" and life == self._life:
            await self._change.wait()
        if life != self._life:
            raise Cut
        return self.core == "alive"

    async def _admin(self, path: str, body: dict[str, Any], params: Mapping[str, str]) -> Answer:
        if not await self._turn(self._life):
            return _refusal(500, _DEAD)
        match path:
            case "/is_paused":
                return _json({"is_paused": self.paused})
            case "/weight_info":
                return _json({"weight_version": self.version})
            case "/get_world_size":
                return _json({"world_size": 1})
            case "/update_weight_version":
                self.version = body["new_version"]
                return _json({"success": True})
            case "/sleep" | "/wake_up":
                return self._sleep(path, params)
            case "/is_sleeping":
                return _json({"is_sleeping": self.paused or bool(self.asleep)})
            case "/pause" | "/resume":
                if path == "/resume" and self.asleep:  # it computes with memory that is not there
                    self.core = "dead"
                    return _refusal(500, _DEAD)
                self.paused = path == "/pause"
                if params.get("mode") == "abort":
                    self._life += 1
                self.changed()
                return _json({"status": path[1:]})
            case "/collective_rpc":
                return self._worker(body["method"], body.get("args", []))
            case _:
                return self._transfer(path, body)

    def _sleep(self, path: str, params: Mapping[str, str]) -> Answer:
        """As vLLM does it: a wake of what is awake already resumes a pause, and so does the last tag."""
        if path == "/sleep" and not self.sleeps:
            return _refusal(500, "Sleep mode is not enabled")
        if path == "/sleep":
            assert params.get("mode") == "keep", "other modes end requests"
            self.paused = True
            if params["level"] == "2" and "weights" not in self.asleep:
                self.weights = "garbage"
            self.asleep = {"weights", "kv_cache"}
        else:
            self.asleep -= {params["tags"]} if "tags" in params else set(self.asleep)
            self.paused = bool(self.asleep)
        self.changed()
        return _json({"status": "sleeping" if self.asleep else "awake"})

    def _worker(self, method: str, args: list[Any]) -> Answer:
        if method == "agentrl_stage" and len(args) > 1 and args[1] and self.room:
            self._staged = args[0]
        swapped = method == "agentrl_publish" and self._staged == args[0]
        staged: dict[str, Json] = {"ready": True, "error": None, "second": self._staged is not None}
        results: dict[str, Json] = {
            "agentrl_facts": {"mending": False, "missing": [], "pickles": True, "dtype": self.dtype},
            "agentrl_stage": staged,
            "agentrl_staged": staged,
            "agentrl_publish": {"swapped": swapped, "paused_s": 0.0},
            "agentrl_untaken": {"untaken": [] if self.takes_updates else ["model.norm.weight"], "unchecked": 0},
        }
        if "plugin" in self.lacks or method not in results:
            return _refusal(400, f"no method {method!r}")
        if swapped:
            if self.takes_updates:
                self.weights = json.loads(args[0])["path"]
            self.version, self.paused, self._staged, self._update = args[1], False, None, None
        return _json({"results": [results[method]]})

    def _transfer(self, path: str, body: dict[str, Any]) -> Answer:
        if "transfer" in self.lacks:
            return _refusal(400, "Weight transfer is not configured")
        match path:
            case "/init_weight_transfer_engine":
                if "agentrl_probe" in body["init_info"]:
                    return _refusal(400, f"Invalid init_info for {self.backend}: unexpected argument")
            case "/shutdown_weight_transfer_engine":
                self._update = None
            case "/start_weight_update":
                if self._update is not None:
                    return _refusal(500, "a weight update is already open")
                self._update = []
            case "/update_weights" | "/finish_weight_update" if self._update is None:
                return _refusal(500, "no weight update is open")
            case "/update_weights":
                if not self.paused or "weights" in self.asleep:
                    self.core = "dead"
                    return _refusal(500, _DEAD)
                assert self._update is not None
                self._update.append(body["update_info"].get("path", "memory"))
            case "/finish_weight_update":
                assert self._update is not None
                if self._update and self.takes_updates:
                    self.weights = self._update[-1]
                self._update, self.version = None, body.get("weight_version") or self.version
            case _:
                return _refusal(404, "Not Found")
        return _json({"message": "ok"})

    def _adapter(self, path: str, body: dict[str, Any]) -> Answer:
        name = body["lora_name"]
        if path == "/v1/unload_lora_adapter":
            return (200, b"Success") if self.adapters.pop(name, None) else _refusal(404, f"{name} does not exist")
        if name in self.adapters:
            return _refusal(400, f"The lora adapter '{name}' has already been loaded.")
        if body["lora_path"].startswith("/nonexistent"):
            return _refusal(404, f"No adapter found for {body['lora_path']}")
        self.adapters[name] = body["lora_path"]
        return 200, b"Success"

    # --- generation ---------------------------------------------------------------------------------------------

    async def _generate(self, body: dict[str, Any]) -> Answer:
        self.requests.append(body)
        fault = self._faults.pop(0) if self._faults else self._always
        if fault is not None and fault.kind == "hang_before_head":
            await self._hang(self._life)
        if fault is not None and fault.kind == "status":
            return _refusal(fault.status, fault.message)
        model = body.get("model", self.model)
        if model != self.model and model not in self.adapters:
            return _refusal(404, f"The model `{model}` does not exist.")
        if len(body["token_ids"]) >= self.max_model_len:
            return _refusal(400, f"the prompt is longer than the context of {self.max_model_len} tokens")
        if body.get("stream"):
            return 200, self._events(body, fault)
        if not await self._turn(self._life):
            return _refusal(500, _DEAD)
        choices = [choice async for choice in self._choices(body)]
        whole: dict[str, Any] = choices[-1] | {
            "token_ids": [token for choice in choices for token in choice["token_ids"]],
            "logprobs": {"content": [entry for choice in choices for entry in choice["logprobs"]["content"]]},
        }
        return _json({"request_id": body["request_id"], "choices": [whole], **self._scores(body)})

    async def _events(self, body: dict[str, Any], fault: GenerationFault | None) -> AsyncGenerator[bytes, None]:
        """Server-sent events with the samples, up to the token of the fault."""
        sent, life = 0, self._life
        self.running += 1
        try:
            async for choice in self._choices(body):
                if not await self._turn(life):
                    yield _event({"error": {"message": _DEAD, "type": "BadRequestError", "code": 400}})
                    break
                here = fault is not None and sent + len(choice["token_ids"]) > fault.after
                if here:
                    assert fault is not None
                    choice = _cut(choice, sent, fault.after + fault.kind.endswith(("logprob", "logprobs")))
                    async for event in self._break(fault, choice, life):
                        yield event
                    break
                sent += len(choice["token_ids"])
                yield _event({"request_id": body["request_id"], "choices": [choice]})
            yield b"data: [DONE]\n\n"
        finally:
            self.running -= 1

    async def _break(self, fault: GenerationFault, choice: dict[str, Any], life: int) -> AsyncGenerator[bytes, None]:
        """The last events of a stream that fails; `choice` holds the tokens before the fault."""
        entries = choice["logprobs"]["content"]
        match fault.kind:
            case "finish_error" | "abort":
                choice["finish_reason"] = "error" if fault.kind == "finish_error" else "abort"
            case "no_logprobs":
                choice["logprobs"] = None
            case "null_logprob":
                entries[-1]["logprob"] = None
            case "nan_logprob":
                entries[-1]["logprob"] = -9999.0
            case _:
                pass
        if choice["token_ids"] or choice["finish_reason"]:
            yield _event({"choices": [choice]})
        match fault.kind:
            case "error_event":
                yield _event({"error": {"message": _DEAD, "type": "BadRequestError", "code": 400}})
            case "bad_json":
                yield b'data: {"choices": [{"token_\n\n'
            case "cut":
                raise Cut
            case "hang":
                await self._hang(life)
            case _:
                pass

    async def _choices(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Choices of a streamed answer, `stream_tokens` tokens each. With our plugin each has weight versions, else
        only the last."""
        params, context, first = body["sampling_params"], list(body["token_ids"]), len(body["token_ids"])
        weights, spans, start, finish = self.adapters.get(body.get("model", "")), list[dict[str, Json]](), 0, None
        content: list[dict[str, Json]] = []
        await trio.sleep(self.first_token_s)
        while finish is None:
            while self.paused:
                await self._change.wait()
            await trio.sleep(self.token_s)
            token, count = self.script(context), len(context) - first
            content.append(self._entry(weights or self.weights, len(context), token, params))
            context.append(token)
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": count, "end": count})
            spans[-1]["end"] = count + 1
            finish = self._finish(context[first:], params)
            if finish or len(content) == self.stream_tokens:
                stamped = "plugin" not in self.lacks or finish
                yield {
                    "index": 0,
                    "token_ids": context[first + start :],
                    "logprobs": {"content": content},
                    "finish_reason": finish,
                    "weight_versions": [dict(span) for span in spans if span["end"] > start] if stamped else None,
                    "sampling_mask": self._sets(content, params),
                }
                start, content = count + 1, []
                spans = [] if "plugin" not in self.lacks else spans

    def _entry(self, weights: str, place: int, token: int, params: dict[str, Any]) -> dict[str, Json]:
        temperature = 1.0 if "processed" in self.lacks else params.get("temperature", 1.0) or 1.0
        value = self.logprob(weights, place, token) / temperature
        tops = [{"token_id": token, "logprob": value}, {"token_id": token + 1, "logprob": value - 1 / temperature}]
        return {"token_id": token, "logprob": value, "top_logprobs": tops}

    def _sets(self, content: Sequence[dict[str, Json]], params: dict[str, Any]) -> list[list[int]] | None:
        """Of a request that cuts: the two tokens that `_entry` names."""
        cuts = params.get("top_p", 1) < 1 or 0 < params.get("top_k", 0) < 1 << 30 or params.get("min_p", 0) > 0
        if "kept" in self.lacks or not cuts:
            return None
        return [[top["token_id"] for top in entry["top_logprobs"]] for entry in content]

    def _finish(self, sampled: Sequence[int], params: dict[str, Any]) -> str | None:
        if sampled[-1] in params.get("stop_token_ids", ()):
            return "stop"
        if any(stop in self.decode(sampled) for stop in params.get("stop", ())):
            return "stop"
        return "length" if len(sampled) >= params["max_tokens"] else None

    def _scores(self, body: dict[str, Any]) -> dict[str, Json]:
        if body["sampling_params"].get("prompt_logprobs") is None:
            return {}
        weights = self.adapters.get(body.get("model", ""), self.weights)
        prompt: list[int] = body["token_ids"]
        scores = [{str(token): {"logprob": self.logprob(weights, at, token)}} for at, token in enumerate(prompt)]
        return {"prompt_logprobs": [None, *scores[1:]]}

    async def _hang(self, life: int) -> None:
        while life == self._life:
            await self._change.wait()
        raise Cut


class _Body(httpx.AsyncByteStream):
    def __init__(self, parts: BodyParts) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        try:
            async for part in self._parts:
                yield part
        except Cut:
            raise httpx.ReadError("connection reset") from None

    async def aclose(self) -> None:
        await self._parts.aclose()


def _cut(choice: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """An unfinished copy of a choice, whose first token is at `start`, with only the tokens before `end`."""
    content = choice["logprobs"]["content"][: end - start]
    spans = [span | {"end": min(span["end"], end)} for span in choice["weight_versions"] or () if span["start"] < end]
    cut: dict[str, Any] = {"logprobs": {"content": content}, "finish_reason": None, "weight_versions": spans}
    cut |= {name: choice[name] and choice[name][: end - start] for name in ("token_ids", "sampling_mask")}
    return choice | cut


def _event(document: Json) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def _json(document: Json) -> Answer:
    return 200, json.dumps(document).encode()


def _refusal(status: int, message: str) -> Answer:
    return status, json.dumps({"error": {"message": message, "type": "Error", "code": status}}).encode()
