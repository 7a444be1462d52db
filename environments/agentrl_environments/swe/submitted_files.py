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
        for at in range(0, len(self.removed), _AT_ONCE):
            paths = [f"./{path}" for path in self.removed[at : at + _AT_ONCE]]
            ended = await box.exec(["rm", "-f", "--", *paths], timeout_s=_LISTING_S)
            if ended.exit_code > 1:  # with 1 it left out what does not fit
                raise SandboxError(f"files that the agent removed cannot be removed: {last_words(ended)}")
        for path, data in self.written.items():
            with suppress(SandboxPathError):
                await box.write(path, data)


class WorkRefused(PolicyFault):
    """An agent's work that cannot be graded, and why. It gets 0."""


async def start_listing(box: Sandbox) -> Listing:
    """The files of a box that no agent has seen. Raises SandboxUnavailable where the image cannot list them, and
    HostBusy."""
    result = await box.exec(["sh", "-c", _LISTING], timeout_s=_LISTING_S)
    if own_time_out(result) or result.truncated:
        raise ConfigError("box", f"{len(result.stdout)} bytes", "the task's files cannot be listed: give larger limits")
    if result.exit_code != 0:
        raise SandboxUnavailable(
            f"the files of the work folder cannot be listed ({last_words(result)}): an image of coding tasks needs "
            "sh, find and sha256sum, see docs/how-to/images.md"
        )
    return _parsed(result.stdout)


async def work(box: Sandbox, start: Listing, declared: Callable[[str, Set[str]], bool]) -> AgentChanges:
    """The declared changes since `start`. Raises WorkRefused if they are too many, SandboxError,
    HostBusy.

    The same commands have worked in this box at its start, so a listing that fails now is the agent's doing: its files
    are too many, or too deep. What could be listed counts."""
    result = await box.exec(["sh", "-c", _LISTING_AGAIN], timeout_s=_LISTING_S)
    if own_time_out(result) or result.truncated or result.oom:
        raise WorkRefused("the files of the work folder are too many to list")
    now = _parsed(result.stdout)
    changed = [path for path, digest in now.items() if start.get(path) != digest and declared(path, start.keys())]
    if len(changed) > _MOST_FILES:
        raise WorkRefused(f"{len(changed)} files were changed: at most {_MOST_FILES} are handed in")
    removed = [path for path in start if path not in now and declared(path, start.keys())]
    written = await carried(box, sorted(changed))
    if (size := sum(map(len, written.values()))) > _MOST_BYTES:
        raise WorkRefused(f"the changed files have {size} bytes: at most {_MOST_BYTES} are handed in")
    return AgentChanges(written, removed, [path for path in sorted(changed) if path not in written])


def _parsed(output: bytes) -> dict[str, str]:
    """Digests by path. coreutils write a backslash in a name twice, and one before the line; busybox does not."""
    digests: dict[str, str] = {}
    for line in output.decode("utf-8", "surrogateescape").split("\n"):
        digest, _, path = line.removeprefix("\\").partition("  ")
        if path:
            path = path.replace("\\\\", "\\") if line.startswith("\\") else path
            digests[path.removeprefix("./")] = digest
    return digests


def last_words(result: ExecResult) -> str:
    """Why a command failed, in its own last words."""
    words = result.stderr.decode(errors="replace").strip().splitlines()
    return words[-1][:200] if words else f"exit code {result.exit_code}"


def is_source(path: str, start: Set[str]) -> bool:
    """Whether a path may hold a source of a project: no test, no setting of tests or packaging, nothing hidden, and,
    if it is new, no module that would stand in front of Python's own or the test runner's."""
    *folders, name = path.split("/")
    stem = name.partition(".")[0]
    if any(part.startswith(".") or part in ("test", "tests", "testing", "__pycache__") for part in [*folders, name]):
        return False
    if stem.startswith("test_") or stem.endswith("_test") or stem in ("conftest", "tests"):
        return False
    if name in _SETTINGS or name.endswith((".pyc", ".pth", ".so")):
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
    parts = path.split("/")
    top = parts[1] if parts[0] in _ROOTS and len(parts) > 1 else parts[0]
    return top.partition(".")[0] in sys.stdlib_module_names | _RUNNERS


def matching(patterns: Sequence[str], where: str) -> Callable[[str, Set[str]], bool]:
    """Declared by patterns: `*` stands for anything, slashes too. Raises ConfigError; a text is no list."""
    untyped: Any = patterns
    if not isinstance(untyped, list) or not all(isinstance(each, str) for each in cast("list[Any]", untyped)):
        raise ConfigError(where, untyped, 'give a list of patterns, such as ["src/*"]')
    return lambda path, start: any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
