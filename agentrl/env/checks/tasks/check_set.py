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
        lower_bound, upper_bound = wilson(count / n, n)
        return cls(count=count, n=n, share=count / n, low=lower_bound, high=upper_bound)


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
        return [task_verdict for task_verdict in self.tasks if task_verdict.verdict not in ("ok", "unknown")]

    @property
    def right(self) -> bool:
        return not self.bad and not self.suspicious and all(task_verdict.verdict == "ok" for task_verdict in self.tasks)


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
        task_count, bad_parts, self._texts, self._files = await _set(self._new)
        if plan.seeds is None and not task_count:
            raise UsageError(f"{plan.env_id} says not how many tasks it has: give --n")
        task_seeds = range(task_count) if plan.seeds is None else plan.seeds
        self._majority, self._chance = words.most_frequent_answer(self._texts)
        word_findings = words.answer_in_prompt(self._texts)
        if plan.held_out is not None:
            for task_index, findings in (await self._held_out(plan.held_out)).items():
                word_findings.setdefault(task_index, []).extend(findings)
        results_file = plan.out / _RESULTS
        file_header = self._header()
        self._results = _kept(results_file, file_header)
        task_slots = trio.CapacityLimiter(plan.jobs)
        plan.out.mkdir(parents=True, exist_ok=True)
        _write_lines(results_file, [file_header, *self._results.values()])
        async with trio.open_nursery() as nursery:
            for task_seed in task_seeds:
                if task_seed not in self._results:
                    nursery.start_soon(self._check, task_seed, task_slots, results_file, nursery.cancel_scope)
        if self._of_every_task is not None:
            raise self._of_every_task
        await self._load(task_seeds, results_file)
        verdicts = [self._verdict(task_seed, word_findings) for task_seed in task_seeds]
        return self._summed(verdicts, bad_parts)

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
        settings = [self._plan.env_id, self._plan.kwargs, list(map(str, self._files))]
        text_pairs = [[task_text.text, task_text.answer] for task_text in self._texts]
        return _digest_of_files(settings, text_pairs, apart=(self._plan.out, self._plan.skip))

    async def _held_out(self, changes: Mapping[str, Json]) -> dict[int, list[Finding]]:
        _, _, held_out, _ = await _set(partial(self._new, **changes))
        if not self._texts or not held_out:
            raise UsageError(f"{self._plan.env_id} offers no words of its tasks: leave out --held-out")
        return words.in_held_out(self._texts, held_out)

    async def _check(self, seed: int, slots: trio.CapacityLimiter, file: Path, scope: trio.CancelScope) -> None:
        async with slots:
            task_result: dict[str, Any] = {"seed": seed, "task": self._name(seed), "findings": []}
            with trio.move_on_after(self._plan.task_s) as deadline:
                try:
                    await self._play(seed, task_result)
                except (UnknownIdError, _NothingOffered) as refusal:
                    self._of_every_task = refusal
                    scope.cancel()
                    return
            if deadline.cancelled_caught:
                task_result["findings"] = [_plain(Finding("deadline", f"not done after {self._plan.task_s:g} s"))]
        self._keep(seed, task_result, file)

    def _keep(self, seed: int, result: dict[str, Any], file: Path) -> None:
        """Write a result down. Of several of one seed the last one counts."""
        self._results[seed] = result
        with file.open("a", encoding="utf-8") as results_file:
            results_file.write(f"{json.dumps(result)}\n")

    async def _play(self, seed: int, result: dict[str, Any]) -> None:
        """Play all oracles of a task, and write what came of it into `result`."""
        try:
            with boundary(EnvError, f"{self._plan.env_id}, seed {seed}: raised", place=True):
                task_look = await self._look(seed)
        except (UnknownIdError, _NothingOffered):
            raise
        except Exception as look_error:
            result["findings"] = [_plain(failure_of(look_error))]
            return
        result["task"] = task_look.task or self._name(seed)
        plays_by_oracle: dict[str, list[Play]] = {}
        no_work_wins = False
        for oracle_index, oracle in enumerate(task_look.oracles):
            if no_work_wins and oracle.cheats:  # it would win as everything does, and show nothing
                continue
            plays_by_oracle[oracle.name] = await self._plays(seed, oracle_index, oracle, task_look.grader_deadline_s)
            no_work_wins = no_work_wins or (
                oracle.name in NO_WORK and all(oracle_play.won for oracle_play in plays_by_oracle[oracle.name])
            )
            # A grader that comes to no verdict on the solution says nothing of an attack either, and takes its time.
            if oracle.outcome >= 1.0 and all(
                oracle_play.failure is not None for oracle_play in plays_by_oracle[oracle.name]
            ):
                break
        if self._majority:
            frequent_oracle = Oracle("the most frequent answer", 0.0, say(self._majority))
            majority_play = await play(self._new, seed, frequent_oracle, 0, lambda _: [frequent_oracle], None)
            result["majority"] = majority_play.won
        hindered = await self._hindered(seed, task_look.oracles, plays_by_oracle)
        task_plays = TaskPlays(plays_by_oracle, task_look.grader_deadline_s, hindered)
        findings = [*task_look.findings, *(finding for run_check in CHECKS for finding in run_check(task_plays))]
        result["findings"] = [_plain(finding) for finding in findings]
        result["plays"] = {
            oracle_name: [oracle_play.won for oracle_play in oracle_plays]
            for oracle_name, oracle_plays in plays_by_oracle.items()
        }
        result["hindered"] = {hindrance: oracle_play.won for hindrance, oracle_play in hindered.items()}
        result["grader_s"] = round(task_plays.grader_s, 3)
        result["grader_deadline_s"] = task_look.grader_deadline_s

    async def _hindered(
        self, seed: int, oracles: Sequence[Oracle], plays: Mapping[str, Sequence[Play]]
    ) -> Mapping[str, Play]:
        """Play a solution that always wins with its grader hindered, as nobody can tell what becomes of others."""
        steady_plays = [
            (oracle_index, plays[oracle.name][0], oracle.outcome >= 1.0)
            for oracle_index, oracle in enumerate(oracles)
            if oracle.name in plays
            and {oracle_play.won for oracle_play in plays[oracle.name]} == {oracle.outcome >= 1.0}
        ]
        winning_play = next(
            ((oracle_index, first_play) for oracle_index, first_play, is_winner in steady_plays if is_winner), None
        )
        losing_play = next(
            (
                (oracle_index, first_play)
                for oracle_index, first_play, _ in steady_plays
                if first_play.oracle.name == NO_WORK[0]
            ),
            None,
        )
        if winning_play is None:
            return {}
        return await in_own_loop(
            partial(hindered_plays, self._new, seed, winning_play, losing_play, partial(self._oracles, seed))
        )

    async def _load(self, seeds: Sequence[int], file: Path) -> None:
        """Grade the solutions of some tasks alone and on a busy machine. Tasks whose solution does not always win
        would say nothing of the load."""
        steady_seeds = [
            task_seed for task_seed in seeds if set(self._results[task_seed].get("plays", {}).get(GOLD, ())) == {True}
        ]
        loaded_count = min(self._plan.loaded, len(steady_seeds))
        for task_seed in (
            steady_seeds[sample_index * len(steady_seeds) // loaded_count] for sample_index in range(loaded_count)
        ):
            task_result = self._results[task_seed]
            if "loaded_s" in task_result:
                continue
            with trio.move_on_after(self._plan.task_s) as deadline:
                lone_play = await self._gold(task_seed)
                with busy_processors():
                    loaded_play = await self._gold(task_seed)
                findings = under_load(lone_play, loaded_play, task_result["grader_deadline_s"])
                task_result["findings"] += [_plain(finding) for finding in findings]
                task_result["alone_s"], task_result["loaded_s"] = (
                    round(graded_play.grader_s, 3) for graded_play in (lone_play, loaded_play)
                )
            if deadline.cancelled_caught:
                task_result["findings"].append(_plain(Finding("deadline", "not graded in time with busy processors")))
            self._keep(task_seed, task_result, file)

    async def _gold(self, seed: int) -> Play:
        def gold(env: AsyncEnv) -> list[Oracle]:
            return [task_oracle for task_oracle in self._oracles(seed, env) if task_oracle.name == GOLD]

        gold_oracle, deadline_s = Oracle(GOLD, 1.0, say("")), self._results[seed]["grader_deadline_s"]
        return await in_own_loop(partial(play, self._new, seed, gold_oracle, 0, gold, deadline_s))

    async def _look(self, seed: int) -> _Look:
        task_env = self._new()
        try:
            _, reset_info = await task_env.areset(seed=seed)
            task_oracles = self._oracles(seed, task_env)
            if not task_oracles:
                raise _NothingOffered(
                    f"{self._plan.env_id} offers no oracles: write a method oracles() as "
                    "agentrl.env.checks.oracles describes it"
                )
            task_name = str(reset_info.get("task", ""))
            if not isinstance(task_env, HasFindings):
                return _Look(task_name, task_oracles, (), None)
            return _Look(task_name, task_oracles, await task_env.task_findings(), task_env.grader_deadline_s)
        finally:
            await close(task_env)

    async def _plays(self, seed: int, index: int, oracle: Oracle, deadline_s: float | None) -> list[Play]:
        """Play an oracle again and again if its outcome matters most, or is not the expected one."""
        oracle_plays: list[Play] = []
        must_win = oracle.outcome >= 1.0
        while len(oracle_plays) < self._plan.repeat:
            oracle_plays.append(await play(self._new, seed, oracle, index, partial(self._oracles, seed), deadline_s))
            is_expected = all(oracle_play.won is must_win for oracle_play in oracle_plays)
            if is_expected and not must_win and oracle.name != NO_WORK[0]:
                break
        return oracle_plays

    def _oracles(self, seed: int, env: AsyncEnv) -> list[Oracle]:
        """All oracles of the task just reset: the environment's, its cheats, and those that its answer gives."""
        env_oracles = [*(env.oracles() if isinstance(env, HasOracles) else ())]
        env_oracles += env.cheats() if isinstance(env, HasCheats) else ()
        if env_oracles:
            return [*env_oracles, UNTOUCHED]
        return _answers(self._texts, seed % len(self._texts)) if self._texts else []

    def _text(self, seed: int) -> TaskText | None:
        return self._texts[seed % len(self._texts)] if self._texts else None

    def _name(self, seed: int) -> str:
        task_text = self._text(seed)
        return f"seed {seed}" if task_text is None else task_text.task

    def _verdict(self, seed: int, of_words: Mapping[int, Sequence[Finding]]) -> TaskVerdict:
        task_result, task_text = self._results[seed], self._text(seed)
        findings = [Finding(**kept_finding) for kept_finding in task_result["findings"]]
        findings += of_words.get(seed % len(self._texts), ()) if self._texts else ()
        reset_options: Mapping[str, Json] = {} if task_text is None else task_text.options
        env_kwargs = {
            argument_name: argument_value
            for argument_name, argument_value in self._plan.kwargs.items()
            if not reset_options or argument_name != "rows"
        }
        checked_task = Task(index=0, env=self._plan.env_id, seed=seed, kwargs=env_kwargs, options=reset_options)
        return TaskVerdict(
            seed=seed,
            task=task_result["task"],
            id=row_id(checked_task) if reset_options else task_id(checked_task),
            verdict=verdict_of(findings),
            findings=findings,
            plays=task_result.get("plays", {}),
            grader_s=task_result.get("grader_s", 0.0),
            grader_deadline_s=task_result.get("grader_deadline_s"),
            hindered=task_result.get("hindered", {}),
            alone_s=task_result.get("alone_s"),
            loaded_s=task_result.get("loaded_s"),
        )

    def _summed(self, tasks: Sequence[TaskVerdict], bad: Sequence[TaskFault]) -> SetVerdict:
        play_counts = [
            changed(oracle_plays)
            for task_verdict in tasks
            for oracle_plays in task_verdict.plays.values()
            if len(oracle_plays) > 1
        ]
        majority = [
            majority_won
            for task_verdict in tasks
            if (majority_won := self._results[task_verdict.seed].get("majority")) is not None
        ]
        reason_counts = Counter(finding.reason for task_verdict in tasks for finding in task_verdict.findings)
        by_verdict = Counter(task_verdict.verdict for task_verdict in tasks)
        verdicts = SetVerdict(
            tasks=tasks,
            bad=bad,
            flakes=Share.of(
                sum(odd_count for _, odd_count in play_counts), sum(judged_count for judged_count, _ in play_counts)
            ),
            majority=Share.of(sum(majority), len(majority)),
            majority_answer=self._majority,
            chance=self._chance,
            by_verdict=dict(by_verdict),
            by_reason={
                finding_reason: reason_counts[finding_reason]
                for finding_reason in REASONS
                if finding_reason in reason_counts
            },
        )
        _write_skip(self._plan.skip, verdicts.wrong)
        return replace(verdicts, skip=self._plan.skip if verdicts.wrong else None)


async def _set(new: Callable[[], AsyncEnv]) -> tuple[int, list[TaskFault], Sequence[TaskText], Sequence[Path]]:
    """How many tasks a set has, the parts of it that make none, its words, and its files."""
    set_env = new()
    try:
        task_texts = set_env.task_texts() if isinstance(set_env, HasTexts) else ()
        task_files = set_env.task_files if isinstance(set_env, HasFiles) else ()
        if not isinstance(set_env, HasTasks):
            return 0, [], task_texts, task_files
        return (
            set_env.task_count,
            [TaskFault(bad_task.task, bad_task.reason) for bad_task in set_env.bad_tasks],
            task_texts,
            task_files,
        )
    finally:
        await close(set_env)


def _answers(texts: Sequence[TaskText], index: int) -> list[Oracle]:
    """Answers to a task that takes one text: the right one, and others, which must not win."""
    right_answer = texts[index].answer
    other_answers = words.other_answers(texts, index, _OTHERS)
    answer_oracles = [Oracle(GOLD, 1.0, say(right_answer))] if right_answer.strip() else []
    answer_oracles += [Oracle(NO_WORK[2], 0.0, say("")), Oracle("nonsense", 0.0, say("zqx zqx zqx"), cheats=True)]
    answer_oracles += [
        Oracle(f"{WRONG} {answer_number}", 0.0, say(other_answer), cheats=True)
        for answer_number, other_answer in enumerate(other_answers, 1)
    ]
    if right_answer.strip() and len(other_answers) == _OTHERS:
        # Others stand at both ends, so a grader that reads the first or the last answer is not fooled.
        joined_answers = "\n".join([other_answers[0], right_answer, *other_answers[1:]])
        answer_oracles.append(Oracle("several answers at once", 0.0, say(joined_answers), cheats=True))
    return answer_oracles


def _kept(file: Path, header: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The results of an earlier call, by seed, without those that are unknown. A line that was not written to its end
    is none. Raises UsageError where they are of other settings."""
    file_lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    kept_rows: list[dict[str, Any]] = []
    for file_line in file_lines:
        try:
            kept_rows.append(json.loads(file_line))
        except ValueError:
            continue
    if not kept_rows:
        return {}
    if differing := sorted(
        header_key for header_key in {*kept_rows[0], *header} if kept_rows[0].get(header_key) != header.get(header_key)
    ):
        former_settings = {
            header_key: kept_rows[0].get(header_key) for header_key in differing if header_key != "files"
        }
        mismatch_reason = (
            f"of other settings: {json.dumps(former_settings)}"
            if former_settings
            else "older than the files of its tasks"
        )
        raise UsageError(f"--out {file.parent}: its results are {mismatch_reason}; name another folder")
    rows_by_seed = {result_row["seed"]: result_row for result_row in kept_rows[1:]}
    return {
        task_seed: result_row
        for task_seed, result_row in rows_by_seed.items()
        if verdict_of([Finding(**kept_finding) for kept_finding in result_row["findings"]]) != "unknown"
    }


def _digest_of_files(settings: object, texts: Sequence[Sequence[str]], *, apart: Sequence[Path]) -> str:
    """A digest of all files that settings name (rows, folders of tasks, the files of functions), and of texts. What
    this command writes itself is `apart`."""
    # A verdict on a task that was corrected since would be wrong, and nothing in the settings shows the correction.
    file_digest = hashlib.sha256(json.dumps(texts).encode())
    output_paths = [digest_path.resolve() for digest_path in apart]
    for digest_path in sorted(
        {named_file for setting_text in _names(settings) for named_file in _files_of(setting_text)}
    ):
        if not any(digest_path == output_path or output_path in digest_path.parents for output_path in output_paths):
            file_digest.update(
                f"{digest_path}\0{hashlib.sha256(digest_path.read_bytes()).hexdigest()}\n".encode(
                    errors="surrogateescape"
                )
            )
    return file_digest.hexdigest()


def _names(settings: object) -> Iterator[str]:
    """All texts among settings."""
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, Mapping):
        yield from _names(list(cast("Mapping[str, object]", settings).values()))
    elif isinstance(settings, Sequence):
        for setting_value in cast("Sequence[object]", settings):
            yield from _names(setting_value)


def _files_of(name: str) -> Iterator[Path]:
    """The file that a setting names, as `rows.jsonl` or `rewards.py:correct`, or all files of a folder."""
    for path_text in (name, name.rpartition(":")[0]):
        with suppress(OSError, ValueError):  # a text that is no path: too long, or with a NUL byte
            if (named_path := Path(path_text).resolve()).is_file():
                yield named_path
            elif path_text and named_path.is_dir():
                # Caches of an import change by themselves.
                yield from (
                    folder_file
                    for folder_file in named_path.rglob("*")
                    if folder_file.is_file() and "__pycache__" not in folder_file.parts
                )


def _write_skip(file: Path, wrong: Sequence[TaskVerdict]) -> None:
    skip_rows = [
        {
            "task": wrong_task.task,
            "id": wrong_task.id,
            "reason": f"{wrong_task.verdict}: {wrong_task.findings[0].evidence}",
        }
        for wrong_task in wrong
    ]
    _write_lines(file, skip_rows)


def _write_lines(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    draft_file = file.with_suffix(".tmp")
    draft_file.write_text("".join(f"{json.dumps(json_row)}\n" for json_row in rows), encoding="utf-8")
    draft_file.replace(file)


def _plain(finding: Finding) -> dict[str, str]:
    return {"reason": finding.reason, "evidence": finding.evidence}
