"""Chunks of a stream become one generation, across engines if need be.

The client joins the chunks of one request, the router those of a turn that went on at another engine, and a rollout
puts what was journaled of a turn before its rest. Never knows a server or a deadline.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from agentrl.errors import EngineBroke, EngineError, UnknownIdError
from agentrl.protocols import Chunk
from agentrl.records import Finish, Generation, RoutedExperts, spans_of
from agentrl.tokens import columns


class Stitcher:
    """The tokens received so far. Chunk spans count from the chunk's first token; an engine that stamps versions only
    at the end restates earlier tokens with negative starts, and the later word holds."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._versions: list[int] = []
        self._recomputed: set[int] = set()
        self._experts: RoutedExperts | None = None
        self._parts: list[tuple[int, columns.Columns]] = []

    def add(self, chunk: Chunk) -> None:
        """Append one chunk. Raises EngineError if it contradicts itself."""
        chunk_start = len(self.token_ids)
        if len(chunk.logprobs) != len(chunk.token_ids):
            raise EngineError(f"a chunk has {len(chunk.token_ids)} tokens but {len(chunk.logprobs)} log-probs")
        if chunk.columns:
            try:
                columns.check(chunk.columns, len(chunk.token_ids))
            except (ValueError, UnknownIdError) as error:
                raise EngineError(f"a chunk's columns do not fit: {error}") from error
        self._parts.append((len(chunk.token_ids), chunk.columns))
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        # One version a token while the turn runs, and spans at the end: a late restatement then is a plain
        # assignment, instead of the cutting and joining of intervals.
        self._versions += [-1] * len(chunk.token_ids)
        self._experts = chunk.experts
        for span in chunk.spans:
            span_start, span_end = chunk_start + span.start, chunk_start + span.end
            if not 0 <= span_start <= span_end <= len(self.token_ids):
                raise EngineError(f"a chunk's version span {span} lies outside the {len(self.token_ids)} tokens")
            # The later word holds. A vLLM without our plugin labels a stream with the version that the client knew,
            # and its last event says what was true.
            self._versions[span_start:span_end] = [span.version] * (span_end - span_start)
            if span.recomputed:
                self._recomputed.add(span_start)
        if -1 in self._versions[chunk_start:]:
            raise EngineError("a chunk has tokens without a weight version")

    def generation(self, finish: Finish) -> Generation:
        """All of it."""
        return Generation(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            spans=spans_of(self._versions, self._recomputed),
            finish=finish,
            experts=self._experts,
            columns=columns.joined(self._parts),
        )


def joined(before: Chunk, rest: Generation) -> Generation:
    """A generation that began elsewhere with `before`; the request for the rest computed keys and values anew."""
    if not before.token_ids:
        return rest
    stitcher = Stitcher()
    stitcher.add(before)
    stitcher.add(
        Chunk(
            token_ids=rest.token_ids,
            logprobs=rest.logprobs,
            # Marked, since only the seam shows it later: keys and values behind it are all of one version, unlike
            # after a swap under kept ones, and the mismatch gauges count the two apart.
            spans=tuple(replace(span, recomputed=span.recomputed or span.start == 0) for span in rest.spans),
            experts=rest.experts,
            columns=rest.columns,
        )
    )
    return stitcher.generation(rest.finish)


async def collect(stream: AsyncGenerator[Chunk, None], on_chunk: Callable[[Chunk], None] | None = None) -> Generation:
    """Join a stream's chunks to one generation; `on_chunk` is called with each chunk as it comes."""
    stitcher = Stitcher()
    finish: str | None = None
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            stitcher.add(chunk)
            if on_chunk is not None:
                on_chunk(chunk)
            finish = chunk.finish
    if finish is not None:
        return stitcher.generation(cast("Finish", finish))
    # A stream without `finish` was cut, whatever it brought: returned as it is, it would pass for an action that
    # ended.
    raise EngineBroke("the stream ended before its last chunk")
