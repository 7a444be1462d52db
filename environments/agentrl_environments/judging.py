"""Runs a repository's tests on sources that a policy wrote, so that nothing in the sources can forge a verdict.

Two fresh boxes. The *judge* holds the tests and runs `unittest`; the *suspect* holds the sources and obeys:
import this, call that, iterate it. All that passes between them, through this process, is calls and plain data:

    tests, expected values ── judge box ◄── lines ──► this process ◄── lines ──► suspect box ── the policy's sources

Why not one process: code that shares an interpreter with its tests can patch `unittest`, walk frames and `gc` to the
expected values or to any nonce, and code that shares a user id can write to the descriptors of its parent. Here the
sources never meet a test, an expected value or a verdict, not even the names of the tests; whatever they exit, patch,
print, pre-seed or leave running, they can only answer calls, and an answer helps only where it is the right one.

Limits: what a test hands over and gets back is plain data (see `boxed/wire.py`) or a handle, so a test that needs
`isinstance` on a class of the repository, patches its modules or mutates a list in place cannot be judged this way.
An `__eq__` of the repository runs in the suspect: a test must not rest on it alone. A context manager of the
repository swallows nothing, and none of its modules stands in front of Python's own or of a helper of the tests. A run
that outlasts its deadline is the sources' own doing. Boxes of a backend without walls (`local-unsafe`) keep nobody out.

Knows nothing of tasks, prompts or rewards.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

import trio

from agentrl.errors import HostBusy
from agentrl.host.clocks import HOST_DEADLINE_S, granted, policy_time
from agentrl.protocols import BoxProcess, Limits, Sandbox, SandboxBackend, SandboxSpec
from agentrl_environments.remembering import Remembered

LIMITS: Final = Limits(wall_s=30.0, cpu_s=5.0, memory_bytes=384 << 20, pids=16, output_bytes=2 << 20)
DEADLINE_S: Final = 30.0
_LONGEST_LINE: Final = 1 << 20  # as in boxed/wire.py
BOXED: Final = Path(__file__).parent / "boxed"
_ENV: Final = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
_TAKEN: Final = sys.stdlib_module_names | {"judge", "wire", "tests"}  # no source stands in front of these
_NO_ANSWER: Final = b"\n"  # what the judge reads in the place of an answer once the suspect has ended


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The tests that passed; `reasons` of those that did not, as far as they got to say it. `whole` is False where
    the suspect ended early or the time was up: another run might end otherwise. Time in which the host gave the
    processes no processor is not counted."""

    passed: frozenset[str]
    reasons: Mapping[str, str]
    whole: bool = True


class SourceJudge:
    """Judges sources in boxes of `backend`; the last `remembered` whole verdicts are kept, so that the same sources
    are not run twice. Raises SandboxError where the boxes' host fails, HostBusy where it has no slot."""

    def __init__(
        self,
        backend: SandboxBackend,
        *,
        image: str | None = None,
        remembered: int = 4096,
        limits: Limits = LIMITS,
        slots: int | None = None,
    ) -> None:
        """`image`: what the boxes are made of, with a `python3` in it. `slots`: runs at the same time, by default one
        for each processor."""
        self._backend, self._image, self._limits = backend, image, limits
        self._verdicts = Remembered[Verdicts](remembered)
        self._slots = trio.CapacityLimiter(slots or os.cpu_count() or 1)

    async def run(self, sources: Mapping[str, bytes], tests: Mapping[str, bytes]) -> Verdicts:
        """`sources` by path from the repository's root, `tests` by file name."""

        async def find() -> tuple[Verdicts, bool]:
            async with granted(self._slots, "a slot to judge in"):
                verdicts = await self._run(sources, tests)
            return verdicts, verdicts.whole

        return await self._verdicts.get(_digest(sources, tests), find)

    async def _run(self, sources: Mapping[str, bytes], tests: Mapping[str, bytes]) -> Verdicts:
        packages = sorted(_tops(sources) - _tops(tests) - _TAKEN)
        open_boxes: list[Sandbox] = []
        try:
            open_boxes.append(
                await self._box(
                    "suspect.py", {f"sources/{source_path}": file_bytes for source_path, file_bytes in sources.items()}
                )
            )
            open_boxes.append(
                await self._box(
                    "judge.py", {f"tests/{test_file}": file_bytes for test_file, file_bytes in tests.items()}
                )
            )
            suspect_process = await open_boxes[0].start(["python3", "-s", "-S", "box/suspect.py"], env=_ENV)
            judge_process = await open_boxes[1].start(["python3", "-s", "-S", "box/judge.py", *packages], env=_ENV)
            with policy_time():
                return await _Session(judge_process, suspect_process).run(DEADLINE_S)
        finally:
            with trio.CancelScope(shield=True):
                for open_box in open_boxes:
                    await open_box.close()

    async def _box(self, program: str, files: Mapping[str, bytes]) -> Sandbox:
        own_files = {
            f"box/{program_name}": (BOXED / program_name).read_bytes() for program_name in ("wire.py", program)
        }
        return await self._backend.create(
            SandboxSpec(image=self._image, limits=self._limits, files={**files, **own_files})
        )


def _tops(files: Mapping[str, bytes]) -> set[str]:
    """The modules that a folder of files offers to `import`."""
    return {file_path.split("/")[0].removesuffix(".py") for file_path in files}


def _digest(*trees: Mapping[str, bytes]) -> bytes:
    content_hash = blake2b()
    for file_tree in trees:
        for file_name, file_bytes in sorted(file_tree.items()):
            content_hash.update(f"{file_name}\0{len(file_bytes)}\0".encode())
            content_hash.update(file_bytes)
        content_hash.update(b"\0")
    return content_hash.digest()


class _Lines:
    """The lines of a process; None at its end, or where a line is too long to be one of ours."""

    def __init__(self, process: BoxProcess) -> None:
        self._process, self._waiting = process, b""

    async def next(self) -> bytes | None:
        while b"\n" not in self._waiting:
            output_chunk = await self._process.receive()
            self._waiting += output_chunk
            if not output_chunk or len(self._waiting) > _LONGEST_LINE:
                return None
        next_line, _, self._waiting = self._waiting.partition(b"\n")
        return next_line + b"\n"


class _Session:
    """One run: relays the judge's questions to the suspect, the answers back, and keeps the verdicts."""

    def __init__(self, judge: BoxProcess, suspect: BoxProcess) -> None:
        self._judge, self._suspect = judge, suspect
        self._questions, self._answers = _Lines(judge), _Lines(suspect)
        self._passed: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._ended = self._suspect_gone = False

    async def run(self, deadline_s: float) -> Verdicts:
        """Raises HostBusy where this machine gave the two processes no processor for HOST_DEADLINE_S."""
        relay_error: Exception | None = None
        starved_out = False

        async def end_in_time(scope: trio.CancelScope) -> None:
            """Cancel `scope` once both have had `deadline_s` seconds. One of the two waits for the other, so their
            times without a processor add up."""
            nonlocal starved_out
            left_s, returned_s = deadline_s, 0.0
            while left_s > 0:
                await trio.sleep(left_s)
                starved_s = sum(getattr(process, "starved_s", 0.0) for process in (self._judge, self._suspect))
                left_s, returned_s = starved_s - returned_s, starved_s
                if starved_s > HOST_DEADLINE_S:
                    starved_out = True
                    break
            scope.cancel()

        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as relay_scope:
                nursery.start_soon(end_in_time, relay_scope)
                try:
                    await self._relay()
                except Exception as error:  # raised outside the nursery, so that it is no group
                    relay_error = error
            nursery.cancel_scope.cancel()
        if relay_error is not None:
            raise relay_error
        if starved_out and not self._ended:
            raise HostBusy(f"the tests got no processor for {HOST_DEADLINE_S:g} s: this machine has too much to do")
        was_whole = self._ended and not self._suspect_gone
        return Verdicts(frozenset(self._passed), dict(self._reasons), was_whole)

    async def _relay(self) -> None:
        while not self._ended and (question_line := await self._questions.next()) is not None:
            if question_line.startswith(b">"):
                await self._judge.send(await self._answer(question_line[1:]))
            elif question_line.startswith(b"="):
                self._note(*json.loads(question_line[1:]))

    async def _answer(self, question: bytes) -> bytes:
        if not self._suspect_gone:
            await self._suspect.send(question)
            answer_line = await self._answers.next()
            if answer_line is not None:
                return answer_line
            self._suspect_gone = True
            await self._suspect.kill()
        return _NO_ANSWER

    def _note(self, test: str, passed: bool, reason: str) -> None:
        if not test:
            self._ended = True
        elif passed:
            self._passed.add(test)
        else:
            self._reasons[test] = reason
