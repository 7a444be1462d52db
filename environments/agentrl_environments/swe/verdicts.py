"""Verdicts of single tests, read from what a test run printed: `pytest -rA`, `pytest -v` and `unittest -v`.

A test that the log calls both passed and failed has failed, and one that it does not name has not passed. Knows nothing
of boxes. A log is no proof: the sources under test ran in the process that printed it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import Final

from agentrl.env import Grade

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_WORDS: Final = "PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED"
_STATUS_FIRST: Final = re.compile(rf"^({_WORDS}) (.+)$")  # the short summary of -rA
_STATUS_LAST: Final = re.compile(rf"^(\S.*?::.+) ({_WORDS})(?:\s+\[ *\d+%\])?$")  # -v
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
        if (found := _STATUS_FIRST.match(line)) is not None:
            status, rest = found.groups()
            # a reason stands behind " - ", which the parameters of a test may hold as well
            parts = rest.split(" - ")
            names = [rest] if status == "PASSED" else [" - ".join(parts[: at + 1]) for at in range(len(parts))]
            (good if status in _GOOD else bad).update(names)
            continue
        if (found := _STATUS_LAST.match(line)) is not None:
            (good if found[2] in _GOOD else bad).add(found[1])
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


def graded(good: Set[str], fails: Sequence[str], passes: Sequence[str]) -> Grade:
    """Success: all listed tests are among those that passed; `fails` is not empty."""
    success = good >= {*fails, *passes}
    mended = len(good & {*fails}) / len({*fails})
    kept = len(good & {*passes}) / len({*passes}) if passes else 1.0
    return Grade(outcome=float(success), success=success, info={"mended": mended, "kept": kept})
