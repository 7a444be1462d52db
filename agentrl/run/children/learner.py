"""The learner of a run: it goes on from its last checkpoint, and ends the training when all steps are done."""

from __future__ import annotations

from collections.abc import Callable

import trio

from agentrl.run.children.child_secrets import engine_key_variables, withheld_from_learner
from agentrl.run.children.registry import ChildRegistry
from agentrl.run.children.restart_loop import WatchedChild
from agentrl.run.cluster import scale_requests
from agentrl.run.cluster.scaling import NoRoom


class WatchedLearner(WatchedChild):
    """The learner's process; `done` is set when it has made all steps."""

    def __init__(self, registry: ChildRegistry) -> None:
        config = registry.config
        settings, arguments = config.train, ["-m", "agentrl.run.processes.child", "learner", str(registry.run.path)]
        key_variables, withheld = engine_key_variables(config, signs=True), withheld_from_learner(config)
        learner_child = registry.create(
            "learner", arguments, threads=settings.threads, env=key_variables, withheld=withheld
        )
        super().__init__(learner_child, registry)
        self._pulse = registry.pulse(
            learner_child,
            silent_s=settings.progress_deadline_s,
            stopped_s=settings.liveness_deadline_s,
            names=("train.progress_deadline_s", "train.liveness_deadline_s"),
        )
        self.done = trio.Event()

    def start(self) -> None:
        """Start the process and keep it."""
        self.child.start()
        self.start_keeping()

    async def watch(self, lives: Callable[[], None]) -> None:
        await self._pulse.run(self.child.kill, lives)

    def is_done(self, status: int) -> bool:
        if status == 0:
            self.done.set()
        return status == 0

    async def renew(self) -> None:
        """Find a place for as many ranks as the learner is to have now; if there is none, for those that it had. Only
        this kind of child ends worn out to change its size, so it counts as no restart."""
        self.registry.launcher.release(self.child.name)
        try:
            await self.registry.launcher.reserve(self.child.name)
        except NoRoom as error:
            refusal = str(error)
            # The request is taken back in the store before the old place is reserved: a supervisor that dies in between
            # comes back, reads the old split, and does not run into the same lack of room again.
            await self.registry.write_with_space(lambda store: scale_requests.take_back(store, refusal))
            await self.registry.launcher.reserve(self.child.name)
