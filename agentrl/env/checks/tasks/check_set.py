"""Checks each task of a set for real, some at the same time, and keeps each result, so that a second call goes on.

    look at the task (oracles, findings of its kind) ─► play each oracle ─► `task_checks` ─► one line of results.jsonl

Each task has a deadline. A result that says `unknown` is not kept for good: a second call plays the task again, as a
machine that was busy may not be so any more. Words of a set are compared at each call, as that costs nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import trio

from agentrl.algos.pass_at_k import wilson
from agentrl.env import as_async
from agentrl.env.checks.oracles import HasOracles, HasTasks, Oracle, say
from agentrl.env.checks.tasks import texts as words
from agentrl.env.checks.tasks.hindrance import busy_processors, hindered_plays, in_own_loop
from agentrl.env.checks.tasks.plays import UNTOUCHED, Play, close, failure_of, play
from agentrl.env.checks.tasks.task_checks import CHECKS, GOLD, NO_WORK, WRONG, TaskPlays, changed, under_load
from agentrl.env.checks.tasks.verdicts import (
    REASONS,
    Finding,
    HasCheats,
    HasFiles,
    HasFindings,
    HasTexts,
    TaskText,
    Verdict,
    verdict_of,
)
from agentrl.env.checks.validate import TaskFault
from agentrl.errors import EnvError, UnknownIdError, UsageError, boundary
from agentrl.protocols import AsyncEnv
from agentrl.records import Json, Task
from agentrl.registration import make
from agentrl.task_ids import row_id, task_id

_RESULTS: Final = "results.jsonl"
_OTHERS: Final = 3  # answers of other tasks that are tried on a task
_MARGIN: Final = 0.1  # above chance, from which on a frequent answer is named
_LOOK: Final = Oracle("look", 0.0, say(""))


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPlan:
    """A set to check: the tasks of the environment `env_id` with the arguments `kwargs`, by their `seeds` (None: each
    task of the set once). `held_out` are the arguments that differ for the held-out tasks, None where there are none.

    `repeat` is how often the solution, doing nothing, and whatever got an unexpected outcome are played. `task_s` are
    the most seconds of one task, `jobs` how many are checked at once. `out` is the folder of the results.

    `loaded` is how many tasks, spread over the set, are graded twice more at the end, each by itself: on the machine as
    it is, and while all its processors are kept busy."""

    env_id: str
    kwargs: Mapping[str, Json]
    seeds: Sequence[int] | None
    out: Path
    skip: Path
    held_out: Mapping[str, Json] | None = None
    repeat: int = 3
    task_s: float = 900.0
    jobs: int = 2
    loaded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskVerdict:
    """A task's verdict with all findings. `id` names it in `rollout.skip_tasks`. `plays` has for each oracle whether it
    won, play by play (None: no verdict), `hindered` whether it won with its grader hindered, by the hindrance.
    `grader_s` are the most seconds that a grading took, `alone_s` and `loaded_s` those of one alone, and of one beside
    busy processors, where this was measured."""

    seed: int
    task: str
    id: str
    verdict: Verdict
    findings: Sequence[Finding]
    plays: Mapping[str, Sequence[bool | None]]
    grader_s: float
    grader_deadline_s: float | None
    hindered: Mapping[str, bool | None] = field(default_factory=dict[str, "bool | None"])
    alone_s: float | None = None
    loaded_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A share of `n` with its 95% interval (Wilson)."""

    count: int
    n: int
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, count: int, n: int) -> Share | None:
        if not n:
            return None
        low, high = wilson(count / n, n)
        return cls(count=count, n=n, share=count / n, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetVerdict:
    """The verdicts on a set. `bad` are parts that make no task. `flakes` is the share of repeated plays that came out
    otherwise than most of their kind. `majority` is the share of tasks that the most frequent answer `majority_answer`
    wins, `chance` what a random one would; it is `suspicious` if the whole interval is clearly above that."""

    tasks: Sequence[TaskVerdict]
    bad: Sequence[TaskFault]
    flakes: Share | None
    majority: Share | None = None
    majority_answer: str = ""
    chance: float = 0.0
    by_verdict: Mapping[str, int] = field(default_factory=dict[str, int])
    by_reason: Mapping[str, int] = field(default_factory=dict[str, int])
    skip: Path | None = None

    @property
    def suspicious(self) -> bool:
        return self.majority is not None and self.majority.low > self.chance + _MARGIN

    @property
    def wrong(self) -> list[TaskVerdict]:
        """The tasks that were shown to be wrong. Unknown ones are none: it may have been this machine's doing."""
        return [task for task in self.tasks if task.verdict not in ("ok", "unknown")]

    @property
    def right(self) -> bool:
        return not self.bad and not self.suspicious and all(task.verdict == "ok" for task in self.tasks)


def check_set(plan: SetPlan) -> SetVerdict:
    """Check the tasks of a set that `plan.out` has no result of, and give the verdicts on all. Raises UnknownIdError,
    UsageError where nothing can be checked."""
    return trio.run(_SetCheck(plan).run)


class _NothingOffered(UsageError):
    """The environment has nothing to play. Every task would say the same."""


@dataclass(frozen=True, slots=True)
class _Look:
    """A task before it is played."""

    task: str
    oracles: Sequence[Oracle]
    findings: Sequence[Finding]
    grader_deadline_s: float | None


class _SetCheck:
    """One call of `check_set`."""

    def __init__(self, plan: SetPlan) -> None:
        self._plan = plan
        self._texts: Sequence[TaskText] = ()
        self._files: Sequence[Path] = ()
        self._majority, self._chance = "", 0.0
        self._results: dict[int, dict[str, Any]] = {}
        self._of_every_task: UsageError | None = None

    async def run(self) -> SetVerdict:
        plan = self._plan
        count, bad, self._texts, self._files = await _set(self._new)
        if plan.seeds is None and not count:
            raise UsageError(f"{plan.env_id} says not how many tasks it has: give --n")
        seeds = range(count) if plan.seeds is None else plan.seeds
        self._majority, self._chance = words.most_frequent_answer(self._texts)
        of_words = words.answer_in_prompt(self._texts)
        if plan.held_out is not None:
            for index, findings in (await self._held_out(plan.held_out)).items():
                of_words.setdefault(index, []).extend(findings)
        file = plan.out / _RESULTS
        header = self._header()
        self._results = _kept(file, header)
        slots = trio.CapacityLimiter(plan.jobs)
        plan.out.mkdir(parents=True, exist_ok=True)
        _write_lines(file, [header, *self._results.values()])
        async with trio.open_nursery() as nursery:
            for seed in seeds:
                if seed not in self._results:
                    nursery.start_soon(self._check, seed, slots, file, nursery.cancel_scope)
        if self._of_every_task is not None:
            raise self._of_every_task
        await self._load(seeds, file)
        verdicts = [self._verdict(seed, of_words) for seed in seeds]
        return self._summed(verdicts, bad)

    def _new(self, **changes: Json) -> AsyncEnv:
        return as_async(make(self._plan.env_id, **{**self._plan.kwargs, **changes}))

    def _header(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "env": plan.env_id,
            "kwargs": dict(plan.kwargs),
            "repeat": plan.repeat,
            "files": self._digest(),
        }

    def _digest(self) -> str:
        """A digest of what the tasks are made of: files that the settings or the environment name, and their words,
        which may come from elsewhere."""
        names = [self._plan.env_id, self._plan.kwargs, list(map(str, self._files))]
        texts = [[text.text, text.answer] for text in self._texts]
        return _digest_of_files(names, texts, apart=(self._plan.out, self._plan.skip))

    async def _held_out(self, changes: Mapping[str, Json]) -> dict[int, list[Finding]]:
        _, _, held_out, _ = await _set(partial(self._new, **changes))
        if not self._texts or not held_out:
            raise UsageError(f"{self._plan.env_id} offers no words of its tasks: leave out --held-out")
        return words.in_held_out(self._texts, held_out)

    async def _check(self, seed: int, slots: trio.CapacityLimiter, file: Path, scope: trio.CancelScope) -> None:
        async with slots:
            result: dict[str, Any] = {"seed": seed, "task": self._name(seed), "findings": []}
            with trio.move_on_after(self._plan.task_s) as deadline:
                try:
                    await self._play(seed, result)
                except (UnknownIdError, _NothingOffered) as error:
                    self._of_every_task = error
                    scope.cancel()
                    return
            if deadline.cancelled_caught:
                result["findings"] = [_plain(Finding("deadline", f"not done after {self._plan.task_s:g} s"))]
        self._keep(seed, result, file)

    def _keep(self, seed: int, result: dict[str, Any], file: Path) -> None:
        """Write a result down. Of several of one seed the last one counts."""
        self._results[seed] = result
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{json.dumps(result)}\n")

    async def _play(self, seed: int, result: dict[str, Any]) -> None:
        """Play all oracles of a task, and write what came of it into `result`."""
        try:
            with boundary(EnvError, f"{self._plan.env_id}, seed {seed}: raised", place=True):
                look = await self._look(seed)
        except (UnknownIdError, _NothingOffered):
            raise
        except Exception as error:
            result["findings"] = [_plain(failure_of(error))]
            return
        result["task"] = look.task or self._name(seed)
        plays: dict[str, list[Play]] = {}
        free = False  # whether doing nothing wins
        for index, oracle in enumerate(look.oracles):
            if free and oracle.cheats:  # it would win as everything does, and show nothing
                continue
            plays[oracle.name] = await self._plays(seed, index, oracle, look.grader_deadline_s)
            free = free or (oracle.name in NO_WORK and all(each.won for each in plays[oracle.name]))
            # A grader that comes to no verdict on the solution says nothing of an attack either, and takes its time.
            if oracle.outcome >= 1.0 and all(each.failure is not None for each in plays[oracle.name]):
                break
        if self._majority:
            frequent = Oracle("the most frequent answer", 0.0, say(self._majority))
            played = await play(self._new, seed, frequent, 0, lambda _: [frequent], None)
            result["majority"] = played.won
        hindered = await self._hindered(seed, look.oracles, plays)
        task = TaskPlays(plays, look.grader_deadline_s, hindered)
        findings = [*look.findings, *(finding for check in CHECKS for finding in check(task))]
        result["findings"] = [_plain(finding) for finding in findings]
        result["plays"] = {name: [each.won for each in of_one] for name, of_one in plays.items()}
        result["hindered"] = {hindrance: each.won for hindrance, each in hindered.items()}
        result["grader_s"] = round(task.grader_s, 3)
        result["grader_deadline_s"] = look.grader_deadline_s

    async def _hindered(
        self, seed: int, oracles: Sequence[Oracle], plays: Mapping[str, Sequence[Play]]
    ) -> Mapping[str, Play]:
        """Play a solution that always wins with its grader hindered, as nobody can tell what becomes of others."""
        steady = [
            (index, plays[oracle.name][0], oracle.outcome >= 1.0)
            for index, oracle in enumerate(oracles)
            if oracle.name in plays and {each.won for each in plays[oracle.name]} == {oracle.outcome >= 1.0}
        ]
        won = next(((index, play) for index, play, wins in steady if wins), None)
        lost = next(((index, play) for index, play, _ in steady if play.oracle.name == NO_WORK[0]), None)
        if won is None:
            return {}
        return await in_own_loop(partial(hindered_plays, self._new, seed, won, lost, partial(self._oracles, seed)))

    async def _load(self, seeds: Sequence[int], file: Path) -> None:
        """Grade the solutions of some tasks alone and on a busy machine. Tasks whose solution does not always win
        would say nothing of the load."""
        steady = [seed for seed in seeds if set(self._results[seed].get("plays", {}).get(GOLD, ())) == {True}]
        count = min(self._plan.loaded, len(steady))
        for seed in (steady[place * len(steady) // count] for place in range(count)):
            result = self._results[seed]
            if "loaded_s" in result:
                continue
            with trio.move_on_after(self._plan.task_s) as deadline:
                alone = await self._gold(seed)
                with busy_processors():
                    loaded = await self._gold(seed)
                findings = under_load(alone, loaded, result["grader_deadline_s"])
                result["findings"] += [_plain(finding) for finding in findings]
                result["alone_s"], result["loaded_s"] = (round(each.grader_s, 3) for each in (alone, loaded))
            if deadline.cancelled_caught:
                result["findings"].append(_plain(Finding("deadline", "not graded in time with busy processors")))
            self._keep(seed, result, file)

    async def _gold(self, seed: int) -> Play:
        def gold(env: AsyncEnv) -> list[Oracle]:
            return [oracle for oracle in self._oracles(seed, env) if oracle.name == GOLD]

        oracle, deadline_s = Oracle(GOLD, 1.0, say("")), self._results[seed]["grader_deadline_s"]
        return await in_own_loop(partial(play, self._new, seed, oracle, 0, gold, deadline_s))

    async def _look(self, seed: int) -> _Look:
        env = self._new()
        try:
            _, info = await env.areset(seed=seed)
            offered = self._oracles(seed, env)
            if not offered:
                raise _NothingOffered(
                    f"{self._plan.env_id} offers no oracles: write a method oracles() as "
                    "agentrl.env.checks.oracles describes it"
                )
            task = str(info.get("task", ""))
            if not isinstance(env, HasFindings):
                return _Look(task, offered, (), None)
            return _Look(task, offered, await env.task_findings(), env.grader_deadline_s)
        finally:
            await close(env)

    async def _plays(self, seed: int, index: int, oracle: Oracle, deadline_s: float | None) -> list[Play]:
        """Play an oracle again and again if its outcome matters most, or is not the expected one."""
        plays: list[Play] = []
        must_win = oracle.outcome >= 1.0
        while len(plays) < self._plan.repeat:
            plays.append(await play(self._new, seed, oracle, index, partial(self._oracles, seed), deadline_s))
            is_expected = all(each.won is must_win for each in plays)
            if is_expected and not must_win and oracle.name != NO_WORK[0]:
                break
        return plays

    def _oracles(self, seed: int, env: AsyncEnv) -> list[Oracle]:
        """All oracles of the task just reset: the environment's, its cheats, and those that its answer gives."""
        offered = [*(env.oracles() if isinstance(env, HasOracles) else ())]
        offered += env.cheats() if isinstance(env, HasCheats) else ()
        if offered:
            return [*offered, UNTOUCHED]
        return _answers(self._texts, seed % len(self._texts)) if self._texts else []

    def _text(self, seed: int) -> TaskText | None:
        return self._texts[seed % len(self._texts)] if self._texts else None

    def _name(self, seed: int) -> str:
        text = self._text(seed)
        return f"seed {seed}" if text is None else text.task

    def _verdict(self, seed: int, of_words: Mapping[int, Sequence[Finding]]) -> TaskVerdict:
        result, text = self._results[seed], self._text(seed)
        findings = [Finding(**each) for each in result["findings"]]
        findings += of_words.get(seed % len(self._texts), ()) if self._texts else ()
        options: Mapping[str, Json] = {} if text is None else text.options
        kwargs = {name: value for name, value in self._plan.kwargs.items() if not options or name != "rows"}
        task = Task(index=0, env=self._plan.env_id, seed=seed, kwargs=kwargs, options=options)
        return TaskVerdict(
            seed=seed,
            task=result["task"],
            id=row_id(task) if options else task_id(task),
            verdict=verdict_of(findings),
            findings=findings,
            plays=result.get("plays", {}),
            grader_s=result.get("grader_s", 0.0),
            grader_deadline_s=result.get("grader_deadline_s"),
            hindered=result.get("hindered", {}),
            alone_s=result.get("alone_s"),
            loaded_s=result.get("loaded_s"),
        )

    def _summed(self, tasks: Sequence[TaskVerdict], bad: Sequence[TaskFault]) -> SetVerdict:
        counted = [changed(plays) for task in tasks for plays in task.plays.values() if len(plays) > 1]
        majority = [won for task in tasks if (won := self._results[task.seed].get("majority")) is not None]
        reasons = Counter(finding.reason for task in tasks for finding in task.findings)
        by_verdict = Counter(task.verdict for task in tasks)
        verdicts = SetVerdict(
            tasks=tasks,
            bad=bad,
            flakes=Share.of(sum(odd for _, odd in counted), sum(n for n, _ in counted)),
            majority=Share.of(sum(majority), len(majority)),
            majority_answer=self._majority,
            chance=self._chance,
            by_verdict=dict(by_verdict),
            by_reason={reason: reasons[reason] for reason in REASONS if reason in reasons},
        )
        _write_skip(self._plan.skip, verdicts.wrong)
        return replace(verdicts, skip=self._plan.skip if verdicts.wrong else None)


async def _set(new: Callable[[], AsyncEnv]) -> tuple[int, list[TaskFault], Sequence[TaskText], Sequence[Path]]:
    """How many tasks a set has, the parts of it that make none, its words, and its files."""
    env = new()
    try:
        texts = env.task_texts() if isinstance(env, HasTexts) else ()
        files = env.task_files if isinstance(env, HasFiles) else ()
        if not isinstance(env, HasTasks):
            return 0, [], texts, files
        return env.task_count, [TaskFault(each.task, each.reason) for each in env.bad_tasks], texts, files
    finally:
        await close(env)


def _answers(texts: Sequence[TaskText], index: int) -> list[Oracle]:
    """Answers to a task that takes one text: the right one, and others, which must not win."""
    answer = texts[index].answer
    others = words.other_answers(texts, index, _OTHERS)
    oracles = [Oracle(GOLD, 1.0, say(answer))] if answer.strip() else []
    oracles += [Oracle(NO_WORK[2], 0.0, say("")), Oracle("nonsense", 0.0, say("zqx zqx zqx"), cheats=True)]
    oracles += [Oracle(f"{WRONG} {number}", 0.0, say(other), cheats=True) for number, other in enumerate(others, 1)]
    if answer.strip() and len(others) == _OTHERS:
        # Others stand at both ends, so a grader that reads the first or the last answer is not fooled.
        several = "\n".join([others[0], answer, *others[1:]])
        oracles.append(Oracle("several answers at once", 0.0, say(several), cheats=True))
    return oracles


def _kept(file: Path, header: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The results of an earlier call, by seed, without those that are unknown. A line that was not written to its end
    is none. Raises UsageError where they are of other settings."""
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    if not rows:
        return {}
    if differing := sorted(key for key in {*rows[0], *header} if rows[0].get(key) != header.get(key)):
        former = {key: rows[0].get(key) for key in differing if key != "files"}
        reason = f"of other settings: {json.dumps(former)}" if former else "older than the files of its tasks"
        raise UsageError(f"--out {file.parent}: its results are {reason}; name another folder")
    results = {row["seed"]: row for row in rows[1:]}
    return {
        seed: row
        for seed, row in results.items()
        if verdict_of([Finding(**each) for each in row["findings"]]) != "unknown"
    }


def _digest_of_files(settings: object, texts: Sequence[Sequence[str]], *, apart: Sequence[Path]) -> str:
    """A digest of all files that settings name (rows, folders of tasks, the files of functions), and of texts. What
    this command writes itself is `apart`."""
    # A verdict on a task that was corrected since would be wrong, and nothing in the settings shows the correction.
    digest, outputs = hashlib.sha256(json.dumps(texts).encode()), [path.resolve() for path in apart]
    for path in sorted({file for name in _names(settings) for file in _files_of(name)}):
        if not any(path == each or each in path.parents for each in outputs):
            digest.update(f"{path}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _names(settings: object) -> Iterator[str]:
    """All texts among settings."""
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, Mapping):
        yield from _names(list(cast("Mapping[str, object]", settings).values()))
    elif isinstance(settings, Sequence):
        for each in cast("Sequence[object]", settings):
            yield from _names(each)


def _files_of(name: str) -> Iterator[Path]:
    """The file that a setting names, as `rows.jsonl` or `rewards.py:correct`, or all files of a folder."""
    for place in (name, name.rpartition(":")[0]):
        with suppress(OSError, ValueError):  # a text that is no path: too long, or with a NUL byte
            if (path := Path(place).resolve()).is_file():
                yield path
            elif place and path.is_dir():
                # Caches of an import change by themselves.
                yield from (each for each in path.rglob("*") if each.is_file() and "__pycache__" not in each.parts)


def _write_skip(file: Path, wrong: Sequence[TaskVerdict]) -> None:
    rows = [
        {"task": task.task, "id": task.id, "reason": f"{task.verdict}: {task.findings[0].evidence}"} for task in wrong
    ]
    _write_lines(file, rows)


def _write_lines(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    draft = file.with_suffix(".tmp")
    draft.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    draft.replace(file)


def _plain(finding: Finding) -> dict[str, str]:
    return {"reason": finding.reason, "evidence": finding.evidence}
