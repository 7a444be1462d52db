"""The checks of one task: each reads what its oracles' plays came to, and yields findings. `CHECKS` is the table.

A new check is a function and a line in the table. Knows nothing of how plays are made, kept or shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from agentrl.env.checks.tasks.plays import EVIDENCE, Play
from agentrl.env.checks.tasks.verdicts import Finding
from agentrl.env.checks.validate import reasons_of
from agentrl.records import Json

GOLD: Final = "gold"
"""The oracle that plays the known solution."""
NO_WORK: Final = ("no-op", "untouched", "empty answer")
"""Oracles that do no work. What others that must lose try is an attack, or a wrong answer."""
WRONG: Final = "wrong answer"
"""How the names of those oracles begin that give another task's answer."""
_SLOW: Final = 0.5  # of a grader's deadline


@dataclass(frozen=True, slots=True)
class TaskPlays:
    """All plays of a task by the name of their oracle, and the deadline of its grader, if it has one. `hindered` are
    plays whose grader this machine hindered on purpose, by the hindrance."""

    plays: Mapping[str, Sequence[Play]]
    grader_deadline_s: float | None = None
    hindered: Mapping[str, Play] = field(default_factory=dict[str, Play])

    def that_must(self, win: bool) -> Iterator[tuple[str, Sequence[Play]]]:
        """The oracles that must win, or must not, with those of their plays that have a verdict."""
        for oracle_name, oracle_plays in self.plays.items():
            judged_plays = [oracle_play for oracle_play in oracle_plays if oracle_play.won is not None]
            if judged_plays and (judged_plays[0].oracle.outcome >= 1.0) == win:
                yield oracle_name, judged_plays

    @property
    def grader_s(self) -> float:
        """The most seconds that a grading took."""
        return max(
            (oracle_play.grader_s for oracle_plays in self.plays.values() for oracle_play in oracle_plays), default=0.0
        )


def outcome_stays(task: TaskPlays) -> Iterator[Finding]:
    """An oracle gets the same outcome each time."""
    for must_win in (True, False):
        for oracle_name, oracle_plays in task.that_must(must_win):
            outcomes = [oracle_play.result.got for oracle_play in oracle_plays if oracle_play.result is not None]
            if len(set(outcomes)) > 1:
                yield Finding("outcome-changes", f"{oracle_name} got {', '.join(map(_shown, outcomes))}")


def machine_is_not_scored(task: TaskPlays) -> Iterator[Finding]:
    """A grader that this machine hinders fails the episode (law 3): the work gets no outcome that it did not earn."""
    scored_hindrances = [
        f"{hindrance}: the solution got {_shown(hindered_play.result.got)}"
        if hindered_play.oracle.outcome >= 1.0
        else f"{hindrance}: everything got {_shown(hindered_play.result.got)}"
        for hindrance, hindered_play in task.hindered.items()
        if hindered_play.result is not None and hindered_play.result.got is not None
        if bool(hindered_play.wins) is not (hindered_play.oracle.outcome >= 1.0)
    ]
    if scored_hindrances:
        yield Finding("host-scored", f"with its grader {'; '.join(scored_hindrances)}")


def gold_wins(task: TaskPlays) -> Iterator[Finding]:
    """The known solution wins."""
    if not any(oracle_plays[0].oracle.outcome >= 1.0 for oracle_plays in task.plays.values()):
        yield Finding("no-gold", "the environment knows no solution of this task")
    for oracle_name, oracle_plays in task.that_must(win=True):
        if (
            not any(oracle_play.won for oracle_play in oracle_plays)
            and (first_result := oracle_plays[0].result) is not None
        ):
            loss_reasons = [
                f"{oracle_name} got {_shown(first_result.got)} in {len(oracle_plays)} of {len(oracle_plays)} plays",
                *reasons_of(first_result),
            ]
            yield Finding("gold-loses", "; ".join(loss_reasons)[:EVIDENCE])


def tests_run(task: TaskPlays) -> Iterator[Finding]:
    """The tests that the known solution must pass run to their end: no skip, no expected failure, none left out."""
    for _, oracle_plays in task.that_must(win=True):
        if oracle_plays[0].result is None or oracle_plays[0].won:
            continue
        result_info: Mapping[str, Any] = oracle_plays[0].result.info
        omissions = [
            f"{omission}: {test_name}" for test_name, omission in result_info.get("left_out_tests", {}).items()
        ]
        omissions += [f"not in the log: {test_name}" for test_name in result_info.get("absent_tests", ())]
        if omissions:
            yield Finding("tests-not-run", "; ".join(omissions)[:EVIDENCE])


def others_lose(task: TaskPlays) -> Iterator[Finding]:
    """Nothing that is no solution wins. Of other tasks' answers one alone may be the right one in other words."""
    winning_oracles = [
        oracle_name
        for oracle_name, oracle_plays in task.that_must(win=False)
        if all(oracle_play.won for oracle_play in oracle_plays)
    ]
    wrong_answers = [oracle_name for oracle_name in task.plays if oracle_name.startswith(WRONG)]
    if not set(wrong_answers) <= set(winning_oracles):
        winning_oracles = [oracle_name for oracle_name in winning_oracles if oracle_name not in wrong_answers]
    for win_reason, matching_names in (
        ("no-work-wins", [oracle_name for oracle_name in winning_oracles if oracle_name in NO_WORK]),
        ("cheat-wins", [oracle_name for oracle_name in winning_oracles if oracle_name not in NO_WORK]),
    ):
        if matching_names:
            yield Finding(win_reason, f"wins: {', '.join(matching_names)}")


def tests_need_the_change(task: TaskPlays) -> Iterator[Finding]:
    """The tests that a solution should fix fail without it."""
    for oracle_play in task.plays.get("no-op", ()):
        vacuous_tests = oracle_play.result.info.get("mended_tests") if oracle_play.result is not None else None
        if isinstance(vacuous_tests, list) and vacuous_tests:
            yield Finding(
                "some-tests-vacuous",
                f"without a change pass {', '.join(map(str, cast('list[Json]', vacuous_tests)))}"[:EVIDENCE],
            )
            return


def grader_is_in_time(task: TaskPlays) -> Iterator[Finding]:
    """The grader is far from its deadline."""
    deadline_s = task.grader_deadline_s
    if deadline_s is not None and task.grader_s > _SLOW * deadline_s:
        yield Finding("grader-slow", f"{task.grader_s:.1f} s of {deadline_s:g} s")


def plays_end(task: TaskPlays) -> Iterator[Finding]:
    """Each play comes to a verdict; where most plays of an oracle do, a single one that did not says nothing."""
    seen_reasons: set[str] = set()
    for oracle_plays in task.plays.values():
        failures = [oracle_play.failure for oracle_play in oracle_plays if oracle_play.failure is not None]
        if 2 * len(failures) > len(oracle_plays) and failures[0].reason not in seen_reasons:
            seen_reasons.add(failures[0].reason)
            yield failures[0]


CHECKS: Final[Sequence[Callable[[TaskPlays], Iterator[Finding]]]] = (
    outcome_stays,
    machine_is_not_scored,
    gold_wins,
    tests_run,
    others_lose,
    tests_need_the_change,
    grader_is_in_time,
    plays_end,
)


def under_load(alone: Play, loaded: Play, deadline_s: float | None) -> Iterator[Finding]:
    """Yield what busy processors make of a solution that wins otherwise. Tasks are not checked so one by one: a whole
    set would keep its machine busy for hours."""
    seconds_text = f"{alone.grader_s:.1f} s alone, {loaded.grader_s:.1f} s with all processors busy"
    if alone.wins and loaded.result is not None and loaded.result.got is not None and not loaded.wins:
        yield Finding(
            "host-scored", f"with all processors busy the solution got {_shown(loaded.result.got)} ({seconds_text})"
        )
    elif deadline_s is not None and loaded.grader_s > _SLOW * deadline_s:
        yield Finding("grader-slow", f"{seconds_text}, of {deadline_s:g} s")


def changed(plays: Sequence[bool | None]) -> tuple[int, int]:
    """How many plays have a verdict, and how many of these have another one than most."""
    judged_outcomes = [is_won for is_won in plays if is_won is not None]
    return len(judged_outcomes), len(judged_outcomes) - max(Counter(judged_outcomes).values(), default=0)


def _shown(outcome: float | None) -> str:
    return "no outcome" if outcome is None else f"{outcome:g}"
