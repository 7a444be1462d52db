"""A coding task, independent of its format. Knows nothing of formats, prompts, tools or backends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentrl.env import Grade
from agentrl.errors import ConfigError
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl_environments.swe.trees import WorkTree


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingTask:
    """`tree` is the work folder as the agent finds it, in a box of `image`. `declared(path, start)` says whether a file
    that the agent changed is carried to grading; `start` are the paths that were there at first. `grade` judges a
    fresh box that has the tree, the changes of `hidden` (a unified diff, laid first: no work can stand in its way) and
    the carried files.

    `env` are variables of its boxes, `limits` fields of `protocols.Limits` for them; `tool_seconds` is how long the
    agent's calls may take. Before the files are carried, the commands `collect` run in the agent's box. `grading` says
    how the fresh box differs from the agent's.

    `secrets` are what no file of the agent's box and no prompt may hold.

    `gold` and `cheats` are shell commands or unified diffs for the oracles: the solution, and what must get 0."""

    id: str
    instruction: str
    tree: WorkTree
    declared: Callable[[str, Set[str]], bool]
    grade: Callable[[Sandbox, SandboxBackend], Awaitable[Grade]]
    image: str | None = None
    limits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    tool_seconds: float | None = None
    hidden: str = ""
    collect: Sequence[Collect] = ()
    grading: Grading | None = None
    secrets: Sequence[Secret] = ()
    gold: Sequence[Act] = ()
    cheats: dict[str, Sequence[Act]] = field(default_factory=dict[str, "Sequence[Act]"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """The solution of a task or its hidden tests: a diff, or a file of the host. `in_prompt` writes a text of it as the
    task's prompt would, which may name other folders."""

    kind: Literal["solution", "tests"]
    diff: str = ""
    file: Path | None = None
    in_prompt: Callable[[str], str] = str


@dataclass(frozen=True, slots=True)
class Collect:
    """A command that makes files of what the agent's programs do. Its failure is the agent's."""

    command: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """A box for grading that differs from the agent's: `image` and work folder `tree` replace the task's together;
    `limits` and `env` go above the task's."""

    image: str | None = None
    tree: WorkTree | None = None
    limits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class BadTask:
    """A part of a set that makes no task: its id, or its place where it has none, and the reason."""

    task: str
    reason: str


class TaskSet:
    """The tasks of a file or folder: `tasks` in order, and `bad`, which are not played and hinder no other."""

    def __init__(self, tasks: Iterable[CodingTask] = ()) -> None:
        self.tasks = list(tasks)
        self.bad: list[BadTask] = []
        self._places = dict.fromkeys((coding_task.id for coding_task in self.tasks), "")

    def add(self, place: str, make: Callable[[], CodingTask]) -> None:
        """One more task, or why it is none. An id counts once: of two tasks that have it the second is bad."""
        try:
            new_task = make()
            if new_task.id in self._places:
                raise ConfigError(
                    place, new_task.id, f"this id is that of {self._places[new_task.id]}: give each its own"
                )
        except ConfigError as error:
            self.bad.append(BadTask(place, str(error)))
        else:
            self._places[new_task.id] = place
            self.tasks.append(new_task)


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
