"""Verdicts of single tests, read from the output of a test run: `pytest -rA`, `pytest -v` and `unittest -v`.

A test that the log calls both passed and failed has failed, and one that it does not name has not passed. Reading costs
time and memory linear in the log, whatever it holds. Knows nothing of boxes. A log is no proof: the sources under test
ran in the process that printed it.

A set's ids often come from another reader of logs, and are not the log's own names. `Log.names` finds the tests that
such an id means: by the first rule below that finds any. A test counts as passed if all tests that its id may mean did.

    the name             tests/a.py::test_x, or mod.Case.test_x however unittest writes it
    a docstring          unittest -v prints its first line below the name
    a cut name           tests/a.py::test_x[1 of tests/a.py::test_x[1 - 2]: up to the first blank
    a shortened path     tests/a.py::test_x[/b.txt] of tests/a.py::test_x[/tmp/run/b.txt]
    the end of one name  a.py::Case::test_x or test_x or a.Case.test_x of tests/a.py::Case::test_x, if no other ends so
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from agentrl.env import Grade
from agentrl.records import Json

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
_SPLIT: Final = re.compile(r"::|[./:]")  # between the parts of a name: folders, file, class, method
_NAMED: Final = 20  # tests that a grade names
_ALIKE: Final = 1_000  # tests of one last name; among more no end of a name is looked for


def canonical(test: str) -> str:
    """One name for a test however a list or a Python version writes it: `test_a (mod.Case)`, `test_a (mod.Case.test_a)`
    and `mod.Case.test_a` are the same; pytest's `file.py::Case::test_a` stays."""
    test = test.strip()
    if (found := _UNITTEST.match(test)) is None:
        return test
    method, owner, _ = found.groups()
    return owner if owner.split(".")[-1] == method else f"{owner}.{method}"


@dataclass(frozen=True)
class Log:
    """The tests that a log names, by their canonical names: those that passed and failed nowhere, and the others.
    `docstrings` has the line below a test's name, as unittest prints it."""

    passed: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    docstrings: dict[str, set[str]] = field(default_factory=dict[str, "set[str]"])

    def names(self, test: str) -> frozenset[str]:
        """The tests of the log that a canonical id may mean; empty if there is none, or no telling which."""
        if test in self.passed or test in self.others:
            return frozenset({test})
        for index in (self.docstrings, self._cut, self._shortened):
            if found := index.get(test):
                return frozenset(found)
        parts = _parts(test)
        alike = self._by_last.get(parts[-1] if parts else "", ())
        ending = [name for name in alike if _ends(_parts(name), parts)] if len(alike) <= _ALIKE else []
        return frozenset(ending) if len(ending) == 1 else frozenset()

    def has_passed(self, test: str) -> bool:
        """Whether all tests that an id may mean are there and have passed."""
        names = self.names(test)
        return bool(names) and names <= self.passed

    @cached_property
    def _all(self) -> frozenset[str]:
        return self.passed | self.others

    @cached_property
    def _cut(self) -> dict[str, set[str]]:
        return _index((name.partition(" ")[0], name) for name in self._all if "::" in name and " " in name)

    @cached_property
    def _shortened(self) -> dict[str, set[str]]:
        return _index((_shortened(name), name) for name in self._all if "::" in name and "[/" in name)

    @cached_property
    def _by_last(self) -> dict[str, set[str]]:
        return _index((parts[-1], name) for name in self._all if (parts := _parts(name)))


def _index(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    index = defaultdict[str, set[str]](set)
    for key, name in pairs:
        index[key].add(name)
    return index


def is_name(test: str) -> bool:
    """Whether a canonical id looks like the name of a test, whole: not a docstring, not cut within its parameters."""
    plain, bracket, _ = test.partition("[")
    return bool(_parts(plain)) and (not bracket or test.endswith("]"))


def _shortened(name: str) -> str:
    """A name whose one parameter is an absolute path, with the path's last part alone."""
    plain, _, parameter = name.partition("[")
    if not parameter.startswith("/") or parameter.startswith("//") or "*" in parameter or parameter[-1] != "]":
        return name
    return f"{plain}[/{parameter[:-1].rpartition('/')[2]}]"


def _parts(name: str) -> list[str]:
    """The parts of a name: tests, a, Case, test_x[1.5] of `tests/a.py::Case::test_x[1.5]` and of the same in dots. A
    text with blanks outside its parameters is no name."""
    plain, bracket, parameters = name.partition("[")
    if not plain or any(map(str.isspace, plain)):
        return []
    parts = [part for part in _SPLIT.split(plain.replace(".py:", ":")) if part]
    return [*parts[:-1], parts[-1] + bracket + parameters] if parts else []


def _ends(name: list[str], end: list[str]) -> bool:
    return name[-len(end) :] == end or (len(end) > len(name) > 1 and end[-len(name) :] == name)


def read_log(log: str) -> Log:
    """The tests that a log names."""
    good: set[str] = set()
    bad: set[str] = set()
    docstrings = defaultdict[str, set[str]](set)
    running = described = ""  # the unittest test whose verdict has not come yet; the one whose name was the last line
    for line in _COLOURS.sub("", log).splitlines():
        line = line.rstrip()
        below, described = described, ""
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
            described = "" if line else running
        elif below and len(words := line.partition(" ... ")[0].strip()) <= _LONGEST:
            docstrings[canonical(words)].add(below)
        if running and (found := _ENDING.search(line)) is not None:
            (good if found[1] in _GOOD else bad).add(running)
            running = ""
    return Log(frozenset(good - bad), frozenset(bad), docstrings)


def passed(log: str) -> frozenset[str]:
    """Canonical names of the tests that passed, and failed nowhere in the log."""
    return read_log(log).passed


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


def graded(log: Log, fails: Sequence[str], passes: Sequence[str]) -> Grade:
    """Success: all listed tests passed; `fails` is not empty. `absent` is how many listed tests the log does not have,
    and `absent_tests` names some of them."""
    good = {test for test in {*fails, *passes} if log.has_passed(test)}
    absent = [test for test in dict.fromkeys([*fails, *passes]) if not log.names(test)]
    success = good >= {*fails, *passes}
    mended = len(good & {*fails}) / len({*fails})
    kept = len(good & {*passes}) / len({*passes}) if passes else 1.0
    info: dict[str, Json] = {"mended": mended, "kept": kept, "tests": len({*fails, *passes}), "absent": len(absent)}
    if absent:
        info["absent_tests"] = [test[:200] for test in absent[:_NAMED]]
    return Grade(outcome=float(success), success=success, info=info)
