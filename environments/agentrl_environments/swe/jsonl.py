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
        exec_result = await box.exec(["sh", "-c", f"{{ {self.command}\n}} 2>&1"], timeout_s=self.deadline_s)
        not_whole = self._not_whole(exec_result)
        log_text = "" if not_whole else exec_result.stdout.decode(errors="replace")

        def judge() -> tuple[Log, Grade]:
            test_log = read_log(log_text)
            return test_log, graded(test_log, self.fails, self.passes, exit_code=exec_result.exit_code)

        test_log, tests_grade = await trio.to_thread.run_sync(judge)  # a long log must not hold up the other episodes
        tests_grade = dataclasses.replace(tests_grade, info={**tests_grade.info, "grader_exit": exec_result.exit_code})
        if not_whole:
            return dataclasses.replace(tests_grade, info={**tests_grade.info, "not_graded": not_whole})
        self.matches.count(test_log, tests_grade, self.fails[0])
        for info_key, notice_text in _UNKNOWN.items():
            if info_key in tests_grade.info:
                notices.note("test logs", notice_text, place=f"the tests of {self.fails[0][:200]}", by_policy=True)
        if tests_grade.info["absent"]:  # for people who look why: the end of what the run printed
            return dataclasses.replace(tests_grade, info={**tests_grade.info, "test_output": log_text.strip()[-_TAIL:]})
        return tests_grade

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
            seen_name = min(log.passed | log.others, default="")
            seen_words = f"the log has {seen_name[:100]!r}" if seen_name else "the log names no test at all"
            notices.note(
                "test logs",
                f"{self.source}: none of the listed test ids stands in the log of any of the first {self.runs} test "
                f"runs, so all of them got 0: {test[:100]!r} is listed, {seen_words}. See test_command, and run "
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
    source_matches = _MATCHES.setdefault(source, Matches(source))
    odd_names: list[str] = []
    test_count = 0

    def make(where: str, raw: bytes | Mapping[str, Any]) -> CodingTask:
        row_object = _row(where, raw) if isinstance(raw, bytes) else raw
        return task_of(
            row_object,
            defaults,
            f"{where} ({row_object['instance_id']})" if "instance_id" in row_object else where,
            source_matches,
        )

    with notices.gathered():
        for row_place, raw_row in _rows(source):
            task_set.add(row_place, lambda where=row_place, raw=raw_row: make(where, raw))
    for coding_task in task_set.tasks:
        if isinstance(coding_task.grade, HiddenTests):
            test_ids = [*coding_task.grade.fails, *coding_task.grade.passes]
            test_count += len(test_ids)
            odd_names += [f"{coding_task.id}: {test_id}" for test_id in test_ids if not is_name(test_id)]
    if odd_names:
        notices.note(
            "rows of coding tasks",
            f"{len(odd_names)} of {test_count} test ids are no names of tests. They are looked for among docstrings "
            "and names cut at a blank; agentrl validate says which a log of the gold patch lacks",
            place=f"{source}, as {odd_names[0][:200]!r}",
        )
    return task_set


def _rows(source: str) -> Iterator[tuple[str, bytes | Mapping[str, Any]]]:
    """The rows with their places; those of JSON lines still to be read, so that each can fail for itself."""
    if not source.endswith(".jsonl") or source.startswith("hf:"):
        yield from (
            (f"{source}, row {row_number}", read_row) for row_number, read_row in enumerate(read_rows(source), 1)
        )
        return
    rows_file = Path(source)
    try:
        file_bytes = rows_file.read_bytes()
    except OSError as error:
        raise ConfigError("tasks", source, f"cannot be read: {error.strerror}") from error
    for row_number, row_line in enumerate(file_bytes.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if row_line.strip():
            yield f"{rows_file.name}:{row_number}", row_line


def _row(where: str, line: bytes) -> Mapping[str, Any]:
    try:
        row_object = json.loads(line.decode())
    except UnicodeDecodeError as error:
        wrong_bytes = line[error.start : error.end]
        raise ConfigError(where, wrong_bytes, f"no UTF-8 at byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(where, line[:40].decode(errors="replace"), f"no JSON: {error}") from error
    if not isinstance(row_object, dict):
        raise ConfigError(where, line[:40].decode(errors="replace"), "a row is a JSON object")
    return cast("dict[str, Any]", row_object)


def task_of(
    row: Mapping[str, Any], defaults: RowDefaults, where: str = "row", matches: Matches | None = None
) -> CodingTask:
    """The task of a row. Raises ConfigError that says what the row lacks."""
    for unknown_key in sorted(row.keys() - _READ - _FACTS):
        # Sets that bring a script or a parser of their own are graded otherwise than their authors meant.
        if row[unknown_key] not in (None, "", [], {}):
            notices.note("rows of coding tasks", f"the key {unknown_key!r} is not used", place=where)
    for text_key in ("instance_id", "repo", "problem_statement", "patch"):
        if not isinstance(row.get(text_key), str):
            raise ConfigError(f"{where}.{text_key}", row.get(text_key), "a row needs this text")
    for text_key in ("test_patch", "test_command", "patch_is", *_IMAGES):
        if row.get(text_key) is not None and not isinstance(row[text_key], str):
            raise ConfigError(f"{where}.{text_key}", row[text_key], "give a text, or leave it out")
    failing_tests = _tests(row, "FAIL_TO_PASS", where)
    if not failing_tests:
        raise ConfigError(f"{where}.FAIL_TO_PASS", [], "name at least one test, or doing nothing solves the task")
    hidden_patch = row.get("test_patch") or ""
    hidden_paths = _paths(hidden_patch, f"{where}.test_patch") if hidden_patch else frozenset[str]()
    patch_is = dataclasses.replace(defaults, patch_is=row.get("patch_is") or defaults.patch_is).patch_is
    gold_patch = row["patch"]
    _paths(gold_patch, f"{where}.patch")
    box_image = next((row[text_key] for text_key in _IMAGES if row.get(text_key)), defaults.image) or _official_image(
        row, defaults
    )
    work_tree = _tree(row["repo"], box_image, defaults, where)
    if patch_is == "bug":
        if work_tree.in_image is not None:
            raise ConfigError(
                f"{where}.patch_is",
                "bug",
                f"the agent could read the whole sources in {work_tree.in_image} of the image: give repositories=",
            )
        work_tree = dataclasses.replace(work_tree, patches=(gold_patch,))
    source_patterns = row.get("sources")
    in_sources = matching(source_patterns, f"{where}.sources") if source_patterns else is_source

    def declared(path: str, start: Set[str]) -> bool:
        return path not in hidden_paths and in_sources(path, start)

    quoted_paths = " ".join(shlex.quote(hidden_path) for hidden_path in sorted(hidden_paths))
    tests_command = (row.get("test_command") or defaults.test_command).replace("{tests}", quoted_paths)
    passing_tests = _tests(row, "PASS_TO_PASS", where)
    is_apart = row.get("apart", defaults.apart)
    if not isinstance(is_apart, bool):
        raise ConfigError(f"{where}.apart", is_apart, "give true or false")
    hidden_tests = HiddenTests(tests_command, failing_tests, passing_tests, defaults.tests_s, matches or Matches(where))
    task_grading = ApartTests(failing_tests, passing_tests, box_image) if is_apart else hidden_tests
    gold_fix = gold_patch if patch_is == "fix" else reversed_patch(gold_patch)
    return CodingTask(
        id=row["instance_id"],
        instruction=f"{row['problem_statement'].strip()}\n\n{_WORDS}",
        tree=work_tree,
        declared=declared,
        grade=task_grading,
        image=box_image,
        hidden=hidden_patch,
        secrets=(
            Secret(kind="solution", diff=gold_fix),
            *([Secret(kind="tests", diff=hidden_patch)] if hidden_patch else []),
        ),
        gold=(Act.patch(gold_fix),),
        cheats={"delete the tests": (Act.shell(r"find . -name 'test*' -prune -exec rm -rf {} +"),)},
    )


def _official_image(row: Mapping[str, Any], defaults: RowDefaults) -> str | None:
    """SWE-bench's own image of its rows, which name none. Registries take no double underscore in a name."""
    if defaults.repositories is not None or not all(isinstance(row.get(row_key), str) for row_key in _OF_SWE_BENCH):
        return None
    return f"swebench/sweb.eval.x86_64.{row['instance_id'].lower().replace('__', '_1776_')}:latest"


def _tests(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    listed_tests = row.get(name) or []
    if isinstance(listed_tests, str):
        try:
            listed_tests = json.loads(listed_tests)
        except ValueError as error:
            raise ConfigError(f"{where}.{name}", listed_tests[:40], "give a list of tests, or JSON of one") from error
    if not isinstance(listed_tests, list) or not all(
        isinstance(test_name, str) for test_name in cast("list[Any]", listed_tests)
    ):
        raise ConfigError(f"{where}.{name}", str(cast(Any, listed_tests))[:40], "give a list of tests, or JSON of one")
    return tuple(canonical(test_name) for test_name in cast("Sequence[str]", listed_tests))


def _paths(patch: str, where: str) -> frozenset[str]:
    """The files that a diff names. Raises ConfigError where it is none."""
    try:
        file_patches = parse_patch(patch)
    except ToolError as error:
        raise ConfigError(where, patch.partition("\n")[0], str(error)) from error
    return frozenset(
        file_path
        for file_patch in file_patches
        for file_path in (file_patch.old, file_patch.new)
        if file_path is not None
    )


def _tree(repo: str, image: str | None, defaults: RowDefaults, where: str) -> WorkTree:
    if defaults.repositories is None:
        if image is None:
            raise ConfigError(
                f"{where}.image_name", None, "name an image that has the repository, or give repositories="
            )
        return WorkTree(in_image=defaults.in_image)
    folder_names = (repo, repo.replace("/", "__"), repo.split("/")[-1])
    for folder_name in folder_names:
        path_parts = Path(folder_name).parts
        is_inside = bool(path_parts) and not {"..", "/"} & set(
            path_parts
        )  # rows are other people's, and what lies here goes into boxes
        if is_inside and (repository_folder := defaults.repositories / folder_name).is_dir():
            return WorkTree(folder=repository_folder)
    raise ConfigError(f"{where}.repo", repo, f"{defaults.repositories} has no folder {' or '.join(folder_names)}")
