"""A server without a model: it speaks vLLM's generate API, samples what the scenario says, and fails on its cue.

It is the judge's record of what was sampled, and lives in the judge's process: a trainer that is killed does not take
it along. Prompts come as tokens. Which turn a prompt asks for is read from the names in the assistant's turns of it,
and a prompt that ends within a turn is continued from there. Standard library only.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import parse_qs, urlsplit

from agentrl.conformance.observation import Sample
from agentrl.conformance.scenario import NAME, SLOW_S, Fault, Scenario, group_of
from agentrl.conformance.tiny_forward import TinyModel
from agentrl.conformance.tiny_model import START, STOP, decode, encode

_EVENT_TOKENS: Final = 6
_ASSISTANT: Final = "assistant\n"
_IDLE_S: Final = 60.0  # without a byte from a client
_LONGEST_BODY: Final = 1 << 24


class _Vanished(Exception):
    """The engine dies in the middle of an answer."""


@dataclass(slots=True)
class _Turn:
    """A turn that was requested: its tokens as they will be, and how many of them were sent."""

    name: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    finish: str
    sent: int = 0
    fault: Fault | None = None


@dataclass(slots=True)
class _Group:
    fresh: deque[int] = field(default_factory=deque[int])  # members that no request was for yet
    lost: deque[int] = field(default_factory=deque[int])  # members whose first turn failed


class ScriptedEngine:
    """Samples turns of a scenario. `version` stamps its tokens."""

    def __init__(self, scenario: Scenario, model: Path | None = None) -> None:
        """`model` is the folder of the weights that it has first: to score prompts it needs one."""
        self.scenario = scenario
        self._weights = None if model is None else TinyModel(model / "model.safetensors")
        self.version = 0
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._turns: dict[str, _Turn] = {}
        self._attempts: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        members = range(len(scenario.members))
        self._groups = defaultdict[int, _Group](lambda: _Group(fresh=deque(members)))
        self._struck: set[tuple[int, Fault]] = set()

    def samples(self) -> list[Sample]:
        """All turns of which a token was sent."""
        with self._lock:
            return [
                Sample(
                    name=turn.name,
                    prompt=tuple(turn.prompt),
                    tokens=tuple(turn.tokens[: turn.sent]),
                    logprobs=tuple(turn.logprobs[: turn.sent]),
                    is_whole=turn.sent == len(turn.tokens),
                )
                for turn in self._turns.values()
                if turn.sent
            ]

    def grade(self, name: str) -> float:
        """The reward of the member whose turn has this name. Raises _Vanished where the grader's host fails."""
        match = NAME.search(name)
        if match is None:
            return 0.0
        grade = self.scenario.members[int(match[2])].grade
        if grade == "fails":
            raise _Vanished
        return float(grade)

    def score(self, tokens: list[int]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs` of a prompt, by the weights that the engine has."""
        if self._weights is None:
            raise _Vanished
        logprobs = self._weights.logprobs(tokens)
        entries = [{str(token): {"logprob": value}} for token, value in zip(tokens[1:], logprobs, strict=True)]
        return [None, *entries]

    def take_weights(self, update: Mapping[str, Any]) -> None:
        """Load the file that an update names, unless the scenario loses it."""
        if self.scenario.delivery != "lost":
            self._weights = TinyModel(Path(update["path"]))

    def turn(self, prompt: list[int], max_tokens: int) -> tuple[_Turn, int]:
        """The turn that a prompt asks for, and how many of its tokens the prompt has already."""
        with self._lock:
            *past, tail = self._assistant_texts(prompt)
            name = NAME.match(tail)
            if name is not None and name[0] in self._turns:
                return self._turns[name[0]], len(encode(tail))
            names = [match for text in past if (match := NAME.search(text))]
            if names:
                group, member, turn = int(names[-1][1]), int(names[-1][2]), int(names[-1][3]) + 1
            else:
                group, turn = group_of(decode(prompt)) or 0, 0
                member = self._next_member(group)
            return self._begin(prompt, (group, member, turn), max_tokens), 0

    def _assistant_texts(self, prompt: list[int]) -> list[str]:
        """The texts of the assistant's turns, and what stands behind the last opening of one."""
        starts = [place for place, token in enumerate(prompt) if token == START]
        texts = [decode(prompt[start + 1 : end]) for start, end in zip(starts, [*starts[1:], len(prompt)], strict=True)]
        return [text.removeprefix(_ASSISTANT) for text in texts if text.startswith(_ASSISTANT)] or [""]

    def _next_member(self, group: int) -> int:
        state = self._groups[group]
        if state.lost:
            return state.lost.popleft()
        if not state.fresh:  # the trainer plays the task once more
            state.fresh.extend(range(len(self.scenario.members)))
        return state.fresh.popleft()

    def _begin(self, prompt: list[int], place: tuple[int, int, int], max_tokens: int) -> _Turn:
        group, member, turn = place
        attempt = self._attempts[place]
        self._attempts[place] += 1
        text = self.scenario.text(group, member, turn, attempt)
        tokens, finish = [*encode(text), STOP], "stop"
        fault = next((each for each in self.scenario.faults if (each.member, each.turn) == (member, turn)), None)
        if fault is not None and fault.kind == "cuts":
            tokens, finish, fault = tokens[: fault.after], "length", None
        elif fault is not None and (fault.kind != "stalls" and (group, fault) in self._struck):
            fault = None
        elif fault is not None:
            self._struck.add((group, fault))
        if len(tokens) > max_tokens:
            tokens, finish = tokens[:max_tokens], "length"
        # Different in every turn, so that a log-prob of another turn or place shows.
        logprobs = [-0.05 - at % 40 / 50 - 0.0007 * member - 0.003 * attempt for at in range(len(tokens))]
        name = f"g{group}m{member}t{turn}{chr(ord('a') + attempt)}"
        begun = _Turn(name, prompt, tokens, logprobs, finish, fault=fault)
        self._turns[name] = begun
        return begun

    def parts(self, turn: _Turn, start: int, size: int) -> Iterator[tuple[int, int]]:
        """Begin and end of each part of an answer, of `size` tokens at most, as they are sent. Raises _Vanished on the
        fault's cue."""
        fault, turn.fault = turn.fault, turn.fault if turn.fault and turn.fault.kind == "stalls" else None
        end = len(turn.tokens)
        if fault is not None and fault.kind == "slow":
            self.ended.wait(SLOW_S)
            fault = None
        last = end if fault is None else min(fault.after, end)
        for begin in range(start, last, size):
            yield begin, min(begin + size, last)
        if fault is None:
            return
        if fault.kind == "dies":
            if turn.name.endswith("t0a"):  # whoever begins it anew cannot say which member it was
                with self._lock:
                    match = NAME.match(turn.name)
                    assert match is not None
                    self._groups[int(match[1])].lost.append(int(match[2]))
            raise _Vanished
        self.ended.wait()
        raise _Vanished


def _choice(turn: _Turn, begin: int, end: int, offset: int, version: int) -> dict[str, Any]:
    """Tokens `begin` to `end` of a turn as vLLM writes them, in an answer that began with token `offset`."""
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(turn.tokens[begin:end], turn.logprobs[begin:end], strict=True)
    ]
    return {
        "index": 0,
        "token_ids": turn.tokens[begin:end],
        "logprobs": {"content": content},
        "finish_reason": turn.finish if end == len(turn.tokens) else None,
        "weight_versions": [{"version": str(version), "start": begin - offset, "end": end - offset}],
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    engine: ScriptedEngine

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads a log of these requests."""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        match address.path:
            case "/version" | "/weight_info":
                self._json({"version": "0", "weight_version": str(self.engine.version)})
            case "/is_paused":
                self._json({"is_paused": False})
            case "/v1/models":
                self._json({"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 4096}]})
            case "/health" | "/metrics":
                self._answer(200, b"", "text/plain")
            case "/grade":
                with self._failing():
                    self._json({"reward": self.engine.grade(parse_qs(address.query)["name"][0])})
            case _:
                self._json({"error": {"message": f"no {address.path} here"}}, status=404)

    def do_POST(self) -> None:
        length = min(int(self.headers.get("content-length", 0)), _LONGEST_BODY)
        body = cast("dict[str, Any]", json.loads(self.rfile.read(length) or b"{}"))
        match urlsplit(self.path).path:
            case "/inference/v1/generate":
                with self._failing():
                    self._generate(body)
            case "/init_weight_transfer_engine" | "/pause" | "/resume" | "/start_weight_update":
                self._json({})
            case "/update_weights":
                self.engine.take_weights(body["update_info"])
                self._json({})
            case "/finish_weight_update":
                self.engine.version = int(body.get("weight_version", self.engine.version))
                self._json({})
            case "/update_weight_version":
                if self.engine.version == 0 or not self.engine.scenario.weights_stuck:
                    self.engine.version = int(body["new_version"])
                self._json({"success": True})
            case other:
                self._json({"error": {"message": f"no {other} here"}}, status=404)

    @contextmanager
    def _failing(self) -> Generator[None]:
        """Break the connection off where the scenario says so, or the client left."""
        try:
            yield
        except (_Vanished, OSError):
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(2)

    def _generate(self, body: Mapping[str, Any]) -> None:
        engine = self.engine
        if "prompt_logprobs" in body["sampling_params"]:
            choice = {"index": 0, "token_ids": [STOP], "logprobs": {"content": [{"logprob": -1.0}]}}
            scores = engine.score(body["token_ids"])
            self._json({"choices": [{**choice, "finish_reason": "length"}], "prompt_logprobs": scores})
            return
        turn, start = engine.turn(body["token_ids"], int(body["sampling_params"].get("max_tokens") or 1 << 30))
        if not body.get("stream"):
            spans = list(engine.parts(turn, start, len(turn.tokens)))
            begin, end = spans[-1] if spans else (start, start)
            choice = _choice(turn, begin, end, start, engine.version)
            document = {"request_id": body.get("request_id"), "choices": [choice]}
            turn.sent = max(turn.sent, end)
            self._json(document)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for begin, end in engine.parts(turn, start, _EVENT_TOKENS):
            event = {"choices": [_choice(turn, begin, end, start, engine.version)]}
            # Before it is sent: nothing of what a client has may be missing in the record.
            turn.sent = max(turn.sent, end)
            self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, document: Any, *, status: int = 200) -> None:
        self._answer(status, json.dumps(document).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no event here."""


@contextmanager
def serving(scenario: Scenario, model: Path | None = None) -> Generator[tuple[ScriptedEngine, str]]:
    """The engine of a scenario, and its URL, for the time of the block."""
    engine = ScriptedEngine(scenario, model)
    handler = type("Handler", (_Handler,), {"engine": engine})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield engine, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        engine.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
