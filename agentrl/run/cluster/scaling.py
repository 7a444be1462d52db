"""How many engines and workers a run has: requested by anybody beside it, and brought about by its supervisor.

    agentrl scale ─► row of the store ─► Scaler ─► RunChildren.join, leave ─► engine_urls, WORKERS ─► workers, learner

The request lies in the run's store, so that it outlives the supervisor; it counts before the run file. Owns these rows,
what may be requested, and when which child comes or goes; never a process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, cast

import trio

from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, ConfigError, RunFailed, StoreError, UsageError
from agentrl.run.children.engine_process import WrongWeights
from agentrl.run.cluster import scale_requests
from agentrl.run.cluster.scale_requests import Meta, requested
from agentrl.run.processes.restart_budget import RestartBudget
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.async_calls import Looks
from agentrl.store.run_values import ENGINE_URLS, SCALING, WORKERS, Value

Kind = Literal["engine", "worker"]
KINDS: tuple[Kind, ...] = ("engine", "worker")

_LOOK_S = 1.0
_AGAIN_S = 1.0  # until the next try, after Ray had no place in time


class NoRoom(RunFailed):
    """The cluster had no place for a process in time."""


@dataclass(frozen=True, slots=True)
class Size:
    """Numbers of processes: engines of each policy that learns (0 if none are the run's own), and workers."""

    engines: int
    workers: int

    @classmethod
    def of(cls, config: RunConfig) -> Size:
        """Return the size that the run file sets."""
        engine = config.engine
        return cls(0 if engine.urls else len(engine.places), config.rollout.workers)

    def count(self, kind: Kind) -> int:
        return self.engines if kind == "engine" else self.workers

    def __str__(self) -> str:
        counts = ((self.engines, "engine"), (self.workers, "worker"))
        return " and ".join(f"{n} {name}{'' if n == 1 else 's'}" for n, name in counts if n)

    def at_most(self, other: Size) -> Size:
        return Size(min(self.engines, other.engines), min(self.workers, other.workers))


class ScaledChild(NamedTuple):
    """One child that comes and goes."""

    kind: Kind
    number: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.number}"


def requested_size(config: RunConfig, meta: Meta) -> Size:
    """The numbers requested last; those of the run file, if none were."""
    request, size = requested(meta), Size.of(config)
    return Size(request.get("engines", size.engines), request.get("workers", size.workers))


def workers_of(config: RunConfig, meta: Meta) -> list[int]:
    """The numbers of the workers that the run has now. One that is not among them leaves."""
    numbers = WORKERS.of(meta)
    return list(range(config.rollout.workers)) if numbers is None else numbers


def ask(run: RunDir, *, engines: int | None, workers: int | None) -> Size:
    """Request these numbers; None leaves one as it is. Returns the size requested now. Raises ConfigError,
    UsageError."""
    config = run.config()
    if engines is None and workers is None:
        raise UsageError(f"say how many: agentrl scale {run.path} --engines N --workers M")
    for name, number in (("--engines", engines), ("--workers", workers)):
        if number is not None and number < 1:
            raise ConfigError(name, number, "a run has at least one of each: give 1 or more")
    if engines is not None:
        _check_engines(config, engines, run)
    with RunStore.open(run.store_path) as store:
        numbers = {"engines": engines, "workers": workers}
        new = {name: number for name, number in numbers.items() if number is not None}
        scale_requests.write(store, lambda last: last | new)
        return requested_size(config, store.meta)


def forget(store: RunStore, *, engines: bool, workers: bool) -> None:
    """The run file says the numbers again."""
    gone = {name for name, is_reset in (("engines", engines), ("workers", workers)) if is_reset}
    gone |= {"ranks", "was"} if engines else set[str]()
    scale_requests.write(store, lambda last: {name: value for name, value in last.items() if name not in gone})


def _check_engines(config: RunConfig, engines: int, run: RunDir) -> None:
    if config.cluster.controller is not None:
        hint = "it moves them by itself: for others, start a run without it, or with other bounds"
        raise ConfigError("--engines", engines, f"this run has a controller (cluster.controller): {hint}")
    engine, resume = config.engine, f"agentrl stop {run.path}; agentrl train --resume {run.path}"
    if engine.urls:
        hint = f"start another server, then {resume} --set 'engine.urls=[…]'"
        raise ConfigError("--engines", engines, f"this run did not start its engines (engine.urls): {hint}")
    if engine.gpus and engines > len(engine.gpus):
        hint = f"{resume} --set 'engine.replicas=[…]'"
        raise ConfigError("--engines", engines, f"engine.replicas names GPUs for {len(engine.gpus)}: {hint}")


# --- the supervisor's side


class Elastic(Protocol):
    """Children that come and go, by kind and number."""

    def present(self, kind: Kind) -> set[int]: ...
    async def join(self, kind: Kind, index: int) -> None:
        """Start one, and return when it serves; what was begun is ended if that fails. Raises NoRoom, AgentRLError."""
        ...

    async def leave(self, kind: Kind, index: int) -> None:
        """End one, once others have its work."""
        ...


# Why a size is a wish that is compared again and again, and no command that is carried out.
#
# `agentrl scale` could send the supervisor a command: start two engines, end one worker. But the supervisor may die
# between the start of a child and the note that the command is done. Its successor would carry it out a second time, or
# never. Two people could command at once, and one command may meet another that is half done. Each case would need an
# answer of its own.
#
# So the row holds the requested number and nothing about the way there. At each look the scaler compares it with the
# children that are present, and starts or ends what differs. It needs no memory of earlier requests: a supervisor that
# was just started does the same as one that was there at the request. A child that is no longer needed while it
# starts is called off by the same comparison. Numbers are taken away from the last, so worker 0, which serves rewards,
# stays.
#
# Each child has a task of its own, since a start may take minutes and may fail: an engine without a place must hold up
# neither the other children nor the looks (law 6). What happens after a failure depends on its kind:
#
#   NoRoom          The request is made again for as long as it stands. A cluster that can grow does so because
#                   somebody waits for a place.
#   other failures  A few starts, then no more, and the run goes on without the child. A request that is newer
#                   than the failed one tries it again; the same request does not, or it would fail for ever.
#
# The price is up to a second until a look sees the row. A smaller size loses no sampled token (law 1): a child ends
# only once others have its work (`Elastic.leave`). `tests/run/test_scaling.py` has a case for each line above, with
# children that are none.
@dataclass(slots=True)
class Scaler:
    """Brings about the requested size, every child in a task of its own. `tell` writes a row of the store.

    A child that finds no place is requested again and again, so that a cluster that can grow knows of it. One that
    fails otherwise is not tried again before the next request; the run goes on without it."""

    config: RunConfig
    looks: Looks[RunStore]
    children: Elastic
    tell: Callable[[Value[dict[str, Any]], dict[str, Any]], Any]
    _coming: dict[ScaledChild, trio.CancelScope] = field(default_factory=dict[ScaledChild, trio.CancelScope])
    _going: set[ScaledChild] = field(default_factory=set[ScaledChild])
    _trouble: dict[ScaledChild, str] = field(default_factory=dict[ScaledChild, str])
    _abandoned: dict[ScaledChild, int] = field(default_factory=dict[ScaledChild, int])  # at which request
    _reported: dict[str, Any] = field(default_factory=dict[str, Any])

    async def run(self) -> None:
        """Start and end children until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                # A store that does not answer is no reason to start or end anything: the next look asks again.
                with suppress(StoreError):
                    self._look(*await self.looks(self._requested), nursery)
                    await self._tell()
                await trio.sleep(_LOOK_S)

    def _requested(self, store: RunStore) -> tuple[Size, int]:
        return requested_size(self.config, store.meta), int(requested(store.meta).get("request", 0))

    def _look(self, size: Size, request: int, nursery: trio.Nursery) -> None:
        for kind in KINDS:
            present, count = self.children.present(kind), size.count(kind)
            for part in (ScaledChild(kind, index) for index in range(count) if index not in present):
                is_moving = part in self._coming or part in self._going
                if not is_moving and self._abandoned.get(part) != request:
                    self._coming[part] = trio.CancelScope()
                    nursery.start_soon(self._join, part, request)
            for part in (ScaledChild(kind, index) for index in present if index >= count):
                if part not in self._going:
                    self._going.add(part)
                    nursery.start_soon(self._leave, part)
        unwanted = [part for part in (*self._coming, *self._trouble) if part.number >= size.count(part.kind)]
        for part in unwanted:
            if part in self._coming:
                self._coming[part].cancel()
            self._trouble.pop(part, None)

    async def _join(self, part: ScaledChild, request: int) -> None:
        budget = RestartBudget(allowed=2)
        try:
            with self._coming[part]:
                while True:
                    try:
                        await self.children.join(*part)
                        self._trouble.pop(part, None)
                        self._abandoned.pop(part, None)
                        return
                    except NoRoom as error:
                        self._trouble[part] = str(error)
                        await trio.sleep(_AGAIN_S)
                    except (WrongWeights, UsageError):
                        raise
                    except AgentRLError as error:
                        self._trouble[part] = str(error)
                        await budget.spend(str(error))
        except AgentRLError as error:
            self._trouble[part], self._abandoned[part] = str(error), request
        finally:
            del self._coming[part]

    async def _leave(self, part: ScaledChild) -> None:
        try:
            await self.children.leave(*part)
        finally:
            self._going.discard(part)

    async def _tell(self) -> None:
        progress = {
            "coming": sorted(str(part) for part in self._coming),
            "going": sorted(str(part) for part in self._going),
            "trouble": {str(part): why for part, why in sorted(self._trouble.items())},
        }
        if progress != self._reported:
            await self.tell(SCALING, progress)
            self._reported = progress


# --- for a reader


def describe(config: RunConfig, meta: Meta, *, live: bool) -> dict[str, Any]:
    """Describe the size of a run for `agentrl status --json`: the requested one, and for a live run the sizes
    `present`, the children `coming` and `going`, and by name the `trouble` of children that do not start."""
    state: dict[str, Any] = {"wanted": asdict(requested_size(config, meta))}
    if live:
        urls = len(ENGINE_URLS.of(meta)) - len(config.engine.urls)
        state["present"] = asdict(Size(urls, len(workers_of(config, meta))))
        state |= SCALING.of(meta)
    return state


def line(size: Mapping[str, Any]) -> str:
    """Format the description of a size as one line for a person."""
    present = cast("dict[str, int] | None", size.get("present"))
    counts = list[str]()
    for name, count in size["wanted"].items():
        if present and present[name] != count:
            counts.append(f"{present[name]} of {count} {name}")
        elif count:
            counts.append(f"{count} {name if count != 1 else name[:-1]}")
    moves = [f"{', '.join(size[key])} {verb}" for key, verb in _MOVES if size.get(key)]
    return "; ".join([", ".join(counts), *moves])


_MOVES = (("coming", "to come"), ("going", "to leave"))
