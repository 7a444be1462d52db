"""Starts a run's children on the nodes of a Ray cluster. It and `ray_head` alone import ray.

    supervisor ── RayLauncher ── one placement group: a bundle for each child that no run is without
                     │           (learner, engine-0, worker-0 …); a demand of its own for each other one
                     │ looks (0.5 s), which renew its lease
                     ▼
                 Seat (actor on a node) ── child (a process of its own group, output in the run's folder)

So the least run is placed whole or not at all, and children that come and go take and give back their own resources:
Ray's autoscaler sees each that waits for a node.

A `Seat` keeps the child of one name. It outlives the child, which is started again in place; if the seat or its node is
lost, another seat is placed. The child cannot outlive its seat (its lifeline, and a janitor on its node), and a seat
cannot outlive the run: Ray ends it with the supervisor, and it ends itself when nobody has looked for `lease_s`. Only
after this time the supervisor counts the child of a lost seat as dead, so that no two processes of a name run.

All nodes must see the run's folder, and find the interpreter and the model's folder under the same paths.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
import ray.exceptions
import ray.util
import trio
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.config import RunConfig
from agentrl.engine.embedded_process import end_group
from agentrl.errors import RunFailed, UsageError
from agentrl.host.janitor import OwnedFolder
from agentrl.host.ports import free_port
from agentrl.run.cluster import ray_head
from agentrl.run.cluster.ray_head import beside, called, result
from agentrl.run.cluster.scaling import NoRoom, Size
from agentrl.run.processes.exit_status import ENDS_THE_RUN
from agentrl.run.processes.keep_alive import AGAIN
from agentrl.run.processes.launcher import NODE_TMP, ChildCommand, ClusterLost, Local, LocalProcess
from agentrl.run.run_folder import RunDir
from agentrl.store.databases.open_store import ADDRESS

Ranks = Callable[[], Awaitable[int]]

_LOOK_S = 0.5
_CALL_S = 10.0  # for an answer of the head that the run can do without
_RAY: Any = ray  # they are typed in parts only
_UTIL: Any = ray.util
_OURS = ("RAY_", "CUDA_", "AGENTRL_")  # variables that a node has of its own


@dataclass(frozen=True, slots=True)
class Look:
    """State of a seat's child."""

    pid: int | None = None
    status: int | None = None
    count: int = 0
    stopped: bool = False


class Seat:
    """Actor on a node: it starts the child of one name there, one after the other, and ends with it."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s, self._heard = lease_s, time.monotonic()
        self._owner = OwnedFolder(prefer_memory=False)
        self._child: LocalProcess | None = None
        self._status: int | None = None
        # A thread of the actor's own watches its lease. A method of the actor could not: it would have to be called,
        # and being cut off is exactly that nobody calls.
        threading.Thread(target=self._end_when_cut_off, daemon=True).start()

    def sees(self, marker: str, text: str) -> tuple[str, str, bool]:
        """The node's id and address, and whether it reads this text in the run's folder."""
        self._heard = time.monotonic()
        with suppress(OSError):
            return _RAY.get_runtime_context().get_node_id(), _host(), Path(marker).read_text() == text
        return "", _host(), False

    def place(self, port: int) -> tuple[str, int]:
        """The node's address, and a port to serve on: `port` if nobody has it."""
        node_host = _host()
        return node_host, free_port(node_host, first=port)

    def start(self, command: ChildCommand, defaults: Mapping[str, str]) -> Look:
        """Start the child. What is left of an earlier one is ended."""
        self._heard = time.monotonic()
        self.end(True)
        temporary = self._owner.path / "tmp"
        temporary.mkdir(exist_ok=True)
        # Ray has chosen this seat's GPUs on this node. The supervisor's own numbers are those of another machine.
        own_variables = {
            variable_name: variable_value
            for variable_name, variable_value in command.env.items()
            if variable_name != "CUDA_VISIBLE_DEVICES"
        }
        variables = command.withheld.without(defaults)
        missing_variables = {
            variable_name: variable_value
            for variable_name, variable_value in variables.items()
            if variable_name not in os.environ
        }
        beat_path = None if command.beat is None else self._owner.path / "beat"
        environment = {**missing_variables, **command.variables(), **own_variables, NODE_TMP: str(temporary)}
        local_command = replace(command, env=environment, beat=beat_path, mark=self._owner.mark)
        self._status, self._child = None, Local().start("", local_command)
        return self.look()

    def look(self) -> Look:
        """Return the child's state and renew the lease."""
        self._heard = time.monotonic()
        seated_child = self._child
        if seated_child is None:
            return Look()
        if self._status is None and (exit_status := seated_child.poll()) is not None:
            trio.run(end_group, seated_child.pid)
            self._status = exit_status
        has_beats = seated_child.beat is not None
        return Look(seated_child.pid, self._status, seated_child.count() if has_beats else 0, seated_child.stopped())

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def dump(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.dump()

    def end(self, group: bool) -> None:
        """Kill the child."""
        if self._child is not None:
            self._child.kill(group=group)
            if group:
                self._child.process.wait()

    def _end_when_cut_off(self) -> None:
        while time.monotonic() - self._heard < self._lease_s:
            time.sleep(min(_LOOK_S, self._lease_s / 4))
        if self._child is not None:
            self._child.kill(group=True)
        os._exit(1)  # the janitor ends the rest


@dataclass(slots=True)
class RayProcess:
    """A child on some node; the launcher writes its latest state into `last`."""

    last: Look = Look()
    seat: Any = None  # the actor's handle, once the child is started
    killed: bool = False
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def pid(self) -> int | None:
        return self.last.pid

    def poll(self) -> int | None:
        return self.last.status if self.ended.is_set() else None

    async def wait(self) -> int:
        await self.ended.wait()
        assert self.last.status is not None
        return self.last.status

    def terminate(self) -> None:
        if self.seat is None:
            self.killed = True
        else:
            self.seat.terminate.remote()

    def kill(self, *, group: bool = False) -> None:
        self.killed = True
        if self.seat is not None and not self.ended.is_set():
            self.seat.end.remote(group)

    def count(self) -> int:
        return self.last.count

    def stopped(self) -> bool:
        return self.last.stopped

    def dump(self) -> None:
        if self.seat is not None:
            self.seat.dump.remote()

    def end(self, status: int) -> None:
        self.last = replace(self.last, status=status)
        self.ended.set()


class RayLauncher:
    """Starts children by name, with places for a run of `size` to begin with. `nursery` looks after them."""

    def __init__(self, run: RunDir, config: RunConfig, size: Size, nursery: trio.Nursery, ranks: Ranks) -> None:
        self._run, self._cluster, self._nursery = run, config.cluster, nursery
        self._config, self._ranks = config, ranks
        self._size = size
        self._bundles: dict[str, dict[str, float]] = {}
        self._group: Any = None
        self._seats: dict[str, Any] = {}
        self._nodes: dict[str, str] = {}  # the ids of their nodes
        self._head, self._job = ray_head.here(), ray_head.job()
        self.lost = False  # the head is: it gets no more calls
        self._asking: set[trio.CancelScope] = set()
        self._marker = run.path.resolve() / ".seen-by-all-nodes"
        self._text = secrets.token_hex(8)

    async def open(self) -> None:
        """Reserve the nodes and seat every child. Raises UsageError if the cluster is too small or a node does not see
        the run's folder."""
        first_bundles = bundles(self._config, self._size, await self._ranks())
        self._bundles = {
            child_name: requirement
            for child_name, requirement in first_bundles.items()
            if _always(child_name, self._config)
        }
        self._marker.write_text(self._text)
        self._nursery.start_soon(self._renew)
        await called(self._reserve)
        try:
            await result(self._group.ready(), self._cluster.place_deadline_s)
        except trio.TooSlowError:
            raise UsageError(f"{await self._no_place(list(self._bundles.values()))}; {self._hint}") from None
        async with trio.open_nursery() as nursery:
            for child_name in first_bundles:
                nursery.start_soon(self._seat_first, child_name)

    async def _seat_first(self, name: str) -> None:
        try:
            await self._seat(name)
        except NoRoom as error:
            raise UsageError(f"{error}; {self._hint}") from None

    async def _renew(self) -> None:
        """Renew the leases of seats without a child, too."""
        while True:
            await trio.sleep(self._cluster.lease_s / 4)
            for seat_actor in self._seats.values():
                seat_actor.look.remote()

    def _reserve(self) -> None:
        # One placement group for what no run is without: it is granted as a whole or not at all. Two runs that each get
        # half of a cluster, child by child, would both wait for the other half for ever.
        self._group = _UTIL.placement_group([bundle | self._here for bundle in self._bundles.values()], strategy="PACK")

    @property
    def _here(self) -> dict[str, float]:
        """Return the resource that ties a child to this node if a child on another node could not write the store."""
        return {} if self._run.store_path.name == ADDRESS else {f"node:{_host()}": 0.001}

    async def _no_place(self, requested_bundles: Sequence[Mapping[str, float]]) -> str:
        total_need = {
            resource: sum(bundle.get(resource, 0.0) for bundle in requested_bundles) for resource in ("CPU", "GPU")
        }
        refusal_text = f"Ray found no place for {_describe(total_need)} within {self._cluster.place_deadline_s:g} s"
        with trio.move_on_after(_CALL_S):
            live_nodes = [node_info for node_info in await called(_RAY.nodes) if node_info["Alive"]]
            capacities = "; ".join(
                f"{node_info['NodeManagerAddress']}: {_describe(node_info['Resources'])}" for node_info in live_nodes
            )
            free_text = _describe(await called(_RAY.available_resources))
            return f"{refusal_text} (cluster.place_deadline_s); nodes: {capacities}; free now: {free_text}"
        return f"{refusal_text} (cluster.place_deadline_s), and its head does not answer"

    @property
    def _hint(self) -> str:
        if self._here:
            return "a store in SQLite keeps all on this node: give cluster.store = 'postgresql://USER@HOST/NAME'"
        return "add a node (ray start --address=HEAD:6379), or lower rollout.workers and the like"

    async def place(self, name: str, port: int) -> tuple[str, int]:
        """Return the address of the seat's node and a port there. See `Launcher.place`."""
        seat_actor = await self._seat(name)
        try:
            return cast("tuple[str, int]", await result(seat_actor.place.remote(port), self._cluster.place_deadline_s))
        except (trio.TooSlowError, ray.exceptions.RayError) as error:
            self._drop(name)
            raise RunFailed(f"{name}: its node was lost before it began ({_line(error)})") from None

    async def reserve(self, name: str) -> None:
        await self._seat(name)

    def release(self, name: str) -> None:
        self._drop(name)

    def start(self, name: str, command: ChildCommand) -> RayProcess:
        """Start the child in its seat, or in a new one if that is lost; returns at once."""
        ray_process = RayProcess()
        self._nursery.start_soon(self._follow, name, command, ray_process)
        return ray_process

    async def watch(self) -> None:
        """See `Launcher.watch`. A child that no call can end is ended by its lease."""
        silent_s = self._cluster.place_deadline_s
        try:
            loss_text = await ray_head.watch(self._head, self._job, away_s=self._cluster.head_away_s, silent_s=silent_s)
            problem = (
                f"Ray's head at {self._head} {loss_text}, and its cluster is gone with it. Once there is a new one"
            )
        except ray_head.JobEnded:
            problem = (
                "Ray lost the node of this machine (its raylet ended), and ends all processes of a run whose supervisor"
                f" was on it. Start it again (ray start --address={self._head})"
            )
        self.lost = True
        for cancel_scope in self._asking:
            cancel_scope.cancel()
        resume_hint = (
            f"go on with agentrl train --resume {self._run.path} (with --keep-alive a run waits for it by itself)"
        )
        raise ClusterLost(f"{problem}, {resume_hint}")

    async def close(self) -> None:
        """End every seat and give the nodes back."""
        self._marker.unlink(missing_ok=True)
        if self.lost:
            return

        def end() -> None:
            for seat_actor in self._seats.values():
                _RAY.kill(seat_actor)
            if self._group is not None:
                _UTIL.remove_placement_group(self._group)

        with trio.CancelScope(shield=True), trio.move_on_after(_CALL_S), suppress(ray.exceptions.RayError):
            await called(end)

    # --- one child

    async def _seat(self, name: str) -> Any:
        """The seat of that name, a new one if there is none. Raises UsageError for a node without the run's folder,
        NoRoom if none is placed in time."""
        if name in self._seats:
            return self._seats[name]
        requirement, placement = demand(self._config, name, await self._ranks()), dict[str, Any]()
        if name in self._bundles:
            bundle_index = list(self._bundles).index(name)
            placement["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle_index
            )
        else:
            placement["resources"] = self._here
        actor_class = _RAY.remote(num_cpus=requirement["CPU"], num_gpus=requirement.get("GPU", 0))(Seat).options(
            name=f"{name}.{secrets.token_hex(3)}",
            **placement,
            # Else Ray's worker kills the janitor, before it has ended what the child left.
            runtime_env={"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}},
        )
        seat_actor: Any = None
        try:
            seat_actor = await called(partial(actor_class.remote, self._cluster.lease_s))
            # Asked at once whether this node sees the run's folder: without it the child would start, find no store or
            # no model, and die with an error about a missing file that names a path which exists.
            pending_look = seat_actor.sees.remote(str(self._marker), self._text)
            node_id, node_host, sees_folder = await result(pending_look, self._cluster.place_deadline_s)
        except BaseException as error:
            # A seat that was requested and is not wanted any more must be killed by hand, or Ray places it later, and
            # it holds a GPU that nobody knows of until its lease ends.
            if seat_actor is not None:
                self._kill(seat_actor)
            if isinstance(error, trio.TooSlowError):
                raise NoRoom(f"{name}: {await self._no_place([requirement])}") from None
            if isinstance(error, ray.exceptions.RayError):
                raise RunFailed(f"{name}: its node was lost before it began ({_line(error)})") from None
            raise
        if not sees_folder:
            self._kill(seat_actor)
            correction = "put --out on a file system that all nodes mount at the same path"
            raise UsageError(f"node {node_host} does not see the run's folder {self._marker.parent}: {correction}")
        self._seats[name], self._nodes[name] = seat_actor, node_id
        return seat_actor

    @contextmanager
    def _while_there_is_a_head(self) -> Generator[None]:
        """The body ends, without an error, when the head is lost."""
        with trio.CancelScope() as cancel_scope:
            self._asking.add(cancel_scope)
            if self.lost:
                cancel_scope.cancel()
            try:
                yield
            finally:
                self._asking.discard(cancel_scope)

    async def _follow(self, name: str, command: ChildCommand, process: RayProcess) -> None:
        """Start the child and look at it until it has ended. A lost seat's child has ended when its lease has."""
        last_answer_s = trio.current_time()
        try:
            seat_actor: Any = None
            with self._while_there_is_a_head():
                seat_actor = await self._seat(name)
            if seat_actor is None or process.killed:
                process.end(-signal.SIGKILL)
                return
            defaults = {
                variable_name: variable_value
                for variable_name, variable_value in os.environ.items()
                if not variable_name.startswith(_OURS)
            }
            process.seat, last_answer_s = seat_actor, trio.current_time()
            process.last = await result(seat_actor.start.remote(_portable(command), defaults), self._cluster.lease_s)
            while process.last.status is None:
                last_answer_s = trio.current_time()
                await trio.sleep(_LOOK_S)
                process.last = await result(seat_actor.look.remote(), self._cluster.lease_s)
            process.ended.set()
        except (UsageError, RunFailed) as error:
            command.error.write_text(f"{error}\n")
            process.end(ENDS_THE_RUN if isinstance(error, UsageError) else 1)
        except (trio.TooSlowError, ray.exceptions.RayError) as error:
            self._drop(name)
            if not process.killed:
                command.error.write_text(f"its node or its Ray actor was lost ({_line(error)})\n")
            # If Ray is certain that the actor died, on a node that is well, its child died with it and can be started
            # again at once. Otherwise the node may only be cut off with the child alive on it, and a second process of
            # the same name must wait until the lease has certainly ended.
            with trio.move_on_at(last_answer_s + self._cluster.lease_s):  # it may be cut off, and live until then
                actor_died = isinstance(error, ray.exceptions.ActorDiedError)
                if not actor_died or not await called(partial(_lives, self._nodes.get(name))):
                    await trio.sleep_forever()
            process.end(-signal.SIGKILL)

    def _drop(self, name: str) -> None:
        if (seat_actor := self._seats.pop(name, None)) is not None:
            self._kill(seat_actor)

    def _kill(self, seat: Any) -> None:
        """End a seat, which Ray does through its head: nobody waits for it."""

        async def end() -> None:
            with suppress(ray.exceptions.RayError):
                await called(partial(_RAY.kill, seat))

        if not self.lost:
            self._nursery.start_soon(end)


def bundles(config: RunConfig, size: Size, ranks: int) -> dict[str, dict[str, float]]:
    """Return what Ray reserves for each child, by name, in a run of this size whose learner has `ranks` ranks."""
    engine_names = [f"engine-{number}" for number in range(size.engines)]
    engine_names += [f"engine-role-{role}-{number}" for role in config.role_models for number in range(size.engines)]
    engine_names += [f"engine-given-{number}" for number in range(len(config.rollout.frozen_models()))]
    child_names = [*engine_names, *(f"worker-{number}" for number in range(size.workers)), "learner"]
    return {child_name: demand(config, child_name, ranks) for child_name in child_names}


def demand(config: RunConfig, name: str, ranks: int) -> dict[str, float]:
    """Return what Ray reserves for the child `name`; `ranks` is the number of the learner's ranks."""
    cluster, rank_count = config.cluster, 1
    if name == "learner":
        cluster_part, rank_count = cluster.learner, ranks
    else:
        cluster_part = cluster.engine if name.startswith("engine") else cluster.workers
    gpu_count = getattr(cluster_part, "gpus", 0)
    return {"CPU": rank_count * cluster_part.cpus} | ({"GPU": float(rank_count * gpu_count)} if gpu_count else {})


def _always(name: str, config: RunConfig) -> bool:
    """Whether no run is without it, however small it becomes, and it keeps its size."""
    is_fixed_learner = name == "learner" and config.cluster.controller is None
    return is_fixed_learner or name.endswith("-0") or name.startswith("engine-given-")


@asynccontextmanager
async def connected(
    run: RunDir,
    config: RunConfig,
    size: Size,
    ranks: Ranks,
    meanwhile: Callable[[], Awaitable[object]] = trio.sleep_forever,
) -> AsyncGenerator[RayLauncher]:
    """A launcher on the cluster at `cluster.address`, for a run that begins with `size`, and a learner of as many
    `ranks` as it is to have whenever it gets a place; all that it placed is released at the end. `meanwhile` runs until
    the body begins, which may be long after: what it raises ends the wait.

    Raises UsageError if there is no such cluster, or no room in it."""
    joins_here, cluster = not _RAY.is_initialized(), config.cluster
    is_lost = False
    if joins_here:
        async with beside(meanwhile):
            await ray_head.join(
                cluster.address, cluster.place_deadline_s, again=run.path if os.environ.pop(AGAIN, None) else None
            )
    try:
        async with trio.open_nursery() as nursery:
            launcher = RayLauncher(run, config, size, nursery, ranks)
            try:
                async with beside(meanwhile, launcher.watch):
                    await launcher.open()
                yield launcher
            finally:
                await launcher.close()
                is_lost = launcher.lost
                nursery.cancel_scope.cancel()
    finally:
        if joins_here:
            await ray_head.leave(lost=is_lost)


def _portable(command: ChildCommand) -> ChildCommand:
    """Spell out the command's folders, since a node has another working folder. This interpreter becomes the seat's
    own."""
    absolute_paths = {field_name: getattr(command, field_name).resolve() for field_name in ("log", "error")}
    own_variables = command.variables()
    python_path = {"PYTHONPATH": own_variables["PYTHONPATH"]}
    return replace(command, **absolute_paths, env={**python_path, **command.env}, python=sys.executable)


def _lives(node: str | None) -> bool:
    """Whether a node is well, so that Ray knows of a dead actor of it that it is dead."""
    return any(node_entry["Alive"] and node_entry["NodeID"] == node for node_entry in _RAY.nodes())


def _host() -> str:
    return str(_UTIL.get_node_ip_address())


def _describe(resources: Mapping[str, float]) -> str:
    return (
        ", ".join(f"{resources[resource]:g} {resource}" for resource in ("CPU", "GPU") if resources.get(resource))
        or "none free"
    )


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
