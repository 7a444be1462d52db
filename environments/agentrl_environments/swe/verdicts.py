"""Verdicts of single tests, read from the output of a test run: `pytest -rA`, `pytest -v` and `unittest -v`.

A test that the log calls both passed and failed has failed, and one that it does not name has not passed. Reading costs
time and memory linear in the log, whatever it holds. Knows nothing of boxes. A log is no proof: the sources under test
ran in the process that printed it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import Final

from agentrl.env import Grade

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_WORDS: Final = frozenset({"PASSED", "FAILED", "ERROR", "XFAIL", "XPASS", "SKIPPED"})
_PERCENT: Final = re.compile(r" *\d+%\]")
_REASON: Final = " - "  # what stands between a name and a reason, and within the parameters of some names
_LONGEST: Final = 4_096  # characters of a name
_PARTS: Final = 16  # a name has fewer separators than this
_UNITTEST: Final = re.compile(r"^(\w+) \(([\w.<>]+)\)(.*)$")
_ENDING: Final = re.compile(r"(?:^|\.\.\. ?|\s)(ok|FAIL|ERROR|expected failure|unexpected success|skipped .*)$")
_COMPLAINT: Final = re.compile(r"^(?:FAIL|ERROR|UNEXPECTED SUCCESS): (\w+ \([\w.<>]+\))")
_GOOD: Final = {"PASSED", "XFAIL", "ok", "expected failure"}


def canonical(test: str) -> str:
    """One name for a test however a list or a Python version writes it: `test_a (mod.Case)`, `test_a (mod.Case.test_a)`
    and `mod.Case.test_a` are the same; pytest's `file.py::Case::test_a` stays."""
    test = test.strip()
    if (found := _UNITTEST.match(test)) is None:
        return test
    method, owner, _ = found.groups()
    return owner if owner.split(".")[-1] == method else f"{owner}.{method}"


def passed(log: str) -> frozenset[str]:
    """Canonical names of the tests that passed, and failed nowhere in the log."""
    good: set[str] = set()
    bad: set[str] = set()
    running = ""  # the unittest test whose verdict has not come yet
    for line in _COLOURS.sub("", log).splitlines():
        line = line.rstrip()
        if not line:
            continue
        status, _, rest = line.partition(" ")
        if status in _WORDS and rest:  # the short summary of -rA
            (good if status in _GOOD else bad).update(_possible(rest, reasoned=status != "PASSED"))
            continue
        name, status = _status_last(line)
        if status in _WORDS:
            (good if status in _GOOD else bad).update(_possible(name, reasoned=False))
            continue
        if (found := _COMPLAINT.match(line)) is not None:
            bad.add(canonical(found[1]))
            continue
        if (found := _UNITTEST.match(line)) is not None:
            running, line = canonical(line), found[3]
        if running and (found := _ENDING.search(line)) is not None:
            (good if found[1] in _GOOD else bad).add(running)
            running = ""
    return frozenset(good - bad)


def _possible(text: str, *, reasoned: bool) -> list[str]:
    """The names of tests that a text may be: itself and, if a reason may stand behind it, each beginning before a
    separator. What is too long, or has too many separators, is no name."""
    if not reasoned:
        return [text] if len(text) <= _LONGEST and text.count(_REASON) < _PARTS else []
    parts = text[: _LONGEST + 1].split(_REASON, _PARTS)[:_PARTS]
    return [name for at in range(len(parts)) if len(name := _REASON.join(parts[: at + 1])) <= _LONGEST]


def _status_last(line: str) -> tuple[str, str]:
    """Name and status of a line of pytest's -v, such as `file.py::test PASSED [ 50%]`; two empty texts for others."""
    before, _, percent = line.rpartition("[")
    if _PERCENT.fullmatch(percent) and before[-1:].isspace():
        line = before.rstrip()
    name, _, status = line.rpartition(" ")
    at = name.find("::", 1)
    return (name, status) if 0 < at < len(name) - 2 and not name[0].isspace() else ("", "")


def graded(good: Set[str], fails: Sequence[str], passes: Sequence[str]) -> Grade:
    """Success: all listed tests are among those that passed; `fails` is not empty."""
    success = good >= {*fails, *passes}
    mended = len(good & {*fails}) / len({*fails})
    kept = len(good & {*passes}) / len({*passes}) if passes else 1.0
    return Grade(outcome=float(success), success=success, info={"mended": mended, "kept": kept})
