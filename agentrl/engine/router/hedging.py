"""A second engine for a turn whose first token is slow to come; the engine that answers first keeps the turn.

Owns the decision when to ask and the race; never knows a token's value, nor which engines there are.

Bias: none in what is sampled. Both requests have the same tokens before them, and the choice falls when a first token
arrives, before anybody reads it; all later tokens are of the same request. An engine must therefore send its first
token alone, as vLLM does: one that waits for a whole chunk would let short answers win. What the other engine sampled
until it hears of its end is thrown away unread, as at any cancelled request. The kept turn comes more often from
engines that are less busy; where engines serve different weight versions, its tokens carry the version of theirs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncGenerator, Callable
from statistics import median
from typing import TypeVar

import trio

T = TypeVar("T")

_KNOWN = 16  # first tokens that must have come before a median means anything
# Some rounds of a group: long enough for a steady median, short enough to follow the load of a run within minutes.
_REMEMBERED = 256
_SHARE = 0.1  # of the running requests, that may be second ones: if all engines are slow, more load helps nobody


# Why the wait is a multiple of the median, and why few turns have a second engine.
#
# Dean and Barroso ("The Tail at Scale", 2013) ask a second server once a request has taken longer than 95 of 100 do.
# That is right for many servers with a rare bad moment. A run has few engines, and the case to help in is one engine
# that is slow for a while. If one of four is slow, a quarter of all waits are its own, and the 95th percentile is the
# wait at the slow engine: the second one would start too late. The median is the wait at a healthy engine until half
# of them are slow.
#
# A setting in seconds would be simpler still. But the time to a first token depends on model, machine, prompt and load,
# and changes while a run goes on. So the last `_REMEMBERED` first tokens are the measure, and nobody is hedged before
# there are `_KNOWN` of them.
#
# A second request is work for the fleet. If all engines are slow, every turn would have one, and all would become
# slower by it. So no more than a tenth of the running requests may be second ones, and one may in any case. No attempt
# at a turn has a third.
#
# The price is the work of the engine that loses. And a wait that ends because the other engine was quicker is not among
# the remembered ones, since nobody knows how long it would have been. An engine that loses every race does not raise
# the median, which is what we want.
#
# Law 6 profits: a group waits for its slowest turn, and one slow engine would hold up every group that has a turn
# there. `tests/engine/test_hedge.py` has both bounds: `test_when_every_engine_is_slow_few_turns_are_doubled` and
# `test_until_the_usual_wait_is_known_nobody_else_is_asked`.
class Hedges:
    """When to ask a second engine: `after` times the median time to a first token have passed. None: never."""

    def __init__(self, after: float | None) -> None:
        self._after = after
        self._took = deque[float](maxlen=_REMEMBERED)
        self.running = 0
        self.opened = 0
        self.won = 0

    @property
    def on(self) -> bool:
        """Whether turns are ever hedged."""
        return self._after is not None

    @property
    def wait_s(self) -> float:
        """Seconds that a turn waits for its first token before a second engine gets it too; without end until enough
        first tokens were timed."""
        if self._after is None or len(self._took) < _KNOWN:
            return math.inf
        return self._after * median(self._took)

    def took(self, seconds: float) -> None:
        """A first token came so long after its request."""
        self._took.append(seconds)

    def allows(self, running: int) -> bool:
        """Whether one more second request may run beside `running` requests."""
        # At least one, or a fleet with fewer than ten requests could never hedge.
        return self.running < max(1.0, _SHARE * running)


async def race(
    first: AsyncGenerator[T, None],
    second: Callable[[], AsyncGenerator[T, None] | None],
    *,
    wait_s: float,
    answers: Callable[[T], bool],
) -> tuple[AsyncGenerator[T, None], T] | None:
    """The stream that is the first to bring an item that `answers`, and this item. `second` is called after `wait_s`
    without one, and may give no stream. Every other stream is closed. None if all streams end before; the first error
    is then raised."""
    streams, ended_count = [first], 0
    errors: list[Exception] = []
    arrived_items: list[tuple[AsyncGenerator[T, None], T]] = []

    async def listen(stream: AsyncGenerator[T, None]) -> None:
        nonlocal ended_count
        try:
            async for item in stream:
                if answers(item):
                    arrived_items.append((stream, item))
                    # The nursery ends here, and not the stream: the winner's generator is left where it is, for the
                    # caller to go on with.
                    nursery.cancel_scope.cancel()
                    return
        except Exception as error:  # the other stream may still answer
            errors.append(error)
        ended_count += 1
        if ended_count == len(streams):
            nursery.cancel_scope.cancel()

    winning_streams: list[AsyncGenerator[T, None]] = []
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen, first)
            await trio.sleep(wait_s)
            if (second_stream := second()) is not None:
                streams.append(second_stream)
                nursery.start_soon(listen, second_stream)
        # Both may have brought an item before the nursery ended. The first to arrive wins, so that the choice never
        # depends on what was sampled.
        winning_streams = [stream for stream, _ in arrived_items[:1]]
    finally:
        with trio.CancelScope(shield=True):  # a request that nobody reads any more must end at its engine
            for stream in streams:
                if stream not in winning_streams:
                    await stream.aclose()
    if errors and not arrived_items:
        raise errors[0]
    return arrived_items[0] if arrived_items else None
