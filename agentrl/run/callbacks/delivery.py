"""Delivers the events of a run to its callbacks: each in a thread of its own, which reads the run's store.

Owns these threads, the places up to which they have delivered, and the line that names a callback that hangs. The run
waits for none of them but at its end, for as long as they get on. Never knows what an event means.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import trio

from agentrl.config import RunConfig
from agentrl.errors import CallbackError, StoreAway, StoreError, place_of, place_of_thread
from agentrl.run.callbacks.callback import (
    Callback,
    EpisodeEnded,
    EvalEnded,
    RunEnded,
    RunStarted,
    StepEnded,
    StopTraining,
    WeightsServed,
    name_of,
    overridden,
)
from agentrl.run.callbacks.event_feed import MOST, EventFeed, FeedPosition, place_key
from agentrl.run.run_folder import RunDir
from agentrl.run.stop_request import StopRequest
from agentrl.store import RunStore

_T = TypeVar("_T")
_POLL_S = 0.5
_LOOK_S = 1.0  # between two looks at whether a hook hangs
_LATE_S = 10.0  # after which a run that is over says whom it waits for, and for how long a stopped one waits for a hook
_HOOK_OF = {EpisodeEnded: "on_episode", StepEnded: "on_step", WeightsServed: "on_weights", EvalEnded: "on_eval"}


@dataclass(frozen=True, slots=True)
class _Call:
    """A hook that is being called, with which event, since `began_s` of the monotonic clock."""

    hook: str
    event: str
    began_s: float


# A thread for each callback, not a task of the supervisor's loop: hooks are users' functions that block, on a network
# or a disk, and one that hangs must hold up neither training nor the other callbacks. And not a pool: order within a
# callback is promised, and a hung one would use the pool up.
#
# The events come from the store and not from a queue in memory. So there is nothing to lose when the process dies, a
# slow callback costs no memory, and a resumed run goes on at the place that the store keeps. The price is a read twice
# a second.
class Teller:
    """Delivers events to one callback. `call` is under way, `handled` have ended."""

    def __init__(self, callback: Callback, run: RunDir, config: RunConfig, stop: StopRequest) -> None:
        self.label = name_of(callback)
        # a daemon: one that hangs does not keep the process
        self.thread = threading.Thread(target=self._run_to_end, name=f"callback {self.label}", daemon=True)
        self.callback, self.handled = callback, 0
        self.call: _Call | None = None
        self._run, self._config, self._stop = run, config, stop
        self._hooks = overridden(callback)
        self._wake, self._finished = threading.Event(), False
        self._closing = self._abandoned = self._broken = False
        self._raised = Counter[tuple[str, str]]()

    def close(self, finished: bool) -> None:
        """Tell what there is by now, then that the run is over, and end."""
        self._finished, self._closing = finished, True
        self._wake.set()

    def abandon(self) -> None:
        """Tell and write nothing after the call under way: nobody waits any more."""
        self._abandoned = True

    def _run_to_end(self) -> None:
        store_path = self._run.store_path
        try:
            with (
                RunStore.open(store_path, away_s=0) as writing_store,
                RunStore.read(store_path, away_s=0) as reading_store,
            ):
                self._tell_all(reading_store, writing_store)
        except StoreError as error:
            self.warn(f"gets no more events until the run goes on: {error}")

    def _tell_all(self, reads: RunStore, writes: RunStore) -> None:
        feed_position = FeedPosition()
        if not self.callback.from_start:
            feed_position = FeedPosition.parse(self._ask(lambda: reads.meta(place_key(self.label))))
        event_feed = EventFeed(self._hooks, feed_position)
        self._tell("on_start", self._ask(lambda: self._started(reads)))
        while not self._ends:
            is_closing = self._closing  # before the read: it has all that was there then
            new_events = self._ask(lambda: event_feed.read(reads))
            for new_event in new_events:
                self._tell(_HOOK_OF[type(new_event)], new_event, new_event.id)
                event_feed.mark(new_event)
                if self._ends:
                    break
            # The place is written after the hooks have returned, once for all events of a read. A kill in between
            # delivers these again, with the same ids; writing it before would lose those whose hook had not begun.
            # Twice is what an id lets a callback notice, never is what it cannot.
            if new_events and not self.callback.from_start:
                self._save(event_feed.place, writes)
            if len(new_events) < MOST:
                if is_closing:
                    break
                self._wake.wait(_POLL_S)
        self._tell("on_end", self._ask(lambda: self._ended(reads)))

    def _ask(self, read: Callable[[], _T]) -> _T:
        """Return the result of `read`, repeated until the database is there. Raises StoreAway if the run is over
        first."""
        while True:
            try:
                return read()
            except StoreAway:
                if self._closing:
                    raise
                self._wake.wait(_POLL_S)

    def _started(self, reads: RunStore) -> RunStarted:
        checkpoint = reads.lineage.latest_checkpoint()
        return RunStarted(
            path=self._run.path,
            config=self._config.model_dump(mode="json"),
            step=0 if checkpoint is None else checkpoint.step,
            attempt=reads.lineage.attempt,
        )

    def _ended(self, reads: RunStore) -> RunEnded:
        step_rows = reads.metrics.values("step")
        return RunEnded(path=self._run.path, step=step_rows[-1].step if step_rows else 0, finished=self._finished)

    @property
    def _ends(self) -> bool:
        return self._broken or self._abandoned

    def _tell(self, hook: str, event: object, id: str = "") -> None:
        if hook not in self._hooks or self._ends:
            return
        self.call = _Call(hook, id, time.monotonic())
        try:
            getattr(self.callback, hook)(event)
        except StopTraining as reason:
            self._stop.ask_to_finish(f"callback {self.label}: {reason}")
        except BaseException as error:  # SystemExit, too: it would end this thread without a word
            self._failed(f"{hook}({id})", error)
        finally:
            self.call = None
            self.handled += 1

    def _failed(self, call: str, error: BaseException) -> None:
        """Print the traceback of the first error of a kind, and a line for each whose number is a power of two."""
        error_place, error_kind = place_of(error), type(error).__name__
        error_line = f"{call} raised {error_kind}: {' '.join(str(error).split())}" + f" ({error_place})" * bool(
            error_place
        )
        self._raised[error_kind, error_place] += 1
        error_count = self._raised[error_kind, error_place]
        if error_count == 1:
            # The frame above is ours.
            traceback_below = None if error.__traceback__ is None else error.__traceback__.tb_next
            print("".join(traceback.format_exception(type(error), error, traceback_below)).rstrip(), file=sys.stderr)
        if self.callback.errors == "stop":
            self._broken = True
            self._stop.fail(CallbackError(f"callback {self.label}: {error_line}; with errors = 'warn' the run goes on"))
        # Powers of two: an error that comes with every step of a long run is named about twenty times, not a million
        # times, and its count is never far from the truth.
        elif error_count & (error_count - 1) == 0:
            self.warn(error_line + f"; {error_count} times by now" * (error_count > 1))

    def _save(self, place: FeedPosition, writes: RunStore) -> None:
        """Let the store keep the place; if it cannot, it does the next time."""
        if self._abandoned:
            return
        try:
            writes.set_meta(place_key(self.label), place.to_json())
        except StoreError as error:
            if self._closing:
                self.warn(f"its last events come again when the run goes on: {error}")

    def warn(self, line: str) -> None:
        print(f"agentrl: warning: callback {self.label}: {line}", file=sys.stderr)

    def stands(self, call: _Call) -> str:
        """Describe for how long, and where, a call is under way."""
        code_place, event_text = place_of_thread(self.thread.ident, __file__), f" ({call.event})" * bool(call.event)
        return (
            f"{call.hook}{event_text} has not returned for {time.monotonic() - call.began_s:.0f} s"
            + f", at {code_place}" * bool(code_place)
        )


async def _watch(tellers: Sequence[Teller]) -> None:
    """Name each hook that has not returned for `deadline_s`, and again whenever that time has doubled."""
    limit_by_call: dict[_Call, float] = {}
    while True:
        for teller in tellers:
            hook_call = teller.call
            if hook_call is None:
                continue
            call_limit_s = limit_by_call.get(hook_call, teller.callback.deadline_s)
            if time.monotonic() - hook_call.began_s > call_limit_s:
                limit_by_call = {
                    **{
                        earlier_call: earlier_limit_s
                        for earlier_call, earlier_limit_s in limit_by_call.items()
                        if earlier_call is teller.call
                    },
                    hook_call: 2 * call_limit_s,
                }
                teller.warn(f"{teller.stands(hook_call)}; the run goes on, and its events come later")
        await trio.sleep(_LOOK_S)


def _finish(tellers: Sequence[Teller], finished: bool) -> None:
    """Wait until all have delivered their events, as long as they get on."""
    for teller in tellers:
        teller.close(finished)
    for teller in tellers:
        deadline_s = teller.callback.deadline_s if finished else min(_LATE_S, teller.callback.deadline_s)
        closing_began_s = last_progress_s = time.monotonic()
        handled_count, is_silent = teller.handled, True
        while teller.thread.is_alive():
            teller.thread.join(0.1)
            current_s = time.monotonic()
            # The deadline begins anew with each event that is handled. A callback with a thousand events to go gets the
            # time that it needs, as long as it gets on; only one that stands still is left behind.
            if teller.handled != handled_count:
                handled_count, last_progress_s = teller.handled, current_s
            if current_s - last_progress_s > deadline_s:
                teller.abandon()
                hook_call = teller.call
                state_text = "has not ended" if hook_call is None else teller.stands(hook_call)
                teller.warn(f"{state_text}; the run ends without it, and delivers the rest when it goes on")
                break
            if is_silent and current_s - closing_began_s > _LATE_S:
                is_silent = False
                teller.warn("the run is over; it gets the events until then")


@asynccontextmanager
async def telling(
    callbacks: Sequence[Callback], run: RunDir, config: RunConfig, stop: StopRequest
) -> AsyncGenerator[None]:
    """Deliver the events of a run whose supervisor this process is to callbacks, the last ones at its end. A callback
    that wants the run to end says so to `stop`."""
    tellers = [Teller(callback, run, config, stop) for callback in callbacks]
    for teller in tellers:
        teller.thread.start()
    is_finished = False
    async with trio.open_nursery() as nursery:
        if tellers:
            nursery.start_soon(_watch, tellers)
        try:
            yield
            is_finished = True
        finally:
            # Shielded: at Ctrl-C the callbacks still hear of the end, within their deadlines, since a tracker that
            # hears nothing shows the run as alive for ever.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(partial(_finish, tellers, is_finished))
        nursery.cancel_scope.cancel()
