"""A solver works a sum out, a verifier says whether the answer is right. Each is paid for what it did itself."""

from __future__ import annotations

import re

from agentrl.env.multi_agent import RolesEnv


class SolverVerifier(RolesEnv):
    """Role `solver` gets 1 for the right number. Role `verifier` reads question and solution, and gets 1 for a verdict
    that is true; it never learns the number, and the solver is not paid by its verdict, so neither can bribe the other.
    Reset option `numbers` sets the question."""

    roles = ("solver", "verifier")
    blocking = False
    replayable = True

    def __init__(self, *, terms: int = 4, largest: int = 99) -> None:
        self._terms, self._largest = terms, largest

    def start(self, task) -> str:
        drawn = [int(n) for n in self.np_random.integers(1, self._largest + 1, size=self._terms)]
        self._numbers = [int(n) for n in task.get("numbers", drawn)]
        self._solution, self._verdict = "", None
        return "solver"

    def see(self, role: str) -> str:
        question = f"What is {' + '.join(map(str, self._numbers))}?"
        if role == "solver":
            return f"{question} Work it out, and end with #### and the number."
        return f"{question}\n\nSomebody answered:\n{self._solution}\n\nCheck it. End with RIGHT or WRONG."

    def play(self, role: str, text: str) -> str | None:
        if role == "solver":
            self._solution = text
            return "verifier"
        said = re.findall(r"RIGHT|WRONG", text)
        self._verdict = said[-1] == "RIGHT" if said else None
        return None

    def outcomes(self, forfeited: str | None) -> dict[str, float]:
        found = re.findall(r"####\s*(-?\d+)", self._solution)
        right = bool(found) and int(found[-1][:30]) == sum(self._numbers)
        return {"solver": float(right), "verifier": float(self._verdict is right)}
