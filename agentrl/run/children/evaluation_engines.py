"""Engines that measure during training alone. The learner sends them nothing: they serve the pinned version."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import trio

from agentrl.errors import EngineError, RunFailed
from agentrl.run.children.engine import WatchedEngine, WatchedEngines
from agentrl.run.children.engine_process import SupervisedEngine, fit
from agentrl.run.evaluation import pinned

_PIN_RETRY_S = 1.0  # until an engine that is away is tried again


@dataclass(slots=True)
class EvaluationEngines:
    """The engines of `eval.engines`."""

    engines: WatchedEngines
    started: list[SupervisedEngine] = field(default_factory=list[SupervisedEngine])

    async def start(self) -> None:
        """Start them one after the other; return when all serve the version that is pinned now."""
        run_folder, config = self.engines.run, self.engines.config
        for number, gpu_numbers in enumerate(config.eval.engine_gpus):
            engine_name = f"engine-eval-{number}"
            engine = self.engines.create(
                engine_name, lambda _: pinned.weights_of(run_folder, config), gpu_numbers, folder=run_folder.path
            )
            await engine.up()
            WatchedEngine(engine, self.engines).start_keeping()
            self.started.append(engine)

    def urls(self) -> list[str]:
        """Where they serve."""
        return [engine.url for engine in self.started]

    async def pin(self, pin: pinned.Pin) -> None:
        """Have all of them serve these weights. Raises RunFailed if one does not take them within
        `engine.mending_deadline_s`."""
        run_folder, config = self.engines.run, self.engines.config
        weights = partial(self.engines.looks, lambda _: pinned.weights_of(run_folder, config, pin))
        deadline_s = config.engine.mending_deadline_s
        deadline = trio.current_time() + deadline_s
        for engine in self.started:
            while True:
                try:
                    # Retried within a deadline, and then the run ends: an evaluation that was measured on some of its
                    # engines, or on old weights, would be a number that nobody can tell from a good one.
                    await fit(engine.child.name, engine.url, weights, config, run_folder.locks)
                    break
                except EngineError as error:
                    if trio.current_time() > deadline:
                        problem = f"{engine.child.name} did not take version {pin.version.version} to measure it"
                        time_limit = f"within {deadline_s:g} s (engine.mending_deadline_s)"
                        raise RunFailed(f"{problem} {time_limit}: {error}") from error
                    await trio.sleep(_PIN_RETRY_S)
