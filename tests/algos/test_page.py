"""The numbers and names in docs/algorithms.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from agentrl import registry

from .test_losses import expected_direction
from .test_ppo import UNCUT, distance

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def cells(first: str) -> list[str]:
    """The other cells of the row that begins with `first`."""
    (row,) = re.findall(rf"^\| {re.escape(first)} \| (.*) \|$", PAGE, re.M)
    return row.split(" | ")


def test_the_page_has_every_algorithm() -> None:
    for kind in registry.ids("algorithms"):
        assert len(cells(f"`{kind}`")) == 4


def test_the_cosines_of_the_normalisations_are_computed() -> None:
    for kind in ("token", "sequence", "constant"):
        assert cells(f'`"{kind}"`')[-1] == f"{expected_direction(kind):.3f}", kind


def test_the_errors_of_the_corrections_are_computed() -> None:
    for name, first in (("none", " (plain GAE)"), ("token", ", uncut"), ("prefix", ", uncut")):
        found = [f"{distance(lag, importance=name, importance_cap=UNCUT):.3f}" for lag in (0, 4, 8)]
        assert cells(f'`"{name}"`{first}') == found, name
