"""The script that measures how the code reads counts what a reader would, and the goals of 0 hold."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from each_case import each_case

ROOT = Path(__file__).parents[1]
SOURCE = '''"""That of a module: see `load` and `nothing_of_ours`."""

# A comment on a line of its own.


def load(path):  # and one behind code
    """What was found at `path`."""
    found, lines = open(path).read(), []
    return found, lines
'''


@pytest.fixture(scope="module")
def voice() -> Any:
    spec = importlib.util.spec_from_file_location("voice", ROOT / "tools" / "voice.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["voice"] = module  # its named tuple looks itself up there
    spec.loader.exec_module(module)
    return module


def test_each_place_is_counted_once_and_named(voice: Any, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    measures = voice.Measures()
    measures.add(file)
    rows = {measure: value for measure, value, _ in measures.rows()}
    assert rows == {
        "vague locals": "50.0% of 2",
        "mean length of a local's name": "5.0",
        "whole-line comments": "11.1% of 9 lines",
        "openings": "2 in 2 docstrings",
        "banned words": "1 in 2 docstrings",
        "missing names": "1 in 2 docstrings",
        "banned names": "1 in 4 names",
    }
    assert [(place.line, place.text) for place in measures.places["vague locals"]] == [(8, "found")]
    assert [(place.line, place.text) for place in measures.places["banned names"]] == [(8, "found")]
    assert [place.text for place in measures.places["missing names"]] == ["nothing_of_ours"]


@each_case(
    ("source", "banned"),
    [
        ("MOST_FOUND = 1", ["MOST_FOUND"]),
        ("class NotFound: ...", ["NotFound"]),
        ("class URLWanted: ...", ["URLWanted"]),
        ("async def _was_told(self, given, *, asked=1): ...", ["_was_told", "given", "asked"]),
        ("def f(*said, **mended): ...", ["said", "mended"]),
        ("self.mend = 1", ["mend"]),
        ("import os as found", ["found"]),
        ("try: ...\nexcept OSError as told: ...", ["told"]),
        ("match rows:\n    case [*wanted]: ...", ["wanted"]),
        ("match rows:\n    case {'a': found, **given}: ...", ["given", "found"]),
        ("masked, unsaid, founded, wantedly = rows", []),
        ("print(other.found, HTTPStatus.NOT_FOUND, call(asked=1))", []),
    ],
)
def test_a_name_is_banned_for_a_word_in_it_where_it_is_bound(
    voice: Any, tmp_path: Path, source: str, banned: list[str]
) -> None:
    file = tmp_path / "module.py"
    file.write_text(source + "\n")
    measures = voice.Measures()
    measures.add(file)
    assert sorted(place.text for place in measures.places["banned names"]) == sorted(banned)


@pytest.mark.medium
def test_our_code_keeps_to_the_goals_of_0(voice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    measures = voice.Measures()
    for path in voice.sources(["agentrl"]):
        measures.add(path)
    measured_at_0 = [measure for measure, _, goal in measures.rows() if goal == "0"]
    assert len(measured_at_0) == 4
    assert [place for measure in measured_at_0 for place in measures.places[measure]] == []


def test_names_and_docstrings_beside_the_package_keep_to_the_goals_of_0(
    voice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    measures, paths = voice.Measures(), voice.sources(["environments", "tools", "agentrl_command.py"])
    assert not [path for path in paths if {"repositories", "harbor_tasks"} & {*path.parts}], "tasks are not our prose"
    for path in paths:
        measures.add(path)
    assert measures.places["banned names"] == measures.places["openings"] == []
    # Keys of data that users have: a reset option, and `mended_tests` of an info.
    keys_of_users = ["Reading: asked", "graded: mended"]
    assert [place.text for place in measures.places["banned words"]] == keys_of_users
