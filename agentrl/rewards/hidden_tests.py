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
import posixpath
import re
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
from agentrl.rewards.score_cache import Recent
from agentrl.sandbox.graded_time import own_time_out
from agentrl.sandbox.shared_backend import SharedBackend, shared
from agentrl.sandbox.work_folder import WORKSPACE

ArtifactsOf = Callable[[str], Awaitable[Mapping[str, bytes] | None]]
"""The files of a turn by its id, None if there are none."""

# The tests are written into every box anew, for every turn: more of them would cost more than the test run.
_MOST_BYTES: Final = 16 << 20  # of the files of tests
# A summary is the last thing that a runner prints, and the output before it is the policy's to flood: only the tail
# is ever decoded. `tests/rewards/test_box_tests.py::test_reading_a_flood_costs_no_more_than_its_tail`.
_TAIL: Final = 8 << 10  # bytes of output in which a summary is looked for
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
        self._files = read_tests(Path(settings.files)) if settings.files else {}
        self._files_of: Callable[[Task], Mapping[str, bytes]] | None = None
        if settings.call:
            self._files_of = load_reference(settings.call)
        self._rewards = Recent[bytes, float]()
        self._has_command = False

    async def __call__(self, seen: Trajectory) -> float:
        """Raises ScoreError if the turn has no artifacts or the box lacks the command, SandboxError if its host fails,
        SandboxPathError if no box can hold the tests.

        Before the first turn there is no work, and the score is 0."""
        if not seen.turns:
            return 0.0
        # By the turn and not from the environment's state: turns are scored while the episode goes on, and by then
        # its files may be those of a later turn.
        work_files = await self._artifacts_of(seen.turns[-1].id)
        if work_files is None:
            raise no_artifacts(seen)
        # A reference of the run file comes last, so that a task can replace a common test.
        test_files = {**self._files, **(self._files_of(seen.task) if self._files_of else {})}
        reward_key = digest_of(work_files, test_files, str(seen.task.seed))
        # Members of a group often end with the same files. The key has the task's seed because the command may read
        # it (`TASK_SEED`).
        if (cached_reward := self._rewards.get(reward_key)) is not None:
            return cached_reward
        try:
            test_reward = await self._run(laid_over(work_files, test_files), seen.task)
        except SandboxPathError:  # names that no box takes, or that stand in the way of the tests: no failure (law 3)
            await self._run(test_files, seen.task)  # unless the tests themselves have them
            test_reward = 0.0
        self._rewards.keep(reward_key, test_reward)
        return test_reward

    async def check(self) -> None:
        """Make a box, and look for the command in it. Raises ScoreError without it, SandboxError without a box."""
        shared_boxes = shared(self._settings.sandbox)
        await shared_boxes.enter()
        try:
            await self._look_for_command(shared_boxes)
        finally:
            await shared_boxes.leave()

    async def _run(self, files: Mapping[str, bytes], task: Task) -> float:
        shared_boxes = shared(self._settings.sandbox)
        await shared_boxes.enter()
        try:
            if not self._has_command:
                await self._look_for_command(shared_boxes)
            test_result = await self._exec(shared_boxes, files, self._settings.command, {"TASK_SEED": str(task.seed)})
        finally:
            await shared_boxes.leave()
        return value_of(test_result, self._settings.score)

    async def _look_for_command(self, boxes: SharedBackend) -> None:
        program_name = next(iter(self._settings.command), "sh")  # a judge with tools needs no command
        if (await self._exec(boxes, {}, ["sh", "-c", 'command -v "$0"', program_name], {})).exit_code != 0:
            raise ScoreError(
                f"a box of {self._settings.sandbox} has no {program_name!r}: give an image with it, or its path"
            )
        self._has_command = True

    async def _exec(
        self, boxes: SharedBackend, files: Mapping[str, bytes], command: list[str], env: Mapping[str, str]
    ) -> ExecResult:
        # A box for each run, closed afterwards: whatever the work leaves behind, processes or files, no other work
        # meets it.
        box_limits = Limits(wall_s=self._settings.box_s, cpu_s=self._settings.box_s, memory_bytes=1 << 30)
        test_box: Sandbox = await boxes.create(SandboxSpec(image=self._settings.image, limits=box_limits, files=files))
        try:
            return await test_box.exec(command, env=env, timeout_s=self._settings.box_s)
        finally:
            # Also when the call's deadline cancels it. A box that nobody closes runs on and takes the place of
            # another.
            with trio.CancelScope(shield=True):
                await test_box.close()


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
    output_lines = _lines(result.stdout)
    if score == "number":
        return _number(output_lines)
    error_lines = _lines(result.stderr)
    if score == "exit":
        summaries = [*_summaries(output_lines, error_lines), *_of_others(output_lines)]
        # Work that makes the runner skip or find no test ends with exit code 0 in several runners. To count it as a
        # success would teach exactly that.
        if result.exit_code == 0 and summaries and not any(run_summary.passed for run_summary in summaries):
            return _contradiction("exit code 0, and no test passed", summaries[0].line)
        return float(result.exit_code == 0)
    last_summary = next(iter(_summaries(output_lines, error_lines)), None)
    if last_summary is None or not last_summary.ran:
        return 0.0
    # A printed summary is easy to forge, and a runner whose tests all pass does not fail: of two signs that
    # contradict each other the worse one counts.
    if last_summary.passed == last_summary.ran and result.exit_code != 0:
        return _contradiction("all tests passed, and the exit code is not 0", last_summary.line)
    return last_summary.passed / last_summary.ran


def counted_tests(result: ExecResult) -> tuple[int, int] | None:
    """How many tests passed, of how many that ran, by the last summary of pytest or unittest; None without one."""
    last_summary = next(iter(_summaries(_lines(result.stdout), _lines(result.stderr))), None)
    return None if last_summary is None else (last_summary.passed, last_summary.ran)


def _contradiction(words: str, line: str) -> float:
    notices.note("test runs", f"{words}: it counts as 0", place=repr(line), by_policy=True)
    return 0.0


def _lines(output: bytes) -> list[str]:
    """The last lines that say something, the last one first."""
    output_lines = output[-_TAIL:].decode("utf-8", "replace").splitlines()
    return [output_line.strip() for output_line in reversed(output_lines) if output_line.strip()]


def _number(lines: list[str]) -> float:
    try:
        score_document: Any = json.loads(lines[0])
        printed_score = float(score_document["score"] if isinstance(score_document, dict) else score_document)  # pyright: ignore[reportUnknownArgumentType]
    # The policy's code shares the output: deep nesting (RecursionError) and `1e999` (infinite) or a number of a
    # million digits are things that it can print, and none of them may end the scorer.
    except (IndexError, KeyError, TypeError, ValueError, RecursionError, OverflowError):
        return 0.0
    return min(max(printed_score, 0.0), 1.0) if math.isfinite(printed_score) else 0.0


@dataclass(frozen=True, slots=True)
class _Summary:
    """A line that counts tests. Skipped tests did not run."""

    line: str
    passed: int
    ran: int


def _summaries(stdout: list[str], stderr: list[str]) -> list[_Summary]:
    """All summaries among the last lines, the last one first; those of pytest before those of unittest."""
    summaries: list[_Summary] = []
    for output_line in stdout:
        ending_counts = [(int(count), ending_word) for count, ending_word in _COUNT.findall(output_line)]
        if ending_counts or _NONE_RAN.search(output_line):
            passed_count = sum(count for count, ending_word in ending_counts if ending_word == "passed")
            summaries.append(
                _Summary(
                    output_line,
                    passed_count,
                    sum(count for count, ending_word in ending_counts if ending_word in _RAN_ENDS),
                )
            )
    for stream_lines in (stderr, stdout):  # `2>&1` puts unittest's lines into stdout
        for line_index, output_line in enumerate(stream_lines):
            if ran_match := _RAN.match(output_line):
                # The lines are in reverse: unittest prints `Ran 3 tests` and below it `OK` or `FAILED (...)`, which
                # is the one before it here.
                verdict_line = stream_lines[line_index - 1] if line_index else ""
                ran_count = max(int(ran_match[1]) - sum(int(count) for count in _SKIPPED.findall(verdict_line)), 0)
                # Without a verdict below it no test passed.
                failed_count = sum(int(count) for count in _BAD.findall(verdict_line)) if line_index else ran_count
                summaries.append(_Summary(f"{output_line} {verdict_line}", max(ran_count - failed_count, 0), ran_count))
    return summaries


def _of_others(lines: list[str]) -> list[_Summary]:
    """Summaries of mocha, node and go, which say only whether any test passed: their lines count passed tests, and that
    number stands for `ran` too. The score "share" cannot read them. If go prints verdicts of single tests, its lines of
    packages do not count, since a package whose tests were all skipped is ok."""
    matched_lines = [
        (output_line, line_match) for output_line in lines if (line_match := _OF_OTHERS.match(output_line)) is not None
    ]
    has_verdicts = any(line_match["go"] for _, line_match in matched_lines)
    summaries: list[_Summary] = []
    for output_line, line_match in matched_lines:
        if line_match["ok"] and has_verdicts:
            continue
        passed_count = (
            line_match["mocha"] or line_match["node"] or (line_match["go"] == "PASS") or bool(line_match["ok"])
        )
        summaries.append(_Summary(output_line, int(passed_count), int(passed_count)))
    return summaries


def no_artifacts(seen: Trajectory) -> ScoreError:
    """The error for an episode whose environment declares no files."""
    return ScoreError(
        f"{seen.task.env} gave no artifacts for turn {seen.turns[-1].id}: give the environment a method"
        " artifacts() (docs/how-to/process-rewards.md)"
    )


def laid_over(work: Mapping[str, bytes], tests: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a test box, in the order in which they are written: the work without what would stand in the place
    of a test, then the tests."""
    # In the other order a policy could bring a file with the name of a test and be graded by it. To merge the two under
    # their names is not enough: `./hidden.py` is another name of the same file, and Python prefers a package `hidden/`,
    # an extension module `hidden.so` and unchecked bytecode to `hidden.py`. The folder of a test is a name as well: for
    # `tests/hidden.py`, `tests.py` or the `__path__` of `tests/__init__.py` could lead to tests of the work's own.
    # `tests/rewards/test_box_tests.py::test_nothing_of_the_work_stands_in_the_place_of_a_test`.
    if not tests:
        return dict(work)
    test_paths = {place_of(test_name) for test_name in tests}
    modules = tuple(test_path.removesuffix(".py") for test_path in test_paths if test_path.endswith(".py"))
    packages = tuple(f"{module}/" for module in modules)
    binaries = tuple(f"{module}." for module in modules)
    folders = {
        "/".join(parts[:depth]) for parts in (path.split("/") for path in test_paths) for depth in range(1, len(parts))
    }
    folder_names = tuple(f"{folder}." for folder in folders)

    def is_in_place(work_path: str) -> bool:
        return (
            work_path in test_paths
            or "__pycache__" in work_path.split("/")
            or work_path.startswith(packages)
            or (work_path.startswith(binaries) and work_path.endswith((".so", ".pyc")))
            or (work_path.startswith(folder_names) and work_path.endswith((".py", ".so", ".pyc")))
        )

    kept_work: dict[str, bytes] = {}
    for name, file_bytes in work.items():
        folder, _, file_name = place_of(name).rpartition("/")
        if folder in folders and file_name.partition(".")[0] == "__init__":
            kept_work[f"{folder}/__init__.py"] = b""  # it stays a package, whatever the work says of it
        elif not is_in_place(place_of(name)):
            kept_work[name] = file_bytes
    return {**kept_work, **tests}


def place_of(name: str) -> str:
    """The path below the work folder that a box resolves a file's name to."""
    path = posixpath.normpath(name)
    if not path.startswith("/"):
        return path
    return f"{path.lstrip('/')}/".removeprefix(f"{WORKSPACE[1:]}/").rstrip("/") or "."


def read_tests(folder: Path) -> dict[str, bytes]:
    """The files of a folder by relative path. Raises UsageError."""
    if not folder.is_dir():
        raise UsageError(f"rewards.files = {str(folder)!r} is no folder: name one with the tests")
    paths_by_name = {
        str(file_path.relative_to(folder)): file_path for file_path in sorted(folder.rglob("*")) if file_path.is_file()
    }
    if sum(file_path.stat().st_size for file_path in paths_by_name.values()) > _MOST_BYTES:
        raise UsageError(
            f"rewards.files = {str(folder)!r} has more than {_MOST_BYTES >> 20} MiB: leave out what tests do not need"
        )
    return {file_name: file_path.read_bytes() for file_name, file_path in paths_by_name.items()}


def digest_of(work: Mapping[str, bytes], tests: Mapping[str, bytes], seed: str) -> bytes:
    """A digest of the files of a work, of its tests and of the task's seed."""
    work_digest = blake2b(seed.encode())
    for named_files in (work, tests):
        for file_name, file_bytes in sorted(named_files.items()):
            # Names and lengths are in the digest, or a byte moved from one file to the next would leave it as it is,
            # and work could get the score of other work.
            work_digest.update(f"\0{file_name}\0{len(file_bytes)}\0".encode("utf-8", "surrogatepass"))
            work_digest.update(file_bytes)
        work_digest.update(b"\0\0")
    return work_digest.digest()
