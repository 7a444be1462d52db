"""Verdicts of single tests in the logs of runners beside pytest and unittest, one line at a time.

    cargo test           test tests::adds ... ok                    tests::adds
    go test -v           --- PASS: TestAdds/small (0.00s)           TestAdds/small
    TAP                  not ok 2 - adds # TODO later               adds
    jest, mocha, node    ✓ adds (3 ms), 1) adds                     adds
    jest, by file        PASS src/sums.test.js (5.1 s)              src/sums.test.js
    PHPUnit, AVA         ✘ Adds, ✘ [fail]: adds                     Adds, adds

A runner that nests its tests prints their names without those of their suites, so tests of one name are one: it has
passed if all of them have. Each line costs linear time.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple


class TestVerdict(NamedTuple):
    """A test and its verdict, read from a line; `good` is None for a test that did not run."""

    name: str
    good: bool | None


_CARGO: Final = {"ok": True, "FAILED": False, "ignored": None, "failed": False}
_GO: Final = re.compile(r"^ *--- (PASS|FAIL|SKIP): (\S+) \(\d")
_TAP: Final = re.compile(r"^ *(not ok|ok) \d+(?: -)? (.*)$")
_MARKS: Final = {"✓": True, "✔": True, "√": True, "✕": False, "✘": False, "✖": False, "✗": False, "\u00d7": False}
_LEFT_OUT: Final = {"○", "﹣", "✎", "◌", "↓", "↩", "∅"}
_NUMBERED: Final = re.compile(r"^ +\d+\) (\S.*)$")  # mocha's failures
_FILE: Final = re.compile(r"^(PASS|FAIL) (\S*[./]\S*)(?: |$)")
_TOOK: Final = re.compile(r"(?: \(\d[\d.]* ?m?s\)| \d[\d.]*m?s)$")
_LONGEST: Final = 4_096  # characters of a line that is read


def verdict(line: str) -> TestVerdict | None:
    """Read a line without colours; None for a line of none of these runners."""
    if len(line) > _LONGEST:
        return None
    line_text = line.strip()
    if line.startswith("test ") and " ... " in line:
        test_name, _, status_word = line[5:].rpartition(" ... ")
        status_word = status_word.split(",")[0]
        return TestVerdict(test_name, _CARGO[status_word]) if status_word in _CARGO else None
    if (line_match := _GO.match(line)) is not None:
        return TestVerdict(line_match[2], {"PASS": True, "FAIL": False, "SKIP": None}[line_match[1]])
    if (line_match := _TAP.match(line)) is not None:
        return _tap(line_match[1] == "ok", line_match[2])
    status_mark, _, test_name = line_text.partition(" ")
    if status_mark in _MARKS and test_name:
        return _marked(_MARKS[status_mark], test_name)
    if status_mark in _LEFT_OUT and test_name:
        return TestVerdict(_plain(test_name.partition(" # ")[0].removeprefix("skipped ").removeprefix("todo ")), None)
    if (line_match := _NUMBERED.match(line)) is not None:
        return TestVerdict(line_match[1].removesuffix(":"), False)
    if (line_match := _FILE.match(line)) is not None:
        return TestVerdict(line_match[2], line_match[1] == "PASS")
    return None


def _tap(good: bool, text: str) -> TestVerdict | None:
    """A point of TAP. One that is to be done may fail: it counts as kept, as an expected failure of pytest does."""
    test_name, _, directive = text.partition(" # ")
    directive_word = directive.strip().split(" ")[0].upper()
    if not test_name.strip():
        return None
    return TestVerdict(test_name.strip(), None if directive_word == "SKIP" else good or directive_word == "TODO")


def _marked(good: bool, text: str) -> TestVerdict:
    test_name, _, directive = text.partition(" # ")
    directive_word = directive.strip().split(" ")[0].upper()
    test_name = _plain(test_name).removeprefix("[fail]: ")  # AVA's
    return TestVerdict(test_name, None if directive_word == "SKIP" else good or directive_word == "TODO")


def _plain(name: str) -> str:
    """A name without the time that its test took."""
    return _TOOK.sub("", name)
