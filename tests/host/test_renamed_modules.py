"""Modules and classes by their earlier names are those of today, and say what to import."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

import agentrl.config
import agentrl_environments.judging
import agentrl_environments.swe

CODE = """
import importlib, warnings, agentrl
from agentrl.host.renamed_modules import RENAMED
for old, new in RENAMED.items():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = importlib.import_module(old)
    assert found is importlib.import_module(new), old
    assert found.__name__ == found.__spec__.name == new, old
    assert [new in str(one.message) for one in seen if one.category is DeprecationWarning] == [True], old
"""


def test_an_earlier_name_is_the_same_module_and_warns() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (agentrl.config, "Buffer", "BufferSettings"),
        (agentrl_environments.judging, "Judge", "SourceJudge"),
        (agentrl_environments.swe, "Task", "CodingTask"),
    ],
)
def test_an_earlier_class_name_is_the_same_class_and_warns(module: ModuleType, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is named {new} now"):
        assert getattr(module, old) is getattr(module, new)
    assert not hasattr(module, "no_such_class")


def test_an_unknown_module_stays_unknown() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("agentrl.no_such_module")
