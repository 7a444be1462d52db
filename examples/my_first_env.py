"""The whole of a first environment: a prompt, a tool, a grade."""

import agentrl


class Guess(agentrl.ToolEnv):
    """Find a hidden number by asking."""

    limits = agentrl.EpisodeLimits(turns=8)
    replayable = True

    def prompt(self, task):
        self.secret = int(self.np_random.integers(1, 101))
        self.solved = False
        return "I think of a whole number from 1 to 100. Find it with as few guesses as you can."

    @agentrl.tool
    def guess(self, number: int) -> str:
        """Compare a number with the hidden one.

        Args:
            number: your guess, from 1 to 100
        """
        if number == self.secret:
            self.solved = True
            self.finish()
            return "found"
        return "larger" if number < self.secret else "smaller"

    def grade(self):
        return self.solved


if __name__ == "__main__":
    agentrl.check_env(Guess)
