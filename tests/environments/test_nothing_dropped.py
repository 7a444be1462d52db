"""No shipped environment lets a policy have its failure dropped: actions at random and at their worst, few seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from each_case import each_case

import agentrl
from agentrl.env.agent_programs import ProgramEnv
from agentrl.errors import SandboxError, ToolError
from agentrl.testing.hostile import check_nothing_dropped

PLAIN: dict[str, dict[str, Any]] = {
    "Blackjack": {},
    "Calculator": {},
    "Calls": {},
    "FrozenLake": {},
    "Gymnasium": {"env": "CliffWalking-v1"},
    "Nim": {},
    "NimTable": {},
    "Retrieval": {},
    "Service": {},
    "Taxi": {},
    "TextGame": {},
}
BOXED = {"CodeRepair": {}, "Harbor": {}, "RepoRepair": {}, "SWE": {}}
SETS: dict[str, dict[str, Any]] = {
    **{
        f"ReasoningGym {name}": {"task": name}
        for name in ("leg_counting", "countdown", "n_queens", "spell_backward", "sudoku")
    },
    **{
        f"PettingZoo {name}": {"env": f"pettingzoo.classic.{name}:env"}
        for name in ("tictactoe_v3", "rps_v2", "connect_four_v3")
    },
    "TextArena": {"game": "GuessTheNumber-v0"},
}
RIGHT = ("<answer>7</answer>", "<answer>[[1, 2], [3, 4]]</answer>", "action: 1", "0", "[5]")


@pytest.mark.medium
@each_case("name", PLAIN)
async def test_no_action_is_dropped(name: str) -> None:
    await check_nothing_dropped(
        lambda: agentrl.make(f"agentrl/{name}-v0", **PLAIN[name]), seeds=range(6), actions=RIGHT
    )


@pytest.mark.medium
@pytest.mark.bubblewrap
@pytest.mark.parametrize("name", BOXED)
async def test_no_action_in_a_box_is_dropped(name: str) -> None:
    await check_nothing_dropped(lambda: agentrl.make(f"agentrl/{name}-v0", **BOXED[name]), seeds=range(2), turns=8)


@pytest.mark.medium
@pytest.mark.bubblewrap
async def test_no_action_of_the_ready_tools_is_dropped() -> None:
    tools = ["python", "shell", "search", "read_file", "write_file", "apply_patch"]
    await check_nothing_dropped(lambda: agentrl.make("agentrl/Calculator-v0", tools=tools), seeds=range(2), turns=10)


@pytest.mark.adapters
@pytest.mark.parametrize("name", SETS)
async def test_no_action_of_another_packages_set_is_dropped(name: str) -> None:
    def make() -> Any:
        return agentrl.make(f"agentrl/{name.split()[0]}-v0", **SETS[name])

    await check_nothing_dropped(make, seeds=range(4), actions=RIGHT)


async def program(session: Any) -> float:
    """An agent program as a newcomer writes it: it trusts the model's answer."""
    import httpx

    async with httpx.AsyncClient(base_url=session.base_url, trust_env=False) as client:
        ask = {"model": "policy", "messages": [{"role": "user", "content": "A number?"}]}
        answer = await client.post("/v1/chat/completions", json=ask, timeout=60.0)
        return float(answer.json()["choices"][0]["message"]["content"])


async def test_no_answer_to_a_program_is_dropped() -> None:
    await check_nothing_dropped(lambda: ProgramEnv(program), seeds=range(8), turns=2)


class Fragile(agentrl.ToolEnv):
    """What the check must find: a tool and a grade that trust the policy."""

    failure: Callable[..., Exception] = ZeroDivisionError
    earned = 0.0

    def prompt(self, task: Any) -> str:
        return "Call take."

    @agentrl.tool
    def take(self, text: str, line: int) -> str:
        """Take a text."""
        if len(text) > 4_000:
            raise self.failure()
        return "ok"

    def grade(self) -> float:
        return self.earned


@each_case("kind", [ZeroDivisionError, SandboxError, ValueError])
async def test_the_check_finds_an_action_that_fails_an_environment(kind: type[Exception]) -> None:
    class Failing(Fragile):
        failure = kind

    with pytest.raises(AssertionError, match=rf"(?s)seed \d: action \d+, .*{kind.__name__}"):
        await check_nothing_dropped(Failing, seeds=range(5))


async def test_the_check_finds_a_grade_that_is_no_number() -> None:
    class Endless(Fragile):
        failure = ToolError
        earned = float("nan")

    with pytest.raises(AssertionError, match=r"JSON|finite"):
        await check_nothing_dropped(Endless)


@pytest.mark.bubblewrap
async def test_the_check_finds_a_tool_that_cannot_take_a_whole_number_with_a_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentrl.env.tools.tools._whole", lambda value: value)
    with pytest.raises(AssertionError, match=r"(?s)replace_line.*TypeError"):
        await check_nothing_dropped(lambda: agentrl.make("agentrl/CodeRepair-v0"))
