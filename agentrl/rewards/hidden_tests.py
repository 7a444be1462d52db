"""Tests of an agent's work in a box of their own: declared files and tests go in, a number from 0 to 1 comes out.

The tests never enter the agent's box, and nothing that they do reaches it. What the box prints is hostile, because the
policy's code runs there: it is bounded by the box's limits, read in linear time, and can only ever mean 0 to 1. Work
that hangs, exhausts its box or ends the test run gets 0: these are the policy's own doing, not failures (law 3). Who
shares an interpreter with the tests can still forge their result; see `docs/how-to/process-rewards.md`.

Knows no store and no environment.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import trio

from agentrl import notices
from agentrl.config.sections import RewardSource
from agentrl.errors import SandboxPathError, ScoreError, UsageError
from agentrl.protocols import ExecResult, Limits, Sandbox, SandboxSpec
from agentrl.records import Task, Trajectory
from agentrl.registry import load_reference
from agentrl.sandbox.graded_time import own_time_out
from agentrl.sandbox.shared_backend import SharedBackend, shared

ArtifactsOf = Callable[[str], Awaitable[Mapping[str, bytes] | None]]
"""The files of a turn by its id, None if there are none."""

# The tests are written into every box anew, for every turn: more of them would cost more than the test run.
_MOST_BYTES: Final = 16 << 20  # of the files of tests
# A summary is the last thing that a runner prints, and the output before it is the policy's to flood: only the tail
# is ever decoded. `tests/rewards/test_box_tests.py::test_reading_a_flood_costs_no_more_than_its_tail`.
_TAIL: Final = 8 << 10  # bytes of output in which a summary is looked for
_REMEMBERED: Final = 4096
# Six digits at most and no nested repetition: these expressions read what the policy prints, and one that backtracks
# would let it hold up the source for as long as it likes.
_COUNT: Final = re.compile(r"\b(\d{1,6}) (passed|failed|errors?|skipped|ignored|xfailed)\b")  # pytest, cargo
_RAN_ENDS: Final = {"passed", "failed", "error", "errors"}
_NONE_RAN: Final = re.compile(r"\bno tests ran in ")  # pytest
_RAN: Final = re.compile(r"^Ran (\d{1,6}) tests? in ")  # unittest
_SKIPPED: Final = re.compile(r"\bskipped=(\d{1,6})\b")
_OF_OTHERS: Final = re.compile(
    r"(?P<mocha>\d{1,6}) passing\b|(?:#|\u2139) pass (?P<node>\d{1,6})$"
    r"|--- (?P<go>PASS|SKIP): |(?:ok|\?)\s.*\[(?P<none>no tests to run|no test files)\]$|ok\s+\S+\s+(?P<ok>[\d.(])"
)
"""Lines of mocha, node and go that say how many tests passed, or that none ran."""
_BAD: Final = re.compile(r"\b(?:failures|errors|unexpected successes)=(\d{1,6})\b")


class BoxTests:
    """The share of tests that the work of the last turn passes, or what `settings.score` says otherwise."""

    def __init__(self, settings: RewardSource, artifacts_of: ArtifactsOf) -> None:
        """Raises UsageError if the tests cannot be read or imported."""
        self._settings, self._artifacts_of = settings, artifacts_of
        self._files = _read(Path(settings.files)) if settings.files else {}
        self._files_of: Callable[[Task], Mapping[str, bytes]] | None = None
        if settings.call:
            self._files_of = load_reference(settings.call)
        self._rewards: OrderedDict[bytes, float] = OrderedDict()
        self._has_command = False

    async def __call__(self, seen: Trajectory) -> float:
        """Raises ScoreError if the turn has no artifacts or the box lacks the command, SandboxError if its host fails,
        SandboxPathError if no box can hold the tests.

        Before the first turn there is no work, and the score is 0."""
        if not seen.turns:
            return 0.0
        # By the turn and not from the environment's state: turns are scored while the episode goes on, and by then
        # its files may be those of a later turn.
        work = await self._artifacts_of(seen.turns[-1].id)
        if work is None:
            raise ScoreError(
                f"{seen.task.env} gave no artifacts for turn {seen.turns[-1].id}: give the environment a method"
                " artifacts() (docs/how-to/process-rewards.md)"
            )
        # A reference of the run file comes last, so that a task can replace a common test.
        tests = {**self._files, **(self._files_of(seen.task) if self._files_of else {})}
        key = _digest(work, tests, str(seen.task.seed))
        # Members of a group often end with the same files. The key has the task's seed because the command may read
        # it (`TASK_SEED`).
        if (cached := self._rewards.get(key)) is not None:
            return cached
        try:
            # The tests overwrite the work. In the other order a policy could bring a file with the name of a test and
            # be graded by it.
            value = await self._run({**work, **tests}, seen.task)
        except SandboxPathError:  # names that no box takes, or that stand in the way of the tests: no failure (law 3)
            await self._run(tests, seen.task)  # unless the tests themselves have them
            value = 0.0
        self._rewards[key] = value
        if len(self._rewards) > _REMEMBERED:
            self._rewards.popitem(last=False)
        return value

    async def check(self) -> None:
        """Make a box, and look for the command in it. Raises ScoreError without it, SandboxError without a box."""
        boxes = shared(self._settings.sandbox)
        await boxes.enter()
        try:
            await self._look_for_command(boxes)
        finally:
            await boxes.leave()

    async def _run(self, files: Mapping[str, bytes], task: Task) -> float:
        boxes = shared(self._settings.sandbox)
        await boxes.enter()
        try:
            if not self._has_command:
                await self._look_for_command(boxes)
            result = await self._exec(boxes, files, self._settings.command, {"TASK_SEED": str(task.seed)})
        finally:
            await boxes.leave()
        return value_of(result, self._settings.score)

    async def _look_for_command(self, boxes: SharedBackend) -> None:
        program = self._settings.command[0]
        if (await self._exec(boxes, {}, ["sh", "-c", 'command -v "$0"', program], {})).exit_code != 0:
            raise ScoreError(
                f"a box of {self._settings.sandbox} has no {program!r}: give an image with it, or its path"
            )
        self._has_command = True

    async def _exec(
        self, boxes: SharedBackend, files: Mapping[str, bytes], command: list[str], env: Mapping[str, str]
    ) -> ExecResult:
        # A box for each run, closed afterwards: whatever the work leaves behind, processes or files, no other work
        # meets it.
        limits = Limits(wall_s=self._settings.box_s, cpu_s=self._settings.box_s, memory_bytes=1 << 30)
        box: Sandbox = await boxes.create(SandboxSpec(image=self._settings.image, limits=limits, files=files))
        try:
            return await box.exec(command, env=env, timeout_s=self._settings.box_s)
        finally:
            # Also when the call's deadline cancels it. A box that nobody closes runs on and takes the place of
            # another.
            with trio.CancelScope(shield=True):
                await box.close()


def value_of(result: ExecResult, score: str) -> float:
    """Score of a test run, from 0 to 1: `exit`: 1 for exit code 0; `number`: the last line of stdout, a number or a
    JSON object with one as `score`, cut to 0 to 1; `share`: the tests that passed of those that ran, by the last
    summary of pytest or unittest. Anything else is 0.

    A run that contradicts itself is no win, and is named: exit code 0 where every summary, also of cargo, jest, mocha,
    node or go, says that no test passed (all were skipped, say), and a share of 1 beside another exit code. Raises
    HostBusy, see `agentrl.sandbox.graded_time`.
    """
    # Only a time-out of its own is the work's fault. One in which the host withheld the processor raises, and the
    # source tries again (law 3):
    # `tests/rewards/test_box_tests.py::test_a_time_out_is_the_hosts_where_the_host_withheld_half_of_the_time`.
    if own_time_out(result) or result.oom:
        return 0.0
    stdout = _lines(result.stdout)
    if score == "number":
        return _number(stdout)
    stderr = _lines(result.stderr)
    if score == "exit":
        summaries = [*_summaries(stdout, stderr), *_of_others(stdout)]
        # Work that makes the runner skip or find no test ends with exit code 0 in several runners. To count it as a
        # success would teach exactly that.
        if result.exit_code == 0 and summaries and not any(summary.passed for summary in summaries):
            return _contradiction("exit code 0, and no test passed", summaries[0].line)
        return float(result.exit_code == 0)
    last = next(iter(_summaries(stdout, stderr)), None)
    if last is None or not last.ran:
        return 0.0
    # A printed summary is easy to forge, and a runner whose tests all pass does not fail: of two signs that
    # contradict each other the worse one counts.
    if last.passed == last.ran and result.exit_code != 0:
        return _contradiction("all tests passed, and the exit code is not 0", last.line)
    return last.passed / last.ran


def _contradiction(words: str, line: str) -> float:
    notices.note("test runs", f"{words}: it counts as 0", place=repr(line), by_policy=True)
    return 0.0


def _lines(output: bytes) -> list[str]:
    """The last lines that say something, the last one first."""
    lines = output[-_TAIL:].decode("utf-8", "replace").splitlines()
    return [line.strip() for line in reversed(lines) if line.strip()]


def _number(lines: list[str]) -> float:
    try:
        document: Any = json.loads(lines[0])
        number = float(document["score"] if isinstance(document, dict) else document)  # pyright: ignore[reportUnknownArgumentType]
    # The policy's code shares the output: deep nesting (RecursionError) and `1e999` (infinite) or a number of a
    # million digits are things that it can print, and none of them may end the scorer.
    except (IndexError, KeyError, TypeError, ValueError, RecursionError, OverflowError):
        return 0.0
    return min(max(number, 0.0), 1.0) if math.isfinite(number) else 0.0


@dataclass(frozen=True, slots=True)
class _Summary:
    """A line that counts tests. Skipped tests did not run."""

    line: str
    passed: int
    ran: int


def _summaries(stdout: list[str], stderr: list[str]) -> list[_Summary]:
    """All summaries among the last lines, the last one first; those of pytest before those of unittest."""
    summaries: list[_Summary] = []
    for line in stdout:
        counts = [(int(n), how) for n, how in _COUNT.findall(line)]
        if counts or _NONE_RAN.search(line):
            passed = sum(n for n, how in counts if how == "passed")
            summaries.append(_Summary(line, passed, sum(n for n, how in counts if how in _RAN_ENDS)))
    for lines in (stderr, stdout):  # `2>&1` puts unittest's lines into stdout
        for number, line in enumerate(lines):
            if match := _RAN.match(line):
                # The lines are in reverse: unittest prints `Ran 3 tests` and below it `OK` or `FAILED (...)`, which
                # is the one before it here.
                verdict = lines[number - 1] if number else ""
                ran = max(int(match[1]) - sum(int(n) for n in _SKIPPED.findall(verdict)), 0)
                bad = sum(int(n) for n in _BAD.findall(verdict)) if number else ran  # without a verdict below it: none
                summaries.append(_Summary(f"{line} {verdict}", max(ran - bad, 0), ran))
    return summaries


def _of_others(lines: list[str]) -> list[_Summary]:
    """Summaries of mocha, node and go, which say only whether any test passed: their lines count passed tests, and that
    number stands for `ran` too. The score "share" cannot read them. If go prints verdicts of single tests, its lines of
    packages do not count, since a package whose tests were all skipped is ok."""
    matches = [(line, match) for line in lines if (match := _OF_OTHERS.match(line)) is not None]
    has_verdicts = any(match["go"] for _, match in matches)
    summaries: list[_Summary] = []
    for line, match in matches:
        if match["ok"] and has_verdicts:
            continue
        number = match["mocha"] or match["node"] or (match["go"] == "PASS") or bool(match["ok"])
        summaries.append(_Summary(line, int(number), int(number)))
    return summaries


def _read(folder: Path) -> dict[str, bytes]:
    """The files of a folder by relative path. Raises UsageError."""
    if not folder.is_dir():
        raise UsageError(f"rewards.files = {str(folder)!r} is no folder: name one with the tests")
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if sum(path.stat().st_size for path in files.values()) > _MOST_BYTES:
        raise UsageError(
            f"rewards.files = {str(folder)!r} has more than {_MOST_BYTES >> 20} MiB: leave out what tests do not need"
        )
    return {name: path.read_bytes() for name, path in files.items()}


def _digest(work: Mapping[str, bytes], tests: Mapping[str, bytes], seed: str) -> bytes:
    digest = blake2b(seed.encode())
    for files in (work, tests):
        for name, data in sorted(files.items()):
            # Names and lengths are in the digest, or a byte moved from one file to the next would leave it as it is,
            # and work could get the score of other work.
            digest.update(f"\0{name}\0{len(data)}\0".encode("utf-8", "surrogatepass"))
            digest.update(data)
        digest.update(b"\0\0")
    return digest.digest()
