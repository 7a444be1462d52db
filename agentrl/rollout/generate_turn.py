"""One turn from an engine: its tokens are written while they come, and an interrupted turn goes on from them.

Owns when tokens are written and which are still to be sampled; never knows where they are written, or what the turn is
for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from agentrl.engine.generation import joined
from agentrl.engine.router.turn_request import Decode, finish_of
from agentrl.errors import DiskFull, EngineError, StoreError
from agentrl.protocols import Chunk, Engine, GenerateRequest
from agentrl.records import Generation, VersionSpan
from agentrl.store import Partial
from agentrl.store.interfaces import Posted
from agentrl.tokens import columns
from agentrl.tokens import sampling_mask as kept


class BrokenOff(Exception):
    """A turn left its engine amid its tokens, and the run does not go on from them (`rollout.resume`)."""


Keep = Callable[[Partial], Posted]


async def sample(
    engine: Engine,
    request: GenerateRequest,
    begun: Partial,
    *,
    decode: Decode,
    keep: Keep,
    every: int,
    unbroken: bool = False,
) -> Generation:
    """Sample the turn that `request` asks for. Its part `begun` is not sampled again, and its seconds count; if it ends
    the turn, no request is made.

    At any instant at most `every` tokens are not yet passed to `keep` (0: it is never called), unless the part before
    is still being written. If the turn is interrupted, it gets the tokens at hand. Raises the errors of engine and
    `keep`; with `unbroken` also BrokenOff, if the turn leaves an engine that has sampled some of it."""
    sampling, sampled_ids = request.sampling, begun.token_ids
    begun_chunk = Chunk(token_ids=sampled_ids, logprobs=begun.logprobs, spans=begun.spans, columns=begun.columns)
    remaining_s = request.deadline_s - begun.spent_s
    finish_reason = finish_of(sampled_ids, sampling.max_tokens, sampling, decode) or (
        "length" if remaining_s <= 0 else None
    )
    if finish_reason is not None:
        return joined(begun_chunk, Generation(token_ids=(), logprobs=(), spans=(), finish=finish_reason))
    remaining_request = request
    if sampled_ids or begun.spent_s:
        remaining_request = replace(
            request,
            token_ids=request.token_ids + sampled_ids,
            sampling=replace(sampling, max_tokens=sampling.max_tokens - len(sampled_ids)),
            deadline_s=remaining_s,
            sampled=len(sampled_ids),
        )
    # Without parts to write there is no need of a stream: one request and one answer, for engines that cannot stream.
    if not every and not unbroken:
        return joined(begun_chunk, _whole(remaining_request, await engine.generate(remaining_request)))
    token_log = _Log(begun, keep, every, len(sampled_ids) + remaining_request.sampling.max_tokens, unbroken)
    try:
        generation = await engine.generate(replace(remaining_request, on_chunk=token_log.add))
        return joined(begun_chunk, _whole(remaining_request, generation))
    except (EngineError, StoreError):  # the episode ends, or is another worker's
        raise
    # Also for a cancellation: whoever cancels (a drain, a pause, a lost lease) does not know of tokens in memory. If
    # the lease is lost, the store refuses this part, and nothing is harmed.
    except BaseException:
        token_log.write()
        raise


def _whole(request: GenerateRequest, generation: Generation) -> Generation:
    """The generation, if it has the kept sets that the request asks for: without them the learner would compute the
    log-probs of another distribution. Raises EngineError."""
    kept_counts = [kept_count for kept_count, _ in kept.parts(generation.columns.get(columns.KEPT, ()))]
    if request.kept and (0 in kept_counts or len(kept_counts) != len(generation.token_ids)):
        raise EngineError("the engine does not say which set each token was drawn from: sample without cuts from it")
    return generation


@dataclass(slots=True)
class _Log:
    """Chunks of a turn on their way to `keep`. An engine has sampled more than it has sent: a chunk that is being made,
    and one on its way, may be lost as well. If the last part cannot be written, the next one holds its chunks too."""

    begun: Partial
    keep: Keep
    every: int
    most: int  # tokens that the turn may have
    unbroken: bool  # whether the turn may not go on at another engine
    kept: int = field(init=False)  # tokens that are written
    chunks: list[Chunk] = field(default_factory=list[Chunk])  # those that are not
    unkept: int = 0  # their tokens
    in_flight: tuple[int, int] = (0, 0)  # chunks, and their tokens, of the part under way
    posted: Posted | None = None  # that part

    def __post_init__(self) -> None:
        self.kept = len(self.begun.token_ids)

    def add(self, chunk: Chunk) -> None:
        """Take a chunk, and write if a crash could lose too many tokens from now on, or if the engine was left. Raises
        the error of an earlier write, save DiskFull; BrokenOff."""
        self.chunks.append(chunk)
        self.unkept += len(chunk.token_ids)
        if chunk.finish is not None:
            return  # the whole turn is journaled at once
        self._settle()
        # Twice the last chunk: one may be on its way while the next is being made. Near the end of the turn no more can
        # come than it may have, and the whole turn is about to be journaled.
        tokens_ahead = min(2 * len(chunk.token_ids), self.most - self.kept - self.unkept)
        # One part at a time. A second one would have to say after how many tokens it begins, and that depends on
        # whether the first was written. A chunk without tokens says that the engine was left: write at once, since the
        # pause may be long.
        if self.posted is None and (self.unkept + tokens_ahead > self.every or not chunk.token_ids):
            self.write()
            self._settle()
        if self.unbroken and not chunk.token_ids and self.kept + self.unkept:
            raise BrokenOff

    def write(self) -> None:
        """Give `keep` the tokens that no part before holds. A part may still be under way if an error ends the turn;
        its chunks stay in `chunks` until `_settle` knows that they are written."""
        chunks_before, tokens_before = self.in_flight
        if self.unkept == tokens_before or not self.every:
            return
        new_chunks = self.chunks[chunks_before:]
        joined_spans, span_offset = list[VersionSpan](), 0
        for chunk in new_chunks:
            joined_spans += (
                replace(span, start=span_offset + span.start, end=span_offset + span.end) for span in chunk.spans
            )
            span_offset += len(chunk.token_ids)
        self.posted = self.keep(
            replace(
                self.begun,
                token_ids=tuple(token_id for chunk in new_chunks for token_id in chunk.token_ids),
                logprobs=tuple(logprob for chunk in new_chunks for logprob in chunk.logprobs),
                spans=tuple(joined_spans),
                columns=columns.joined([(len(chunk.token_ids), chunk.columns) for chunk in new_chunks]),
                at=self.kept + tokens_before,
                spent_s=self.begun.spent_s + max(chunk.spent_s for chunk in new_chunks),
            )
        )
        self.in_flight = len(self.chunks), self.unkept

    def _settle(self) -> None:
        """Note what came of the last part, once it is known."""
        if self.posted is None or self.posted.result is None:
            return
        (_, part_error), self.posted = self.posted.result, None
        if part_error is None:
            chunk_count, token_count = self.in_flight
            self.kept, self.unkept = self.kept + token_count, self.unkept - token_count
            del self.chunks[:chunk_count]
        elif not isinstance(part_error, DiskFull):  # after that one the next chunk tries again
            raise part_error
        self.in_flight = (0, 0)
