"""Every shipped environment passes gymnasium's own checker, and keeps to the oracles that it offers."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import pytest
from each_case import each_case
from gymnasium.utils.env_checker import check_env

import agentrl
from agentrl import registry
from agentrl.env.checks.oracles import judge

CASES: list[tuple[str, dict[str, Any]]] = [
    ("agentrl/Calculator-v0", {}),
    ("agentrl/Calculator-v0", {"terms": 1, "largest": 9, "tool_format": "react"}),
    ("agentrl/Calls-v0", {}),
    ("agentrl/Calls-v0", {"split": "held_out", "partial": True, "tool_format": "json"}),
    ("agentrl/Combination-v0", {}),
    ("agentrl/Combination-v0", {"dials": 1}),
    ("agentrl/Nim-v0", {}),
    ("agentrl/Nim-v0", {"opponent": "random", "heaps": 5}),
    ("agentrl/PictureGrid-v0", {}),
    ("agentrl/PictureGrid-v0", {"size": 26, "rounds": 1, "pixels": 1}),
    ("agentrl/Reading-v0", {}),
    ("agentrl/Reading-v0", {"pages": 1, "facts": 1, "words": 0}),
    ("agentrl/Retrieval-v0", {}),
    ("agentrl/Retrieval-v0", {"split": "held_out", "tool_format": "json"}),
    ("agentrl/Service-v0", {}),
    ("agentrl/Service-v0", {"levels": [4], "split": "held_out", "tool_format": "json"}),
    ("agentrl/TextGame-v0", {}),
    ("agentrl/TextGame-v0", {"rooms": 12, "locks": 3, "shaped": True}),
]

MADE: dict[str, dict[str, Any]] = {
    "Blackjack": {},
    "Calculator": {},
    "Calls": {},
    "CodeRepair": {},
    "Combination": {},
    "FrozenLake": {},
    "Gymnasium": {"env": "CliffWalking-v1"},
    "Harbor": {},
    "Nim": {},
    "NimTable": {},
    "PictureGrid": {},
    "RepoRepair": {},
    "Reading": {},
    "Retrieval": {},
    "SWE": {},
    "Service": {},
    "Taxi": {},
    "TextGame": {},
}
"""What makes each environment that needs no other package; those that do are checked beside their adapters' tests."""
ADAPTERS = {"BFCL", "OpenEnv", "PettingZoo", "Program", "ReasoningGym", "TRL", "TextArena", "Verifiers"}
BOXED = {"CodeRepair", "Harbor", "RepoRepair", "SWE"}


def test_no_shipped_environment_is_forgotten() -> None:
    shipped = {id.removeprefix("agentrl/").removesuffix("-v0") for id in registry.ids("environments")}
    assert {name for name in shipped if "/" not in name} == set(MADE) | ADAPTERS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.bubblewrap] if name in BOXED else []) for name in MADE]
)
def test_gymnasiums_checker_passes_without_a_warning(name: str) -> None:
    env = gymnasium.make(f"agentrl/{name}-v0", disable_env_checker=True, **MADE[name])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message=".*render modes.*")
            check_env(env.unwrapped)
    finally:
        env.close()


@pytest.mark.medium
@each_case(("id", "kwargs"), CASES)
async def test_oracles_get_what_they_must(id: str, kwargs: dict[str, Any]) -> None:
    for seed in range(10):
        verdicts = await judge(lambda: agentrl.make(id, **kwargs), seed)
        assert {verdict.expected for verdict in verdicts} >= {0.0, 1.0}
        assert all(verdict.holds for verdict in verdicts), (seed, verdicts)
