"""The head of a Ray cluster as a run sees it: joined, watched, left.

    join ─► watch ─┬─ answers ─► go on
                   ├─ refuses connections for `cluster.head_away_s` ─┐
                   ├─ is the head of another cluster ────────────────┤
                   ├─ has ended the run's job, its node being lost ──┤
                   └─ says nothing for `cluster.place_deadline_s` ───┴─► ClusterLost ─► leave

Without its head Ray places and ends nothing, but actors go on and obey. So a run needs the head for no step, and stays
with one that is slow or stopped for long. A head that refuses connections is dead. Unless it keeps what it knows on a
disk or in Redis, its cluster died with it, and Ray would end this process after a minute: the run leaves soon.

If the node of this process (its raylet) is lost, the head marks the run's job as dead some seconds later: it ends all
actors of the job, and places nothing for it any more. Calls for a place would wait for ever.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
import trio
from ray import _raylet  # pyright: ignore[reportAttributeAccessIssue]
from ray._private import services

from agentrl.errors import UsageError, boundary

_T = TypeVar("_T")
_RAY: Any = ray  # they are typed in parts only
_RAYLET: Any = _raylet
_SERVICES: Any = services
_LOOK_S = 0.5
_ANSWER_S = 2.0  # after which a head counts as silent
_LEAVE_S = 10.0
_LOST_S = 0.2
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # RFC 9113, 3.4: empty settings
"""The beginning of every gRPC connection. A server answers it with its settings, before it asks who calls."""


class HeadAnswer(Enum):
    """Answer of a head to a greeting."""

    ANSWERS = auto()
    REFUSES = auto()
    SILENT = auto()


async def ask(address: str) -> HeadAnswer:
    """Greet the head at `address`. It answers as long as its process turns, and refuses when nobody listens there. All
    else is silence: a process that is stopped, a host or a network that is gone."""
    head_host, _, head_port = address.rpartition(":")
    with trio.move_on_after(_ANSWER_S):
        try:
            head_stream = await trio.open_tcp_stream(head_host.strip("[]"), int(head_port))
        except OSError as error:
            return HeadAnswer.REFUSES if _refused(error) else HeadAnswer.SILENT
        async with head_stream:
            with suppress(trio.BrokenResourceError):  # an end of the stream is an answer: with TLS nobody greets so
                await head_stream.send_all(_GREETING)
                await head_stream.receive_some(1)
            return HeadAnswer.ANSWERS
    return HeadAnswer.SILENT


def _refused(error: OSError) -> bool:
    """Whether every address of the host refused."""
    cause = error.__cause__
    is_group = isinstance(cause, ExceptionGroup)
    attempts = cast("ExceptionGroup[Exception]", cause).exceptions if is_group else (cause,)
    return all(isinstance(attempt, ConnectionRefusedError) for attempt in attempts)


class JobEnded(Exception):
    """The head has marked this run's job as dead."""


async def watch(address: str, job: str | None = None, *, away_s: float, silent_s: float) -> str:
    """Returns why the head at `address` counts as gone, once it does. Raises JobEnded once it has ended `job`."""
    limiter = trio.CapacityLimiter(1)
    cluster_id = await _cluster(address, limiter)
    began_by_answer = dict[HeadAnswer, float]()  # when a row of refusals, or of looks without an answer, began
    while True:
        head_answer, current_s = await ask(address), trio.current_time()
        # A head that was restarted answers and greets like the old one, and knows nothing of this run's actors. Only
        # the cluster's id tells the two apart; `None` is no answer and proves nothing.
        if (
            cluster_id
            and head_answer is HeadAnswer.ANSWERS
            and await _cluster(address, limiter) not in (cluster_id, None)
        ):
            return "was started anew and knows nothing of before"
        if job is not None and head_answer is HeadAnswer.ANSWERS and await _ended(address, job, limiter):
            raise JobEnded
        if head_answer is not HeadAnswer.REFUSES:
            began_by_answer.pop(HeadAnswer.REFUSES, None)
        if head_answer is HeadAnswer.ANSWERS:
            began_by_answer.clear()
        else:
            # A refusal counts as silence too: a head that now refuses and now says nothing is as gone as one that does
            # either, but must not be taken for one that refused all along.
            began_by_answer = {head_answer: current_s, HeadAnswer.SILENT: current_s} | began_by_answer
        if current_s - began_by_answer.get(HeadAnswer.REFUSES, current_s) >= away_s:
            return f"has refused connections for {away_s:g} s (cluster.head_away_s)"
        if current_s - began_by_answer.get(HeadAnswer.SILENT, current_s) >= silent_s:
            return f"has not answered for {silent_s:g} s (cluster.place_deadline_s)"
        await trio.sleep(_LOOK_S)


async def _cluster(address: str, limiter: trio.CapacityLimiter) -> str | None:
    """The id of the cluster whose head is there, None if it does not say: a head has a new one unless it has kept what
    it knows. One thread asks (0.5 ms), so a head that only greets holds no other thread of this process."""
    with trio.move_on_after(_ANSWER_S), suppress(Exception):  # Ray names no error that this raises
        return await called(partial(_cluster_id, address), limiter)


def _cluster_id(address: str) -> str:
    return _RAYLET.GcsClient(address=address).cluster_id.hex()


async def _ended(address: str, job: str, limiter: trio.CapacityLimiter) -> bool:
    """Whether the head says that a job is dead. False if it does not say."""
    with trio.move_on_after(_ANSWER_S), suppress(Exception):  # Ray names no error that this raises
        return await called(partial(_is_dead, address, job), limiter)
    return False


def _is_dead(address: str, job: str) -> bool:
    job_infos = _RAYLET.GcsClient(address=address).get_all_job_info(
        job_or_submission_id=job, skip_submission_job_info_field=True, skip_is_running_tasks_field=True
    )
    return any(job_info.is_dead for job_id, job_info in job_infos.items() if job_id.hex() == job)


def job() -> str:
    """The id of this process's job."""
    return str(_RAY.get_runtime_context().get_job_id())


def here() -> str:
    """The address of the head that this process has joined."""
    return str(_RAY.get_runtime_context().gcs_address)


async def join(address: str, deadline_s: float, *, again: Path | None) -> None:
    """Join the cluster at `address`. `again`: the folder of a run that was in one before, so it waits for a head.

    Raises UsageError if there is none."""
    failure_text = "the head does not answer"
    with trio.move_on_after(deadline_s):  # Ray itself tries for many minutes
        while True:
            try:
                # Greeted first, since `ray.init` cannot be cancelled and tries for minutes: a thread that hangs in it
                # would keep this process from joining the head that comes up in between.
                reachable = await _one_that_answers(address) if again else address
                return await called(partial(connect, reachable))
            except UsageError as error:
                if not again:
                    raise
                failure_text = f"it could not be joined ({error})"
                await trio.sleep(_LOOK_S)
    elsewhere = f"; if it is elsewhere: agentrl train --resume {again} --set cluster.address=HOST:PORT" if again else ""
    raise UsageError(
        f"no Ray cluster at cluster.address = {address!r}: {failure_text} within {deadline_s:g} s"
        f" (cluster.place_deadline_s): look with `ray status`{elsewhere}"
    )


async def _one_that_answers(address: str) -> str:
    """The address once its head answers. "auto" is the cluster that `ray start` joined last here, wherever that is."""
    while True:
        candidate = address
        if address == "auto":
            candidate = os.environ.get("RAY_ADDRESS") or cast("str | None", _SERVICES.find_bootstrap_address(None))
        if candidate is None or await ask(candidate) is HeadAnswer.ANSWERS:
            return candidate or address
        await trio.sleep(_LOOK_S)


def connect(address: str) -> None:
    """Join, in a thread: this may take long. Raises UsageError."""
    if address.startswith("ray://"):
        raise UsageError(f"cluster.address = {address!r}: start agentrl on a node of the cluster, and give 'auto'")
    with boundary(UsageError, f"no Ray cluster at cluster.address = {address!r}: start one (ray start --head)"):
        _RAY.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)


async def leave(*, lost: bool) -> None:
    """Leave the cluster, in a thread that may outlive this call: without its head Ray takes up to 9 s to end."""
    with trio.CancelScope(shield=True), trio.move_on_after(_LOST_S if lost else _LEAVE_S):
        await called(_RAY.shutdown)


# --- calls that wait


@asynccontextmanager
async def beside(*others: Callable[[], Awaitable[object]]) -> AsyncGenerator[None]:
    """Have these run for ever while the body does; what one of them raises ends it."""
    async with trio.open_nursery() as nursery:
        for other in others:
            nursery.start_soon(other)
        yield
        nursery.cancel_scope.cancel()


async def called(function: Callable[[], _T], limiter: trio.CapacityLimiter | None = None) -> _T:
    """The result of a call that waits for the head. It may be cancelled: then its thread goes on alone."""
    return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)


async def result(reference: Any, deadline_s: float) -> Any:
    """Wait for a Ray call. Raises TooSlowError, or its error."""
    # Ray's futures speak asyncio or threads. A callback that wakes the loop costs nothing while it waits; a thread for
    # each pending call would be one for each child, all of them stuck when the head is.
    trio_token, done_event = trio.lowlevel.current_trio_token(), trio.Event()

    def tell(_: object) -> None:
        with suppress(trio.RunFinishedError):
            trio_token.run_sync_soon(done_event.set)

    ray_future = reference.future()
    ray_future.add_done_callback(tell)
    with trio.fail_after(deadline_s):
        await done_event.wait()
    return ray_future.result()
