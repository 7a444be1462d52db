"""The script that measures how the code reads counts what a reader would."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "tools" / "voice.py"
SOURCE = '''"""That of a module: see `load` and `nothing_of_ours`."""

# A comment on a line of its own.


def load(path):  # and one behind code
    """What was found at `path`."""
    found, lines = open(path).read(), []
    return found, lines
'''


def test_each_place_is_counted_once_and_named(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("voice", SCRIPT)
    assert spec is not None and spec.loader is not None
    voice = importlib.util.module_from_spec(spec)
    sys.modules["voice"] = voice  # its named tuple looks itself up there
    spec.loader.exec_module(voice)
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
    }
    assert [(place.line, place.text) for place in measures.places["vague locals"]] == [(8, "found")]
    assert [place.text for place in measures.places["missing names"]] == ["nothing_of_ours"]
