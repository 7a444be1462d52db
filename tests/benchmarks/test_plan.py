"""The table of what the recipes ask of GPUs."""

from __future__ import annotations

import plan


def test_every_recipe_is_in_the_table() -> None:
    assert set(plan.GPUS) == {file.parent.name for file in plan.RECIPES.glob("*/run.toml")}
