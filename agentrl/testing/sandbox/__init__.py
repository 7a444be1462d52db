"""Does a sandbox backend keep its promises? A conformance suite and a red team, for our backends and for yours.

    report = await check_sandbox(MyBackend())
    report.must_pass()

or one test per case, under pytest with trio::

    @pytest.mark.parametrize("case", CASES, ids=str)
    async def test_my_backend(case, backend):
        await case.run(backend)

The boxes need `sh`, coreutils and `python3`. For a backend without walls, leave out the cases that need them
(`case.isolation`) and the whole red team: `check_sandbox(backend, isolation=False)`.
`python -m agentrl.testing.sandbox bubblewrap docker` prints the tables of `benchmarks/sandbox_promises.md`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.errors import SandboxUnavailable
from agentrl.protocols import SandboxBackend
from agentrl.testing.sandbox import box_files, commands, escapes, lifetime, misuse
from agentrl.testing.sandbox.case import Bench, Case, Suite, case

__all__ = ["CASES", "Bench", "Case", "Outcome", "Report", "case", "check_sandbox", "tables"]

CASES: tuple[Case, ...] = (*commands.CASES, *box_files.CASES, *lifetime.CASES, *escapes.CASES, *misuse.CASES)
"""All cases, in the order of the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one case. `problem` is empty if it held."""

    case: Case
    problem: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of all cases on one backend."""

    backend: str
    outcomes: Sequence[Outcome] = field(default_factory=list[Outcome])

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.problem]

    def must_pass(self) -> None:
        """Raises AssertionError, which names every failed case."""
        failure_lines = [f"{outcome.case.suite}: {outcome.case.name}: {outcome.problem}" for outcome in self.failed]
        if failure_lines:
            promises = f"{len(failure_lines)} of {len(self.outcomes)} promises"
            raise AssertionError(f"{self.backend} breaks {promises}:\n" + "\n".join(failure_lines))


async def check_sandbox(
    backend: SandboxBackend, *, isolation: bool = True, suites: Sequence[Suite] = ("conformance", "red team")
) -> Report:
    """Run the cases one after the other. The caller closes the backend. Raises SandboxUnavailable if it has no box."""
    outcomes: list[Outcome] = []
    for sandbox_case in CASES:
        if sandbox_case.suite not in suites or (sandbox_case.isolation and not isolation):
            continue
        began_at = time.monotonic()
        problem = ""
        try:
            await sandbox_case.run(backend)
        # Raised and not counted: a machine without the backend says nothing about its promises, and a table of failures
        # would.
        except SandboxUnavailable:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        outcomes.append(Outcome(case=sandbox_case, problem=problem, duration_s=time.monotonic() - began_at))
    return Report(backend=backend.name, outcomes=outcomes)


def tables(reports: Iterable[Report]) -> str:
    """The reports together as Markdown, one list per suite. A case without a note holds with every backend."""
    reports = list(reports)
    results: Mapping[str, Mapping[str, Outcome]] = {
        report.backend: {outcome.case.name: outcome for outcome in report.outcomes} for report in reports
    }
    lines: list[str] = []
    for suite, title in (("conformance", "Conformance"), ("red team", "Red team")):
        cases = [each for each in CASES if each.suite == suite]
        verdicts = [
            f"{name} {sum(not results[name][each.name].problem for each in cases if each.name in results[name])}"
            for name in results
        ]
        lines += [f"## {title}", "", f"Of {len(cases)} cases hold: {', '.join(verdicts)}.", ""]
        for each in cases:
            notes = [f"{name} {note}" for name in results if (note := _note(results[name].get(each.name)))]
            lines.append(f"- {each.name}{': ' if notes else ''}{'; '.join(notes)}")
        lines.append("")
    return "\n".join(lines)


def _note(outcome: Outcome | None) -> str:
    """The remark on a case that does not hold, for a reader; "" for one that holds."""
    if outcome is None:
        return "**not run**"
    return f"**broken** ({outcome.problem})" if outcome.problem else ""
