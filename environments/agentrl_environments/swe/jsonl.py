"""Rows of SWE-bench and SWE-smith as tasks, and how they are graded: hidden tests in, test command, verdicts out.

A row has `instance_id`, `repo`, `problem_statement`, `patch`, `FAIL_TO_PASS`, `PASS_TO_PASS` (lists, or JSON of lists)
and may have `test_patch`, `image_name`, `test_command`, `sources` (patterns of what is carried to grading), `apart`
and `patch_is`. In SWE-bench the patch is the *fix*; in SWE-smith it is the *bug*, which is laid on a whole repository.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import trio

from agentrl.env import Grade
from agentrl.errors import ConfigError, ToolError
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl_environments.swe.apart import ApartTests
from agentrl_environments.swe.carrying import is_source, matching
from agentrl_environments.swe.task import Act, Task, text_of
from agentrl_environments.swe.trees import Tree, reversed_patch
from agentrl_environments.swe.verdicts import canonical, graded, passed
from agentrl_tools.patching import parse_patch

PatchIs = Literal["fix", "bug"]
TEST_COMMAND: Final = "python3 -m pytest -rA -p no:cacheprovider {tests}"
_IMAGES: Final = ("image_name", "docker_image", "image")
_WORDS: Final = (
    "Mend the sources in the work folder. Handed in are the source files that you change, and nothing else: \
no tests, no settings. They are judged by tests that you may not see. Call submit when you are done."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a row may leave out. `repositories` is a folder with a subfolder for each `repo`; without it, the image has
    the repository in `in_image`. `{tests}` of a test command are the files of the test patch. `apart`: the tests run in
    a box without the sources (`apart.py`), and not by the test command."""

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

    async def __call__(self, box: Sandbox, boxes: SandboxBackend) -> Grade:
        result = await box.exec(["sh", "-c", f"{{ {self.command}\n}} 2>&1"], timeout_s=self.deadline_s)
        whole = not result.timed_out and not result.truncated
        log = result.stdout.decode(errors="replace") if whole else ""
        good = await trio.to_thread.run_sync(passed, log)  # a long log must not hold up the other episodes
        return graded(good, self.fails, self.passes)


def load(file: Path, defaults: Defaults) -> list[Task]:
    """The tasks of a file, in order. Raises ConfigError that names the line."""
    tasks: list[Task] = []
    for number, line in enumerate(text_of(file).split("\n"), 1):  # splitlines would part a text at its U+2028
        if not line.strip():
            continue
        where = f"{file.name}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(where, line[:40], f"no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(where, line[:40], "a row is a JSON object")
        tasks.append(task_of(cast("dict[str, Any]", row), defaults, where))
    return tasks


def task_of(row: Mapping[str, Any], defaults: Defaults, where: str = "row") -> Task:
    """The task of a row. Raises ConfigError that says what the row lacks."""
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
    image = next((row[name] for name in _IMAGES if row.get(name)), defaults.image)
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
    grading = ApartTests(fails, passes, image) if apart else HiddenTests(command, fails, passes, defaults.tests_s)
    return Task(
        id=row["instance_id"],
        instruction=f"{row['problem_statement'].strip()}\n\n{_WORDS}",
        tree=tree,
        declared=declared,
        grade=grading,
        image=image,
        hidden=test_patch,
        gold=(Act.patch(patch if patch_is == "fix" else reversed_patch(patch)),),
        cheats={"delete the tests": (Act.shell(r"find . -name 'test*' -prune -exec rm -rf {} +"),)},
    )


def _tests(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    given = row.get(name) or []
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"{where}.{name}", given[:40], "give a list of tests, or JSON of one") from error
    if not isinstance(given, list) or not all(isinstance(test, str) for test in cast("list[Any]", given)):
        raise ConfigError(f"{where}.{name}", str(cast(Any, given))[:40], "give a list of tests, or JSON of one")
    return tuple(canonical(test) for test in cast("Sequence[str]", given))


def _paths(patch: str, where: str) -> frozenset[str]:
    """The files that a diff names. Raises ConfigError where it is none."""
    try:
        changes = parse_patch(patch)
    except ToolError as error:
        raise ConfigError(where, patch.partition("\n")[0], str(error)) from error
    return frozenset(path for change in changes for path in (change.old, change.new) if path is not None)


def _tree(repo: str, image: str | None, defaults: Defaults, where: str) -> Tree:
    if defaults.repositories is None:
        if image is None:
            raise ConfigError(
                f"{where}.image_name", None, "name an image that has the repository, or give repositories="
            )
        return Tree(in_image=defaults.in_image)
    names = (repo, repo.replace("/", "__"), repo.split("/")[-1])
    for name in names:
        parts = Path(name).parts
        stays = bool(parts) and not {"..", "/"} & set(
            parts
        )  # rows are other people's, and what lies here goes into boxes
        if stays and (folder := defaults.repositories / name).is_dir():
            return Tree(folder=folder)
    raise ConfigError(f"{where}.repo", repo, f"{defaults.repositories} has no folder {' or '.join(names)}")
