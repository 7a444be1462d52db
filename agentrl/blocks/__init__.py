"""The blocks of a training loop of your own: an engine fleet, rollouts, scores, a durable buffer, a learner,
publishing.

    EngineFleet   engines that serve one model, started or attached to: `sample`
    rollout       plays tasks with a fleet: an async iterator of trajectories
    score         outcome rewards of trajectories, by a function or a judge
    Buffer        groups of trajectories, each trained once, also after a crash: `put`, `take`
    Learner       `forward_backward` with an algorithm or a loss of yours, `step`, `save`, `weights`
    publish       weights of a learner to a fleet
    sync          the same for programs without a loop, and for notebooks

What waits is awaited under trio. `docs/tutorials/own-loop.md` has a loop. Names are imported when first used: without a
`Learner` nothing here loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.blocks import sync as sync
    from agentrl.blocks.buffer import Batch as Batch
    from agentrl.blocks.buffer import Buffer as Buffer
    from agentrl.blocks.fleet import EngineFleet as EngineFleet
    from agentrl.blocks.fleet import Sample as Sample
    from agentrl.blocks.learner import Learner as Learner
    from agentrl.blocks.outcomes import score as score
    from agentrl.blocks.publishing import Weights as Weights
    from agentrl.blocks.publishing import publish as publish
    from agentrl.blocks.rollouts import Rollouts as Rollouts
    from agentrl.blocks.rollouts import rollout as rollout

_WHERE = {
    "Batch": "buffer",
    "Buffer": "buffer",
    "EngineFleet": "fleet",
    "Learner": "learner",
    "Rollouts": "rollouts",
    "Sample": "fleet",
    "Weights": "publishing",
    "publish": "publishing",
    "rollout": "rollouts",
    "score": "outcomes",
}

__all__ = [
    "Batch",
    "Buffer",
    "EngineFleet",
    "Learner",
    "Rollouts",
    "Sample",
    "Weights",
    "publish",
    "rollout",
    "score",
    "sync",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'agentrl.blocks' has no attribute {name!r}")
    module = importlib.import_module(f"agentrl.blocks.{_WHERE.get(name, name)}")
    exported = module if name == "sync" else getattr(module, name)
    # The next use finds it without this function. A rollout on a machine without torch must be able to import this
    # package, so no name may be imported at the top.
    globals()[name] = exported
    return exported


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
