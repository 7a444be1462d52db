"""A coding task, independent of its format. Knows nothing of formats, prompts, tools or backends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.env import Grade
from agentrl.errors import ConfigError
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl_environments.swe.trees import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`tree` is the work folder as the agent finds it, in a box of `image`. `declared(path, start)` says whether a file
    that the agent changed is carried to grading; `start` are the paths that were there at first. `grade` judges a
    fresh box that has the tree, the changes of `hidden` (a unified diff, laid first: no work can stand in its way) and
    the carried files.

    `limits` are fields of `protocols.Limits` for its boxes; `tool_seconds` is how long the agent's calls may take.

    `gold` and `cheats` are shell commands or unified diffs for the oracles: the solution, and what must get 0."""

    id: str
    instruction: str
    tree: Tree
    declared: Callable[[str, Set[str]], bool]
    grade: Callable[[Sandbox, SandboxBackend], Awaitable[Grade]]
    image: str | None = None
    limits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tool_seconds: float | None = None
    hidden: str = ""
    gold: Sequence[Act] = ()
    cheats: dict[str, Sequence[Act]] = field(default_factory=dict[str, "Sequence[Act]"])


@dataclass(frozen=True, slots=True)
class Act:
    """A call of a tool that an oracle makes."""

    tool: str
    argument: str

    @classmethod
    def shell(cls, command: str) -> Act:
        return cls("shell", command)

    @classmethod
    def patch(cls, diff: str) -> Act:
        return cls("apply_patch", diff)


def text_of(file: Path) -> str:
    """A file of a task. Raises ConfigError for a file that is not text."""
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            str(file), error.object[error.start : error.end], f"no UTF-8 at byte {error.start}"
        ) from error
    except OSError as error:
        raise ConfigError(str(file), "", f"cannot be read: {error.strerror}") from error
