"""Modules by their earlier names are the modules of today, and say what to import."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

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


def test_an_unknown_module_stays_unknown() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("agentrl.no_such_module")
