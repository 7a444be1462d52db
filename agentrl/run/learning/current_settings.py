"""The run's configuration as the learner has it now: some settings, and the number of ranks, change while a run goes
on (`agentrl.run.live_settings`, `agentrl.run.cluster.scale_requests`)."""

from __future__ import annotations

from typing import Any

from agentrl.config import RunConfig
from agentrl.run import live_settings
from agentrl.run.cluster import scale_requests
from agentrl.run.learning.store_calls import StoreCalls
from agentrl.run.run_folder import RunDir


class CurrentSettings:
    """`config` is the configuration that holds now, for a learner over `ranks`."""

    def __init__(self, run: RunDir, calls: StoreCalls, as_written: RunConfig, ranks: int) -> None:
        self._run, self._calls, self._as_written, self._ranks = run, calls, as_written, ranks
        self.config = with_ranks(as_written, ranks)

    async def refresh(self, step: int) -> bool:
        """Take up the settings that somebody requested, from `step` on. Returns True if there were some."""
        new_config = await self._calls(lambda store: live_settings.take_up(self._run, store, step))
        if new_config is None:
            return False
        # Two configurations: the one that is written has the user's ranks, the one that holds has those that a
        # controller gave. Written back, the controller's number would look like the user's wish at the next resume.
        self._as_written, self.config = new_config, with_ranks(new_config, self._ranks)
        return True

    async def changed(self) -> dict[str, Any]:
        """The settings that ever changed in this run, as they are now: for the row of a step."""
        return await self._calls(lambda store: live_settings.of_step(store, self.config))

    async def requested_ranks(self) -> int:
        """The number of ranks of the learner that starts next, equal to the present one if nobody requested another."""
        if self.config.cluster.controller is None:
            return self._ranks
        return await self._calls(lambda store: scale_requests.ranks(self._as_written, store.meta))


def with_ranks(config: RunConfig, ranks: int) -> RunConfig:
    """The configuration of a learner over so many ranks."""
    return config.model_copy(update={"train": config.train.over(ranks)})
