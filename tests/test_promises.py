"""Promises that nobody keeps: plug-in points, settings and marks of tests that nothing uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from agentrl.config import run_config as config

ROOT = Path(__file__).resolve().parent.parent
CODE = "\n".join(path.read_text() for path in sorted((ROOT / "agentrl").rglob("*.py")))


def settings() -> Iterator[str]:
    """`Buffer.max_lag` and so on. Those of a curriculum are arguments of one, which refuses what it does not know."""
    for section in vars(config).values():
        if isinstance(section, type) and issubclass(section, BaseModel) and section is not config.CurriculumSettings:
            yield from (f"{section.__name__}.{name}" for name in section.model_fields)


@pytest.mark.parametrize("setting", sorted(settings()))
def test_every_setting_is_read(setting: str) -> None:
    name = setting.partition(".")[2]
    assert re.search(rf"\.{name}\b", CODE), f"nothing reads {setting}"


def test_every_plug_in_point_is_used() -> None:
    offered = ast.parse((ROOT / "agentrl" / "protocols.py").read_text()).body
    names = [node.name for node in offered if isinstance(node, ast.ClassDef)]
    assert [name for name in names if len(re.findall(rf"\b{name}\b", CODE)) < 2] == []


def test_every_mark_of_a_part_has_a_test() -> None:
    marks = re.findall(r'^  "(\w+): needs ', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_conftest.py"]
    assert len(marks) > 3
    assert [mark for mark in marks if not any(f"mark.{mark}" in text for text in tests)] == []
