"""An environment class as TRL's `environment_factory` takes it, with nothing of ours: `agentrl/TRL-v0` plays it."""


class Counter:
    """Count to a number by calling a tool."""

    def reset(self, target: int = 3, **row) -> str:
        self.target, self.count = target, 0
        return f"Count to {target}."

    def increment(self, by: int) -> str:
        """Add to the counter.

        Args:
            by: how much to add
        """
        self.count += by
        return f"The counter stands at {self.count}."

    def get_reward(self) -> float:
        return float(self.count == self.target)
