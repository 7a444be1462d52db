"""The verdicts on a task, the reasons for them, and what an environment may offer to the checks.

A reason always has the same verdict. The table of reasons is closed, so that a count by reason can be compared between
sets. Knows nothing of how a task is played.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol, runtime_checkable

from agentrl.env.checks.oracles import Oracle
from agentrl.records import Json

Verdict = Literal["flaky", "lies", "impossible", "unknown", "ok"]

# A flaky grader makes each outcome of a single play doubtful, so it is said before a cheat that won once. `unknown`
# comes behind everything that was shown: a late grader does not take back a solution that stands in the prompt.
ORDER: Final[tuple[Verdict, ...]] = ("flaky", "lies", "impossible", "unknown", "ok")
"""Verdicts by rank: that of a task is the first one that any of its findings has."""

REASONS: Final[Mapping[str, tuple[Verdict, str]]] = {
    "outcome-changes": ("flaky", "the same actions got different outcomes"),
    "host-scored": ("flaky", "a failure or a load of the machine changes the outcome of the same actions"),
    "no-work-wins": ("lies", "doing nothing, an untouched box or an empty answer wins"),
    "cheat-wins": ("lies", "an attack on the tests or the task wins"),
    "answer-in-prompt": ("lies", "the answer or the solution stands in the prompt"),
    "solution-readable": ("lies", "the solution stands in a file that the agent can read"),
    "tests-readable": ("lies", "the hidden tests stand in a file that the agent can read, or in the prompt"),
    "solution-in-history": ("lies", "a git history in the box holds the solution"),
    "in-held-out": ("lies", "the task is a held-out one, too"),
    "near-held-out": ("lies", "the task is a held-out one in nearly the same words"),
    "gold-loses": ("impossible", "the known solution does not win, so nobody is known to"),
    "tests-not-run": ("impossible", "tests that a solution must pass are skipped, deselected or expected to fail"),
    "cannot-be-played": ("impossible", "the task's own parts do not fit together"),
    "no-gold": ("unknown", "no solution is known, so nobody has shown that the task can be won"),
    "grader-late": ("unknown", "the grader of the solution was ended at its deadline"),
    "grader-killed": ("unknown", "the grader of the solution was killed"),
    "not-graded": ("unknown", "the solution could not be graded"),
    "infrastructure": ("unknown", "this machine or its sandbox failed"),
    "raised": ("unknown", "code of the environment raised an exception"),
    "deadline": ("unknown", "the checks of the task took longer than --task-s"),
    "not-searched": ("unknown", "files or a git history of the box could not be searched for the solution"),
    "some-tests-vacuous": ("ok", "some of the tests that need the solution pass without it"),
    "grader-slow": ("ok", "the grader needs more than half of its deadline"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason, a key of `REASONS`, and what was seen."""

    reason: str
    evidence: str

    @property
    def verdict(self) -> Verdict:
        return REASONS[self.reason][0]


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """The verdict on a task with these findings."""
    seen_verdicts: list[Verdict] = [finding.verdict for finding in findings]
    for verdict in ORDER:
        if verdict in seen_verdicts:
            return verdict
    return "ok"


@dataclass(frozen=True, slots=True)
class TaskText:
    """The words of a task: what a policy reads first, and the right answer where the task is answered by one text and
    it is known. `options` are the reset options of the task where it is a row of a data set."""

    task: str
    text: str
    answer: str = ""
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])


@runtime_checkable
class HasTexts(Protocol):
    """An environment that knows the words of all its tasks, in the order of its seeds."""

    def task_texts(self) -> Sequence[TaskText]: ...


@runtime_checkable
class HasFiles(Protocol):
    """An environment whose tasks are made of `task_files`, files or folders, also those of its own package. Results of
    tasks are no longer valid once one of them has changed."""

    task_files: Sequence[Path]


@runtime_checkable
class HasCheats(Protocol):
    """An environment with cheap attacks on the task just reset, beside those among its oracles: none may win."""

    def cheats(self) -> Sequence[Oracle]: ...


@runtime_checkable
class HasFindings(Protocol):
    """An environment that searches the task just reset for what only its kind has, such as leaks into a box.
    `grader_deadline_s` is the deadline of the task's grader, None where there is none."""

    async def task_findings(self) -> Sequence[Finding]: ...
    @property
    def grader_deadline_s(self) -> float | None: ...
