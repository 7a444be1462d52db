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
from agentrl.errors import AgentRLError, ConfigError, RunFailed, StoreError, UsageError, WrongWeights
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
        engine_settings = config.engine
        return cls(0 if engine_settings.urls else len(engine_settings.places), config.rollout.workers)

    def count(self, kind: Kind) -> int:
        return self.engines if kind == "engine" else self.workers

    def __str__(self) -> str:
        child_counts = ((self.engines, "engine"), (self.workers, "worker"))
        return " and ".join(
            f"{child_count} {kind_name}{'' if child_count == 1 else 's'}"
            for child_count, kind_name in child_counts
            if child_count
        )

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
    last_request, configured_size = requested(meta), Size.of(config)
    return Size(
        last_request.get("engines", configured_size.engines), last_request.get("workers", configured_size.workers)
    )


def workers_of(config: RunConfig, meta: Meta) -> list[int]:
    """The numbers of the workers that the run has now. One that is not among them leaves."""
    worker_numbers = WORKERS.of(meta)
    return list(range(config.rollout.workers)) if worker_numbers is None else worker_numbers


def ask(run: RunDir, *, engines: int | None, workers: int | None) -> Size:
    """Request these numbers; None leaves one as it is. Returns the size requested now. Raises ConfigError,
    UsageError."""
    run_config = run.config()
    if engines is None and workers is None:
        raise UsageError(f"say how many: agentrl scale {run.path} --engines N --workers M")
    for count_name, child_count in (("--engines", engines), ("--workers", workers)):
        if child_count is not None and child_count < 1:
            raise ConfigError(count_name, child_count, "a run has at least one of each: give 1 or more")
    if engines is not None:
        _check_engines(run_config, engines, run)
    with RunStore.open(run.store_path) as run_store:
        requested_counts = {"engines": engines, "workers": workers}
        changed_counts = {
            count_name: child_count for count_name, child_count in requested_counts.items() if child_count is not None
        }
        scale_requests.write(run_store, lambda last: last | changed_counts)
        return requested_size(run_config, run_store.meta)


def forget(store: RunStore, *, engines: bool, workers: bool) -> None:
    """The run file says the numbers again."""
    removed_keys = {kind_name for kind_name, is_reset in (("engines", engines), ("workers", workers)) if is_reset}
    removed_keys |= {"ranks", "was"} if engines else set[str]()
    scale_requests.write(store, lambda last: {name: value for name, value in last.items() if name not in removed_keys})


def _check_engines(config: RunConfig, engines: int, run: RunDir) -> None:
    if config.cluster.controller is not None:
        correction = "it moves them by itself: for others, start a run without it, or with other bounds"
        raise ConfigError("--engines", engines, f"this run has a controller (cluster.controller): {correction}")
    engine_settings, resume_command = config.engine, f"agentrl stop {run.path}; agentrl train --resume {run.path}"
    if engine_settings.urls:
        correction = f"start another server, then {resume_command} --set 'engine.urls=[…]'"
        raise ConfigError("--engines", engines, f"this run did not start its engines (engine.urls): {correction}")
    if engine_settings.gpus and engines > len(engine_settings.gpus):
        correction = f"{resume_command} --set 'engine.replicas=[…]'"
        raise ConfigError(
            "--engines", engines, f"engine.replicas names GPUs for {len(engine_settings.gpus)}: {correction}"
        )


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
        for child_kind in KINDS:
            present_numbers, child_count = self.children.present(child_kind), size.count(child_kind)
            for scaled_child in (
                ScaledChild(child_kind, index) for index in range(child_count) if index not in present_numbers
            ):
                is_moving = scaled_child in self._coming or scaled_child in self._going
                if not is_moving and self._abandoned.get(scaled_child) != request:
                    self._coming[scaled_child] = trio.CancelScope()
                    nursery.start_soon(self._join, scaled_child, request)
            for scaled_child in (ScaledChild(child_kind, index) for index in present_numbers if index >= child_count):
                if scaled_child not in self._going:
                    self._going.add(scaled_child)
                    nursery.start_soon(self._leave, scaled_child)
        surplus = [
            scaled_child
            for scaled_child in (*self._coming, *self._trouble)
            if scaled_child.number >= size.count(scaled_child.kind)
        ]
        for scaled_child in surplus:
            if scaled_child in self._coming:
                self._coming[scaled_child].cancel()
            self._trouble.pop(scaled_child, None)

    async def _join(self, part: ScaledChild, request: int) -> None:
        restart_budget = RestartBudget(allowed=2)
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
                        await restart_budget.spend(str(error))
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
            "coming": sorted(str(scaled_child) for scaled_child in self._coming),
            "going": sorted(str(scaled_child) for scaled_child in self._going),
            "trouble": {
                str(scaled_child): trouble_text for scaled_child, trouble_text in sorted(self._trouble.items())
            },
        }
        if progress != self._reported:
            await self.tell(SCALING, progress)
            self._reported = progress


# --- for a reader


def describe(config: RunConfig, meta: Meta, *, live: bool) -> dict[str, Any]:
    """Describe the size of a run for `agentrl status --json`: the requested one, and for a live run the sizes
    `present`, the children `coming` and `going`, and by name the `trouble` of children that do not start."""
    size_state: dict[str, Any] = {"wanted": asdict(requested_size(config, meta))}
    if live:
        engine_count = len(ENGINE_URLS.of(meta)) - len(config.engine.urls)
        size_state["present"] = asdict(Size(engine_count, len(workers_of(config, meta))))
        size_state |= SCALING.of(meta)
    return size_state


def line(size: Mapping[str, Any]) -> str:
    """Format the description of a size as one line for a person."""
    present_counts = cast("dict[str, int] | None", size.get("present"))
    count_texts = list[str]()
    for kind_name, requested_count in size["wanted"].items():
        if present_counts and present_counts[kind_name] != requested_count:
            count_texts.append(f"{present_counts[kind_name]} of {requested_count} {kind_name}")
        elif requested_count:
            count_texts.append(f"{requested_count} {kind_name if requested_count != 1 else kind_name[:-1]}")
    move_texts = [f"{', '.join(size[move_key])} {move_verb}" for move_key, move_verb in _MOVES if size.get(move_key)]
    return "; ".join([", ".join(count_texts), *move_texts])


_MOVES = (("coming", "to come"), ("going", "to leave"))
