"""An engine without a model: deterministic tokens, any speed, failures on demand. For tests of engines' callers."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

import trio

from agentrl.engine.generation import collect
from agentrl.errors import EngineError
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import Generation, RoutedExperts, VersionSpan

Script = Callable[[GenerateRequest], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Raise `error` in request number `request` (from 0), after its first `after` tokens."""

    request: int
    error: EngineError
    after: int = 0


def counting_script(vocab: int = 256, length: int = 8) -> Script:
    """`length` tokens that depend only on the prompt, then the request's first stop token, if it has one."""

    def script(request: GenerateRequest) -> list[int]:
        state = zlib.crc32(repr(request.token_ids).encode())
        tokens = [(state + 7919 * i) % vocab for i in range(length)]
        return [t for t in tokens if t not in request.sampling.stop_token_ids] + list(
            request.sampling.stop_token_ids[:1]
        )

    return script


def _experts(request: GenerateRequest, sampled: Sequence[int]) -> RoutedExperts | None:
    if request.experts_from is None:
        return None
    computed = [*request.token_ids, *sampled][request.experts_from : -1]
    data = bytes(token % 256 for token in computed)
    return RoutedExperts(start=request.experts_from, layers=1, per_token=1, width=1, data=data)


def _begun(request: GenerateRequest) -> GenerateRequest:
    """The request that the turn began with."""
    if not request.sampled:
        return request
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens + request.sampled)
    return replace(request, token_ids=request.token_ids[: -request.sampled], sampling=sampling, sampled=0)


class FakeEngine:
    """`protocols.Engine` in memory. `script` gives all tokens of a turn from the request that began it; token i of the
    turn has log-prob -0.5 - i / 100 and the `version` set at that moment, or the one that is asked for. A request that
    continues a turn gets the rest. Each chunk of `chunk_tokens` takes `chunk_s` seconds. On request for experts it is a
    mixture of one layer that computes a token with expert `token % 256`.

    `requests` records all requests; `failures` break requests; `closed` says whether `aclose` was called."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        version: int = 0,
        chunk_tokens: int = 4,
        chunk_s: float = 0.0,
        failures: Sequence[Failure] = (),
        url: str = "fake://engine",
    ) -> None:
        self.url, self.readings = url, dict[str, float]()
        self.version, self.requests, self.closed = version, list[GenerateRequest](), False
        self._script = script or counting_script()
        self._chunk_tokens, self._chunk_s, self.failures = chunk_tokens, chunk_s, failures

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """The scripted tokens in chunks, cut at `max_tokens`; finish is "stop" if a stop token ends them."""
        failure = next((planned for planned in self.failures if planned.request == len(self.requests)), None)
        self.requests.append(request)
        turn = _begun(request)
        tokens = list(self._script(turn))[: turn.sampling.max_tokens]
        ends = [at for at, token in enumerate(tokens) if token in request.sampling.stop_token_ids]
        tokens = (tokens[: ends[0] + 1] if ends else tokens)[request.sampled :]
        for start in range(0, max(len(tokens), 1), self._chunk_tokens):
            await trio.sleep(self._chunk_s)
            part = tokens[start : start + self._chunk_tokens]
            if failure is not None and failure.after < start + len(part):
                part = part[: max(failure.after - start, 0)]
            chunk = self._chunk(request.sampled + start, part)
            if request.version is not None:
                chunk = replace(chunk, spans=tuple(replace(span, version=request.version) for span in chunk.spans))
            if failure is not None and failure.after <= start + len(part):
                if part:
                    yield chunk
                raise failure.error
            if start + self._chunk_tokens < len(tokens):
                yield chunk
            else:
                yield replace(chunk, finish="stop" if ends else "length", experts=_experts(request, tokens))

    def _chunk(self, start: int, tokens: Sequence[int]) -> Chunk:
        logprobs = tuple(-0.5 - (start + i) / 100 for i in range(len(tokens)))
        spans = (VersionSpan(self.version, 0, len(tokens)),) if tokens else ()
        return Chunk(token_ids=tuple(tokens), logprobs=logprobs, spans=spans)

    async def generate(self, request: GenerateRequest) -> Generation:
        """The whole scripted turn."""
        return await collect(self.stream(request), request.on_chunk)

    async def alive(self, *, deadline_s: float = 5.0) -> bool:
        """Always True."""
        return True

    async def served_version(self) -> int:
        """The version that the next token will carry."""
        return self.version

    async def metrics(self) -> dict[str, float]:
        """The readings that a test has put into `readings`."""
        return self.readings

    async def aclose(self) -> None:
        """Note that the owner closed it."""
        self.closed = True
