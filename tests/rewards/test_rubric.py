"""A rubric makes one number of several rewards, and says what each of them gave."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from each_case import each_case

import agentrl
from agentrl.errors import ConfigError, EngineError, ScoreError
from agentrl.rewards import Judge, Part, Rubric, ScoringClient
from agentrl.testing.scoring import FakeScoring

JUDGE = Judge(ScoringClient("http://fake", transport=FakeScoring(8)), rubric="Is it polite?", scale=(0, 10))


def right(text: str) -> bool:
    return "42" in text


async def brevity(text: str) -> float:
    return 1 / len(text.split())


async def never(text: str) -> float:
    raise AssertionError("asked although a gate was closed")


async def test_a_sum_weighs_its_parts_and_shows_them() -> None:
    rubric = Rubric({"right": right, "brief": Part(brevity, weight=0.5), "polite": Part(JUDGE.score, weight=2.0)})
    found = await rubric.score("it is 42 sir")
    assert found.parts == {"right": 1.0, "brief": 0.25, "polite": 0.8}
    assert found.total == pytest.approx(1.0 + 0.5 * 0.25 + 2.0 * 0.8)
    assert found.info == {"rewards": {"right": 1.0, "brief": 0.25, "polite": 0.8}}
    assert await rubric("it is 42 sir") == found.total


async def test_a_product_is_zero_where_one_part_is() -> None:
    rubric = Rubric({"right": right, "brief": brevity}, combine="product")
    assert (await rubric.score("42 sir")).total == 0.5
    assert (await rubric.score("no sir")).total == 0.0


async def test_below_a_gate_nothing_counts_and_nothing_else_is_asked() -> None:
    rubric = Rubric({"polite": never, "right": Part(right, gate=1.0)})
    found = await rubric.score("no")
    assert (found.total, found.parts) == (0.0, {"right": 0.0})
    assert (await Rubric({"polite": brevity, "right": Part(right, gate=1.0)}).score("42")).total == 2.0


async def test_parts_that_are_no_gates_are_asked_at_once(autojump_clock: trio.testing.MockClock) -> None:
    async def slow(text: str) -> float:
        await trio.sleep(10)
        return 1.0

    assert await Rubric({"one": slow, "two": slow, "three": slow})("x") == 3.0
    assert trio.current_time() == pytest.approx(10)


@pytest.mark.parametrize("failure", [EngineError("the judge is gone"), ValueError("mine")])
async def test_a_part_that_fails_fails_the_rubric_as_it_failed(failure: Exception) -> None:
    async def fails(text: str) -> float:
        raise failure

    with pytest.raises(type(failure), match=str(failure)):
        await Rubric({"right": right, "fails": fails})("42")


async def test_a_part_without_a_number_is_named() -> None:
    with pytest.raises(ScoreError, match=r"^the part 'odd' of a rubric gave nan$"):
        await Rubric({"right": right, "odd": lambda text: float("nan")})("42")


@each_case(
    ("parts", "combine", "said"),
    [
        ({}, "sum", r"parts = \{\}: give at least one reward"),
        ({"a": right}, "mean", r"combine = 'mean': give 'sum' or 'product'"),
        ({"a": Part(right, weight=2.0)}, "product", r"parts.a.weight = 2.0: a product has no weights"),
        ({"a": Part(right, weight=float("inf"))}, "sum", r"parts.a.weight = inf: give a finite number"),
    ],
)
def test_what_makes_no_rubric_is_refused(parts, combine, said) -> None:
    with pytest.raises(ConfigError, match=said):
        Rubric(parts, combine=combine)


async def test_an_environment_shows_the_parts_in_the_info_of_its_last_step() -> None:
    rubric = Rubric({"right": right, "brief": Part(brevity, weight=0.5)})

    class Answer(agentrl.ToolEnv):
        def prompt(self, task):
            return "6 * 7?"

        def on_text(self, text):
            self.said = text
            self.finish()

        async def grade(self):
            found = await rubric.score(self.said)
            return agentrl.Grade(outcome=found.total, success=found.total >= 1.0, info=found.info)

    async with Answer() as env:
        await env.areset(seed=0)
        *_, info = await env.astep("42 sir")
    assert info["outcome"] == 1.25 and info["rewards"] == {"right": 1.0, "brief": 0.5}
