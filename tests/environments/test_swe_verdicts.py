"""Test logs as pytest and unittest print them, and which tests they say have passed."""

from __future__ import annotations

import re

import pytest

from agentrl.testing.printing import check_linear
from agentrl_environments.swe.verdicts import canonical, passed

PYTEST = """\
tests/test_a.py .F.sxE                                                   [100%]
================================== FAILURES ===================================
FAILED to open the file
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_two[a - b]
SKIPPED [1] tests/test_a.py:9: not here
XFAIL tests/test_a.py::test_known - a bug
XPASS tests/test_a.py::test_mended - a bug
FAILED tests/test_a.py::test_three[c - d] - AssertionError: 1 - 2
ERROR tests/test_b.py::test_four - fixture 'x' not found
==================== 1 failed, 2 passed in 0.01s ====================
"""

UNITTEST = """\
test_one (test_a.ATest.test_one) ... ok
test_two (test_a.ATest.test_two)
It has a docstring. ... ok
test_three (test_a.ATest.test_three) ... FAIL
test_four (test_a.ATest.test_four) ... skipped 'not here'
test_five (test_a.ATest.test_five) ... expected failure
test_six (test_a.ATest.test_six) ... unexpected success
test_seven (test_a.ATest.test_seven) ... a line that the test printed
ok
test_eight (test_a.ATest.test_eight) ... ERROR
test_old (test_a.ATest) ... ok
"""


def test_pytests_summary() -> None:
    assert passed(PYTEST) == {
        "tests/test_a.py::test_one",
        "tests/test_a.py::test_two[a - b]",
        "tests/test_a.py::test_known",
        "tests/test_a.py::test_known - a bug",
    }


def test_pytests_lines_of_v_in_colour() -> None:
    log = "tests/a.py::test_x[1 2] \x1b[32mPASSED\x1b[0m   [ 50%]\ntests/a.py::test_y FAILED [100%]\n"
    assert passed(log) == {"tests/a.py::test_x[1 2]"}


def test_unittests_lines() -> None:
    names = ("test_one", "test_two", "test_five", "test_seven", "test_old")
    assert passed(UNITTEST) == {f"test_a.ATest.{name}" for name in names}


@pytest.mark.parametrize(
    "log",
    [
        "PASSED tests/a.py::test_x\nFAILED tests/a.py::test_x - no\n",
        "FAILED tests/a.py::test_x - no\nPASSED tests/a.py::test_x\n",
        "tests/a.py::test_x PASSED\nERROR tests/a.py::test_x - at teardown\n",
        "test_x (a.A.test_x) ... ok\nERROR: test_x (a.A.test_x) [subtest 2]\n",
        "test_x (a.A.test_x) ... ",
        "",
    ],
)
def test_what_failed_once_or_has_no_verdict_has_not_passed(log: str) -> None:
    assert passed(log) == frozenset()


def test_one_name_for_a_test_however_it_is_written() -> None:
    for name in ("test_x (a.b.Case)", "test_x (a.b.Case.test_x)", "a.b.Case.test_x", " a.b.Case.test_x "):
        assert canonical(name) == "a.b.Case.test_x"
    assert canonical("tests/a.py::Case::test_x[(1)]") == "tests/a.py::Case::test_x[(1)]"


def test_a_log_costs_no_more_than_linear_time_and_memory() -> None:
    words = [
        "FAILED ",
        "PASSED ",
        "XFAIL ",
        "a - ",
        "::",
        " PASSED",
        " [ 50%]",
        "\x1b[0",
        "test_a (b.C)",
        " ... ",
        "skipped ",
    ]
    check_linear(passed, words=words)


def test_a_name_that_is_too_long_or_parted_too_often_has_not_passed() -> None:
    for name in ("a.py::" + "x" * 5_000, "a.py::x[" + " - " * 50 + "]"):
        assert passed(f"PASSED {name}\n{name} PASSED\n") == frozenset()


@pytest.mark.parametrize("name", ["a.py::t[x] - y", ":: ::", "a::b c", "x::y [ 5%]", "a::b PASSED"])
def test_lines_of_v_read_as_the_pattern_that_they_once_were(name: str) -> None:
    pattern = re.compile(r"^(\S.*?::.+) (PASSED|FAILED)(?:\s+\[ *\d+%\])?$")
    for line in (
        f"{name} PASSED",
        f"{name} PASSED  [ 50%]",
        f"{name} PASSED[50%]",
        f" {name} PASSED",
        f"{name} PASSED [%]",
    ):
        found = pattern.match(line)
        assert passed(line) == ({found[1]} if found and found[2] == "PASSED" else set()), line
