"""Ids and references resolve lazily, and what cannot be resolved names what could."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from each_case import each_case

from agentrl import registry
from agentrl.errors import UnknownIdError, UsageError


def module_level() -> int:
    return 3


def test_an_unknown_id_names_the_nearest_known_one() -> None:
    with pytest.raises(UnknownIdError, match=r"known: agentrl/CodeRepair-v0, .* new .* pip install it again"):
        registry.resolve("environments", "agentrl/CodeRepiar-v0")


def test_a_registered_reference_is_imported_when_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
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


@each_case(
    ("text", "says"),
    [
        ("class X(:", r"SyntaxError: invalid syntax \(broken.py, line 1\)$"),
        ("x = 1\nX = y\n", r"NameError: name 'y' is not defined \(.*broken.py:2\)$"),
        ("import no_such_module", r"No module named 'no_such_module'$"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(UsageError, match=rf"^cannot import '{tmp_path}/broken.py' of '.*broken.py:X': {says}"):
        registry.resolve("environments", f"{tmp_path}/broken.py:X")


def test_an_entry_point_that_leads_nowhere_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentrl.tools]\nmine = agentrl.records:Tasks\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._offered.cache_clear()
    try:
        with pytest.raises(UsageError, match=r"^'agentrl.records' has no 'Tasks' \(from 'agentrl.records:Tasks'\)$"):
            registry.resolve("tools", "mine")
    finally:
        registry._offered.cache_clear()
