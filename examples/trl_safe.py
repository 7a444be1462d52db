"""A class as TRL's documentation writes it, and a reward function that reads it: agentrl/TRL-v0 runs both."""


class Safe:
    def reset(self, code="42", **row):
        self.code, self.reward = code, 0.0

    def open(self, code: str) -> str:
        """
        Try a code.

        Args:
            code: The code.
        """
        self.reward = 1.0 if code == self.code else 0.0
        return "open" if self.reward else "click"


def opened(environments, **kwargs):
    return [environment.reward for environment in environments]
