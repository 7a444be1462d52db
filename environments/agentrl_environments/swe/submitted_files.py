"""Selects the agent's work that goes to grading: the declared files that differ from the start, by their bytes alone.

Owns: comparing a work folder with itself at an earlier time, and which paths are sources. Links, pipes, modes and files
that are too large stay behind, as do files that decide how tests are found and run.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, cast

from agentrl.errors import ConfigError, SandboxPathError
from agentrl.protocols import Sandbox
from agentrl_environments.rewards import carried

_LISTING: Final = ["sh", "-c", "find . -type f -exec sha256sum -z -- {} +"]
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
    """An agent's changes: new contents by path, and the paths that it removed."""

    written: Mapping[str, bytes]
    removed: Sequence[str]

    async def lay(self, box: Sandbox) -> None:
        """Do the same to another box. A change that does not fit there (a file where a folder is) is left out."""
        for at in range(0, len(self.removed), _AT_ONCE):
            await box.exec(["rm", "-f", "--", *(f"./{path}" for path in self.removed[at : at + _AT_ONCE])])
        for path, data in self.written.items():
            with suppress(SandboxPathError):
                await box.write(path, data)


async def listing(box: Sandbox) -> Listing | None:
    """The box's files; None if they are too many to list, or the box too broken."""
    result = await box.exec(_LISTING, timeout_s=_LISTING_S)
    if result.timed_out or result.truncated:
        return None
    entries = [entry for entry in result.stdout.decode("utf-8", "surrogateescape").split("\0") if entry]
    return {path.removeprefix("./"): digest for digest, _, path in (entry.partition("  ") for entry in entries)}


async def work(box: Sandbox, start: Listing, declared: Callable[[str, Set[str]], bool]) -> AgentChanges | None:
    """The declared changes since `start`; None if they are too many. Raises SandboxError."""
    now = await listing(box)
    if now is None:
        return None
    changed = [path for path, digest in now.items() if start.get(path) != digest and declared(path, start.keys())]
    if len(changed) > _MOST_FILES:
        return None
    removed = [path for path in start if path not in now and declared(path, start.keys())]
    written = await carried(box, sorted(changed))
    return AgentChanges(written, removed) if sum(map(len, written.values())) <= _MOST_BYTES else None


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
    given: Any = patterns
    if not isinstance(given, list) or not all(isinstance(each, str) for each in cast("list[Any]", given)):
        raise ConfigError(where, given, 'give a list of patterns, such as ["src/*"]')
    return lambda path, start: any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
