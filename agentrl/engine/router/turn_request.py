"""One turn over as many engines as needed: the tokens received, the rest to sample, and whose time it took.

Pure: opens nothing, waits for nothing. Two clocks run. `spent_s` is the policy's: time between tokens while they came
at the pace of their engine. All other time is the engines': waiting for a replica, queueing, prefill, pauses, outages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from agentrl.errors import EngineRefusal
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import Finish, SamplingParams
from agentrl.tokens import columns

Decode = Callable[[Sequence[int]], str]

SEAM = Chunk(token_ids=(), logprobs=(), spans=())
"""Says that an engine was left, and that the turn goes on at another."""

_PAUSE = 3.0  # times the usual gap between two chunks: time beyond that is not sampling
# Asymmetric: a single long gap is probably a pause and should hardly count, while a shorter one shows what the engine
# can do.
_SLOWER, _FASTER = 0.1, 0.5  # weight of a new gap in the usual gap: a pause must not change the pace much


@dataclass(slots=True)
class TokenPace:
    """How long an engine usually takes from one chunk of a turn to the next, in seconds."""

    usual_s: float | None = None

    def sampling(self, gap_s: float) -> float:
        """The part of a gap that was sampling, in seconds: all of it, unless it is much longer than usual; nothing of
        the first gap, as the usual gap is not yet known."""
        if self.usual_s is None:
            self.usual_s = gap_s
            return 0.0
        spent_s = min(gap_s, _PAUSE * self.usual_s)
        self.usual_s += (_SLOWER if spent_s > self.usual_s else _FASTER) * (spent_s - self.usual_s)
        return spent_s


@dataclass(slots=True, eq=False)
class TurnRequest:
    """A request and its progress: `received` begins with the tokens sampled before the request. `decode` gives the text
    of tokens, which stop texts need. `faults` counts how often an engine took the request and failed it; `refusals` has
    the engines, by URL, that refused it before any token."""

    request: GenerateRequest
    decode: Decode | None = None
    received: list[int] = field(default_factory=list[int])
    attempts: int = 0
    faults: int = 0
    refusals: dict[str, EngineRefusal] = field(default_factory=dict[str, EngineRefusal])
    spent_s: float = 0.0
    waited_s: float = 0.0
    _seam: int = 0  # number of tokens received before this attempt

    def __post_init__(self) -> None:
        self.received += self.request.token_ids[len(self.request.token_ids) - self.request.sampled :]

    def rest(self) -> GenerateRequest:
        """Begin an attempt: a request for the rest of the turn, with an infinite deadline: the caller bounds waits."""
        request, received = self.request, self.received
        attempt_number, self.attempts, self._seam = self.attempts, self.attempts + 1, len(received)
        new_token_ids = received[request.sampled :]
        return replace(
            request,
            # Another name for each attempt: the engine that was left may not yet know of its end, and vLLM refuses a
            # second request under a running id.
            request_id=f"{request.request_id}~{attempt_number}" if attempt_number else request.request_id,
            token_ids=(*request.token_ids, *new_token_ids),
            # The limit is the turn's, over all engines. Given whole to each, a turn that is interrupted often would
            # become longer than the others of its group.
            sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - len(new_token_ids)),
            deadline_s=float("inf"),
            sampled=len(received),
            on_chunk=None,
        )

    def take(self, chunk: Chunk) -> Chunk:
        """Add a chunk. Returns the part of it that belongs to the turn, with `finish` if it is the last: also if a stop
        text began at another engine, or the policy's time is over."""
        # "abort": the engine was paused or drained with abort; the caller did not ask for it.
        chunk = replace(chunk, finish=None if chunk.finish == "abort" else chunk.finish, spent_s=self.spent_s)
        if chunk.spans and 0 < self._seam == len(self.received):  # the request computed all that came before
            chunk = replace(chunk, spans=(replace(chunk.spans[0], recomputed=True), *chunk.spans[1:]))
        for token_count in range(1, len(chunk.token_ids) + 1):
            self.received.append(chunk.token_ids[token_count - 1])
            if self._stops_over_the_seam():
                return _first(chunk, token_count)
        # Ended as by a token limit: the policy wrote for too long, so what it wrote is its action and is scored (law
        # 3). An error here would call it the infrastructure's failure.
        if chunk.finish is None and chunk.token_ids and self.spent_s >= self.request.deadline_s:
            return replace(chunk, finish="length")
        return chunk

    def versions(self, chunk: Chunk) -> list[int]:
        """The versions in a chunk that say which weights its engine serves: none if the turn is a past self's."""
        return [span.version for span in chunk.spans] if self.request.version is None else []

    def ending(self) -> Chunk | None:
        """The last chunk, if an engine broke off after the turn's last token but before it sent `finish`."""
        token_limit = self.request.sampled + self.request.sampling.max_tokens
        # The engine may die between the stop token and its word that it stopped. Asked to go on, another engine would
        # sample behind a finished turn.
        finish = finish_of(self.received, token_limit, self.request.sampling, self.decode)
        return None if finish is None else replace(SEAM, finish=finish, spent_s=self.spent_s)

    def _stops_over_the_seam(self) -> bool:
        """Whether a stop text ends with the newest token. The engine cannot see it if it began at another engine."""
        stop_texts = self.request.sampling.stop
        # Decoding costs more than the rest of this function; beyond the reach of a stop text the engine itself has
        # seen all of it.
        is_near_seam = self._seam > 0 and len(self.received) - self._seam < _reach(stop_texts)
        return is_near_seam and _says(self.received, stop_texts, self.decode)


def finish_of(
    token_ids: Sequence[int], max_tokens: int, sampling: SamplingParams, decode: Decode | None
) -> Finish | None:
    """How a turn of these sampled tokens has ended; None if it goes on. `max_tokens` is the turn's limit."""
    if token_ids and (token_ids[-1] in sampling.stop_token_ids or _says(token_ids, sampling.stop, decode)):
        return "stop"
    return "length" if len(token_ids) >= max_tokens else None


def _says(token_ids: Sequence[int], stop: Sequence[str], decode: Decode | None) -> bool:
    """Whether a stop text ends with the newest token. Each token has at least one byte of it, so it suffices to decode
    as many tokens as it has bytes, and one before them, since decoders strip a space at the beginning."""
    token_reach = _reach(stop)
    if not token_reach or decode is None:
        return False
    last_text = decode(token_ids[-token_reach - 1 :])
    return any(stop_text in last_text for stop_text in stop)


def _reach(stop: Sequence[str]) -> int:
    """The most tokens that a stop text can have."""
    return max((len(stop_text.encode()) for stop_text in stop), default=0)


def _first(chunk: Chunk, count: int) -> Chunk:
    """The first `count` tokens of a chunk, as the end of their turn."""
    version_spans = tuple(replace(span, end=min(span.end, count)) for span in chunk.spans if span.start < count)
    return Chunk(
        token_ids=chunk.token_ids[:count],
        logprobs=chunk.logprobs[:count],
        spans=version_spans,
        finish="stop",
        columns=columns.first(chunk.columns, count),
    )
