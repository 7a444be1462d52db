"""Logs that real runners printed (`logs/`, each of one small set of tests), and what each test did, written by hand.

pytest 7.4, 8.4 and 9.0 ran one file, 7 and 8 with pytest-subtests; unittest of Python 3.8 and 3.13; cargo test; node
--test, mocha and jest. Go's lines are made up after its format: no Go was at hand to print real ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from each_case import each_case

from agentrl_environments.swe.verdicts import Log, canonical, graded, read_log

LOGS = Path(__file__).parent / "logs"
FILE = "tests/test_kinds.py::"
PASSED = {"test_good", "test_why", "test_each[a b]", "test_each[[1]]", r"test_each[\xe9]", "test_each[a::b]"}
PASSED |= {"TestSubs::test_fine_subs", "TestSubs::test_expected"}
FAILED = {"test_bad", "test_strict", "test_error", "test_error_after", "test_each[x - y]"}
FAILED |= {"TestSubs::test_unexpected", "TestSubs::test_subs", "test_fixture_subs"}
LEFT_OUT = {"test_left", "TestSubs::test_skipped"}


@each_case("name", [path.stem for path in sorted(LOGS.glob("pytest*.txt"))])
def test_pytest(name: str) -> None:
    log = read_log((LOGS / f"{name}.txt").read_text())
    assert {test for test in PASSED if log.has_passed(FILE + test)} == PASSED
    assert {test for test in FAILED if FILE + test in log.failed} == FAILED
    assert not any(log.has_passed(FILE + test) for test in FAILED | LEFT_OUT)
    assert not log.unknown


@pytest.mark.parametrize("name", ["unittest38", "unittest313"])
def test_unittest(name: str) -> None:
    """In 3.8 the line of a test whose subtest failed goes on with the next test's."""
    log = read_log((LOGS / f"{name}.txt").read_text())
    assert log.passed == {f"ut.T.test_{test}" for test in ("ok", "noisy", "expected")}
    assert log.failed == {f"ut.T.test_{test}" for test in ("subs", "error", "unexpected")}
    assert log.others - log.failed == {"ut.T.test_skipped"}


@each_case(
    ("name", "passed", "failed", "left_out"),
    [
        (
            "cargo",
            {"tests::good", "tests::panics - should panic", "good_whole", "src/lib.rs - (line 1)"},
            {"tests::bad"},
            {"tests::left"},
        ),
        ("node-spec", {"good", "todo one", "inside good"}, {"bad", "inside bad"}, {"left"}),
        ("node-tap", {"good", "todo one", "inside good"}, {"bad", "inside bad"}, {"left"}),
        ("mocha-spec", {"good", "slow good", "inside good"}, {"bad"}, set[str]()),
        (
            "mocha-tap",
            {"suite good", "suite slow good", "suite deep inside good"},
            {"suite bad"},
            {"suite left", "suite todo one"},
        ),
        ("jest-verbose", {"good", "slow good", "inside good", "only"}, {"bad"}, {"left", "todo one"}),
        ("jest", {"./k.test.js"}, {"./j.test.js"}, set[str]()),
    ],
)
def test_other_runners(name: str, passed: set[str], failed: set[str], left_out: set[str]) -> None:
    log = read_log((LOGS / f"{name}.txt").read_text())
    assert passed <= log.passed
    assert not log.passed & (failed | left_out)
    assert failed <= log.failed and left_out <= log.others - log.failed


def test_go() -> None:
    lines = "=== RUN   TestA\n--- FAIL: TestA (0.01s)\n    --- PASS: TestA/one (0.00s)\n--- SKIP: TestB (0.00s)\nFAIL\n"
    log = read_log(f"{lines}--- PASS: TestC (1.20s)\n")
    assert (log.passed, log.failed, log.others - log.failed) == ({"TestA/one", "TestC"}, {"TestA"}, {"TestB"})


def test_marks_of_phpunit_and_ava() -> None:
    log = read_log(" ✔ a\n ✔ Adds\n ✘ Adds\n ↩ Skips\n ∅ Waits\n  ✔ sums\n  ✘ [fail]: sums\n")
    assert (log.passed, log.failed, log.others - log.failed) == ({"a"}, {"Adds", "sums"}, {"Skips", "Waits"})
    assert graded(log, ["a"], [], exit_code=1).success, "the exit code is that of the tests that failed"


@each_case(
    "line",
    [
        "tests/a.py::test_x XFAIL (not yet (see 3))    [100%]",
        "[gw0] [ 50%] PASSED tests/a.py::test_x ",
        "[gw12] PASSED tests/a.py::test_x",
        "\x1b[32mPASSED\x1b[0m\x1b[K tests/a.py::test_x",
        "\x1b[38:5:2mPASSED\x1b[0m tests/a.py::test_x",
        "\x1b]0;running\x07PASSED tests/a.py::test_x",
        "\x1b]8;;http://h/\x1b\\PASSED\x1b]8;;\x1b\\ tests/a.py::test_x",
        "\x1b(BPASSED tests/a.py::test_x",
    ],
)
def test_reasons_workers_and_escapes_hide_no_pass(line: str) -> None:
    assert read_log(line).has_passed("tests/a.py::test_x")


@each_case(
    "line",
    [
        "SUBFAILED[odd] (n=1) tests/a.py::test_x - assert 1",
        "SUBFAILED(n=1) tests/a.py::test_x",
        "SUBFAILED[a::b c] tests/a.py::test_x - why",
        "[odd] (n=1) SUBFAIL tests/a.py::test_x - AssertionError...",
        "[gw1] [ 78%] [odd] (n=1) SUBFAIL tests/a.py::test_x ",
        "tests/a.py::test_x [odd] (n=1) SUBFAIL       [ 50%]",
        "tests/a.py::test_x SUBFAILED[odd] (n=1)      [ 50%]",
    ],
)
def test_a_test_of_which_a_part_failed_has_failed(line: str) -> None:
    log = read_log(f"PASSED tests/a.py::test_x\n{line}\nPASSED tests/a.py::test_y\n")
    assert "tests/a.py::test_x" in log.failed and log.passed == {"tests/a.py::test_y"}


def grade_of(log: str, exit_code: int = 0) -> tuple[float, object]:
    grade = graded(read_log(log), [canonical("a.py::test_x")], [canonical("a.py::test_y")], exit_code=exit_code)
    return grade.outcome, grade.info.get("unknown_tests", grade.info.get("contradiction"))


def test_what_is_not_known_is_named_and_no_win() -> None:
    good = "PASSED a.py::test_y\n"
    odd = {"a.py::test_x": "QUARANTINED"}
    assert grade_of(f"a.py::test_x QUARANTINED  [ 50%]\nPASSED a.py::test_x\n{good}") == (0.0, odd)
    assert grade_of(f"PASSED a.py::test_x\n{good}= short test summary info =\nQUARANTINED a.py::test_x - w\n") == (
        0.0,
        odd,
    )
    assert grade_of(f"a.py::test_x RERUN [ 50%]\na.py::test_x PASSED [ 50%]\n{good}") == (1.0, None), (
        "run again, passed"
    )
    assert grade_of(f"PASSED a.py::test_x\n{good}DEBUG a.py::test_x began\n") == (1.0, None), "what a program printed"


def test_an_exit_code_that_no_failure_explains_is_a_contradiction() -> None:
    log = "PASSED a.py::test_x\nPASSED a.py::test_y\na.py::test_z SKIPPED (why) [100%]\n"
    assert grade_of(log) == (1.0, None)
    assert grade_of(log, exit_code=1) == (0.0, "exit code 1, and no test of the log has failed")
    assert grade_of(f"{log}FAILED a.py::test_other - no\n", exit_code=1) == (1.0, None), "another test's code"


def test_an_empty_log_passes_nothing() -> None:
    assert read_log("") == Log()
