"""The checker finds what is broken, names it, and fits the counts that it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import UsageError
from agentrl.protocols import ExecResult
from agentrl.testing.fake_sandbox import FakeBackend
from agentrl.testing.sandbox import CASES, Case, Report, check_sandbox, tables
from agentrl.testing.sandbox.__main__ import BEGIN, END, with_tables


def test_there_are_enough_cases_and_each_has_one_name() -> None:
    conformance = [case for case in CASES if case.suite == "conformance"]
    red_team = [case for case in CASES if case.suite == "red team"]
    assert len(conformance) >= 50 and len(red_team) >= 25
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.isolation for case in red_team)


async def test_broken_promises_are_named_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    few = tuple(case for case in CASES if case.name.startswith(("exit codes 0", "close may be", "what is written can")))
    monkeypatch.setattr("agentrl.testing.sandbox.CASES", few)
    backend = FakeBackend(lambda argv, files: ExecResult(exit_code=0, stdout=b"", stderr=b""))
    report: Report = await check_sandbox(backend)
    broken = {outcome.case.name for outcome in report.failed}
    assert broken == {case.name for case in few if not case.name.startswith("close")}
    with pytest.raises(AssertionError, match="fake breaks 2 of 3 promises"):
        report.must_pass()
    text = tables([report])
    assert "\n- close may be called again\n" in text and "Of 3 cases hold: fake 1." in text


async def test_case_has_a_deadline() -> None:
    import trio

    async def never(_: object) -> None:
        await trio.sleep_forever()

    with pytest.raises(AssertionError, match="not done after 0 s"):
        await Case("never", "conformance", never, False, 0.01).run(FakeBackend())


def test_documented_tables_name_every_case_and_all_hold() -> None:
    document = (Path(__file__).parents[2] / "benchmarks" / "sandbox_promises.md").read_text()
    for case in CASES:
        assert f"\n- {case.name}\n" in document, f"run the command that makes the tables: {case.name}"


def test_tables_are_put_between_the_marks() -> None:
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_tables(document, "new") == f"before\n{BEGIN}\n\nnew\n{END}\nafter\n"
    with pytest.raises(UsageError, match="marks"):
        with_tables("no marks", "new")
