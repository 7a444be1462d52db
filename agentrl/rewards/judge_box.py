"""The files of a finished work, and a box in which a judge runs commands over them.

Files are shown from their bytes, so that what a judge reads is the work as it was handed in and never what a command
made of it. Each command gets a box of its own, made from the same bytes and closed afterwards: nothing that code of the
work leaves behind meets the next command, another judgement or the policy's box. All that a tool returns is hostile,
names of files included; only `ToolAnswer.facts` are words of ours. Knows no model and no rubric.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import trio

from agentrl.env.tools.tool_results import readable
from agentrl.errors import SandboxPathError
from agentrl.protocols import ExecResult, Limits, SandboxSpec
from agentrl.rewards.hidden_tests import counted_tests, laid_over, place_of
from agentrl.sandbox.graded_time import own_time_out
from agentrl.sandbox.shared_backend import SharedBackend

_COMMANDS: Final = 3  # that may use up their time, before all of it is spent
_MOST_COMMAND: Final = 8192  # characters
# Files that a test runner or an interpreter obeys wherever it meets them. The tests are ours, so none of the work's is
# needed. It is a list of names and no wall: code of the work that the tests import runs in their process, see
# docs/how-to/rewards.md.
_STEERING: Final = frozenset(
    {
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "pyproject.toml",
        "tox.ini",
        "setup.cfg",
        "sitecustomize.py",
        "usercustomize.py",
    }
)
_RUNNERS: Final = frozenset({"unittest", "pytest", "_pytest", "pluggy", "sitecustomize", "usercustomize"})


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The answer of a tool: `facts` in our own words, and beneath each heading bytes that the work may have written."""

    facts: str
    data: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


class UnboxableWork(Exception):
    """No box takes the files of the work, and one takes the tests alone: the policy's own doing."""


class JudgeBox:
    """The tools of one judgement over `work` and `tests`, by relative path.

    All commands together may run `commands_s` seconds. `boxes` has been entered by the caller."""

    def __init__(
        self,
        work: Mapping[str, bytes],
        tests: Mapping[str, bytes],
        *,
        boxes: SharedBackend,
        image: str | None,
        commands_s: float,
        env: Mapping[str, str],
    ) -> None:
        self._boxes, self._image, self._env, self._tests = boxes, image, dict(env), dict(tests)
        steering_names = {name for name in work if _steers(name)} if tests else set[str]()
        self._boxed = laid_over({name: work[name] for name in work if name not in steering_names}, tests)
        # By the place that a box would give the name: a judge writes `./a.py` and `/workspace/a.py` too.
        self._shown = {place_of(name): file_bytes for name, file_bytes in {**work, **tests}.items()}
        self._absent = {place_of(name) for name in work.keys() - self._boxed.keys()} - {*map(place_of, tests)}
        self._ours = {*map(place_of, tests)}
        self._left_s, self._one_s = commands_s, commands_s / _COMMANDS

    def list_files(self, path: str) -> ToolAnswer:
        """The files below a folder, one a line: whose they are, their bytes, their name."""
        folder = place_of(path)
        listed_names = sorted(
            name for name in self._shown if folder in (".", "", name) or name.startswith(f"{folder}/")
        )
        if not listed_names:
            return ToolAnswer("no file is there")
        # The name comes last and is escaped, so that none can pass for another line or column.
        file_lines = [f"{self._owner(name)}\t{len(self._shown[name])}\t{ascii(name)[1:-1]}" for name in listed_names]
        return ToolAnswer(
            f"{len(listed_names)} files, as whose, bytes and name", {"files": "\n".join(file_lines).encode()}
        )

    def read_file(self, path: str, from_line: int, lines: int) -> ToolAnswer:
        """Lines of a file, which are numbered from 1."""
        file_bytes = self._shown.get(place_of(path))
        if file_bytes is None:
            return ToolAnswer("no such file; list_files shows all names")
        line_count = file_bytes.count(b"\n") + (not file_bytes.endswith(b"\n"))
        if from_line > line_count:
            return ToolAnswer(f"the file has {line_count} lines")
        shown_lines = file_bytes.split(b"\n", from_line - 1 + lines)[from_line - 1 : from_line - 1 + lines]
        last_line = min(from_line - 1 + lines, line_count)
        return ToolAnswer(
            f"{self._owner(place_of(path))}: lines {from_line} to {last_line} of {line_count}",
            {"lines": b"\n".join(shown_lines)},
        )

    async def run(self, command: str) -> ToolAnswer:
        """Run a shell command in a new box of the files, without a network.

        Raises UnboxableWork, SandboxError where the host of the boxes fails, HostBusy where it is too slow."""
        if len(command) > _MOST_COMMAND or not _is_text(command):
            return ToolAnswer(f"the command was not run: give at most {_MOST_COMMAND} printable characters")
        limit_s = min(self._one_s, self._left_s)
        if limit_s <= 0:
            return ToolAnswer("the command was not run: the time for commands is spent")
        try:
            result = await self._exec(self._boxed, command, limit_s)
        except SandboxPathError as error:
            await self._exec(self._tests, "true", limit_s)  # unless the tests themselves have such names
            raise UnboxableWork(str(error)) from error
        self._left_s -= max(result.duration_s - result.starved_s, 0.0)
        facts = [_ending(result, limit_s)]
        if self._tests:
            facts.append(_count(result))
        if result.truncated:
            facts.append("more output than this was cut")
        return ToolAnswer("; ".join(facts), {"stdout": result.stdout, "stderr": result.stderr})

    async def _exec(self, files: Mapping[str, bytes], command: str, limit_s: float) -> ExecResult:
        limits = Limits(wall_s=limit_s, cpu_s=limit_s, memory_bytes=1 << 30)
        box = await self._boxes.create(SandboxSpec(image=self._image, limits=limits, files=files))
        try:
            return await box.exec(["sh", "-c", command], env=self._env, timeout_s=limit_s)
        finally:
            with trio.CancelScope(shield=True):
                await box.close()

    def _owner(self, name: str) -> str:
        if name in self._ours:
            return "ours"
        return "work, left out of your box" if name in self._absent else "work"


def _ending(result: ExecResult, limit_s: float) -> str:
    if own_time_out(result):
        return f"did not end within {limit_s:.3g} s and was killed"
    return "was killed: out of memory" if result.oom else f"exit code {result.exit_code}"


def _count(result: ExecResult) -> str:
    # Beside the exit code, since the work's code can choose that: an exit handler ends a failed run with 0.
    if (counts := counted_tests(result)) is None:
        return "no summary of tests"
    return f"{counts[0]} of {counts[1]} tests passed by the last summary"


def _steers(name: str) -> bool:
    """Whether a file of the work would steer the run of our tests."""
    path_parts = place_of(name).split("/")
    return path_parts[-1] in _STEERING or path_parts[-1].endswith(".pth") or path_parts[0].split(".")[0] in _RUNNERS


def _is_text(command: str) -> bool:
    return all(character.isprintable() or character in "\n\t" for character in command)


def plain(data: bytes, most_bytes: int) -> str:
    """At most `most_bytes` of what the work wrote, its middle left out, as text: what drives a terminal, or hides,
    shows as an escape."""
    # Cut before it is decoded: a file of the work may have megabytes.
    half_bytes = most_bytes // 2
    shown_bytes = data if len(data) <= most_bytes else data[:half_bytes] + b"\n[...]\n" + data[len(data) - half_bytes :]
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1]
        for character in readable(shown_bytes)
    )
