"""Engines for the models that play a role and do not learn; no weights are ever pushed to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.models.resolve import frozen_model_dir
from agentrl.records import WeightVersion
from agentrl.run.children.engine import WatchedEngine, WatchedEngines
from agentrl.run.children.engine_process import ServedWeights, SupervisedEngine


@dataclass(slots=True)
class FrozenEngines:
    """One engine for each model that the run file names for a role, by that model."""

    engines: WatchedEngines
    by_model: dict[str, SupervisedEngine] = field(default_factory=dict[str, SupervisedEngine])

    async def start(self) -> None:
        """Start them one after the other; return when all serve."""
        config = self.engines.config
        first_version = WeightVersion(version=0, step=0)  # belongs to no run: its samples are never trained
        # Sorted, as the number is part of the child's name: in the order of a set, a resumed run would look for the
        # seat or the log of one model under the name of another.
        for number, model_id in enumerate(sorted(config.rollout.frozen_models())):
            weights = ServedWeights(model=frozen_model_dir(config, model_id), base=first_version, current=first_version)
            # Bound as a default: a closure over the loop's variable would give every engine the weights of the last
            # one.
            engine = self.engines.create(f"engine-given-{number}", lambda _, weights=weights: weights)
            await engine.up()
            WatchedEngine(engine, self.engines).start_keeping()
            self.by_model[model_id] = engine

    def urls(self) -> dict[str, str]:
        """Where they serve, by model."""
        return {model_id: engine.url for model_id, engine in self.by_model.items()}
