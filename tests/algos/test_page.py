"""Names in docs/explanation/algorithms.md, and exact numbers in benchmarks/staleness.md, are those of the code."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

from agentrl import config, registry

from .test_divergence import cosine, spread
from .test_losses import expected_direction
from .test_ppo import UNCUT, distance

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "algorithms.md").read_text()
STALENESS = (ROOT / "benchmarks" / "staleness.md").read_text()


def cells(first: str) -> list[str]:
    """The other cells of the row of benchmarks/staleness.md that begins with `first`."""
    (row,) = re.findall(rf"^\| {re.escape(first)} \| (.*) \|$", STALENESS, re.M)
    return row.split(" | ")


def test_the_page_has_every_algorithm() -> None:
    for kind in registry.ids("algorithms"):
        row = rf"^\| `{re.escape(kind)}` (\| [^|]+){{4}}\|$"
        assert re.search(row, PAGE, re.M), f"give {kind} a row of five cells in docs/explanation/algorithms.md"


def test_the_cosines_of_the_normalisations_are_computed() -> None:
    for value, name in (("token", '`"token"`'), ("sequence", '`"sequence"`'), (3, "a number")):
        assert cells(name) == [f"{expected_direction(value):.3f}"], name


def test_the_errors_of_the_corrections_are_computed() -> None:
    for name, first in (("none", " (plain GAE)"), ("token", ", uncut"), ("prefix", ", uncut")):
        found = [
            f"{distance(lag, importance=name, importance_bounds=(0.0, UNCUT), trace_cap=UNCUT):.3f}"
            for lag in (0, 4, 8)
        ]
        assert cells(f'`"{name}"`{first}') == found, name


def test_the_levels_of_distillation_are_computed() -> None:
    for level in ("token", "episode"):
        assert cells(f'`distil_level = "{level}"`') == [f"{cosine(level):.3f}", f"{spread(level):.2f}"]


def test_an_algorithm_is_one_short_file() -> None:
    """Lines of code: explanations may be as long as a reader needs."""
    for kind in registry.ids("algorithms"):
        source = inspect.getsource(cast("ModuleType", inspect.getmodule(config.algorithm(kind))))
        explained = {
            line
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            for line in range(node.lineno, cast("int", node.end_lineno) + 1)
        }
        code = [
            line
            for number, line in enumerate(source.splitlines(), 1)
            if line.strip() and not line.lstrip().startswith("#") and number not in explained
        ]
        assert len(code) <= 112, kind


def test_settings_are_read_without_torch() -> None:
    """Every process of a run reads them, also those that never train."""
    code = (
        "import sys\nfrom agentrl import config, registry\n"
        "for kind in registry.ids('algorithms'):\n"
        "    config.parse({'model': 'm', 'env': {'id': 'e'}, 'algo': {'kind': kind}})\n"
        "print(kind, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == [registry.ids("algorithms")[-1], "False"], done.stderr
