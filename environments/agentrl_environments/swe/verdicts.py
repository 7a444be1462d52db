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
    if (unittest_match := _UNITTEST.match(test)) is None:
        return test
    method_name, owner_name, _ = unittest_match.groups()
    return owner_name if owner_name.split(".")[-1] == method_name else f"{owner_name}.{method_name}"


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
        for name_index in (self.docstrings, self._cut, self._shortened):
            if candidates := name_index.get(test):
                return frozenset(candidates)
        test_parts = _parts(test)
        same_last_part = self._by_last.get(test_parts[-1] if test_parts else "", ())
        ending_alike = (
            [log_name for log_name in same_last_part if _ends(_parts(log_name), test_parts)]
            if len(same_last_part) <= _ALIKE
            else []
        )
        return frozenset(ending_alike) if len(ending_alike) == 1 else frozenset()

    def has_passed(self, test: str) -> bool:
        """Whether all tests that an id may mean are there and have passed."""
        log_names = self.names(test)
        return bool(log_names) and log_names <= self.passed

    @cached_property
    def _all(self) -> frozenset[str]:
        return self.passed | self.others

    @cached_property
    def _cut(self) -> dict[str, set[str]]:
        return _index(
            (log_name.partition(" ")[0], log_name) for log_name in self._all if "::" in log_name and " " in log_name
        )

    @cached_property
    def _shortened(self) -> dict[str, set[str]]:
        return _index(
            (_shortened(log_name), log_name) for log_name in self._all if "::" in log_name and "[/" in log_name
        )

    @cached_property
    def _by_last(self) -> dict[str, set[str]]:
        return _index((name_parts[-1], log_name) for log_name in self._all if (name_parts := _parts(log_name)))


def _index(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    names_by_key = defaultdict[str, set[str]](set)
    for index_key, log_name in pairs:
        names_by_key[index_key].add(log_name)
    return names_by_key


def is_name(test: str) -> bool:
    """Whether a canonical id looks like the name of a test, whole: not a docstring, not cut within its parameters."""
    plain_name, bracket, _ = test.partition("[")
    return bool(_parts(plain_name)) and (not bracket or test.endswith("]"))


def _shortened(name: str) -> str:
    """A name whose one parameter is an absolute path, with the path's last part alone."""
    plain_name, _, parameter = name.partition("[")
    if not parameter.startswith("/") or parameter.startswith("//") or "*" in parameter or parameter[-1] != "]":
        return name
    return f"{plain_name}[/{parameter[:-1].rpartition('/')[2]}]"


def _parts(name: str) -> list[str]:
    """The parts of a name: tests, a, Case, test_x[1.5] of `tests/a.py::Case::test_x[1.5]` and of the same in dots. A
    text with blanks outside its parameters is no name."""
    plain_name, bracket, parameters = name.partition("[")
    if not plain_name or any(map(str.isspace, plain_name)):
        return []
    name_parts = [name_part for name_part in _SPLIT.split(plain_name.replace(".py:", ":")) if name_part]
    return [*name_parts[:-1], name_parts[-1] + bracket + parameters] if name_parts else []


def _ends(name: list[str], end: list[str]) -> bool:
    return name[-len(end) :] == end or (len(end) > len(name) > 1 and end[-len(name) :] == name)


def read_log(log: str) -> Log:
    """The tests that a log names."""
    reader = _Reader()
    for log_line in _ESCAPES.sub("", log).splitlines():
        reader.read(log_line.rstrip())
    not_passed = reader.failed | reader.left_out | reader.unknown.keys()
    return Log(
        passed=frozenset(reader.good - not_passed),
        others=frozenset(not_passed),
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
        described_test, self._described = self._described, ""
        if not line:
            return
        self._in_summary = self._in_summary or _SUMMARY in line
        is_of_cargo = line.startswith("test ") and " ... " in line  # whose names hold "::", as pytest's do
        if is_of_cargo or not (self._of_pytest(line) or self._of_unittest(line, described_test)):
            self._of_others(line)

    def _of_pytest(self, line: str) -> bool:
        if self._of_part(line):
            return True
        plain_line = _WORKER.sub("", line)
        status_word, _, line_rest = plain_line.partition(" ")
        # A line of -rA's summary or of a worker, and not unittest's end.
        if status_word in _WORDS and line_rest and not line_rest.startswith("("):
            self._add(status_word, _possible(line_rest.strip(), reasoned=status_word != "PASSED"))
            return True
        test_name, status_word = _status_last(line)
        if status_word in _WORDS:
            self._add(status_word, _possible(test_name, reasoned=False))
            return True
        if status_word and status_word not in _NO_VERDICT:
            self.unknown.update(dict.fromkeys(_possible(test_name, reasoned=False), status_word))
            return True
        status_word, _, line_rest = plain_line.partition(" ")
        if self._in_summary and _UPPER.fullmatch(status_word) and status_word not in _NO_VERDICT and "::" in line_rest:
            self.unknown.update(dict.fromkeys(_possible(line_rest.strip(), reasoned=True), status_word))
            return True
        return False

    def _of_part(self, line: str) -> bool:
        """A line of a subtest. Its own name stands beside the test's, so each cut that may be the test's counts."""
        if "SUB" not in line or "::" not in line or _PART.search(line) is None:
            return False
        if (failed_match := _PART_FAILED.search(line)) is not None:
            text_before, text_after = _WORKER.sub("", line[: failed_match.start()]).rstrip(), line[failed_match.end() :]
            for test_name in _beginnings(text_before):
                self.failed.update(_possible(test_name, reasoned=False))
            for name_text in _endings(text_after):
                self.failed.update(_possible(name_text, reasoned=True))
        return True

    def _of_unittest(self, line: str, below: str) -> bool:
        if (line_match := _COMPLAINT.match(line)) is not None:
            self.failed.add(canonical(line_match[1]))
            return True
        if (line_match := _UNITTEST.match(line)) is not None:
            self._running, line = canonical(line), line_match[3]
            self._described = "" if line else self._running
        elif below and len(described := line.partition(" ... ")[0].strip()) <= _LONGEST:
            self.docstrings[canonical(described)].add(below)
        if not self._running:
            return False
        # Before Python 3.11 a test whose subtests failed ends its line with nothing, and the next one follows in it.
        line_head, _, line_rest = line.partition(" ... ")
        if line_rest and (line_match := _UNITTEST.match(line_rest)) is not None and len(line_head) <= _LONGEST:
            return self._of_unittest(line_rest, "")
        if (line_match := _ENDING.search(line)) is not None:
            self._add(line_match[1], [self._running])
            self._running = ""
            return True
        return False

    def _of_others(self, line: str) -> None:
        line_verdict = other_runners.verdict(line)
        if line_verdict is not None and len(line_verdict.name) <= _LONGEST:
            self._add({True: "ok", False: "FAIL", None: "skipped"}[line_verdict.good], [line_verdict.name])

    def _add(self, status: str, names: Iterable[str]) -> None:
        is_left_out = status == "SKIPPED" or status.startswith("skipped")
        test_names = list(names)
        (self.good if status in _GOOD else self.left_out if is_left_out else self.failed).update(test_names)
        if status in _XFAILED:
            self.xfailed.update(test_names)


def _beginnings(text: str) -> list[str]:
    """List what may be the name of a test before the description of its part, in brackets: `a.py::test [odd] (n=1)`."""
    name_ends = [bracket_match.start() for bracket_match in islice(re.finditer(r" [\[(]", text[:_LONGEST]), _CUTS)]
    return [beginning for name_end in (*name_ends, len(text)) if "::" in (beginning := text[:name_end])]


def _endings(text: str) -> list[str]:
    """List what may be the name of a test, and a reason, behind the description of its part, which may hold what looks
    like a name: `[odd] (n=1) a.py::test - why`."""
    name_starts = [name_match.start() for name_match in islice(re.finditer(r"[^ ]*::", text[:_LONGEST]), _CUTS)]
    return [text[name_start:].strip() for name_start in name_starts]


def passed(log: str) -> frozenset[str]:
    """Canonical names of the tests that passed, and failed nowhere in the log."""
    return read_log(log).passed


def _possible(text: str, *, reasoned: bool) -> list[str]:
    """The names of tests that a text may be: itself and, if a reason may stand behind it, each beginning before a
    separator. What is too long, or has too many separators, is no name."""
    if not reasoned:
        return [text] if len(text) <= _LONGEST and text.count(_REASON) < _PARTS else []
    text_parts = text[: _LONGEST + 1].split(_REASON, _PARTS)[:_PARTS]
    return [
        beginning
        for part_index in range(len(text_parts))
        if len(beginning := _REASON.join(text_parts[: part_index + 1])) <= _LONGEST
    ]


def _status_last(line: str) -> tuple[str, str]:
    """Name and status of a line of pytest's -v, such as `file.py::test PASSED [ 50%]` or `file.py::test SKIPPED (why)`;
    two empty texts for others. Only beside a share of the run is a word that is not known here a status."""
    text_before, _, percent_text = line.rpartition("[")
    has_percent = _PERCENT.fullmatch(percent_text) is not None and text_before[-1:].isspace()
    if has_percent:
        line = text_before.rstrip()
    test_name, _, status_word = line.rpartition(" ")
    if status_word not in _WORDS and line.endswith(")") and (reason_match := _REASONED.search(line)) is not None:
        test_name, status_word = line[: reason_match.start()], reason_match[1]
    elif status_word not in _WORDS and not (has_percent and _UPPER.fullmatch(status_word)):
        return "", ""
    colons_index = test_name.find("::", 1)
    return (
        (test_name, status_word) if 0 < colons_index < len(test_name) - 2 and not test_name[0].isspace() else ("", "")
    )


def graded(log: Log, fails: Sequence[str], passes: Sequence[str], *, exit_code: int = 0) -> Grade:
    """Success: all listed tests passed; `fails` is not empty. A test that failed as expected is no proof of a change,
    as sources can call `pytest.xfail` themselves: of `passes` it counts, as in SWE-bench, and of `fails` it does not.

    `left_out_tests` has those that would have to pass and were skipped, or failed as expected. `absent` is how many
    listed tests the log does not have, and `absent_tests` names some of them; `mended_tests` are some of `fails` that
    pass where not all tests do. `unknown_tests` has the status of those whose status is not known here.

    A run that ended with another exit code than 0 and names no test that failed contradicts itself: it is no success,
    and `contradiction` says so. Where other tests failed the exit code is theirs, and the listed ones count."""
    listed_tests = list(dict.fromkeys([*fails, *passes]))
    needed_tests, xfailed = {*fails}, {test for test in fails if log.names(test) & log.xfailed}
    good_tests = {test for test in listed_tests if log.has_passed(test)} - xfailed
    absent_tests = [test for test in listed_tests if not log.names(test)]
    is_success = len(good_tests) == len(listed_tests)
    fixed_share = len(good_tests & needed_tests) / len(needed_tests)
    kept_share = len(good_tests & {*passes}) / len({*passes}) if passes else 1.0
    grade_info: dict[str, Json] = {
        "mended": fixed_share,
        "kept": kept_share,
        "tests": len(listed_tests),
        "absent": len(absent_tests),
    }
    if not is_success and (fixed_tests := [test for test in dict.fromkeys(fails) if test in good_tests]):
        grade_info["mended_tests"] = [test[:200] for test in fixed_tests[:_NAMED]]
    if absent_tests:
        grade_info["absent_tests"] = [test[:200] for test in absent_tests[:_NAMED]]
    skipped_tests = {
        test for test in listed_tests if (log_names := log.names(test)) and log_names <= log.others - log.failed
    }
    if left_out_tests := {
        test: "xfailed" if test in xfailed else "skipped" for test in listed_tests if test in skipped_tests | xfailed
    }:
        grade_info["left_out_tests"] = {
            test[:200]: left_out_as for test, left_out_as in list(left_out_tests.items())[:_NAMED]
        }
    unknown_tests = {
        test: log.unknown[log_name] for test in listed_tests for log_name in log.names(test) if log_name in log.unknown
    }
    if unknown_tests:
        grade_info["unknown_tests"] = {test[:200]: status for test, status in list(unknown_tests.items())[:_NAMED]}
    if is_success and exit_code and not log.failed:
        is_success = False
        grade_info["contradiction"] = f"exit code {exit_code}, and no test of the log has failed"
    return Grade(outcome=float(is_success), success=is_success, info=grade_info)
