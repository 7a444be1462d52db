"""`agentrl validate`: plays an environment's oracles for real and says whether each got its expected outcome.

Owns the count over seeds, and which tasks of a set to leave out. `agentrl.env.checks.oracles` defines an oracle and
plays one episode of it. A task that fails hinders no other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import trio

from agentrl.env import as_async
from agentrl.env.checks.oracles import HasTasks, OracleResult, judge
from agentrl.errors import EnvError, UnknownIdError, UsageError, boundary
from agentrl.protocols import AsyncEnv
from agentrl.records import Json
from agentrl.registration import make

_WORDS = 900  # characters of a reason
_SHOWN = 240  # characters of a text that a reason quotes
_ANSWERS = 3  # that a reason quotes


@dataclass(slots=True)
class OracleTally:
    """An oracle over all tasks: its expected outcome, how many episodes it played, and how many of them `held`, so had
    this outcome. `missed` has the actual outcome of the others by seed; `turns` is the sum over all episodes."""

    name: str
    expected: float
    episodes: int = 0
    held: int = 0
    turns: int = 0
    missed: dict[int, float | None] = field(default_factory=dict[int, "float | None"])

    def count(self, seed: int, verdict: OracleResult) -> None:
        self.episodes += 1
        self.turns += verdict.turns
        if verdict.holds:
            self.held += 1
        else:
            self.missed[seed] = verdict.got


@dataclass(frozen=True, slots=True)
class TaskFault:
    """A task that is not as it must be: its id (or place in its set, or seed), and the reason. Of its `tests` listed
    test ids, `absent` are not in the log of the gold patch."""

    task: str
    reason: str
    absent: int = 0
    tests: int = 0


@dataclass(frozen=True, slots=True)
class Validation:
    """The result: a tally for each oracle; `bad` parts of the set; `failed` tasks that raised; `missed` tasks of which
    an oracle got another outcome. `tasks` is how many tasks the set has (0: not a set), `played` how many seeds played.
    Of the `tests` listed test ids of the tasks played, `absent` are not in the log of the gold patch."""

    tallies: Sequence[OracleTally]
    bad: Sequence[TaskFault] = ()
    failed: Sequence[TaskFault] = ()
    missed: Sequence[TaskFault] = ()
    tasks: int = 0
    played: int = 0
    absent: int = 0
    tests: int = 0

    @property
    def faults(self) -> list[TaskFault]:
        return [*self.bad, *self.failed, *self.missed]

    def drop(self, file: Path) -> int:
        """Write the faulty tasks for the setting `skip`, one JSON object a line; how many they are. Raises UsageError,
        and writes nothing, where every task failed: then it is not the tasks' fault."""
        # A missing sandbox or a full disk fails every task. Written down, that list would leave out the whole set, on
        # this machine's account.
        if self.played and len(self.failed) == self.played:
            raise UsageError(f"{file} is not written, as every task failed, first {self.failed[0].reason}")
        fault_rows = {
            task_fault.task: {
                "task": task_fault.task,
                "reason": task_fault.reason,
                "absent": task_fault.absent,
                "tests": task_fault.tests,
            }
            for task_fault in self.faults
        }
        file.write_text("".join(f"{json.dumps(fault_row)}\n" for fault_row in fault_rows.values()), encoding="utf-8")
        return len(fault_rows)


def validate(env_id: str, *, seeds: Sequence[int] | None, kwargs: Mapping[str, Json]) -> Validation:
    """Play all oracles of the task of each seed, some seeds at the same time; `seeds` None: each task of the set once.
    Raises UnknownIdError, UsageError if the environment offers no oracles, or is no set where `seeds` is None."""
    return trio.run(_validate, lambda: as_async(make(env_id, **kwargs)), env_id, seeds)


async def _validate(new: Callable[[], AsyncEnv], env_id: str, chosen_seeds: Sequence[int] | None) -> Validation:
    task_count, bad_parts = await _set(new)
    if chosen_seeds is None and not task_count:
        raise UsageError(f"{env_id} says not how many tasks it has: give --n")
    task_seeds = range(task_count) if chosen_seeds is None else chosen_seeds
    verdicts: dict[int, list[OracleResult]] = {}
    failed_tasks: dict[int, TaskFault] = {}
    unknown_ids: list[UnknownIdError] = []
    seed_slots = trio.CapacityLimiter(os.cpu_count() or 1)

    async def play(seed: int) -> None:
        environments: list[AsyncEnv] = []

        def make() -> AsyncEnv:
            environments.append(new())
            return environments[-1]

        async with seed_slots:
            try:
                with boundary(EnvError, f"{env_id}, seed {seed}: raised", place=True):
                    verdicts[seed] = await judge(make, seed)
            except UnknownIdError as play_error:  # every task would say the same
                unknown_ids.append(play_error)
                nursery.cancel_scope.cancel()
            except Exception as play_error:  # named in the result: the other tasks go on
                task_name = _task_of(environments[-1]) if environments else ""
                failed_tasks[seed] = TaskFault(task_name or f"seed {seed}", f"{play_error}"[:_WORDS])

    async with trio.open_nursery() as nursery:
        for task_seed in task_seeds:
            nursery.start_soon(play, task_seed)
    if unknown_ids:
        raise unknown_ids[0]
    oracle_tallies: dict[tuple[str, float], OracleTally] = {}
    for task_seed in task_seeds:
        if task_seed in verdicts and not verdicts[task_seed]:
            raise UsageError(
                f"{env_id} offers no oracles: write a method oracles() as agentrl.env.checks.oracles describes it"
            )
        for verdict in verdicts.get(task_seed, ()):
            oracle_key = verdict.name, verdict.expected
            oracle_tallies.setdefault(oracle_key, OracleTally(*oracle_key)).count(task_seed, verdict)
    gold_verdicts = [
        verdict for seed_verdicts in verdicts.values() for verdict in seed_verdicts if verdict.name == "gold"
    ]
    return Validation(
        list(oracle_tallies.values()),
        bad_parts,
        [failed_tasks[task_seed] for task_seed in task_seeds if task_seed in failed_tasks],
        [
            task_fault
            for task_seed in task_seeds
            if task_seed in verdicts
            for task_fault in _missed(task_seed, verdicts[task_seed])
        ],
        tasks=task_count,
        played=len(task_seeds),
        absent=sum(_number(verdict, "absent") for verdict in gold_verdicts),
        tests=sum(_number(verdict, "tests") for verdict in gold_verdicts),
    )


async def _set(new: Callable[[], AsyncEnv]) -> tuple[int, list[TaskFault]]:
    """How many tasks an environment's set has, and the parts of it that make none."""
    set_env = new()
    try:
        if not isinstance(set_env, HasTasks):
            return 0, []
        return set_env.task_count, [TaskFault(bad_task.task, bad_task.reason) for bad_task in set_env.bad_tasks]
    finally:
        await set_env.aclose()


def _missed(seed: int, verdicts: Sequence[OracleResult]) -> Iterator[TaskFault]:
    """The first oracle of a task that did not get its outcome, and what is known of why."""
    for verdict in verdicts:
        if not verdict.holds:
            absent_count, test_count = _number(verdict, "absent"), _number(verdict, "tests")
            miss_reasons = [
                f"the oracle {verdict.name} got {verdict.got} instead of {verdict.expected:g}",
                *reasons_of(verdict),
            ]
            yield TaskFault(verdict.task or f"seed {seed}", "; ".join(miss_reasons)[:_WORDS], absent_count, test_count)
            return


def reasons_of(verdict: OracleResult) -> Iterator[str]:
    """Why an oracle missed its outcome, as far as the environment knows: what its actions were answered, what the
    grader noted, then the end of what the tests printed."""
    if answer_texts := [answer_text for answer_text in verdict.answers if answer_text.strip()]:
        yield "it read " + ", then ".join(map(_short, answer_texts[:_ANSWERS]))
    result_info = verdict.info
    for info_key in ("not_graded", "contradiction"):
        if isinstance(info_value := result_info.get(info_key), str):
            yield info_value
    for info_key in ("unknown_tests", "reward_faults", "left_behind"):
        if info_value := result_info.get(info_key):
            yield f"{info_key}: {_short(json.dumps(info_value, ensure_ascii=False))}"
    if (absent_count := _number(verdict, "absent")) and "not_graded" not in result_info:
        absent_ids = result_info.get("absent_tests")
        absent_example = f", as {absent_ids[0]!r}" if isinstance(absent_ids, list) and absent_ids else ""
        test_count = _number(verdict, "tests")
        yield f"{absent_count} of {test_count} test ids are not in the log of its test run{absent_example}"
    if isinstance(test_output := result_info.get("test_output"), str) and test_output:
        yield f"the test run ended with {_short(test_output, end=True)}"


def _short(text: str, *, end: bool = False) -> str:
    """A text on one line, its beginning or its end."""
    return repr(text.strip()[-_SHOWN:] if end else text.strip()[:_SHOWN])


def _number(verdict: OracleResult, name: str) -> int:
    info_value = verdict.info.get(name)
    return info_value if isinstance(info_value, int) else 0


def _task_of(env: AsyncEnv) -> str:
    """Name of the task that an environment of a set plays, also where its reset failed; empty if it has none."""
    played_task: object = getattr(env, "task", None)
    return str(cast("Mapping[str, object]", played_task).get("task", "")) if isinstance(played_task, Mapping) else ""
