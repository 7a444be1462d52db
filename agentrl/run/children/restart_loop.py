"""The one loop that keeps a child of a run: watch it, find out why it ended, restart it within its budget.

    started ─► watched ─► ended ─┬─ its work is done, or the run closes ──► kept no longer
                  ▲              ├─ a restart would not help ─────────────► the run fails
                  │              ├─ worn out, or no disk or database ─┐
                  │              ├─ an episode killed it ─────────────┤ costs nothing
                  │              └─ any other death ─► budget ────────┤
                  └───────────────────────────────────────────────────┴─► no room: dropped

A hang is a death: `watch` kills a child that hangs, so there is one way to a restart and not two.

A child that says itself why it had to end (it wore out, the disk was full, the database away) costs none of its budget.
On a full disk all children die at once and again and again; a budget of five would end a run that only needs space. The
supervisor's own deadlines bound how long that may last.

A child may die once more while it is being restarted, before anything watches it. `_restart` therefore holds the error
of a failed attempt against the same budget and tries again. Leaving that to the next round of the loop was not enough:
an engine that hung half-started had not ended, so the loop waited for it for ever.

The loop owns no kind of child: what differs between engine, worker and learner is in the hooks of `WatchedChild`.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from agentrl.errors import AgentRLError, DiskFull, RunFailed, StoreAway, UsageError, WornOut
from agentrl.run.children.registry import DISK_RETRY_S, ChildRegistry
from agentrl.run.cluster.scaling import NoRoom
from agentrl.run.processes.exit_status import ENDS_THE_RUN
from agentrl.run.processes.restart_budget import RestartBudget
from agentrl.run.processes.supervised_child import Child

_FINAL = (UsageError.exit_code, ENDS_THE_RUN)
_WAITS_FOR_SPACE = (DiskFull.exit_code, StoreAway.exit_code)


class WatchedChild:
    """One child and the loop that keeps it. As it stands, the child is watched by nobody and restarted at once."""

    def __init__(self, child: Child, registry: ChildRegistry) -> None:
        self.child, self.registry = child, registry

    # --- override these; they stand in the order of a child's life

    async def watch(self, lives: Callable[[], None]) -> None:
        """Watch the running child until cancelled, call `lives` at each sign of life, and kill it if it hangs."""
        await trio.sleep_forever()

    def is_done(self, status: int) -> bool:
        """True if a child that ended with this exit status has done its work."""
        return False

    async def renew(self) -> None:
        """Prepare another process of a child that ended because it is worn out."""
        self.registry.restarts[self.child.name] += 1

    async def was_innocent(self, budget: RestartBudget) -> bool:
        """Clean up after a death. Returns True if something else caused it; such a death costs no budget."""
        return False

    async def restart(self) -> None:
        """Start the child again; return when others can count on it."""
        self.child.start()

    def is_final(self, error: AgentRLError) -> bool:
        """True if no other attempt shall follow after this error of `restart`. A child without which the run goes on
        says so of NoRoom, and is dropped then."""
        return False

    async def drop(self) -> None:
        """Remove the child from the run, since nothing has room for it: from now on it is one that may yet come."""
        await self.registry.remove(self.child)

    # --- the loop

    def start_keeping(self) -> None:
        """Keep the child, in a task that has its name."""
        self.registry.start_task(self.child.name, self.keep)

    async def keep(self) -> None:
        """Watch the running child and restart it. Returns when it has done its work, was dropped, or the run closes.

        Raises RunFailed if its budget is spent or a restart would not help."""
        restart_budget = RestartBudget()
        while True:
            restart_budget.begin()
            exit_status = await self._wait(restart_budget)
            # Asked before the status is read: at the end of a run children die of signals, and each would be reported
            # as a crash and started again.
            if self.registry.is_closing or self.is_done(exit_status):
                return
            failure_text = self.child.failure(exit_status)
            if exit_status in _FINAL:
                raise RunFailed(failure_text)
            if exit_status == WornOut.exit_code:
                await self.renew()
                self.child.start()
            elif exit_status in _WAITS_FOR_SPACE:
                await trio.sleep(DISK_RETRY_S)
                self.registry.restarts[self.child.name] += 1
                self.child.start()
            elif await self.was_innocent(restart_budget):
                self._report_restart(failure_text)
                self.child.start()
            else:
                with self.registry.marked_restarting(self.child):
                    try:
                        await self._restart(restart_budget, failure_text)
                    except NoRoom:
                        await self.drop()
                        return

    async def _wait(self, budget: RestartBudget) -> int:
        """Wait under `watch` until the child has ended. Returns its exit status."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.watch, budget.lives)
            exit_status = await self.child.wait()
            nursery.cancel_scope.cancel()
        return exit_status

    async def _restart(self, budget: RestartBudget, why: str) -> None:
        """Restart the child; if it dies while it starts, again, as often as its budget allows. Raises a final error."""
        while True:
            # The budget waits before it lets a start through, longer each time, and raises once it is spent. So a child
            # that dies at once does not use up five starts in a second, during an outage that would have been over in a
            # minute.
            await budget.spend(why)
            if self.registry.is_closing:
                return
            self._report_restart(why)
            try:
                await self.restart()
                return
            except AgentRLError as error:
                if self.is_final(error):
                    raise
                why = str(error)
                # Killed before the next attempt, although it has just failed: a start that failed by its deadline has
                # left a process that may still come up, with the port and the GPU of its successor.
                await self.child.end()

    def _report_restart(self, why: str) -> None:
        self.registry.restarts[self.child.name] += 1
        self.registry.report_death(self.child, why)
