"""No answer drops an episode of an example: its rewards and tools meet the worst texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from each_case import each_case

import agentrl
from agentrl import config as configuration
from agentrl.testing.hostile import check_nothing_dropped

ROOT = Path(__file__).resolve().parents[2]
ODD = (",", "-,", ",5", "1,,2", "1.", "٣", "²", "½", "९,९.९", "9" * 5_000, "-" + "9" * 5_000 + ".5", "1e9999", "nan")
ANSWERS = tuple(f"{mark}{number}" for mark in ("#### ", "####") for number in ODD)
EXAMPLES: dict[str, dict[str, Any]] = {
    "agentrl/TRL-v0": {"env": "examples/trl_environment.py:Counter"},
    "examples/my_first_env.py:Guess": {},
}
RECIPES = {"gsm8k": {"rows": "examples/recipes/gsm8k/held_out.jsonl"}, "solver_verifier": {}, "tool_use": {}}


@pytest.mark.medium
@each_case("name", [*RECIPES, *EXAMPLES])
async def test_no_answer_is_dropped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    kwargs = EXAMPLES.get(name, {})
    if name in RECIPES:
        env = configuration.load(ROOT / "examples" / "recipes" / name / "run.toml").env
        name, kwargs = env.id, {**env.kwargs, **RECIPES[name]}
    await check_nothing_dropped(lambda: agentrl.make(name, **kwargs), seeds=range(3), actions=ANSWERS)
