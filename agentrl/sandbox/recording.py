"""Record of an environment's calls to its box, and of the answers: another instance gets the same answers, and no work
is repeated.

Owns the calls that are answered from a record and those that no record can answer. Never knows the environment.
"""

from __future__ import annotations

import base64
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import trio

from agentrl.errors import EnvError, SandboxError, SandboxPathError
from agentrl.protocols import ExecResult
from agentrl.records import Json

T = TypeVar("T")


class Tape:
    """The calls so far, in the order of their answers. While it `plays`, a call gets the recorded answer of an equal
    call: each answer once, the oldest first."""

    def __init__(self, most_bytes: int, entries: Sequence[tuple[str, Json]] | None = None) -> None:
        """`most_bytes` bounds the answers; 0: none are kept. With another tape's `entries` it plays until `end`."""
        self.entries: list[tuple[str, Json]] = []
        self.flaw = "" if most_bytes else "snapshots were off when the episode began"
        self.plays = entries is not None
        self.copies_open = 0
        self._copies = 0
        self._most, self._size = most_bytes, 0
        self._waiting: defaultdict[str, deque[Json]] = defaultdict(deque)
        for call_key, recorded_answer in entries or ():
            self._waiting[call_key].append(recorded_answer)

    async def ask(
        self, what: str, about: object, do: Callable[[], Awaitable[T]], read: Callable[[Json], T], write: Any
    ) -> T:
        """The answer of `do()` to the call `what` with the arguments `about`, or the recorded one; `read` and `write`
        turn answers from and into JSON."""
        # By content and not by order: an environment may ask its box side by side, and which call is first differs from
        # one time to the next. Equal calls are answered in the order in which they were recorded.
        call_key = blake2b(repr((what, about)).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        if self.plays:
            return await self._answer(call_key, what, about, read)
        try:
            live_answer = await do()
        # A refusal is an answer, which the environment has acted upon. Any other failure left no answer, so nothing can
        # stand for it later.
        except SandboxPathError as refusal:
            self._keep(call_key, {"refused": str(refusal)})
            raise
        except BaseException:
            self.flaw = self.flaw or f"its box gave no answer to {what}: the call was cut short, or the host failed"
            raise
        self._keep(call_key, {"answer": write(live_answer)})
        return live_answer

    def copied(self) -> str:
        """The name of a copy of the box that was just made: calls to it begin with it."""
        self._copies, self.copies_open = self._copies + 1, self.copies_open + 1
        return f"copy {self._copies}: "

    def end(self) -> None:
        """Let the box itself answer from now on. Raises EnvError if calls of the record were not made again."""
        self.plays = False
        if unasked_count := sum(map(len, self._waiting.values())):
            raise EnvError(f"the environment did not repeat {unasked_count} of its calls to its box")

    def _keep(self, key: str, answer: Json) -> None:
        self._size += len(key) + len(repr(answer))
        if self._size > self._most and not self.flaw:
            self.flaw = f"the answers of its box come to more than {self._most} bytes"
        if self.flaw:
            # A record with a gap can restore nothing, so its memory is given back at once.
            self.entries.clear()
        else:
            self.entries.append((key, answer))

    async def _answer(self, key: str, what: str, about: Any, read: Callable[[Json], T]) -> T:
        await trio.lowlevel.checkpoint()
        if not self._waiting[key]:
            shown_call = " ".join([what, *(repr(argument) for argument in about[:1])])[:200]
            raise EnvError(f"the environment made a call to its box that it had not made before: {shown_call}")
        recorded_answer = self._waiting[key].popleft()
        # Kept again: the episode that goes on may be moved once more.
        self._keep(key, recorded_answer)
        if "refused" in recorded_answer:
            raise SandboxPathError(recorded_answer["refused"])
        return read(recorded_answer["answer"])


def result_as_json(result: ExecResult) -> Json:
    """An `ExecResult` for `result_of_json`."""
    encoded_outputs = [base64.b64encode(output_bytes).decode() for output_bytes in (result.stdout, result.stderr)]
    return [
        result.exit_code,
        *encoded_outputs,
        result.timed_out,
        result.oom,
        result.truncated,
        result.duration_s,
        result.cpu_s,
        result.starved_s,
    ]


def result_of_json(document: Json) -> ExecResult:
    """Raises EnvError if it is none."""
    try:
        exit_code, stdout, stderr, timed_out, oom, truncated, duration_s, cpu_s, starved_s = document
        return ExecResult(
            exit_code=int(exit_code),
            stdout=base64.b64decode(stdout),
            stderr=base64.b64decode(stderr),
            timed_out=bool(timed_out),
            oom=bool(oom),
            truncated=bool(truncated),
            duration_s=float(duration_s),
            cpu_s=None if cpu_s is None else float(cpu_s),
            starved_s=float(starved_s),
        )
    except (TypeError, ValueError, ArithmeticError) as document_error:
        raise EnvError(f"the snapshot is damaged: a command's result: {document_error}") from document_error


def bytes_of_json(document: Json) -> bytes:
    """Raises EnvError if they are none."""
    try:
        return base64.b64decode(document)
    except (TypeError, ValueError) as document_error:
        raise EnvError(f"the snapshot is damaged: a file: {document_error}") from document_error


def unsaved(what: str) -> SandboxError:
    """The error of a box whose state no snapshot can hold."""
    return SandboxError(f"the box cannot be saved: {what}")
