"""Verdicts of single tests, read from the output of a test run: `pytest -rA`, `pytest -v`, `unittest -v`, and those of
`other_runners`.

A test that the log calls both passed and failed has failed, also where only a part of it (a subtest) failed, and one
that it does not name has not passed. A status that is not known here, and a log that contradicts its exit code, are
*unknown*: they are named and are never a win. Reading costs time and memory linear in the log, whatever it holds. Knows
nothing of boxes. A log is no proof: the sources under test ran in the process that printed it.

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
from itertools import islice
from typing import Final

from agentrl.env import Grade
from agentrl.records import Json
from agentrl_environments.swe import other_runners

_ESCAPES: Final = re.compile(
    r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]"  # colours, moves of the cursor, erasing
    r"|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)"  # titles and links
    r"|[()][0-9A-Za-z]|[@-Z\\^_])"
)
_WORDS: Final = frozenset({"PASSED", "FAILED", "ERROR", "XFAIL", "XPASS", "SKIPPED"})
_NO_VERDICT: Final = frozenset({"RERUN", "SUBPASS", "SUBPASSED", "SUBSKIP", "SUBSKIPPED", "SUBXFAIL", "SUBXFAILED"})
# Of a subtest, as pytest-subtests (SUBFAIL) and pytest 9 (SUBFAILED) write it: beside it stands a test that has passed.
_PART_FAILED: Final = re.compile(r"(?:^|(?<=\s))SUB(?:FAIL(?:ED)?|ERROR)(?=[\[(\s]|$)")
_PART: Final = re.compile(r"(?:^|(?<=\s))SUB[A-Z]+(?=[\[(\s]|$)")
_REASONED: Final = re.compile(r" (XFAIL|SKIPPED|XPASS) \(")  # -v prints why behind these
_WORKER: Final = re.compile(r"^\[gw\d+\] (?:\[ *\d+%\] )?")  # of pytest-xdist
_UPPER: Final = re.compile(r"[A-Z]{3,20}")
_CUTS: Final = 4  # places of a line where a name may begin or end
_SUMMARY: Final = "short test summary info"
_PERCENT: Final = re.compile(r" *\d+%\]")
_REASON: Final = " - "  # what stands between a name and a reason, and within the parameters of some names
_LONGEST: Final = 4_096  # characters of a name
_PARTS: Final = 16  # a name has fewer separators than this
_UNITTEST: Final = re.compile(r"^(\w+) \(([\w.<>]+)\)(.*)$")
_ENDING: Final = re.compile(r"(?:^|\.\.\. ?|\s)(ok|FAIL|ERROR|expected failure|unexpected success|skipped .*)$")
_COMPLAINT: Final = re.compile(r"^(?:FAIL|ERROR|UNEXPECTED SUCCESS): (\w+ \([\w.<>]+\))")
_XFAILED: Final = {"XFAIL", "expected failure"}
_GOOD: Final = {"PASSED", "ok", *_XFAILED}
_SPLIT: Final = re.compile(r"::|[./:]")  # between the parts of a name: folders, file, class, method
_NAMED: Final = 20  # tests that a grade names
_ALIKE: Final = 1_000  # tests of one last name; among more no end of a name is looked for


def canonical(test: str) -> str:
    """One name for a test however a list or a Python version writes it: `test_a (mod.Case)`, `test_a (mod.Case.test_a)`
    and `mod.Case.test_a` are the same; pytest's `file.py::Case::test_a` stays."""
    test = test.strip()
    if (match := _UNITTEST.match(test)) is None:
        return test
    method, owner, _ = match.groups()
    return owner if owner.split(".")[-1] == method else f"{owner}.{method}"


@dataclass(frozen=True)
class Log:
    """The tests that a log names, by their canonical names: those that passed and failed nowhere, and the others, of
    which some have `failed`: the rest was left out.
    `unknown` are those of the others that have a status which is not known here, with it. `docstrings` has the line
    below a test's name, as unittest prints it. `xfailed` are those of the passed that failed as expected."""

    passed: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    unknown: dict[str, str] = field(default_factory=dict[str, str])
    docstrings: dict[str, set[str]] = field(default_factory=dict[str, "set[str]"])
    xfailed: frozenset[str] = frozenset()

    def names(self, test: str) -> frozenset[str]:
        """The tests of the log that a canonical id may mean; empty if there is none, or no telling which."""
        if test in self.passed or test in self.others:
            return frozenset({test})
        for index in (self.docstrings, self._cut, self._shortened):
            if candidates := index.get(test):
                return frozenset(candidates)
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
    reader = _Reader()
    for line in _ESCAPES.sub("", log).splitlines():
        reader.read(line.rstrip())
    others = reader.failed | reader.left_out | reader.unknown.keys()
    return Log(
        passed=frozenset(reader.good - others),
        others=frozenset(others),
        failed=frozenset(reader.failed),
        unknown=reader.unknown,
        docstrings=reader.docstrings,
        xfailed=frozenset(reader.xfailed),
    )


class _Reader:
    """The verdicts of the lines read so far."""

    def __init__(self) -> None:
        self.good: set[str] = set()
        self.failed: set[str] = set()
        self.left_out: set[str] = set()
        self.xfailed: set[str] = set()
        self.unknown: dict[str, str] = {}
        self.docstrings = defaultdict[str, set[str]](set)
        self._running = ""  # the unittest test whose verdict has not come yet
        self._described = ""  # the one whose name was the last line
        self._in_summary = False  # of pytest: there a word before a name is a status, whatever it is

    def read(self, line: str) -> None:
        below, self._described = self._described, ""
        if not line:
            return
        self._in_summary = self._in_summary or _SUMMARY in line
        of_cargo = line.startswith("test ") and " ... " in line  # whose names hold "::", as pytest's do
        if of_cargo or not (self._of_pytest(line) or self._of_unittest(line, below)):
            self._of_others(line)

    def _of_pytest(self, line: str) -> bool:
        if self._of_part(line):
            return True
        plain = _WORKER.sub("", line)
        status, _, rest = plain.partition(" ")
        if status in _WORDS and rest and not rest.startswith("("):  # -rA's summary, a worker's line; not unittest's end
            self._add(status, _possible(rest.strip(), reasoned=status != "PASSED"))
            return True
        name, status = _status_last(line)
        if status in _WORDS:
            self._add(status, _possible(name, reasoned=False))
            return True
        if status and status not in _NO_VERDICT:
            self.unknown.update(dict.fromkeys(_possible(name, reasoned=False), status))
            return True
        status, _, rest = plain.partition(" ")
        if self._in_summary and _UPPER.fullmatch(status) and status not in _NO_VERDICT and "::" in rest:
            self.unknown.update(dict.fromkeys(_possible(rest.strip(), reasoned=True), status))
            return True
        return False

    def _of_part(self, line: str) -> bool:
        """A line of a subtest. Its own name stands beside the test's, so each cut that may be the test's counts."""
        if "SUB" not in line or "::" not in line or _PART.search(line) is None:
            return False
        if (match := _PART_FAILED.search(line)) is not None:
            before, after = _WORKER.sub("", line[: match.start()]).rstrip(), line[match.end() :]
            for name in _beginnings(before):
                self.failed.update(_possible(name, reasoned=False))
            for text in _endings(after):
                self.failed.update(_possible(text, reasoned=True))
        return True

    def _of_unittest(self, line: str, below: str) -> bool:
        if (match := _COMPLAINT.match(line)) is not None:
            self.failed.add(canonical(match[1]))
            return True
        if (match := _UNITTEST.match(line)) is not None:
            self._running, line = canonical(line), match[3]
            self._described = "" if line else self._running
        elif below and len(words := line.partition(" ... ")[0].strip()) <= _LONGEST:
            self.docstrings[canonical(words)].add(below)
        if not self._running:
            return False
        # Before Python 3.11 a test whose subtests failed ends its line with nothing, and the next one follows in it.
        head, _, rest = line.partition(" ... ")
        if rest and (match := _UNITTEST.match(rest)) is not None and len(head) <= _LONGEST:
            return self._of_unittest(rest, "")
        if (match := _ENDING.search(line)) is not None:
            self._add(match[1], [self._running])
            self._running = ""
            return True
        return False

    def _of_others(self, line: str) -> None:
        verdict = other_runners.verdict(line)
        if verdict is not None and len(verdict.name) <= _LONGEST:
            self._add({True: "ok", False: "FAIL", None: "skipped"}[verdict.good], [verdict.name])

    def _add(self, status: str, names: Iterable[str]) -> None:
        left_out = status == "SKIPPED" or status.startswith("skipped")
        named = list(names)
        (self.good if status in _GOOD else self.left_out if left_out else self.failed).update(named)
        if status in _XFAILED:
            self.xfailed.update(named)


def _beginnings(text: str) -> list[str]:
    """List what may be the name of a test before the description of its part, in brackets: `a.py::test [odd] (n=1)`."""
    ends = [match.start() for match in islice(re.finditer(r" [\[(]", text[:_LONGEST]), _CUTS)]
    return [each for end in (*ends, len(text)) if "::" in (each := text[:end])]


def _endings(text: str) -> list[str]:
    """List what may be the name of a test, and a reason, behind the description of its part, which may hold what looks
    like a name: `[odd] (n=1) a.py::test - why`."""
    starts = [match.start() for match in islice(re.finditer(r"[^ ]*::", text[:_LONGEST]), _CUTS)]
    return [text[start:].strip() for start in starts]


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
    """Name and status of a line of pytest's -v, such as `file.py::test PASSED [ 50%]` or `file.py::test SKIPPED (why)`;
    two empty texts for others. Only beside a share of the run is a word that is not known here a status."""
    before, _, percent = line.rpartition("[")
    has_percent = _PERCENT.fullmatch(percent) is not None and before[-1:].isspace()
    if has_percent:
        line = before.rstrip()
    name, _, status = line.rpartition(" ")
    if status not in _WORDS and line.endswith(")") and (match := _REASONED.search(line)) is not None:
        name, status = line[: match.start()], match[1]
    elif status not in _WORDS and not (has_percent and _UPPER.fullmatch(status)):
        return "", ""
    at = name.find("::", 1)
    return (name, status) if 0 < at < len(name) - 2 and not name[0].isspace() else ("", "")


def graded(log: Log, fails: Sequence[str], passes: Sequence[str], *, exit_code: int = 0) -> Grade:
    """Success: all listed tests passed; `fails` is not empty. A test that failed as expected is no proof of a change,
    as sources can call `pytest.xfail` themselves: of `passes` it counts, as in SWE-bench, and of `fails` it does not.

    `left_out_tests` has those that would have to pass and were skipped, or failed as expected. `absent` is how many
    listed tests the log does not have, and `absent_tests` names some of them; `mended_tests` are some of `fails` that
    pass where not all tests do. `unknown_tests` has the status of those whose status is not known here.

    A run that ended with another exit code than 0 and names no test that failed contradicts itself: it is no success,
    and `contradiction` says so. Where other tests failed the exit code is theirs, and the listed ones count."""
    listed = list(dict.fromkeys([*fails, *passes]))
    needed, xfailed = {*fails}, {test for test in fails if log.names(test) & log.xfailed}
    good = {test for test in listed if log.has_passed(test)} - xfailed
    absent = [test for test in listed if not log.names(test)]
    success = len(good) == len(listed)
    fixed = len(good & needed) / len(needed)
    kept = len(good & {*passes}) / len({*passes}) if passes else 1.0
    info: dict[str, Json] = {"mended": fixed, "kept": kept, "tests": len(listed), "absent": len(absent)}
    if not success and (already := [test for test in dict.fromkeys(fails) if test in good]):
        info["mended_tests"] = [test[:200] for test in already[:_NAMED]]
    if absent:
        info["absent_tests"] = [test[:200] for test in absent[:_NAMED]]
    skipped = {test for test in listed if (names := log.names(test)) and names <= log.others - log.failed}
    if left_out := {test: "xfailed" if test in xfailed else "skipped" for test in listed if test in skipped | xfailed}:
        info["left_out_tests"] = {test[:200]: how for test, how in list(left_out.items())[:_NAMED]}
    unknown = {test: log.unknown[name] for test in listed for name in log.names(test) if name in log.unknown}
    if unknown:
        info["unknown_tests"] = {test[:200]: status for test, status in list(unknown.items())[:_NAMED]}
    if success and exit_code and not log.failed:
        success = False
        info["contradiction"] = f"exit code {exit_code}, and no test of the log has failed"
    return Grade(outcome=float(success), success=success, info=info)
