"""Rows of SWE-bench and SWE-smith as tasks, and how they are graded: hidden tests in, test command, verdicts out.

A row has `instance_id`, `repo`, `problem_statement`, `patch`, `FAIL_TO_PASS`, `PASS_TO_PASS` (lists, or JSON of lists)
and may have `test_patch`, `image_name`, `test_command`, `sources` (patterns of what is carried to grading), `apart`
and `patch_is`. In SWE-bench the patch is the *fix*; in SWE-smith it is the *bug*, which is laid on a whole repository.
A row that names no image and has the columns of SWE-bench is played in SWE-bench's own image.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import trio

from agentrl import notices
from agentrl.env import Grade
from agentrl.env.datasets import read_rows
from agentrl.errors import ConfigError, ToolError
from agentrl.protocols import ExecResult, Sandbox, SandboxBackend
from agentrl.sandbox.graded_time import own_time_out
from agentrl_environments.swe.separate_grading import ApartTests
from agentrl_environments.swe.submitted_files import is_source, matching
from agentrl_environments.swe.task import Act, CodingTask, Secret, TaskSet
from agentrl_environments.swe.trees import WorkTree, reversed_patch
from agentrl_environments.swe.verdicts import Log, canonical, graded, is_name, read_log
from agentrl_tools.patching import parse_patch

PatchIs = Literal["fix", "bug"]
TEST_COMMAND: Final = "python3 -m pytest -rA -p no:cacheprovider {tests}"
_IMAGES: Final = ("image_name", "docker_image", "image")
_OF_SWE_BENCH: Final = ("base_commit", "version", "environment_setup_commit")  # columns that no other set has together
_TAIL: Final = 600  # characters of a test run's output that an info has
_UNMATCHED: Final = 8  # test runs without one listed id before a set is said to have other ids than its logs
_WORDS: Final = (
    "Mend the sources in the work folder. Handed in are the source files that you change, and nothing else: \
no tests, no settings. They are judged by tests that you may not see. Call submit when you are done."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowDefaults:
    """Values of fields that a row may leave out. `repositories` is a folder with a subfolder for each `repo`; without
    it, the image has the repository in `in_image`. `{tests}` of a test command are the files of the test patch.
    `apart`: the tests run in a box without the sources (`apart.py`), and not by the test command."""

    patch_is: PatchIs = "fix"
    test_command: str = TEST_COMMAND
    tests_s: float = 600.0
    image: str | None = None
    in_image: str = "/testbed"
    repositories: Path | None = None
    apart: bool = False

    def __post_init__(self) -> None:
        if self.patch_is not in get_args(PatchIs):
            raise ConfigError("patch_is", self.patch_is, "choose fix (SWE-bench) or bug (SWE-smith)")


@dataclasses.dataclass(frozen=True, slots=True)
class HiddenTests:
    """Grades by the log of a test run. Success: all listed tests pass."""

    command: str
    fails: tuple[str, ...]
    passes: tuple[str, ...]
    deadline_s: float
    matches: Matches

    async def __call__(self, box: Sandbox, boxes: SandboxBackend) -> Grade:
        """Raises HostBusy, see `agentrl.sandbox.graded_time`."""
        result = await box.exec(["sh", "-c", f"{{ {self.command}\n}} 2>&1"], timeout_s=self.deadline_s)
        reason = self._not_whole(result)
        text = "" if reason else result.stdout.decode(errors="replace")

        def judge() -> tuple[Log, Grade]:
            log = read_log(text)
            return log, graded(log, self.fails, self.passes, exit_code=result.exit_code)

        log, grade = await trio.to_thread.run_sync(judge)  # a long log must not hold up the other episodes
        grade = dataclasses.replace(grade, info={**grade.info, "grader_exit": result.exit_code})
        if reason:
            return dataclasses.replace(grade, info={**grade.info, "not_graded": reason})
        self.matches.count(log, grade, self.fails[0])
        for name, words in _UNKNOWN.items():
            if name in grade.info:
                notices.note("test logs", words, place=f"the tests of {self.fails[0][:200]}", by_policy=True)
        if grade.info["absent"]:  # for people who look why: the end of what the run printed
            return dataclasses.replace(grade, info={**grade.info, "test_output": text.strip()[-_TAIL:]})
        return grade

    def _not_whole(self, result: ExecResult) -> str:
        """Why a test run has no log that could be read, empty where it has."""
        if own_time_out(result):
            return f"the test run was ended at its deadline of {self.deadline_s:g} s"
        if result.oom:
            return "the test run had no memory left"
        return "the test run printed more than its box may (output_bytes)" if result.truncated else ""


_UNKNOWN: Final = {
    "contradiction": "the exit code is not 0 and no test has failed: the run counts as failed",
    "unknown_tests": "a status of tests that is not known here: they count as failed",
}


@dataclasses.dataclass(slots=True)
class Matches:
    """Whether the ids of a set ever stand in the logs of its test runs. Where they never do every episode gets 0, and
    nobody would know why: then a warning says it, once a process."""

    source: str
    runs: int = 0
    over: bool = False

    def count(self, log: Log, grade: Grade, test: str) -> None:
        self.runs += 1
        self.over = self.over or grade.info["absent"] != grade.info["tests"]
        if not self.over and self.runs >= _UNMATCHED:
            self.over = True
            seen = min(log.passed | log.others, default="")
            heard = f"the log has {seen[:100]!r}" if seen else "the log names no test at all"
            notices.note(
                "test logs",
                f"{self.source}: none of the listed test ids stands in the log of any of the first {self.runs} test "
                f"runs, so all of them got 0: {test[:100]!r} is listed, {heard}. See test_command, and run "
                "agentrl validate",
                by_policy=True,  # sources that end each test run would do the same
            )


_READ: Final = frozenset(
    {
        *("instance_id", "repo", "problem_statement", "patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS"),
        *("test_command", "patch_is", "sources", "apart", *_IMAGES),
    }
)
_FACTS: Final = frozenset(
    {
        *("base_commit", "environment_setup_commit", "version", "created_at", "difficulty", "hints_text", "language"),
        *("repo_language", "license", "license_name", "pull_number", "issue_numbers", "pr_id", "pull_requests"),
    }
)
"""Fields of SWE-bench's sets that describe a row, and that no grading needs."""

_MATCHES: dict[str, Matches] = {}  # by source: one process makes an environment for each of its slots


def load(source: str, defaults: RowDefaults) -> TaskSet:
    """The tasks of JSON lines, or of whatever else `agentrl.env.datasets.read_rows` reads: Parquet, `hf:NAME`. A row
    that makes no task is bad for itself alone. Raises ConfigError, UsageError where nothing can be read."""
    task_set = TaskSet()
    matches = _MATCHES.setdefault(source, Matches(source))
    odd: list[str] = []
    tests = 0

    def make(where: str, raw: bytes | Mapping[str, Any]) -> CodingTask:
        row = _row(where, raw) if isinstance(raw, bytes) else raw
        return task_of(row, defaults, f"{where} ({row['instance_id']})" if "instance_id" in row else where, matches)

    with notices.gathered():
        for where, raw in _rows(source):
            task_set.add(where, lambda where=where, raw=raw: make(where, raw))
    for task in task_set.tasks:
        if isinstance(task.grade, HiddenTests):
            ids = [*task.grade.fails, *task.grade.passes]
            tests += len(ids)
            odd += [f"{task.id}: {id}" for id in ids if not is_name(id)]
    if odd:
        notices.note(
            "rows of coding tasks",
            f"{len(odd)} of {tests} test ids are no names of tests. They are looked for among docstrings and names cut "
            "at a blank; agentrl validate says which a log of the gold patch lacks",
            place=f"{source}, as {odd[0][:200]!r}",
        )
    return task_set


def _rows(source: str) -> Iterator[tuple[str, bytes | Mapping[str, Any]]]:
    """The rows with their places; those of JSON lines still to be read, so that each can fail for itself."""
    if not source.endswith(".jsonl") or source.startswith("hf:"):
        yield from ((f"{source}, row {number}", row) for number, row in enumerate(read_rows(source), 1))
        return
    file = Path(source)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError("tasks", source, f"cannot be read: {error.strerror}") from error
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            yield f"{file.name}:{number}", line


def _row(where: str, line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        wrong = line[error.start : error.end]
        raise ConfigError(where, wrong, f"no UTF-8 at byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(where, line[:40].decode(errors="replace"), f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(where, line[:40].decode(errors="replace"), "a row is a JSON object")
    return cast("dict[str, Any]", row)


def task_of(
    row: Mapping[str, Any], defaults: RowDefaults, where: str = "row", matches: Matches | None = None
) -> CodingTask:
    """The task of a row. Raises ConfigError that says what the row lacks."""
    for key in sorted(row.keys() - _READ - _FACTS):
        # Sets that bring a script or a parser of their own are graded otherwise than their authors meant.
        if row[key] not in (None, "", [], {}):
            notices.note("rows of coding tasks", f"the key {key!r} is not used", place=where)
    for name in ("instance_id", "repo", "problem_statement", "patch"):
        if not isinstance(row.get(name), str):
            raise ConfigError(f"{where}.{name}", row.get(name), "a row needs this text")
    for name in ("test_patch", "test_command", "patch_is", *_IMAGES):
        if row.get(name) is not None and not isinstance(row[name], str):
            raise ConfigError(f"{where}.{name}", row[name], "give a text, or leave it out")
    fails = _tests(row, "FAIL_TO_PASS", where)
    if not fails:
        raise ConfigError(f"{where}.FAIL_TO_PASS", [], "name at least one test, or doing nothing solves the task")
    test_patch = row.get("test_patch") or ""
    hidden = _paths(test_patch, f"{where}.test_patch") if test_patch else frozenset[str]()
    patch_is = dataclasses.replace(defaults, patch_is=row.get("patch_is") or defaults.patch_is).patch_is
    patch = row["patch"]
    _paths(patch, f"{where}.patch")
    image = next((row[name] for name in _IMAGES if row.get(name)), defaults.image) or _official_image(row, defaults)
    tree = _tree(row["repo"], image, defaults, where)
    if patch_is == "bug":
        if tree.in_image is not None:
            raise ConfigError(
                f"{where}.patch_is",
                "bug",
                f"the agent could read the whole sources in {tree.in_image} of the image: give repositories=",
            )
        tree = dataclasses.replace(tree, patches=(patch,))
    patterns = row.get("sources")
    in_sources = matching(patterns, f"{where}.sources") if patterns else is_source

    def declared(path: str, start: Set[str]) -> bool:
        return path not in hidden and in_sources(path, start)

    files = " ".join(shlex.quote(path) for path in sorted(hidden))
    command = (row.get("test_command") or defaults.test_command).replace("{tests}", files)
    passes = _tests(row, "PASS_TO_PASS", where)
    apart = row.get("apart", defaults.apart)
    if not isinstance(apart, bool):
        raise ConfigError(f"{where}.apart", apart, "give true or false")
    hidden_tests = HiddenTests(command, fails, passes, defaults.tests_s, matches or Matches(where))
    grading = ApartTests(fails, passes, image) if apart else hidden_tests
    fix = patch if patch_is == "fix" else reversed_patch(patch)
    return CodingTask(
        id=row["instance_id"],
        instruction=f"{row['problem_statement'].strip()}\n\n{_WORDS}",
        tree=tree,
        declared=declared,
        grade=grading,
        image=image,
        hidden=test_patch,
        secrets=(Secret(kind="solution", diff=fix), *([Secret(kind="tests", diff=test_patch)] if test_patch else [])),
        gold=(Act.patch(fix),),
        cheats={"delete the tests": (Act.shell(r"find . -name 'test*' -prune -exec rm -rf {} +"),)},
    )


def _official_image(row: Mapping[str, Any], defaults: RowDefaults) -> str | None:
    """SWE-bench's own image of its rows, which name none. Registries take no double underscore in a name."""
    if defaults.repositories is not None or not all(isinstance(row.get(name), str) for name in _OF_SWE_BENCH):
        return None
    return f"swebench/sweb.eval.x86_64.{row['instance_id'].lower().replace('__', '_1776_')}:latest"


def _tests(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    tests = row.get(name) or []
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise ConfigError(f"{where}.{name}", tests[:40], "give a list of tests, or JSON of one") from error
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in cast("list[Any]", tests)):
        raise ConfigError(f"{where}.{name}", str(cast(Any, tests))[:40], "give a list of tests, or JSON of one")
    return tuple(canonical(test) for test in cast("Sequence[str]", tests))


def _paths(patch: str, where: str) -> frozenset[str]:
    """The files that a diff names. Raises ConfigError where it is none."""
    try:
        changes = parse_patch(patch)
    except ToolError as error:
        raise ConfigError(where, patch.partition("\n")[0], str(error)) from error
    return frozenset(path for change in changes for path in (change.old, change.new) if path is not None)


def _tree(repo: str, image: str | None, defaults: RowDefaults, where: str) -> WorkTree:
    if defaults.repositories is None:
        if image is None:
            raise ConfigError(
                f"{where}.image_name", None, "name an image that has the repository, or give repositories="
            )
        return WorkTree(in_image=defaults.in_image)
    names = (repo, repo.replace("/", "__"), repo.split("/")[-1])
    for name in names:
        parts = Path(name).parts
        stays = bool(parts) and not {"..", "/"} & set(
            parts
        )  # rows are other people's, and what lies here goes into boxes
        if stays and (folder := defaults.repositories / name).is_dir():
            return WorkTree(folder=folder)
    raise ConfigError(f"{where}.repo", repo, f"{defaults.repositories} has no folder {' or '.join(names)}")
