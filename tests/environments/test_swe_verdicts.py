"""Test logs as pytest and unittest print them, and which tests they say have passed."""

from __future__ import annotations

import re

import pytest
from each_case import each_case

from agentrl.testing.printing import check_linear
from agentrl_environments.swe.verdicts import canonical, graded, passed, read_log

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


@each_case(
    ("log", "how"),
    [
        ("XFAIL a.py::x - later", "xfailed"),
        ("a.py::x XFAIL (later) [100%]", "xfailed"),
        ("x (a.py::x) ... expected failure\nXFAIL a.py::x", "xfailed"),
        ("a.py::x SKIPPED (later) [100%]", "skipped"),
        ("", None),
    ],
)
def test_a_test_that_did_not_run_to_its_end_fixes_nothing(log: str, how: str | None) -> None:
    """What a change should fix must pass. What passed before may fail as expected, as SWE-bench counts it."""
    grade = graded(read_log(f"{log}\nXFAIL a.py::y - known\n"), ["a.py::x"], ["a.py::y"])
    assert not grade.success and grade.info["mended"] == 0.0 and grade.info["kept"] == 1.0
    assert grade.info.get("left_out_tests") == (None if how is None else {"a.py::x": how})
    assert graded(read_log("PASSED a.py::x\nXFAIL a.py::y - known\n"), ["a.py::x"], ["a.py::y"]).success


@each_case(
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


@pytest.mark.medium
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


@each_case("name", ["a.py::t[x] - y", ":: ::", "a::b c", "x::y [ 5%]", "a::b PASSED"])
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


# --- ids as public sets hold them, each written by another reader of logs

NAMES = """\
test_one (app.tests.ATest.test_one)
An integer is rejected. ... ok
test_two (app.tests.ATest.test_two)
Said twice. ... ok
test_three (app.tests.BTest.test_three)
Said twice. ... FAIL
PASSED tests/test_a.py::test_cut[1 - 2]
PASSED tests/test_a.py::test_part[a b]
FAILED tests/test_a.py::test_part[a c] - AssertionError
PASSED tests/test_a.py::test_file[/tmp/run-7/data/x.dcm]
PASSED tests/test_a.py::test_url[//host/a/x]
PASSED sympy/core/tests/test_basic.py::test_structure
PASSED tests/test_b.py::TestB::test_same
PASSED tests/test_c.py::TestC::test_same
PASSED tests/test_v.py::test_v[1.5-a/b]
"""


@each_case(
    ("id", "names"),
    [
        ("An integer is rejected.", {"app.tests.ATest.test_one"}),
        ("Said twice.", {"app.tests.ATest.test_two", "app.tests.BTest.test_three"}),
        ("tests/test_a.py::test_cut[1", {"tests/test_a.py::test_cut[1 - 2]"}),
        ("tests/test_a.py::test_part[a", {"tests/test_a.py::test_part[a b]", "tests/test_a.py::test_part[a c]"}),
        ("tests/test_a.py::test_file[/x.dcm]", {"tests/test_a.py::test_file[/tmp/run-7/data/x.dcm]"}),
        ("tests/test_a.py::test_url[/x]", set[str]()),
        ("test_structure", {"sympy/core/tests/test_basic.py::test_structure"}),
        ("tests.test_b.TestB.test_same", {"tests/test_b.py::TestB::test_same"}),
        ("test_b.py::TestB::test_same", {"tests/test_b.py::TestB::test_same"}),
        ("/testbed/tests/test_b.py::TestB::test_same", {"tests/test_b.py::TestB::test_same"}),
        ("test_same", set[str]()),  # of two classes: no telling which
        ("tests/test_v.py::test_v[1.5-a/b]", {"tests/test_v.py::test_v[1.5-a/b]"}),
        ("v.py::test_v[1.5-a/b]", set[str]()),
        ("nothing", set[str]()),
        ("", set[str]()),
        ("a b", set[str]()),
    ],
)
def test_an_id_means_the_tests_that_it_can_only_mean(id: str, names: set[str]) -> None:
    log = read_log(NAMES)
    found = log.names(canonical(id))
    assert {name for name in found if " - Assert" not in name} == names
    assert log.has_passed(canonical(id)) is (bool(names) and "three" not in str(names) and "[a c]" not in str(names))


def test_ids_that_the_readers_of_swe_bench_made_are_found_in_our_reading() -> None:
    """The rules of `swebench.harness.log_parsers` 5.0.2, as ids of a list, and the log each was made from."""
    for id, log in (
        ("test_x (app.Case)", "test_x (app.Case) ... ok\n"),  # Django before Python 3.11, and since
        ("test_x (app.Case)", "test_x (app.Case.test_x) ... ok\n"),
        ("It says so.", "test_x (app.Case)\nIt says so. ... ok\n"),
        ("It says so.", "test_x (app.Case)\nIt says so. ... Testing against Django installed in /a silenced\nok\n"),
        ("a.py::t[x", "PASSED a.py::t[x y]\n"),  # pytest: the second word of a line
        ("a.py::t[/y.txt]", "PASSED a.py::t[/x/y.txt]\n"),  # requests, pylint, pydicom
        ("test_x", "PASSED sympy/a/tests/test_b.py::test_x\n"),  # sympy: the name of the function
    ):
        assert graded(read_log(log), [canonical(id)], ()).success, (id, log)


def test_a_grade_counts_what_the_log_does_not_have() -> None:
    grade = graded(read_log("PASSED a.py::t\nFAILED a.py::u - no\n"), ["a.py::t", "a.py::gone"], ["a.py::u"])
    assert not grade.success
    assert grade.info == {
        "mended": 0.5,
        "kept": 0.0,
        "tests": 3,
        "absent": 1,
        "absent_tests": ["a.py::gone"],
        "mended_tests": ["a.py::t"],
    }


@pytest.mark.medium
def test_finding_ids_in_a_hostile_log_costs_no_more_than_linear_time() -> None:
    def look(text: str) -> None:
        log = read_log(text)
        for id in ("a.py::t[/x]", "test_x", "a.Case.test_x", "no such thing", "a.py::t[x"):
            log.names(id)

    words = ["PASSED ", "a.py::", "t[/", "/", "x]", " ", "test_a (b.C)", "\n", ".", "::test_x", " ... ok"]
    check_linear(look, words=words)
