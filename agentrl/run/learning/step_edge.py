"""Work of a learner between two steps, while it waits for its next batch: it applies settings that changed, makes way
for a learner over another number of ranks, and looks at its push."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from agentrl.config import RunConfig
from agentrl.errors import WornOut
from agentrl.learner.learner import Learner
from agentrl.run.alarms import LagBound
from agentrl.run.learning.background import TorchThread
from agentrl.run.learning.checkpoint_writer import CheckpointWriter
from agentrl.run.learning.current_settings import CurrentSettings
from agentrl.run.learning.store_calls import StoreCalls
from agentrl.run.learning.weight_push import WeightPush
from agentrl.store.run_values import MAX_LAG

_WAIT_S = 0.25  # the longest wait for groups before the learner looks at its push again


class StepEdge:
    """The edge of the next step of `learner`. `bound` is the lag bound in force."""

    def __init__(
        self,
        learner: Learner,
        torch: TorchThread,
        calls: StoreCalls,
        settings: CurrentSettings,
        pushes: WeightPush,
        checkpoints: CheckpointWriter,
        bound: LagBound,
        mark: Callable[[], None],
    ) -> None:
        self._learner, self._torch, self._calls, self._settings = learner, torch, calls, settings
        self._pushes, self._checkpoints, self._bound, self._mark = pushes, checkpoints, bound, mark

    async def apply_settings(self) -> RunConfig | None:
        """Let settings that somebody requested hold from the next step on. Returns the configuration if it changed."""
        if not await self._settings.refresh(self._learner.step_index + 1):
            return None
        new_config = self._settings.config
        # Here and nowhere else: between two steps no gradient is half summed, so one step never has two learning rates.
        await self._torch.run(partial(self._learner.retune, new_config.learner))
        self._checkpoints.train = new_config.train
        max_lag = self._bound.resize(new_config.buffer.max_lag)
        await self._calls(lambda store: MAX_LAG.set(store, max_lag))
        return new_config

    async def make_way(self) -> None:
        """Save and end if another number of ranks is requested. The next learner of this run has that number."""
        present_ranks, requested = self._learner.ranks.size, await self._settings.requested_ranks()
        if requested == present_ranks:
            return
        # In this order a learner that dies on the way loses nothing new: the engines have the weights, then a
        # checkpoint has them, then the process ends. Ranks cannot change within a process, since the process group of
        # torch has a fixed size.
        await self._pushes.settle()
        if self._learner.trained:
            await self._checkpoints.start(await self._calls(lambda store: store.versions.current_version()))
            await self._checkpoints.settle()
        raise WornOut(f"the learner goes on with {requested} ranks instead of {present_ranks}")

    async def wait_a_moment(self, longest_s: float = _WAIT_S) -> None:
        """Wait for groups, or for what the supervisor says. Engines that lack the weights get them meanwhile."""
        await self._pushes.look()
        self._mark()
        await self._calls.wait_for_work(longest_s)
