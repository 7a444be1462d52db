"""Sums, in twelve tokens: the task of `examples/laptop_llm.toml`. A chat model knows sums, but talks around them."""

import re

import agentrl

PAIRS = [(a, b) for a in range(1, 31) for b in range(1, 31)]
HELD_OUT = [pair for at, pair in enumerate(PAIRS) if at % 7 == 3]


class Sums(agentrl.Env):
    """Answer a sum of two numbers from 1 to 30. The last number of the answer counts, whatever else it says."""

    replayable = True

    def __init__(self, held_out: bool = False):
        self.pairs = HELD_OUT if held_out else [pair for pair in PAIRS if pair not in HELD_OUT]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        a, b = self.pairs[int(self.np_random.integers(len(self.pairs)))]
        self.sum = a + b
        return ({"role": "user", "content": f"What is {a} + {b}?"},), {}

    def step(self, action):
        numbers = re.findall(r"\d+", action)
        good = bool(numbers) and numbers[-1] == str(self.sum)
        return (), 0.0, True, False, {"outcome": float(good), "success": good}
