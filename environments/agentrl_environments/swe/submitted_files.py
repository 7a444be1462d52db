"""Selects the agent's work that goes to grading: the declared files that differ from the start, by their bytes alone.

Owns: comparing a work folder with itself at an earlier time, and which paths are sources. Links, pipes, modes and files
that are too large stay behind, as do files that decide how tests are collected and run.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, cast

from agentrl.errors import ConfigError, PolicyFault, SandboxError, SandboxPathError, SandboxUnavailable
from agentrl.protocols import ExecResult, Sandbox
from agentrl.sandbox.graded_time import own_time_out
from agentrl_environments.rewards import carried

_LISTING: Final = """
find . -type f ! -path '*
*' -exec sha256sum {} +"""
"""POSIX, and `sha256sum` as coreutils and busybox have it: no `-z`. So a name with a line break is not listed."""
_LISTING_AGAIN: Final = f"chmod -R u+rwX . 2>/dev/null; {_LISTING}"  # an agent may have locked folders
_LISTING_S: Final = 60.0
_MOST_FILES: Final = 500  # changed by one agent; more is no work that anyone would review
_MOST_BYTES: Final = 16 << 20  # of them together: a full disk must not hinder the grading
_AT_ONCE: Final = 200  # paths of one command
_OF_PYTEST: Final = {"pytest.ini", "pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"}
_SETTINGS: Final = _OF_PYTEST | {"setup.py", "noxfile.py", "Makefile"}
_RUNNERS: Final = {"pytest", "_pytest", "py", "pluggy", "xdist", "sitecustomize", "usercustomize"}
_ROOTS: Final = {"src", "lib"}  # folders that may stand on the path of imports beside the work folder itself

Listing = Mapping[str, str]
"""Digests of the plain files of a work folder, by path."""


@dataclass(frozen=True, slots=True)
class AgentChanges:
    """An agent's changes: new contents by path, and the paths that it removed. Files that are too large, or no plain
    files any more, are `left_behind`."""

    written: Mapping[str, bytes]
    removed: Sequence[str]
    left_behind: Sequence[str] = ()

    async def lay(self, box: Sandbox) -> None:
        """Do the same to another box. A change that does not fit there (a file where a folder is) is left out. Raises
        SandboxError where the box cannot do it at all."""
        for batch_start in range(0, len(self.removed), _AT_ONCE):
            batch_paths = [f"./{file_path}" for file_path in self.removed[batch_start : batch_start + _AT_ONCE]]
            exec_result = await box.exec(["rm", "-f", "--", *batch_paths], timeout_s=_LISTING_S)
            if exec_result.exit_code > 1:  # with 1 it left out what does not fit
                raise SandboxError(f"files that the agent removed cannot be removed: {last_words(exec_result)}")
        for file_path, file_bytes in self.written.items():
            with suppress(SandboxPathError):
                await box.write(file_path, file_bytes)


class WorkRefused(PolicyFault):
    """An agent's work that cannot be graded, and why. It gets 0."""


async def start_listing(box: Sandbox) -> Listing:
    """The files of a box that no agent has seen. Raises SandboxUnavailable where the image cannot list them, and
    HostBusy."""
    exec_result = await box.exec(["sh", "-c", _LISTING], timeout_s=_LISTING_S)
    if own_time_out(exec_result) or exec_result.truncated:
        raise ConfigError(
            "box", f"{len(exec_result.stdout)} bytes", "the task's files cannot be listed: give larger limits"
        )
    if exec_result.exit_code != 0:
        raise SandboxUnavailable(
            f"the files of the work folder cannot be listed ({last_words(exec_result)}): an image of coding tasks "
            "needs sh, find and sha256sum, see docs/how-to/images.md"
        )
    return _parsed(exec_result.stdout)


async def work(box: Sandbox, start: Listing, declared: Callable[[str, Set[str]], bool]) -> AgentChanges:
    """The declared changes since `start`. Raises WorkRefused if they are too many, SandboxError,
    HostBusy.

    The same commands have worked in this box at its start, so a listing that fails now is the agent's doing: its files
    are too many, or too deep. What could be listed counts."""
    exec_result = await box.exec(["sh", "-c", _LISTING_AGAIN], timeout_s=_LISTING_S)
    if own_time_out(exec_result) or exec_result.truncated or exec_result.oom:
        raise WorkRefused("the files of the work folder are too many to list")
    current_files = _parsed(exec_result.stdout)
    changed_paths = [
        file_path
        for file_path, file_digest in current_files.items()
        if start.get(file_path) != file_digest and declared(file_path, start.keys())
    ]
    if len(changed_paths) > _MOST_FILES:
        raise WorkRefused(f"{len(changed_paths)} files were changed: at most {_MOST_FILES} are handed in")
    removed_paths = [
        file_path for file_path in start if file_path not in current_files and declared(file_path, start.keys())
    ]
    written_files = await carried(box, sorted(changed_paths))
    if (total_bytes := sum(map(len, written_files.values()))) > _MOST_BYTES:
        raise WorkRefused(f"the changed files have {total_bytes} bytes: at most {_MOST_BYTES} are handed in")
    return AgentChanges(
        written_files,
        removed_paths,
        [file_path for file_path in sorted(changed_paths) if file_path not in written_files],
    )


def _parsed(output: bytes) -> dict[str, str]:
    """Digests by path. coreutils write a backslash in a name twice, and one before the line; busybox does not."""
    digests: dict[str, str] = {}
    for listing_line in output.decode("utf-8", "surrogateescape").split("\n"):
        file_digest, _, file_path = listing_line.removeprefix("\\").partition("  ")
        if file_path:
            file_path = file_path.replace("\\\\", "\\") if listing_line.startswith("\\") else file_path
            digests[file_path.removeprefix("./")] = file_digest
    return digests


def last_words(result: ExecResult) -> str:
    """Why a command failed, in its own last words."""
    error_lines = result.stderr.decode(errors="replace").strip().splitlines()
    return error_lines[-1][:200] if error_lines else f"exit code {result.exit_code}"


def is_source(path: str, start: Set[str]) -> bool:
    """Whether a path may hold a source of a project: no test, no setting of tests or packaging, nothing hidden, and,
    if it is new, no module that would stand in front of Python's own or the test runner's."""
    *folders, file_name = path.split("/")
    file_stem = file_name.partition(".")[0]
    if any(
        path_part.startswith(".") or path_part in ("test", "tests", "testing", "__pycache__")
        for path_part in [*folders, file_name]
    ):
        return False
    if file_stem.startswith("test_") or file_stem.endswith("_test") or file_stem in ("conftest", "tests"):
        return False
    if file_name in _SETTINGS or file_name.endswith((".pyc", ".pth", ".so")):
        return False
    return path in start or not _shadows(path)


def is_artifact(path: str, start: Set[str]) -> bool:
    """Whether a path may hold work of any kind: all but what changes how the tests of a task run."""
    if path.startswith(".harbor/") or path.endswith((".pyc", ".pth")):
        return False
    if path.split("/")[-1].removeprefix(".") in {"conftest.py", *_OF_PYTEST}:
        return False
    return path in start or not _shadows(path)


def _shadows(path: str) -> bool:
    """Whether Python would take a path for a module of its own, or for one of the test runner's."""
    path_parts = path.split("/")
    top_name = path_parts[1] if path_parts[0] in _ROOTS and len(path_parts) > 1 else path_parts[0]
    return top_name.partition(".")[0] in sys.stdlib_module_names | _RUNNERS


def matching(patterns: Sequence[str], where: str) -> Callable[[str, Set[str]], bool]:
    """Declared by patterns: `*` stands for anything, slashes too. Raises ConfigError; a text is no list."""
    untyped: Any = patterns
    if not isinstance(untyped, list) or not all(
        isinstance(pattern_value, str) for pattern_value in cast("list[Any]", untyped)
    ):
        raise ConfigError(where, untyped, 'give a list of patterns, such as ["src/*"]')
    return lambda path, start: any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
