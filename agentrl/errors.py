"""Every error agentrl raises, in one tree; a failure is named once, at the boundary it crossed.

AgentRLError
├── UsageError                 the user's request is impossible (exit code 2)
│   ├── ConfigError            a run file or argument: names field, value and hint
│   ├── UnknownIdError         an id that no package registered
│   ├── ModelError             a model folder that cannot be used for this
│   ├── FormatError            a store, run folder or checkpoint of another format
│   ├── StrictInputError       input from outside that is not honoured, under --strict
│   └── EnvCheckFailed         an environment breaks its contract
├── WornOut                    a process asks to be started anew (exit code 4)
├── RunFailed                  the run cannot go on (exit code 1); journaled data stays
│   ├── WrongWeights           a restarted engine computes with other weights than it claims
│   └── CallbackError          a callback of the user's raised
├── InfrastructureError        the policy could not have caused it: leaves loss and baseline
│   ├── EngineError            ├── EngineUnavailable   └── EngineBroke
│   │                          ├── EngineTimeout       ├── EngineRefusal  └── ContextFull
│   │                          ├── WeightSyncError     ├── CanaryMismatch  └── FilesUnseen
│   │                          └── ScoreError
│   ├── SandboxError           ├── SandboxUnavailable  ├── SandboxLost
│   │                          └── BoxBusy
│   ├── EnvError               an environment's own code raised
│   ├── HostBusy               this machine did not have a slot in time
│   ├── RankLost               a rank of the learner died, or did not come to a collective in time
│   └── StoreError             ├── LeaseLost           ├── DiskFull
│                              ├── StoreBusy           ├── StoreDamaged
│                              ├── StoreAway           └── NotInStore
└── PolicyFault                the policy could have caused it: stays in loss and baseline
    ├── ParseError             ├── StructuralParseError   ├── ContentParseError
    ├── SandboxPathError       a path in a box: missing, of the wrong kind, leading out, no space
    └── ToolError              ├── ToolArgumentError      ├── ToolTimeout
"""

from __future__ import annotations

import logging
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import cast

log = logging.getLogger(__name__)


class AgentRLError(Exception):
    """Base of everything agentrl raises on purpose. Its text is one readable line."""

    exit_code = 1
    at_once = False  # the process ends without the clean-up of libraries, which wait for what is not there


class UsageError(AgentRLError):
    """The user's request is impossible; the text names what and says how to fix it."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is wrong, or a required one is missing. `field` is its dotted name, `value` its value, `hint` what to
    do. The message leaves out what may be a password in a URL or a connection string."""

    def __init__(self, field: str, value: object, hint: str, *, is_missing: bool = False) -> None:
        self.field, self.value, self.hint = field, value, hint
        problem = "is required" if is_missing else f"= {_without_passwords(repr(value))}"
        super().__init__(f"{field} {problem}: {hint}")


def _without_passwords(text: str) -> str:
    text = re.sub(r"(\w:/{1,2}).*@", r"\1…@", text, flags=re.DOTALL)  # a password may have any character, an "@" too
    return re.sub(r"""(password\s*=\s*)('[^']*'|[^\s&'"]+)""", r"\1…", text, flags=re.IGNORECASE)


class UnknownIdError(UsageError):
    """No installed package registered this id."""


class ModelError(UsageError):
    """A model folder lacks a required part (chat template, architecture, weights)."""


class FormatError(UsageError):
    """A store, run folder or checkpoint is of another format. `format` is the file's, 0 if it names none; `expected`
    is the only one that this agentrl reads and writes."""

    def __init__(self, path: object, kind: str, format: object, expected: int) -> None:
        self.format, self.expected = format, expected
        super().__init__(
            f"{path} has {kind} {format}, but this agentrl reads {kind} {expected} alone: go on with the agentrl that"
            " wrote it, or begin a new run"
        )


class StrictInputError(UsageError):
    """Input from outside holds something that is not honoured, which --strict refuses."""


class EnvCheckFailed(UsageError):
    """An environment breaks promises of its contract; the text is the checker's report, several lines."""


class RunFailed(AgentRLError):
    """The run cannot go on. All journaled data stays; `agentrl train --resume` goes on from it."""


class WrongWeights(RunFailed):
    """A restarted engine computes with other weights than it claims: another restart would not help."""


class CallbackError(RunFailed):
    """A callback of the user's raised, and asks that the run stop: the learner has saved its step."""


class WornOut(AgentRLError):
    """This process has ended in order, its leases released or its state saved: restart it, without cost to its restart
    budget."""

    exit_code = 4


class InfrastructureError(AgentRLError):
    """A failure that the policy could not have caused (law 3): leaves the loss and the baseline."""


class EngineError(InfrastructureError):
    """The inference engine answered wrongly or not at all.

    `url` is its address, if the failure is of one engine; `status` is the HTTP status of its answer, 0 if no answer
    came; `reason` holds the engine's own words."""

    def __init__(self, text: str, *, url: str = "", status: int = 0, reason: str = "") -> None:
        super().__init__(text)
        self.url, self.status, self.reason = url, status, reason or text


class EngineUnavailable(EngineError):
    """The engine could not be reached or closed the connection before the end."""


class EngineBroke(EngineUnavailable):
    """The engine took a request and failed it: it broke off, or its answer makes no sense."""


class EngineRefusal(EngineError):
    """The engine refuses the request itself: it would refuse the same request again. `context_full` is True if its
    words say that the conversation is too long for the model."""

    def __init__(
        self, text: str, *, url: str = "", status: int = 0, reason: str = "", context_full: bool = False
    ) -> None:
        super().__init__(text, url=url, status=status, reason=reason)
        self.context_full = context_full


class ContextFull(EngineRefusal):
    """A conversation has outgrown the context of a policy whose limit nobody knew: the episode ends there, scored."""


class EngineTimeout(EngineError):
    """The engine did not answer within the deadline."""


class WeightSyncError(EngineError):
    """New weights did not arrive whole, or the engine does not confirm their version."""


class FilesUnseen(WeightSyncError):
    """The engine does not reach the files of new weights, which are there: it shares no disk with the learner."""


class CanaryMismatch(WeightSyncError):
    """An engine confirmed a version and samples from other weights: pushing again would not help."""


class ScoreError(EngineError):
    """A judge or reward model answered, but not with a score of the requested kind."""


class SandboxError(InfrastructureError):
    """The sandbox host failed; a command that fails inside a box is a result, not an error."""


class SandboxUnavailable(SandboxError):
    """This machine cannot make such a box; the text says what to install."""


class SandboxLost(SandboxError):
    """The host of the boxes does not answer any more; what ran there may go on, or not."""


class BoxBusy(SandboxError):
    """The box cannot be packed while `running` processes run in it; later it may."""

    def __init__(self, running: int) -> None:
        super().__init__(f"processes run in the box ({running}), and a copy of its files would not restore them")


class EnvError(InfrastructureError):
    """An environment's own code raised; the cause is chained."""


class HostBusy(InfrastructureError):
    """This machine did not have a free resource (a slot, a thread, a box) in time."""


class RankLost(InfrastructureError):
    """A rank of the learner died, failed or came too late; the text names it. The learner starts again, whole."""


class StoreError(InfrastructureError):
    """The run store refused a read or a write."""


class NotInStore(StoreError):
    """The store has no episode, group or image of this number."""


class LeaseLost(StoreError):
    """This worker lost the episode: another one claimed it, or its group is closed. Drop it, journal no more of it."""


class DiskFull(StoreError):
    """No disk space for the journal: the run pauses, nothing is lost."""

    exit_code = 5


class StoreBusy(StoreError):
    """Another process held the store's write lock past the deadline: a person has to end that process."""


class StoreAway(StoreError):
    """The database of the store does not answer, and nothing was written: the same call may be made again.
    Its flag is True once the retries have lasted as long as the settings allow."""

    exit_code = 6
    retries_spent = False


class StoreDamaged(StoreError):
    """The store's file was damaged after it was written: a person has to replace it by a copy."""


class PolicyFault(AgentRLError):
    """A failure that the policy could have caused (law 3): the model reads its text as an observation."""


class ParseError(PolicyFault):
    """The model's text does not hold a valid action."""


class StructuralParseError(ParseError):
    """The envelope is broken: an unclosed tag, JSON that does not parse. `read`: how many characters of JSON it took to
    know it, at most."""

    read: int = 0


class ContentParseError(ParseError):
    """The envelope is sound but the call in it is not: unknown tool, wrong arguments."""


class SandboxPathError(PolicyFault):
    """A path in a box cannot be read or written as requested: missing, of the wrong kind, leading out, too large, no
    space.

    The policy shapes the box's files, so it is the policy's fault. An environment that reads a file which the policy
    cannot have changed raises `SandboxError` from it."""


class ToolError(PolicyFault):
    """A tool refused or failed because of the request itself."""


class ToolArgumentError(ToolError):
    """Arguments do not fit the tool's JSON schema."""


class ToolTimeout(ToolError):
    """The tool ran past its deadline and was ended."""


def boundary(
    becomes: Callable[[str], AgentRLError],
    what: str,
    *,
    passes: tuple[type[AgentRLError], ...] = (InfrastructureError, UsageError),
    place: bool = False,
) -> AbstractContextManager[None]:
    """Turn an exception of somebody else's code into one of our errors. The block may hold plain and awaited calls.

    `becomes` makes the error from one line: `what`, then the exception's kind and text, and with `place` the file and
    line of its author's code that raised it, see `place_of`. The exception is the error's cause. Errors of the kinds in
    `passes` go through unchanged. If a nursery raised a group of errors, the one that `matters` counts.

        with boundary(EnvError, "mine/Guess-v0: step raised"):
            await env.astep(action)     # EnvError: mine/Guess-v0: step raised KeyError: 'secret'
    """
    return _Boundary(becomes, what, passes, place)


class _Boundary(AbstractContextManager[None]):
    """`boundary`: no generator, since each call into an environment crosses one."""

    def __init__(
        self,
        becomes: Callable[[str], AgentRLError],
        what: str,
        passes: tuple[type[AgentRLError], ...],
        place: bool,
    ) -> None:
        self._becomes, self._what, self._passes, self._place = becomes, what, passes, place

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not for KeyboardInterrupt, nor for trio's Cancelled: they are no failure of the code in the block, and an
        # error in their place would stop what they were sent to stop.
        if not isinstance(error, Exception):
            return
        inner_error = matters(error)
        # An error that was named once keeps its name: a SandboxError that comes out of an environment's step is the
        # sandbox's, not the environment's.
        if isinstance(inner_error, self._passes):
            if inner_error is error:
                return
            raise inner_error from error
        place_suffix = _place(inner_error) if self._place else ""
        error_line = f"{self._what} {type(inner_error).__name__}: {' '.join(str(inner_error).split())}{place_suffix}"
        raise self._becomes(error_line) from error


def _place(error: BaseException) -> str:
    """`place_of` as the end of a line; a SyntaxError names its place itself."""
    file_and_line = "" if isinstance(error, SyntaxError) else place_of(error)
    return f" ({file_and_line})" if file_and_line else ""


_OURS = f"{Path(__file__).resolve().parent}/"
_INSTALLED = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LOOPS = tuple(f"{root}{name}/" for root in _INSTALLED for name in ("trio", "outcome"))  # our code and theirs run in it


def first_line(error: BaseException) -> str:
    """The first line of an error of another library, whose others are often advice or a picture; its class if it has no
    words."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def place_of(error: BaseException) -> str:
    """`file:line` of the last frame of the code that somebody wrote for a run: neither of agentrl nor of Python, nor of
    an installed package if there is another one. "" for an error that was never raised, and for one of ours that no
    such code led to: its text says what to change."""
    file_and_line = _place_in(traceback.extract_tb(error.__traceback__))
    return "" if isinstance(error, AgentRLError) and file_and_line.startswith(_OURS) else file_and_line


def place_of_thread(thread: int | None, below: str) -> str:
    """Return `file:line`, as `place_of` does, of the code that a thread runs now, as far as the file `below` called it;
    "" if it runs none."""
    thread_frame = sys._current_frames().get(thread or 0)  # pyright: ignore[reportPrivateUsage]
    frames = list(traceback.extract_stack(thread_frame)) if thread_frame is not None else list[traceback.FrameSummary]()
    first_called = next(
        (depth for depth in range(len(frames), 0, -1) if frames[depth - 1].filename == below), len(frames)
    )
    return _place_in(frames[first_called:])


def _place_in(stack: Sequence[traceback.FrameSummary]) -> str:
    named_frames = [frame for frame in stack if not frame.filename.startswith("<frozen ")]
    foreign_frames = [frame for frame in named_frames if not frame.filename.startswith((_OURS, *_LOOPS))]
    own_frames = [frame for frame in foreign_frames if not frame.filename.startswith(_INSTALLED)]
    # The last frame of the author's code and not the innermost one: a KeyError deep in pandas is of use only with the
    # line that called it.
    candidate_frames = own_frames or foreign_frames or named_frames
    return f"{candidate_frames[-1].filename}:{candidate_frames[-1].lineno}" if candidate_frames else ""


def split_place(text: str) -> tuple[str, str]:
    """The text of an error without the place at its end, and the place ("" if it names none)."""
    place_match = _PLACE.search(text)
    return (text, "") if place_match is None else (text[: place_match.start()], place_match[1])


_PLACE = re.compile(r" \(([^()]+:\d+)\)$")


class Tracebacks:
    """Logs the traceback of the first error of each kind: of one class, raised at one place. A run that fails a
    thousand times for one reason has it once in its log. `quiet`: logs none, for callers that raise the error."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._seen: set[tuple[str, str]] = set()

    def log(self, error: BaseException, what: str) -> None:
        """Log an error that is about to become one line; `what` is that line, with whose episode it was."""
        root, cause = error, error.__cause__
        while isinstance(root, AgentRLError) and cause is not None and (inner := matters(cause)) is not root:
            root, cause = inner, inner.__cause__  # an error that came out of a group has the group as its cause
        # By class and place, not by text: texts hold seeds and file names, and a thousand failures of one line would be
        # a thousand kinds.
        error_kind = type(root).__name__, place_of(root)
        if error_kind not in self._seen and not self._quiet:
            self._seen.add(error_kind)
            log.error("%s; the first of its kind:\n%s", what, "".join(traceback.format_exception(root)).rstrip())


def matters(error: BaseException) -> BaseException:
    """The most important error of a group, nested groups included: first one that the user can fix, then one that ends
    the run, then any other of ours, then the rest. An error that is not a group is returned as it is."""
    # Several tasks often fail for one reason, and the rest only because they were cancelled or met a closed connection.
    # The first in this order is the one that somebody can act upon.
    ranked_kinds = (UsageError, (RunFailed, StoreBusy, StoreDamaged, StoreAway), AgentRLError)

    def rank(leaf: BaseException) -> int:
        return next(
            (kind_rank for kind_rank, ranked_kind in enumerate(ranked_kinds) if isinstance(leaf, ranked_kind)),
            len(ranked_kinds),
        )

    return min(_leaves(error), key=rank)


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    member_errors = cast("BaseExceptionGroup[BaseException]", error).exceptions
    return [leaf_error for member_error in member_errors for leaf_error in _leaves(member_error)]
