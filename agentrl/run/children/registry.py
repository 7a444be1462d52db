"""The processes of one run by name, the task that keeps each, and what the run records of their restarts.

It creates, ends and counts children; it knows no kind of child and never decides that one is started again.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from agentrl.config import RunConfig
from agentrl.host.child_environment import NOTHING, Withheld
from agentrl.host.disk_space import wait_for_space
from agentrl.run.processes.heartbeat import Pulse
from agentrl.run.processes.launcher import Launcher
from agentrl.run.processes.supervised_child import Child
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.async_calls import Aside
from agentrl.store.run_values import RESTARTED, Value

DISK_RETRY_S = 2.0
"""Seconds until the next attempt of a child, or of a write, after a full disk or a lost database."""

_MAX_DEATHS = 50  # newest deaths that the store keeps
_PINNED = {
    # Threads that wait for work sleep instead of spinning: several processes share the cores of a machine, and one that
    # spins takes them from those that compute.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Huge pages for large blocks: each pass allocates its activations anew, and on a CPU the page faults cost the
    # learner one fifteenth of its time. Only glibc reads it.
    "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
    # Otherwise the tokenizer starts a thread for each core in every worker, and warns at each fork.
    "TOKENIZERS_PARALLELISM": "false",
}
_T = TypeVar("_T")


@dataclass(slots=True)
class _Task:
    """A named task, so that it can be cancelled and awaited by itself."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True, kw_only=True)
class ChildRegistry:
    """All children of one supervisor, whose janitor finds their processes by `mark`. Tasks run in `nursery`."""

    run: RunDir
    config: RunConfig
    writes: Aside[RunStore]
    nursery: trio.Nursery
    mark: Mapping[str, str]
    launcher: Launcher
    restarts: Counter[str] = field(default_factory=Counter[str])
    """How often each child was started again, by name."""
    restarting: set[str] = field(default_factory=set[str])
    """The names of children that are away until their restart has succeeded."""
    is_closing: bool = False
    """True once the run ends its children: a death is no failure any more."""
    children: dict[str, Child] = field(default_factory=dict[str, Child])
    _tasks: dict[str, _Task] = field(default_factory=dict[str, _Task])

    def create(
        self,
        name: str,
        argv: Sequence[str],
        *,
        threads: int,
        env: Mapping[str, str] | None = None,
        withheld: Withheld = NOTHING,
    ) -> Child:
        """Register a child, which is not started yet. `env` is added to the variables that all children have."""
        variables = {**_PINNED, "OMP_NUM_THREADS": str(threads), **(env or {})}
        logs_folder, launcher = self.run.logs, self.launcher
        new_child = Child(name, argv, logs_folder, variables, mark=self.mark, launcher=launcher, withheld=withheld)
        self.children[name] = new_child
        return new_child

    def pulse(self, child: Child, *, silent_s: float, stopped_s: float, names: tuple[str, str]) -> Pulse:
        """A watch over the child's marks, which it makes in scratch. As `Pulse`, which has the deadlines."""
        child.beat = self.run.scratch / "beats" / child.name
        start_deadline_s = self.config.engine.start_deadline_s
        return Pulse(process=child, start_s=start_deadline_s, silent_s=silent_s, stopped_s=stopped_s, names=names)

    def start_task(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        """Run `body` until it returns or `cancel_task` is called with this name."""
        child_task = self._tasks[name] = _Task()

        async def run() -> None:
            try:
                with child_task.scope:
                    await body()
            finally:
                child_task.done.set()

        self.nursery.start_soon(run)

    async def cancel_task(self, name: str) -> None:
        """Cancel the task of that name, if there is one, and wait for its end."""
        child_task = self._tasks.pop(name, None)
        if child_task is not None:
            child_task.scope.cancel()
            await child_task.done.wait()
        self.restarting.discard(name)

    @contextmanager
    def marked_restarting(self, child: Child) -> Generator[None]:
        """Count the child as away during the body."""
        self.restarting.add(child.name)
        try:
            yield
        finally:
            self.restarting.discard(child.name)

    async def remove(self, child: Child) -> None:
        """End the child, give back its place and forget it."""
        # Shielded, since this often runs because something is being cancelled: a child that is not waited for outlives
        # its owner (law 4), and a place that is not given back stays taken on the cluster.
        with trio.CancelScope(shield=True):
            await child.stop()
            self.launcher.release(child.name)
        if self.children.get(child.name) is child:  # else the next one of this name is there already
            del self.children[child.name]

    async def stop(self) -> None:
        """End every child, engines last, so that nobody sees a dead engine as a failure."""
        for stopped_group in (
            [other_child for other_child in self.children.values() if not other_child.name.startswith("engine")],
            self.children.values(),
        ):
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as nursery:
                    for stopped_child in stopped_group:
                        nursery.start_soon(stopped_child.stop)

    def pids(self) -> dict[str, int]:
        """Process ids by child name."""
        return {live_child.name: live_child.pid for live_child in self.children.values() if live_child.pid is not None}

    def report_death(self, child: Child, why: str) -> None:
        """Print why a child that is started again died, and record it for readers of the run. The record is written in
        the background: a restart waits for nothing."""
        print(f"agentrl: {why}; it is started again", file=sys.stderr, flush=True)
        death_row = {"time_s": time.time(), "process": child.name, "why": why}

        def record(store: RunStore) -> None:
            RESTARTED.set(store, [*RESTARTED.of(store.meta), death_row][-_MAX_DEATHS:])

        self.nursery.start_soon(self.write_with_space, record)

    async def write_with_space(self, write: Callable[[RunStore], _T]) -> _T:
        """Write once the disk has space for it."""
        return await wait_for_space(lambda: self.writes(write), every_s=DISK_RETRY_S)

    async def publish(self, value: Value[_T], to: _T) -> None:
        """Write a value of the run, which its processes read."""
        await self.writes(lambda store: value.set(store, to))
