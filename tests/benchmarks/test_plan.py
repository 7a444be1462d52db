"""The table of what the recipes ask of GPUs."""

from __future__ import annotations

import plan
import pytest


def test_every_recipe_is_in_the_table() -> None:
    assert set(plan.GPUS) == {file.parent.name for file in plan.RECIPES.glob("*/run.toml")}


@pytest.mark.long
def test_a_mixture_with_an_adapter_is_planned_without_a_number_of_its_weights() -> None:
    own, best = plan.planned("moe_lora", "h100", 0.1)
    embeddings, attention = 2 * 151_936 * 2048, 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128
    parameters = embeddings + 48 * (attention + 128 * 3 * 2048 * 768 + 2048 * 128 + 2 * 2048) + 2048
    adapter = 48 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    held = 2 * parameters + 2 * embeddings / 2 + 4 * adapter  # bfloat16, but for the tokens' embeddings and the adapter
    assert own["weights"] * 1e9 == pytest.approx(held, rel=1e-4)
    assert (own["learners"], own["engines"]) == (1, 6)
    assert best["fits"] and best["hours"] <= own["hours"]
