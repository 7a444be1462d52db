"""An algorithm of your own, which learns less from failures: `[algo] kind = "examples/own_algorithm.py:Optimist"`."""

from agentrl.algos.grpo import GRPO


class Optimist(GRPO):
    """GRPO in which a negative advantage counts less: failures of a hard task push the policy away more gently."""

    failure_weight: float = 0.5

    def prepare(self, siblings):
        columns = super().prepare(siblings)
        advantage_GT = columns["advantage"]  # [members of the group, turns]
        return columns | {"advantage": advantage_GT.where(advantage_GT > 0, self.failure_weight * advantage_GT)}
