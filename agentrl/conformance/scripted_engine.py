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
        member_numbers = range(len(scenario.members))
        self._groups = defaultdict[int, _Group](lambda: _Group(fresh=deque(member_numbers)))
        self._struck: set[tuple[int, Fault]] = set()

    def samples(self) -> list[Sample]:
        """All turns of which a token was sent."""
        with self._lock:
            return [
                Sample(
                    name=sampled_turn.name,
                    prompt=tuple(sampled_turn.prompt),
                    tokens=tuple(sampled_turn.tokens[: sampled_turn.sent]),
                    logprobs=tuple(sampled_turn.logprobs[: sampled_turn.sent]),
                    is_whole=sampled_turn.sent == len(sampled_turn.tokens),
                )
                for sampled_turn in self._turns.values()
                if sampled_turn.sent
            ]

    def grade(self, name: str) -> float:
        """The reward of the member whose turn has this name. Raises _Vanished where the grader's host fails."""
        name_match = NAME.search(name)
        if name_match is None:
            return 0.0
        member_grade = self.scenario.members[int(name_match[2])].grade
        if member_grade == "fails":
            raise _Vanished
        return float(member_grade)

    def score(self, tokens: list[int]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs` of a prompt, by the weights that the engine has."""
        if self._weights is None:
            raise _Vanished
        prompt_logprobs = self._weights.logprobs(tokens)
        token_entries = [
            {str(token_id): {"logprob": token_logprob}}
            for token_id, token_logprob in zip(tokens[1:], prompt_logprobs, strict=True)
        ]
        return [None, *token_entries]

    def take_weights(self, update: Mapping[str, Any]) -> None:
        """Load the file that an update names, unless the scenario loses it."""
        if self.scenario.delivery != "lost":
            self._weights = TinyModel(Path(update["path"]))

    def turn(self, prompt: list[int], max_tokens: int) -> tuple[_Turn, int]:
        """The turn that a prompt asks for, and how many of its tokens the prompt has already."""
        with self._lock:
            *earlier_texts, opened_text = self._assistant_texts(prompt)
            opened_name = NAME.match(opened_text)
            if opened_name is not None and opened_name[0] in self._turns:
                return self._turns[opened_name[0]], len(encode(opened_text))
            earlier_names = [name_match for earlier_text in earlier_texts if (name_match := NAME.search(earlier_text))]
            if earlier_names:
                group_index, member_index, turn_index = (
                    int(earlier_names[-1][1]),
                    int(earlier_names[-1][2]),
                    int(earlier_names[-1][3]) + 1,
                )
            else:
                group_index, turn_index = group_of(decode(prompt)) or 0, 0
                member_index = self._next_member(group_index)
            return self._begin(prompt, (group_index, member_index, turn_index), max_tokens), 0

    def _assistant_texts(self, prompt: list[int]) -> list[str]:
        """The texts of the assistant's turns, and what stands behind the last opening of one."""
        start_indices = [token_index for token_index, token_id in enumerate(prompt) if token_id == START]
        message_texts = [
            decode(prompt[start_index + 1 : text_end])
            for start_index, text_end in zip(start_indices, [*start_indices[1:], len(prompt)], strict=True)
        ]
        return [
            message_text.removeprefix(_ASSISTANT)
            for message_text in message_texts
            if message_text.startswith(_ASSISTANT)
        ] or [""]

    def _next_member(self, group: int) -> int:
        group_state = self._groups[group]
        if group_state.lost:
            return group_state.lost.popleft()
        if not group_state.fresh:  # the trainer plays the task once more
            group_state.fresh.extend(range(len(self.scenario.members)))
        return group_state.fresh.popleft()

    def _begin(self, prompt: list[int], place: tuple[int, int, int], max_tokens: int) -> _Turn:
        group_index, member_index, turn_index = place
        attempt_index = self._attempts[place]
        self._attempts[place] += 1
        turn_text = self.scenario.text(group_index, member_index, turn_index, attempt_index)
        token_ids, finish_reason = [*encode(turn_text), STOP], "stop"
        turn_fault = next(
            (
                scenario_fault
                for scenario_fault in self.scenario.faults
                if (scenario_fault.member, scenario_fault.turn) == (member_index, turn_index)
            ),
            None,
        )
        if turn_fault is not None and turn_fault.kind == "cuts":
            token_ids, finish_reason, turn_fault = token_ids[: turn_fault.after], "length", None
        elif turn_fault is not None and (turn_fault.kind != "stalls" and (group_index, turn_fault) in self._struck):
            turn_fault = None
        elif turn_fault is not None:
            self._struck.add((group_index, turn_fault))
        if len(token_ids) > max_tokens:
            token_ids, finish_reason = token_ids[:max_tokens], "length"
        # Different in every turn, so that a log-prob of another turn or place shows.
        logprobs = [
            -0.05 - token_index % 40 / 50 - 0.0007 * member_index - 0.003 * attempt_index
            for token_index in range(len(token_ids))
        ]
        turn_name = f"g{group_index}m{member_index}t{turn_index}{chr(ord('a') + attempt_index)}"
        begun_turn = _Turn(turn_name, prompt, token_ids, logprobs, finish_reason, fault=turn_fault)
        self._turns[turn_name] = begun_turn
        return begun_turn

    def parts(self, turn: _Turn, start: int, size: int) -> Iterator[tuple[int, int]]:
        """Begin and end of each part of an answer, of `size` tokens at most, as they are sent. Raises _Vanished on the
        fault's cue."""
        turn_fault, turn.fault = turn.fault, turn.fault if turn.fault and turn.fault.kind == "stalls" else None
        answer_end = len(turn.tokens)
        if turn_fault is not None and turn_fault.kind == "slow":
            self.ended.wait(SLOW_S)
            turn_fault = None
        sent_until = answer_end if turn_fault is None else min(turn_fault.after, answer_end)
        for part_begin in range(start, sent_until, size):
            yield part_begin, min(part_begin + size, sent_until)
        if turn_fault is None:
            return
        if turn_fault.kind == "dies":
            if turn.name.endswith("t0a"):  # whoever begins it anew cannot say which member it was
                with self._lock:
                    name_match = NAME.match(turn.name)
                    assert name_match is not None
                    self._groups[int(name_match[1])].lost.append(int(name_match[2]))
            raise _Vanished
        self.ended.wait()
        raise _Vanished


def _choice(turn: _Turn, begin: int, end: int, offset: int, version: int) -> dict[str, Any]:
    """Tokens `begin` to `end` of a turn as vLLM writes them, in an answer that began with token `offset`."""
    logprob_entries: list[dict[str, Any]] = [
        {"token": f"token_id:{token_id}", "logprob": token_logprob, "bytes": None, "top_logprobs": []}
        for token_id, token_logprob in zip(turn.tokens[begin:end], turn.logprobs[begin:end], strict=True)
    ]
    return {
        "index": 0,
        "token_ids": turn.tokens[begin:end],
        "logprobs": {"content": logprob_entries},
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
        request_url = urlsplit(self.path)
        match request_url.path:
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
                    self._json({"reward": self.engine.grade(parse_qs(request_url.query)["name"][0])})
            case _:
                self._json({"error": {"message": f"no {request_url.path} here"}}, status=404)

    def do_POST(self) -> None:
        body_length = min(int(self.headers.get("content-length", 0)), _LONGEST_BODY)
        request_body = cast("dict[str, Any]", json.loads(self.rfile.read(body_length) or b"{}"))
        match urlsplit(self.path).path:
            case "/inference/v1/generate":
                with self._failing():
                    self._generate(request_body)
            case "/init_weight_transfer_engine" | "/pause" | "/resume" | "/start_weight_update":
                self._json({})
            case "/update_weights":
                self.engine.take_weights(request_body["update_info"])
                self._json({})
            case "/finish_weight_update":
                self.engine.version = int(request_body.get("weight_version", self.engine.version))
                self._json({})
            case "/update_weight_version":
                if self.engine.version == 0 or not self.engine.scenario.weights_stuck:
                    self.engine.version = int(request_body["new_version"])
                self._json({"success": True})
            case unknown_path:
                self._json({"error": {"message": f"no {unknown_path} here"}}, status=404)

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
        scripted_engine = self.engine
        if "prompt_logprobs" in body["sampling_params"]:
            answer_choice = {"index": 0, "token_ids": [STOP], "logprobs": {"content": [{"logprob": -1.0}]}}
            prompt_scores = scripted_engine.score(body["token_ids"])
            self._json({"choices": [{**answer_choice, "finish_reason": "length"}], "prompt_logprobs": prompt_scores})
            return
        sampled_turn, answer_start = scripted_engine.turn(
            body["token_ids"], int(body["sampling_params"].get("max_tokens") or 1 << 30)
        )
        if not body.get("stream"):
            part_spans = list(scripted_engine.parts(sampled_turn, answer_start, len(sampled_turn.tokens)))
            part_begin, part_end = part_spans[-1] if part_spans else (answer_start, answer_start)
            answer_choice = _choice(sampled_turn, part_begin, part_end, answer_start, scripted_engine.version)
            document = {"request_id": body.get("request_id"), "choices": [answer_choice]}
            sampled_turn.sent = max(sampled_turn.sent, part_end)
            self._json(document)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part_begin, part_end in scripted_engine.parts(sampled_turn, answer_start, _EVENT_TOKENS):
            stream_event = {
                "choices": [_choice(sampled_turn, part_begin, part_end, answer_start, scripted_engine.version)]
            }
            # Before it is sent: nothing of what a client has may be missing in the record.
            sampled_turn.sent = max(sampled_turn.sent, part_end)
            self._chunk(b"data: " + json.dumps(stream_event).encode() + b"\n\n")
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
    scripted_engine = ScriptedEngine(scenario, model)
    handler_class = type("Handler", (_Handler,), {"engine": scripted_engine})
    http_server = _Server(("127.0.0.1", 0), handler_class)
    server_thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    server_thread.start()
    try:
        yield scripted_engine, f"http://127.0.0.1:{http_server.server_address[1]}"
    finally:
        scripted_engine.ended.set()
        http_server.shutdown()
        http_server.server_close()
        server_thread.join()
