"""The settings of a learner: the `[train]` table, and what other tables say about the same step.

`RunConfig.learner` makes them of a run file. Without one, a `Train` and an algorithm are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.algos.algorithm import Algorithm
from agentrl.algos.grpo import GRPO
from agentrl.config.roles import RoleTable, WithRoles
from agentrl.config.train import Train
from agentrl.records import POLICY


@dataclass(frozen=True, kw_only=True)
class LearnerSettings(WithRoles):
    """What a learner needs to know before its first step. Plain data: it is sent to the other ranks."""

    model: str = ""  # as the run file names it; the learner gets a folder
    train: Train = field(default_factory=Train)
    algo: Algorithm = field(default_factory=GRPO)  # of environments and roles without their own
    algo_by_env: Mapping[str, Algorithm] = field(default_factory=dict[str, Algorithm])
    roles: list[RoleTable] = field(default_factory=list[RoleTable])
    named: Mapping[str, Algorithm] | None = None  # those that train something, by field; default: `algo` alone
    seed: int = 0  # decides the weights of a fresh adapter, and the order of minibatches
    temperature: float = 1.0  # of sampling: `rollout.temperature`
    max_lag: int = 0  # `buffer.max_lag`
    quorum: int | None = None  # how many members close a group: `RunConfig.quorum`
    keeps_kv: bool = True  # running requests keep keys and values of older weights: `engine.recompute_kv` is off
    routed_experts: bool = False  # rows name the experts of their tokens: `engine.routed_experts`

    @property
    def algorithms(self) -> Mapping[str, Algorithm]:
        """The algorithms that train something, by the field that names them."""
        return {"algo": self.algo} if self.named is None else self.named

    def algo_of(self, env: str, role: str = POLICY) -> Algorithm:
        """What trains a role in the tasks of an environment."""
        by_role = self.algo_by_role
        return by_role[role] if role in by_role else self.algo_by_env.get(env, self.algo)
