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
        for name, plays in self.plays.items():
            judged = [play for play in plays if play.won is not None]
            if judged and (judged[0].oracle.outcome >= 1.0) == win:
                yield name, judged

    @property
    def grader_s(self) -> float:
        """The most seconds that a grading took."""
        return max((play.grader_s for plays in self.plays.values() for play in plays), default=0.0)


def outcome_stays(task: TaskPlays) -> Iterator[Finding]:
    """An oracle gets the same outcome each time."""
    for win in (True, False):
        for name, plays in task.that_must(win):
            outcomes = [play.result.got for play in plays if play.result is not None]
            if len(set(outcomes)) > 1:
                yield Finding("outcome-changes", f"{name} got {', '.join(map(_shown, outcomes))}")


def machine_is_not_scored(task: TaskPlays) -> Iterator[Finding]:
    """A grader that this machine hinders fails the episode (law 3): the work gets no outcome that it did not earn."""
    scored = [
        f"{hindrance}: the solution got {_shown(play.result.got)}"
        if play.oracle.outcome >= 1.0
        else f"{hindrance}: everything got {_shown(play.result.got)}"
        for hindrance, play in task.hindered.items()
        if play.result is not None and play.result.got is not None
        if bool(play.wins) is not (play.oracle.outcome >= 1.0)
    ]
    if scored:
        yield Finding("host-scored", f"with its grader {'; '.join(scored)}")


def gold_wins(task: TaskPlays) -> Iterator[Finding]:
    """The known solution wins."""
    if not any(plays[0].oracle.outcome >= 1.0 for plays in task.plays.values()):
        yield Finding("no-gold", "the environment knows no solution of this task")
    for name, plays in task.that_must(win=True):
        if not any(play.won for play in plays) and (result := plays[0].result) is not None:
            why = [f"{name} got {_shown(result.got)} in {len(plays)} of {len(plays)} plays", *reasons_of(result)]
            yield Finding("gold-loses", "; ".join(why)[:EVIDENCE])


def tests_run(task: TaskPlays) -> Iterator[Finding]:
    """The tests that the known solution must pass run to their end: no skip, no expected failure, none left out."""
    for _, plays in task.that_must(win=True):
        if plays[0].result is None or plays[0].won:
            continue
        info: Mapping[str, Any] = plays[0].result.info
        reasons = [f"{how}: {test}" for test, how in info.get("left_out_tests", {}).items()]
        reasons += [f"not in the log: {test}" for test in info.get("absent_tests", ())]
        if reasons:
            yield Finding("tests-not-run", "; ".join(reasons)[:EVIDENCE])


def others_lose(task: TaskPlays) -> Iterator[Finding]:
    """Nothing that is no solution wins. Of other tasks' answers one alone may be the right one in other words."""
    winners = [name for name, plays in task.that_must(win=False) if all(play.won for play in plays)]
    wrong = [name for name in task.plays if name.startswith(WRONG)]
    if not set(wrong) <= set(winners):
        winners = [name for name in winners if name not in wrong]
    for reason, names in (
        ("no-work-wins", [name for name in winners if name in NO_WORK]),
        ("cheat-wins", [name for name in winners if name not in NO_WORK]),
    ):
        if names:
            yield Finding(reason, f"wins: {', '.join(names)}")


def tests_need_the_change(task: TaskPlays) -> Iterator[Finding]:
    """The tests that a solution should fix fail without it."""
    for play in task.plays.get("no-op", ()):
        tests = play.result.info.get("mended_tests") if play.result is not None else None
        if isinstance(tests, list) and tests:
            yield Finding(
                "some-tests-vacuous",
                f"without a change pass {', '.join(map(str, cast('list[Json]', tests)))}"[:EVIDENCE],
            )
            return


def grader_is_in_time(task: TaskPlays) -> Iterator[Finding]:
    """The grader is far from its deadline."""
    deadline_s = task.grader_deadline_s
    if deadline_s is not None and task.grader_s > _SLOW * deadline_s:
        yield Finding("grader-slow", f"{task.grader_s:.1f} s of {deadline_s:g} s")


def plays_end(task: TaskPlays) -> Iterator[Finding]:
    """Each play comes to a verdict; where most plays of an oracle do, a single one that did not says nothing."""
    seen: set[str] = set()
    for plays in task.plays.values():
        failures = [play.failure for play in plays if play.failure is not None]
        if 2 * len(failures) > len(plays) and failures[0].reason not in seen:
            seen.add(failures[0].reason)
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
    took = f"{alone.grader_s:.1f} s alone, {loaded.grader_s:.1f} s with all processors busy"
    if alone.wins and loaded.result is not None and loaded.result.got is not None and not loaded.wins:
        yield Finding("host-scored", f"with all processors busy the solution got {_shown(loaded.result.got)} ({took})")
    elif deadline_s is not None and loaded.grader_s > _SLOW * deadline_s:
        yield Finding("grader-slow", f"{took}, of {deadline_s:g} s")


def changed(plays: Sequence[bool | None]) -> tuple[int, int]:
    """How many plays have a verdict, and how many of these have another one than most."""
    judged = [won for won in plays if won is not None]
    return len(judged), len(judged) - max(Counter(judged).values(), default=0)


def _shown(outcome: float | None) -> str:
    return "no outcome" if outcome is None else f"{outcome:g}"
