"""The smallest useful environment: an arithmetic question, a calculator to ask, one answer to give."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from agentrl.env import EpisodeLimits, ToolEnv, tool
from agentrl.env.checks.oracles import Oracle, say, script
from agentrl.errors import UsageError
from agentrl_environments.calculator.arithmetic import ArithmeticRefused, evaluate, written


class Calculator(ToolEnv):
    """`agentrl/Calculator-v0`: work out an expression of `terms` numbers up to `largest` and submit the result.

    Options: `expression` sets the question itself. Outcome: 1 for the exact number, else 0."""

    system = "Use the calculator, then submit the result."
    blocking = False
    replayable = True
    limits = EpisodeLimits(turns=6)

    def __init__(self, *, terms: int = 3, largest: int = 99, **kwargs: Any) -> None:
        if terms < 1 or largest < 1:
            raise UsageError(f"terms = {terms}, largest = {largest}: give 1 or more")
        self._terms, self._largest = terms, largest
        super().__init__(**kwargs)

    def make_task(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if "expression" in options:
            return {"expression": str(options["expression"])}
        term_values = self.np_random.integers(1, self._largest + 1, size=self._terms)
        sign_indices = self.np_random.integers(0, 3, size=self._terms)
        expression = str(term_values[0])
        for term_value, sign_index in zip(term_values[1:], sign_indices, strict=False):
            expression += f" {'+-*'[sign_index]} {term_value}"
        return {"expression": expression}

    def prompt(self, task: Mapping[str, Any]) -> str:
        self._question = str(task["expression"])
        self._expected = evaluate(self._question)
        self._answer: Fraction | None = None
        return f"What is {self._question}?"

    @tool(parallel=True, errors=(ArithmeticRefused,))
    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression exactly.

        Args:
            expression: numbers, brackets and + - * / // % **
        """
        return written(evaluate(expression))

    @tool(errors=(ArithmeticRefused,))
    def submit(self, answer: str) -> str:
        """Give the result and end the episode.

        Args:
            answer: the number, such as 42, -1.5 or 2/3
        """
        self._answer = evaluate(answer)
        self.finish()
        return "submitted"

    def grade(self) -> bool:
        return self._answer == self._expected

    def oracles(self) -> list[Oracle]:
        right_answer = written(self._expected)
        return [
            Oracle(
                "gold",
                1.0,
                script(self.call("calculate", expression=self._question), self.call("submit", answer=right_answer)),
            ),
            Oracle("off by one", 0.0, say(self.call("submit", answer=written(self._expected + 1)))),
            Oracle("no-op", 0.0, say("")),
        ]
