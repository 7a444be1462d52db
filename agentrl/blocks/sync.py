"""The blocks that wait, for programs without a loop: scripts, and notebooks also while asyncio runs in them.

Owns one thread with a trio loop, made at the first call. An interrupt (Ctrl-C, a stopped cell) ends what the call
began; the end of the process ends engines and episodes. `Buffer` and `Learner` are the same here and there.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import trio

from agentrl.blocks import fleet as fleets
from agentrl.blocks import outcomes, publishing, rollouts
from agentrl.blocks.buffer import Buffer
from agentrl.config import EngineSettings, Rollout
from agentrl.engine.weight_sync.canary import Dtype
from agentrl.errors import UsageError, matters
from agentrl.host.clocks import HostClock
from agentrl.host.with_block import Closing
from agentrl.protocols import Rewarder
from agentrl.records import Json, Trajectory, WeightVersion

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_END_S = 15.0  # for what was interrupted, or left at the end of the process, to end


class _Loop:
    """A trio loop in a thread of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._up: Future[tuple[trio.lowlevel.TrioToken, trio.Nursery]] = Future()
        self._thread = threading.Thread(target=self._serve, name="agentrl blocks", daemon=True)
        self._thread.start()
        self._token, self.nursery = self._up.result()

    def _serve(self) -> None:
        async def main() -> None:
            async with trio.open_nursery() as nursery:
                self._up.set_result((trio.lowlevel.current_trio_token(), nursery))
                await trio.sleep_forever()

        trio.run(main, clock=HostClock())

    def call(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Await `work` in the loop. If this thread is interrupted meanwhile, `work` is cancelled and has ended before
        the interrupt goes on."""
        outcome_future: Future[_T] = Future()
        cancel_scope = trio.CancelScope()

        async def run() -> None:
            with cancel_scope:
                try:
                    outcome_future.set_result(await work())
                except Exception as error:
                    outcome_future.set_exception(matters(error))
            if not outcome_future.done():
                outcome_future.set_exception(UsageError("the loop of agentrl.blocks.sync has ended with its process"))

        # In the loop's own nursery, which is open for the whole process: engines and episodes go on between two calls,
        # which no `trio.run` for each call could give.
        self._token.run_sync_soon(self.nursery.start_soon, run)
        try:
            return outcome_future.result()
        # KeyboardInterrupt above all: a stopped cell must stop what it began, or the next cell finds the engines at
        # work for a call that nobody waits for.
        except BaseException:
            if not outcome_future.done():
                self._token.run_sync_soon(cancel_scope.cancel)
                with suppress(BaseException):
                    outcome_future.result(_END_S)
            raise

    def close(self) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self.nursery.cancel_scope.cancel)
        self._thread.join(_END_S)


_loop: _Loop | None = None
_lock = threading.Lock()


def _call(work: Callable[[], Awaitable[_T]]) -> _T:
    global _loop
    if trio.lowlevel.in_trio_run():
        raise UsageError("agentrl.blocks.sync was called inside a trio program: await the names of agentrl.blocks")
    with _lock:
        if _loop is None or _loop.pid != os.getpid():  # a forked child has no thread of its parent's
            _loop = _Loop()
            atexit.register(_loop.close)
    return _loop.call(work)


class _Held(Generic[_T]):
    """An async context that is open in the loop until `close`."""

    def __init__(self, context: Callable[[], AbstractAsyncContextManager[_T]]) -> None:
        self.value = _call(partial(self._open, context))

    async def _open(self, context: Callable[[], AbstractAsyncContextManager[_T]]) -> _T:
        assert _loop is not None
        self._close, self._closed = trio.Event(), trio.Event()
        return await _loop.nursery.start(self._hold, context)

    async def _hold(
        self,
        context: Callable[[], AbstractAsyncContextManager[_T]],
        *,
        task_status: trio.TaskStatus[_T] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        has_opened = False
        try:
            async with context() as opened_value:
                task_status.started(opened_value)
                has_opened = True
                await self._close.wait()
        except Exception:
            if not has_opened:
                raise
            log.exception("what was open did not close in order")  # the loop goes on
        finally:
            self._closed.set()

    async def _end(self) -> None:
        self._close.set()
        await self._closed.wait()

    def close(self) -> None:
        """Close it, and wait until it is closed. Idempotent."""
        _call(self._end)


class EngineFleet(Closing):
    """`agentrl.blocks.EngineFleet`, closed by `with`, `close`, or the end of the process.

    with EngineFleet.start("agentrl/tiny-coder") as fleet:
        print(fleet.sample("What is 1 + 1?", max_tokens=16).text)
    """

    def __init__(self, context: Callable[[], AbstractAsyncContextManager[fleets.EngineFleet]]) -> None:
        """For `start` and `attach`."""
        self._held = _Held(context)
        self.fleet = self._held.value

    @classmethod
    def start(
        cls,
        model: str | Path,
        *,
        settings: EngineSettings | Mapping[str, Any] | None = None,
        max_context: int | None = None,
    ) -> Self:
        """See `agentrl.blocks.EngineFleet.start`."""
        return cls(partial(fleets.EngineFleet.start, model, settings=settings, max_context=max_context))

    @classmethod
    def attach(
        cls,
        urls: str | Sequence[str],
        model: str | Path,
        *,
        settings: EngineSettings | Mapping[str, Any] | None = None,
    ) -> Self:
        """See `agentrl.blocks.EngineFleet.attach`."""
        return cls(partial(fleets.EngineFleet.attach, urls, model, settings=settings))

    @property
    def version(self) -> int:
        """The newest weight version that an engine of the fleet is known to serve."""
        return self.fleet.version

    @property
    def dtype(self) -> Dtype:
        """The dtype in which its engines take weights."""
        return self.fleet.dtype

    def sample(self, prompt: fleets.Prompt, **sampling: Any) -> fleets.Sample:
        """See `agentrl.blocks.EngineFleet.sample`."""
        return _call(partial(self.fleet.sample, prompt, **sampling))

    def close(self) -> None:
        """End the engines that it started, and the episodes that run on it."""
        self._held.close()


class Rollouts(Closing):
    """An iterator of trajectories, in the order in which their episodes end. `close` ends those that run."""

    def __init__(self, inner: Callable[[], Awaitable[rollouts.Rollouts]]) -> None:
        """For `rollout`."""
        self._inner = _call(inner)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Trajectory:
        trajectory = _call(partial(anext, self._inner, None))
        if trajectory is None:
            raise StopIteration
        return trajectory

    def groups(self) -> Iterator[tuple[Trajectory, ...]]:
        """See `agentrl.blocks.Rollouts.groups`."""
        groups = self._inner.groups()
        while (group := _call(partial(anext, groups, None))) is not None:
            yield group

    def close(self) -> None:
        """End the episodes that run; what was journaled in a buffer stays."""
        _call(self._inner.aclose)


def rollout(
    env: rollouts.EnvLike,
    engine: EngineFleet,
    tasks: rollouts.Tasks | None = None,
    *,
    group_size: int = 1,
    kwargs: Mapping[str, Json] | None = None,
    settings: Rollout | Mapping[str, Any] | None = None,
    reward: Rewarder | None = None,
    buffer: Buffer | None = None,
) -> Rollouts:
    """See `agentrl.blocks.rollout`. With a `buffer` episodes are played from now on, whether or not anybody
    iterates."""

    async def begin() -> rollouts.Rollouts:
        rollout_stream = rollouts.rollout(
            env,
            engine.fleet,
            tasks,
            group_size=group_size,
            kwargs=kwargs,
            settings=settings,
            reward=reward,
            buffer=buffer,
        )
        # Groups of a buffer are taken from the buffer, so nobody may ever iterate, which would begin the playing.
        if buffer is not None:
            rollout_stream.play()
        return rollout_stream

    return Rollouts(begin)


def score(
    trajectories: Iterable[Trajectory], reward: Rewarder, *, concurrency: int = 16, deadline_s: float = 60.0
) -> list[Trajectory]:
    """See `agentrl.blocks.score`."""
    return _call(partial(outcomes.score, trajectories, reward, concurrency=concurrency, deadline_s=deadline_s))


def publish(weights: publishing.Weights, fleet: EngineFleet, buffer: Buffer | None = None) -> WeightVersion:
    """See `agentrl.blocks.publish`."""
    return _call(partial(publishing.publish, weights, fleet.fleet, buffer))
