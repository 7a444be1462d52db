"""Ids and references resolve lazily, and what cannot be resolved names what could."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from agentrl import registry
from agentrl.errors import UnknownIdError, UsageError


def module_level() -> int:
    return 3


def test_an_unknown_id_names_the_nearest_known_one() -> None:
    with pytest.raises(UnknownIdError, match="CodeRepair-v0"):
        registry.resolve("environments", "agentrl/CodeRepiar-v0")


def test_a_registered_reference_is_imported_when_first_used() -> None:
    registry.register("environments", "test/Later-v0", "no_such_module_of_ours:Env")
    assert "test/Later-v0" in registry.ids("environments")
    with pytest.raises(UsageError, match="no_such_module_of_ours"):
        registry.resolve("environments", "test/Later-v0")


def test_a_reference_to_a_file_needs_no_package(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Env:\n    class Inner: ...\n")
    assert registry.resolve("environments", f"{tmp_path / 'mine.py'}:Env.Inner").__name__ == "Inner"
    with pytest.raises(UsageError, match="has no 'Nope'"):
        registry.load_reference(f"{tmp_path / 'mine.py'}:Nope")
    with pytest.raises(UsageError, match="no such file"):
        registry.load_reference(f"{tmp_path / 'absent.py'}:Env")


def test_only_what_another_process_can_import_has_a_reference() -> None:
    assert registry.load_reference(registry.reference_of(module_level)) is module_level
    with pytest.raises(UsageError, match="module level"):
        registry.reference_of(lambda: 3)
    with pytest.raises(UsageError, match="is no function or class: give the reference of its name"):
        registry.reference_of(functools.partial(module_level))
