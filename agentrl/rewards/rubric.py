"""A rubric: several rewards under names, made into one number whose parts stay visible.

Owns the arithmetic and the order in which parts are called. Knows no server, no environment, no run.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, cast

import trio

from agentrl.errors import ConfigError, ScoreError
from agentrl.records import Json
from agentrl.rewards.judge import Judgement

T = TypeVar("T")
Score = float | Judgement
"""What a part gives: a number, a truth value, or a judge's verdict, of which its `score` counts."""


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """One reward of a rubric: a plain or async function, such as a judge or a reward model.

    `weight` is its factor in a sum. With a `gate` it decides whether the others count: below it the total is 0, and
    the parts that are no gates are not called."""

    reward: Callable[[T], Score | Awaitable[Score]]
    weight: float = 1.0
    gate: float | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """The total, and the number of each part that was called, before its weight."""

    total: float
    parts: Mapping[str, float]

    @property
    def info(self) -> dict[str, Json]:
        """Value for `Grade(info=…)`: the parts beside the step that they judge, as `rewards`."""
        return {"rewards": dict(self.parts)}


class Rubric(Generic[T]):
    """Several rewards as one: the weighted sum of the parts, or their product.

    Gates are called first, one after the other; all others at once. Plain functions are called in place, so they must
    not block. It is a rewarder too (`env.reward`), if its parts take a trajectory.

    Example::

        rubric = Rubric({"right": Part(is_right, gate=1.0), "short": Part(brevity, weight=0.2), "polite": judge.score})

        class Support(agentrl.ToolEnv):
            async def grade(self):
                scores = await rubric.score(self.messages)
                return agentrl.Grade(outcome=scores.total, success=scores.total >= 1.0, info=scores.info)
    """

    def __init__(
        self,
        parts: Mapping[str, Part[T] | Callable[[T], Score | Awaitable[Score]]],
        *,
        combine: Literal["sum", "product"] = "sum",
    ) -> None:
        if not parts:
            raise ConfigError("parts", dict(parts), "give at least one reward")
        if combine not in ("sum", "product"):
            raise ConfigError("combine", combine, "give 'sum' or 'product'")
        self._parts: dict[str, Part[T]] = {part_name: _part(declared) for part_name, declared in parts.items()}
        for part_name, rubric_part in self._parts.items():
            if not math.isfinite(rubric_part.weight):
                raise ConfigError(f"parts.{part_name}.weight", rubric_part.weight, "give a finite number")
            # A factor before a product scales all of it, whichever part has it, and would look as if it weighed that
            # part alone.
            if combine == "product" and rubric_part.weight != 1.0:
                raise ConfigError(
                    f"parts.{part_name}.weight", rubric_part.weight, "a product has no weights: leave it out"
                )
        self._combine = combine

    async def score(self, subject: T) -> Scores:
        """Ask the parts. Raises a part's own error, and ScoreError naming the part that gave no finite number."""
        scores_by_part: dict[str, float] = {}
        for part_name, rubric_part in self._parts.items():
            if rubric_part.gate is not None:
                scores_by_part[part_name] = await self._ask(part_name, subject)
                # The other parts are not called at all. They may be judges that cost seconds and money, and their
                # number would not count.
                # `tests/rewards/test_rubric.py::test_below_a_gate_nothing_counts_and_nothing_else_is_asked`.
                if scores_by_part[part_name] < rubric_part.gate:
                    return Scores(0.0, scores_by_part)
        scores_by_part |= await self._ask_all(
            [part_name for part_name, rubric_part in self._parts.items() if rubric_part.gate is None], subject
        )
        # In the order of declaration: they came in the order in which they finished, and sums and journals should not
        # depend on that.
        ordered_scores = {part_name: scores_by_part[part_name] for part_name in self._parts}
        if self._combine == "product":
            return Scores(math.prod(ordered_scores.values()), ordered_scores)
        return Scores(
            math.fsum(self._parts[part_name].weight * part_score for part_name, part_score in ordered_scores.items()),
            ordered_scores,
        )

    async def __call__(self, subject: T) -> float:
        """Return the total score as a rewarder."""
        return (await self.score(subject)).total

    async def _ask_all(self, names: list[str], subject: T) -> dict[str, float]:
        scores_by_part: dict[str, float] = {}
        part_errors: list[Exception] = []

        async def ask(name: str) -> None:
            try:
                scores_by_part[name] = await self._ask(name, subject)
            # Taken out of the nursery by hand. Raised inside, it would reach the environment as an exception group,
            # and its handling of an EngineError (law 3) would not see one.
            except Exception as error:
                part_errors.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for part_name in names:
                nursery.start_soon(ask, part_name)
        if part_errors:
            raise part_errors[0]
        return scores_by_part

    async def _ask(self, name: str, subject: T) -> float:
        part_answer = self._parts[name].reward(subject)
        part_score = await part_answer if isinstance(part_answer, Awaitable) else part_answer
        score_number = float(part_score.score if isinstance(part_score, Judgement) else part_score)
        if not math.isfinite(score_number):
            raise ScoreError(f"the part {name!r} of a rubric gave {score_number}")
        return score_number


def _part(reward: Part[T] | Callable[[T], Score | Awaitable[Score]]) -> Part[T]:
    return cast("Part[T]", reward) if isinstance(reward, Part) else Part(reward)
