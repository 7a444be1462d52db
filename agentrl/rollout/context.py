"""The context of an episode: the parts and settings that a worker gives to each episode that it plays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from agentrl.config import Rollout
from agentrl.errors import Tracebacks
from agentrl.protocols import AsyncEnv, Engine, MessageRenderer, Rewarder
from agentrl.records import SamplingParams, Task
from agentrl.rollout.drain import TurnGate
from agentrl.rollout.opponents import Opponents
from agentrl.store.interfaces import EpisodeStore


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """The context that all episodes of a worker share."""

    engine: Engine
    """Samples the turns of the policy that learns."""
    renderer: MessageRenderer
    store: EpisodeStore
    settings: Rollout
    make_env: Callable[[Task], AsyncEnv]
    rewarder: Rewarder | None = None
    """Gives the outcome of each episode; None leaves that to the environment."""
    frozen: Mapping[str, Engine] = field(default_factory=dict[str, Engine])
    """Engines of roles whose policy does not learn, by role."""
    pinned: Engine | None = None
    """Samples the evaluations during training, from fixed weights. None: `engine` does."""
    adapted: Collection[str] = ()
    """Roles whose tokens are sampled with an adapter of their own."""
    opponents: Opponents = field(default_factory=Opponents)
    """Past versions of the policy that play roles."""
    experts: bool = False
    """Journal the experts that a mixture of experts chose for each token."""
    eval_sampling: SamplingParams | None = None
    """Sampling of turns that only measure the policy. None: as in training."""
    artifacts: bool = False
    """Keep the files that a reward source tests."""
    gate: TurnGate = field(default_factory=TurnGate)
    """Holds turns up while the run is paused or the worker is leaving."""
    tracebacks: Tracebacks = field(default_factory=Tracebacks)
