"""The workers of a run: they play its episodes, and the first one serves its reward sources to all.

They come and go while the run goes on. A dead worker is simply started again: its leases are released, and its episodes
go on from the journal.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from agentrl.errors import AgentRLError
from agentrl.run.children.child_secrets import engine_key_variables
from agentrl.run.children.registry import ChildRegistry
from agentrl.run.children.restart_loop import WatchedChild
from agentrl.run.cluster.scaling import NoRoom
from agentrl.run.processes.restart_budget import RestartBudget
from agentrl.run.processes.supervised_child import Child
from agentrl.store.run_values import WORKERS

_STEPS = 4  # a worker that leaves has ended its own work after so many deadlines of a step


@dataclass(slots=True)
class Workers:
    """The workers by number."""

    registry: ChildRegistry
    by_number: dict[int, Child] = field(default_factory=dict[int, Child])

    async def start(self, count: int) -> None:
        """Start `count` workers, which wait for the engines."""
        self.by_number = {number: self.create(number) for number in range(count)}
        await self._publish()
        for number in self.by_number:
            self._begin(number)

    def create(self, number: int) -> Child:
        """A worker that is not started yet."""
        registry, config = self.registry, self.registry.config
        arguments = ["-m", "agentrl.run.processes.child", "worker", str(registry.run.path), str(number)]
        # Python orders the strings of a set by this seed. An author's code that goes through a set then gives all
        # members of a group the same task, whichever worker plays them.
        hash_seed = str(zlib.crc32(f"agentrl {config.seed}".encode()))
        variables = {"PYTHONHASHSEED": hash_seed, **engine_key_variables(config, signs=False)}
        return registry.create(f"worker-{number}", arguments, threads=1, env=variables)

    def _begin(self, number: int) -> None:
        watched_worker = WatchedWorker(number, self)
        watched_worker.child.start()
        watched_worker.start_keeping()

    async def _publish(self) -> None:
        """Write which workers there are into the store: they share the episodes, and one that is not named leaves."""
        await self.registry.publish(WORKERS, sorted(self.by_number))

    def present(self) -> set[int]:
        """The numbers of workers that work or are being restarted."""
        return set(self.by_number)

    async def join(self, number: int) -> None:
        """Start one more. Raises NoRoom if there is no place for it in time; nothing of it is left then."""
        new_worker = self.create(number)
        try:
            await self.registry.launcher.reserve(new_worker.name)
        except BaseException:
            await self.registry.remove(new_worker)
            raise
        self.by_number[number] = new_worker
        await self._publish()
        self._begin(number)

    async def leave(self, number: int) -> None:
        """End one, once it has handed its episodes to others."""
        leaving_worker = self.by_number.pop(number)
        # The loop that keeps it goes first, or the worker's end would be taken for a death and it would be started
        # again.
        await self.registry.cancel_task(leaving_worker.name)
        await self._publish()
        with trio.move_on_after(_STEPS * self.registry.config.rollout.step_deadline_s):
            await leaving_worker.wait()
        await self.registry.remove(leaving_worker)
        await self.release_dead_worker(leaving_worker, RestartBudget())  # of episodes that it did not hand over in time

    async def release_dead_worker(self, child: Child, budget: RestartBudget) -> bool:
        """Release the leases of a dead worker. Returns True if one of its episodes crashed it; such a death does not
        count against the restart budget."""
        # With the process id, as a worker registers itself by it: the leases of the dead process are freed and not
        # those of a successor that has started already.
        worker_name = f"{child.name}.{child.pid}"
        released_leases = await self.registry.write_with_space(lambda store: store.deaths.release_worker(worker_name))
        for _ in released_leases.quarantined:
            budget.forgive()  # gives back the earlier death, before the episode was known as its cause
        return released_leases.foretold

    async def drop(self, number: int) -> None:
        """Remove a worker for which there is no room."""
        await self.registry.remove(self.by_number.pop(number))
        await self._publish()


class WatchedWorker(WatchedChild):
    """A worker that works. All but the first are dropped where the cluster has no room: the first serves rewards."""

    def __init__(self, number: int, workers: Workers) -> None:
        super().__init__(workers.by_number[number], workers.registry)
        silence_limit_s, setting_name = self.registry.config.rollout.hang_deadline_s, "rollout.lease_s / 2"
        self._number, self._workers = number, workers
        self._pulse = self.registry.pulse(
            self.child, silent_s=silence_limit_s, stopped_s=silence_limit_s, names=(setting_name, setting_name)
        )

    async def watch(self, lives: Callable[[], None]) -> None:
        await self._pulse.run(self.child.kill, lives)

    async def was_innocent(self, budget: RestartBudget) -> bool:
        return await self._workers.release_dead_worker(self.child, budget)

    async def restart(self) -> None:
        await self.registry.launcher.reserve(self.child.name)
        self.child.start()

    def is_final(self, error: AgentRLError) -> bool:
        return isinstance(error, NoRoom) and self._number > 0

    async def drop(self) -> None:
        await self._workers.drop(self._number)
