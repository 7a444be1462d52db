"""Every shipped environment that offers oracles keeps to them over many seeds."""

from __future__ import annotations

from typing import Any

import pytest

import agentrl
from agentrl.env.oracles import judge

CASES: list[tuple[str, dict[str, Any]]] = [
    ("agentrl/Calculator-v0", {}),
    ("agentrl/Calculator-v0", {"terms": 1, "largest": 9, "tool_format": "react"}),
    ("agentrl/Nim-v0", {}),
    ("agentrl/Nim-v0", {"opponent": "random", "heaps": 5}),
    ("agentrl/Retrieval-v0", {}),
    ("agentrl/Retrieval-v0", {"split": "held_out", "tool_format": "json"}),
    ("agentrl/TextGame-v0", {}),
    ("agentrl/TextGame-v0", {"rooms": 12, "locks": 3, "shaped": True}),
]


@pytest.mark.parametrize(("id", "kwargs"), CASES, ids=str)
async def test_oracles_get_what_they_must(id: str, kwargs: dict[str, Any]) -> None:
    for seed in range(25):
        verdicts = await judge(lambda: agentrl.make(id, **kwargs), seed)
        assert {verdict.expected for verdict in verdicts} >= {0.0, 1.0}
        assert all(verdict.holds for verdict in verdicts), (seed, verdicts)
