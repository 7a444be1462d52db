"""Differences between the servers that the client speaks to: one protocol, and a dialect each.

`EngineClient` owns connections, deadlines and the names of failures, whatever it speaks to. A dialect owns paths, the
shape of requests and answers, and the order of admin calls: vLLM's (the embedded engine speaks it too) is in
`engine/vllm/vllm_dialect.py`, SGLang's in `engine/sglang/sglang_dialect.py`. Whatever a dialect does is one or more
`EngineCalls.call`, so it raises as that does. It never knows the client, which knows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import Json, VersionSpan

EngineKind = Literal["embedded", "vllm", "sglang"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """New weights for one engine, from the arguments of `file_transport.push`. `files` describe the parts: path, digest
    and version each; `base` says whether the engine is to keep them as the base of deltas (None: unspecified)."""

    version: int
    files: Sequence[Mapping[str, Json]]
    stage: bool
    second: bool
    clear_cache: bool
    asleep: bool
    keep_base: bool | None


# A protocol, and not the client itself: the client owns a dialect, so a dialect that imports it would close a circle.
class EngineCalls(Protocol):
    """Requests to one server; `EngineClient` makes them with its connections, key and names of failures."""

    @property
    def url(self) -> str: ...

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
        ...


class EventParser(Protocol):
    """Reads the events of one generation. `version` is that of tokens for which no event states one, `stated` the
    versions in the last event, `unsound` what was wrong with a token that was left out."""

    version: int
    stated: tuple[VersionSpan, ...]
    unsound: str | None

    def parse(self, document: Mapping[str, Json]) -> Chunk | None:
        """One event; None if it carries nothing. Raises EngineRefusal if it refuses the request, EngineError if it
        makes no sense."""
        ...


class EngineDialect(Protocol):
    """How one kind of server is spoken to."""

    generate_path: ClassVar[str]
    health_path: ClassVar[str]

    def request_json(self, request: GenerateRequest) -> dict[str, Json]:
        """The body of a request for a stream of tokens. Raises ConfigError for what such a server cannot sample."""
        ...

    def parser(self, version: int, request: GenerateRequest, vocabulary: int | None) -> EventParser: ...

    def score_json(self, tokens: Sequence[int], model: str | None) -> dict[str, Json]:
        """The body of a request for the log-probs of a prompt's tokens at temperature 1."""
        ...

    def prompt_logprobs(self, document: Mapping[str, Json], tokens: Sequence[int]) -> tuple[float, ...]:
        """The log-probs of `tokens[1:]` in the answer to it. Raises EngineError if they are not there."""
        ...

    def metric(self, name: str) -> str:
        """The name that readers of metrics look for (vLLM's), of what the server calls `name`."""
        ...

    async def look(self, engine: EngineCalls, *, deadline_s: float) -> None:
        """Ask what the engine itself answers, between two passes, also while it is paused."""
        ...

    async def paused(self, engine: EngineCalls, *, deadline_s: float) -> bool: ...

    async def stated_version(self, engine: EngineCalls, *, deadline_s: float) -> int | None:
        """The weight version that it serves; None if it does not say."""
        ...

    async def announce(self, engine: EngineCalls, version: int, *, deadline_s: float) -> None:
        """Have it stamp its tokens with `version`; the weights stay as they are."""
        ...

    async def resume(self, engine: EngineCalls, *, deadline_s: float) -> None: ...

    async def take_weights(self, engine: EngineCalls, update: WeightUpdate, *, deadline_s: float) -> float:
        """Have it load new weights while its requests wait; returns the seconds in which it computed nothing. Raises
        WeightSyncError, too. Safe to repeat."""
        ...

    async def load_adapter(self, engine: EngineCalls, name: str, place: str, digest: str, *, deadline_s: float) -> None:
        """Have it load the adapter in the folder `place`, whose contents have this digest; safe to repeat."""
        ...

    async def unload_adapter(self, engine: EngineCalls, name: str, *, deadline_s: float) -> None: ...

    async def adapters_in_use(self, engine: EngineCalls, *, deadline_s: float) -> str:
        """The names of adapters that running or waiting requests use, in one text."""
        ...
