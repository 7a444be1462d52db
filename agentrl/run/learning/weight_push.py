"""How the weights of a step come to the engines, beside the next step (law 6).

    start    torch: write or copy the weights ─► mint a version ─► a job ──────────────────────► settle
    the job                                       deliver to every engine ─► confirm ─► the step's row ─► tidy

The weights are copied between two steps, since the next step changes the originals while engines still read. The row
of a step is recorded with its push: a step counts for those who read the run once its weights are served. At most one
push is under way; whoever starts the next one has settled it before. Never knows what a row says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import trio

from agentrl.engine.weight_sync.transport import MemoryParcel, Parcel
from agentrl.engine.weight_sync.weight_lock import WeightLock
from agentrl.records import WeightVersion
from agentrl.run.league import League
from agentrl.run.learning.background import Job, TorchThread
from agentrl.run.learning.store_calls import StoreCalls
from agentrl.run.learning.weight_parcels import ParcelMaker
from agentrl.run.processes.heartbeat import BEAT_S
from agentrl.run.reporting import notice_counts
from agentrl.run.telemetry import Telemetry
from agentrl.run.weights.gpu_turns import Turns
from agentrl.run.weights.role_policies import Publishers
from agentrl.store import RunStore

_RESEND_S = 1.0  # between two checks of the engines' versions while the learner waits


def leader_meta(store: RunStore, key: str) -> str | None:
    """Return a value of the store's `meta`, for a publisher that asks again and again where the engines are. Raises
    LeaseLost once another learner leads."""
    store.lineage.still_leads()
    return store.meta(key)


# Why a push overlaps the next step, and why it may not overlap more.
#
# If the learner waited until every engine serves the new weights, the two would take turns: an engine that restarts for
# a minute would stop training for a minute, which law 6 forbids. So the push is a job of its own. Its weights are a
# copy in a file or in memory, taken between two steps on torch's thread: the originals change with the next step, while
# engines still read.
#
# At most one push is under way. With two, an engine could confirm a newer version before an older one and then take the
# older one, and its tokens would carry a version that it no longer serves. It would also hide a fleet that takes
# weights more slowly than the learner makes them; now the learner waits in `settle`, and the time is counted as idle.
#
# An error of the push is raised by whoever settles it, which is the loop after its next step. So a step under way is
# finished and can be saved. While the learner waits for groups nobody would settle, and no group may ever come without
# the version that failed: `look` is called then.
#
# The row of a step is written by its push and not by its step. A reader that sees the row may count on engines that
# serve its weights, and the cost of the push belongs to the row. A checkpoint waits for the push as well: the canary
# finds weights that an engine did not take, and a checkpoint of such a step would carry the fault on.
class WeightPush:
    """Sends the weights that `parcels` packs. `pin` keeps a version's weights if an evaluation needs them. Engines that
    no file can serve (`in_memory`) get them again from a learner that waits. `patience_s` is longer than any delivery
    takes: a push that takes longer is no sign of life."""

    def __init__(
        self,
        parcels: ParcelMaker,
        publisher: Publishers,
        calls: StoreCalls,
        torch: TorchThread,
        nursery: trio.Nursery,
        telemetry: Telemetry,
        mark: Callable[[], None],
        *,
        pin: Callable[[WeightVersion, Path], None],
        in_memory: bool,
        patience_s: float,
        league: League | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._parcels, self._publisher, self._calls, self._torch = parcels, publisher, calls, torch
        self._nursery, self._telemetry, self._mark, self._pin = nursery, telemetry, mark, pin
        self._in_memory, self._patience_s, self._league, self._turns = in_memory, patience_s, league, turns
        self._resend_at = trio.current_time() if in_memory else math.inf
        self.under_way: Job | None = None

    async def start(self, row: dict[str, Any]) -> WeightVersion:
        """Take the learner's weights, have it leave a GPU that it shares, and start to send them. The metrics `row` of
        the step is recorded when every engine has them."""
        trained_step, weight_lock = self._parcels.step, None
        if self._turns is not None:
            await self._turns.begin_leaving()
        if self._in_memory:
            new_version = await self._calls(lambda store: store.versions.mint_version(trained_step))
            role_parcels = await self._torch.run(lambda: self._parcels.of_memory(new_version))
        else:
            written_weights = await self._torch.run(self._parcels.write_files)
            self._mark()
            # Minted after the file is whole: a version in the store with half a file would be loaded by an engine that
            # starts right then.
            new_version = await self._calls(
                lambda store: store.versions.mint_version(trained_step, written_weights.path)
            )
            role_parcels = await self._torch.run(lambda: self._parcels.of_files(new_version, written_weights))
            weight_lock = None if self._turns is None else await self._turns.end()
        self.under_way = Job(self._nursery, partial(self._send, new_version, role_parcels, row, weight_lock))
        return new_version

    async def settle(self) -> float:
        """Wait for the push under way. Returns how long that took, in seconds. Raises the push's error."""
        wait_began_s = trio.current_time()
        push_job, self.under_way = self.under_way, None
        if push_job is not None:
            await push_job.wait(lambda: self._beat(wait_began_s), BEAT_S)
            await push_job.result()
        return trio.current_time() - wait_began_s

    def _beat(self, started: float) -> None:
        # A wait for engines is a sign of life for a bounded time only. Marked for ever, a push that hangs in a call
        # without a deadline would keep a dead learner alive (law 4).
        if trio.current_time() - started < self._patience_s:
            self._mark()

    async def look(self) -> None:
        """While the learner waits: raise the error of a push that failed, since no group may ever come without its
        version; send the current weights again to engines that were restarted, or that the run attached to."""
        if self.under_way is not None:
            if self.under_way.has_ended:
                await self.settle()
        elif trio.current_time() >= self._resend_at:
            self._resend_at = trio.current_time() + _RESEND_S
            current_version = await self._calls(lambda store: store.versions.current_version())
            # Only if the weights in memory are those of the current version: after an update that was not pushed yet
            # they are not, and engines would be given newer weights under an older number (law 1).
            if current_version.step == self._parcels.step and await self._publisher.behind(current_version.version):
                role_parcels = await self._torch.run(lambda: self._parcels.of_memory(current_version))
                self.under_way = Job(self._nursery, partial(self._send, current_version, role_parcels, {}))

    async def is_behind(self, version: int) -> bool:
        """Whether some engine serves another version."""
        return await self._publisher.behind(version)

    def urls(self) -> list[str]:
        """Where the engines serve now. Asks the store."""
        return self._publisher.urls()

    async def end(self) -> None:
        """Let the attempt under way come to its end, and no other one begin; nobody gets its error any more."""
        self._publisher.end()
        wait_began_s = trio.current_time()
        if self.under_way is not None:
            await self.under_way.wait(lambda: self._beat(wait_began_s), BEAT_S)

    async def _send(
        self,
        version: WeightVersion,
        parcels: Mapping[str | None, Parcel | MemoryParcel],
        row: dict[str, Any],
        held: WeightLock | None = None,
    ) -> None:
        """Send the weights to every engine, confirm the version, drop the versions that nobody needs any more."""
        try:
            push_costs = await self._publisher.deliver(parcels, held)
        finally:
            if held is not None:
                held.let_go()
        if self._turns is not None:
            push_costs |= self._turns.cost()
        if self._league is not None:  # first: groups that this version admits draw from all members before it
            await self._league.announce(await trio.to_thread.run_sync(self.urls))
        main_parcel = parcels[None]
        if row and isinstance(main_parcel, Parcel):
            await self._calls.write_file(lambda: self._pin(version, main_parcel.path))
        # The pin came before the confirmation: a learner that is killed in between must not leave a version that counts
        # as served and that no evaluation can measure any more.
        await self._calls(lambda store: store.versions.confirm_version(version))
        if row:
            step_values = {**row, **push_costs, "version": version.version}
            await self._calls(lambda store: store.metrics.record("step", version.step, step_values))
            await self._calls.write_file(lambda: self._telemetry.append("step", version.step, step_values))
        await self._calls(lambda store: notice_counts.record(store.metrics, version.step))
        await self._publisher.tidy()
