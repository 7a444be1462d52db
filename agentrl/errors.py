"""Every error agentrl raises, in one tree; a failure is named once, at the boundary it crossed.

AgentRLError
├── UsageError                 the user asked for something impossible (exit code 2)
│   ├── ConfigError            a run file or argument: names field, value and hint
│   ├── UnknownIdError         an id that no package registered
│   ├── ModelError             a model folder that cannot be used as asked
│   ├── StoreVersionError      a run store written by another schema
│   └── EnvCheckFailed         an environment breaks its contract
├── WornOut                    a process asks to be started anew (exit code 4)
├── RunFailed                  the run cannot go on (exit code 1); what was journaled stays
├── InfrastructureError        the policy could not have caused it: leaves loss and baseline
│   ├── EngineError            ├── EngineUnavailable   └── EngineBroke
│   │                          ├── EngineTimeout       ├── EngineRefusal
│   │                          ├── WeightSyncError     └── CanaryMismatch
│   │                          └── ScoreError
│   ├── SandboxError           ├── SandboxUnavailable
│   ├── EnvError               an environment's own code raised
│   ├── HostBusy               this machine did not have a slot in time
│   └── StoreError             ├── LeaseLost           ├── DiskFull
│                              ├── StoreBusy           └── StoreDamaged
└── PolicyFault                the policy could have caused it: stays in loss and baseline
    ├── ParseError             ├── StructuralParseError   ├── ContentParseError
    ├── SandboxPathError       a path in a box: missing, of the wrong kind, leading out, no space
    └── ToolError              ├── ToolArgumentError      ├── ToolTimeout
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Generator
from typing import cast


class AgentRLError(Exception):
    """Base of everything agentrl raises on purpose. Its text is one readable line."""

    exit_code = 1


class UsageError(AgentRLError):
    """The user asked for something that cannot be; the text says what, and what to do."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is wrong. `field` is its dotted name, `value` what was given, `hint` what to do."""

    def __init__(self, field: str, value: object, hint: str) -> None:
        self.field, self.value, self.hint = field, value, hint
        super().__init__(f"{field} = {value!r}: {hint}")


class UnknownIdError(UsageError):
    """No installed package registered this id."""


class ModelError(UsageError):
    """A model folder lacks something (chat template, architecture, weights) that was asked of it."""


class StoreVersionError(UsageError):
    """The run store was written by a schema this version cannot read."""


class EnvCheckFailed(UsageError):
    """An environment breaks promises of its contract; the text is the checker's report, several lines."""


class RunFailed(AgentRLError):
    """The run cannot go on. What was journaled stays; `agentrl train --resume` goes on from it."""


class WornOut(AgentRLError):
    """This process cannot go on as it is and has given back what it held: it is to be started anew, without blame."""

    exit_code = 4


class InfrastructureError(AgentRLError):
    """A failure that the policy could not have caused (law 3): leaves the loss and the baseline."""


class EngineError(InfrastructureError):
    """The inference engine answered wrongly or not at all."""


class EngineUnavailable(EngineError):
    """The engine could not be reached or closed the connection before the end."""


class EngineBroke(EngineUnavailable):
    """The engine took a request and failed it: it broke off, or what it sent makes no sense."""


class EngineRefusal(EngineError):
    """The engine refuses the request itself: it would refuse it again."""


class EngineTimeout(EngineError):
    """The engine did not answer within the deadline."""


class WeightSyncError(EngineError):
    """New weights did not arrive whole, or the engine does not confirm their version."""


class CanaryMismatch(WeightSyncError):
    """An engine confirmed a version and samples from other weights: pushing again would not help."""


class ScoreError(EngineError):
    """A judge or reward model answered, but not with a score of the kind asked for."""


class SandboxError(InfrastructureError):
    """The sandbox host failed; a command that fails inside a box is no error but a result."""


class SandboxUnavailable(SandboxError):
    """This machine cannot make such a box; the text says what to install."""


class EnvError(InfrastructureError):
    """An environment's own code raised; the cause is chained."""


class HostBusy(InfrastructureError):
    """What this machine gives to one episode at a time (a slot, a thread, a box) was not to be had in time."""


class StoreError(InfrastructureError):
    """The run store refused a read or a write."""


class LeaseLost(StoreError):
    """The episode is no longer this worker's: another claimed it, or its group is closed. Drop it, journal no more."""


class DiskFull(StoreError):
    """No space for the journal: the run pauses, nothing is lost."""


class StoreBusy(StoreError):
    """Another process held the store's write lock past every patience: a person has to end it."""


class StoreDamaged(StoreError):
    """The store's file is not what was written: a person has to put a copy in its place."""


class PolicyFault(AgentRLError):
    """A failure that the policy could have caused (law 3): the model reads its text as an observation."""


class ParseError(PolicyFault):
    """The model's text does not hold the action it should."""


class StructuralParseError(ParseError):
    """The envelope is broken: an unclosed tag, JSON that does not parse."""


class ContentParseError(ParseError):
    """The envelope is sound but what it asks for is not: unknown tool, wrong arguments."""


class SandboxPathError(PolicyFault):
    """A path in a box cannot be read or written as asked: missing, of the wrong kind, leading out, too large, no space.

    The policy shapes the box's files, so this is its own doing; an environment that reads a file it laid itself and
    knows better raises `SandboxError` from it."""


class ToolError(PolicyFault):
    """A tool refused or failed because of what it was asked to do."""


class ToolArgumentError(ToolError):
    """Arguments do not fit the tool's JSON schema."""


class ToolTimeout(ToolError):
    """The tool ran past its deadline and was ended."""


@contextlib.contextmanager
def boundary(
    becomes: Callable[[str], AgentRLError],
    what: str,
    *,
    passes: tuple[type[AgentRLError], ...] = (InfrastructureError, UsageError),
    place: bool = False,
) -> Generator[None]:
    """Turn an exception of somebody else's code into an error of ours. Plain and awaited calls may stand inside.

    `becomes` makes the error from one line: `what`, then the exception's kind and text, and with `place` the file and
    line that raised it. The exception is the error's cause. Errors of the kinds `passes` have their name already and go
    through. Of a group, such as a nursery raises, the one error that matters counts.

        with boundary(EnvError, "mine/Guess-v0: step raised"):
            await env.astep(action)     # EnvError: mine/Guess-v0: step raised KeyError: 'secret'
    """
    try:
        yield
    except Exception as error:
        inner = matters(error)
        if isinstance(inner, passes):
            if inner is error:
                raise
            raise inner from error
        where = _place(inner) if place else ""
        raise becomes(f"{what} {type(inner).__name__}: {' '.join(str(inner).split())}{where}") from error


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or isinstance(error, SyntaxError):  # whose text names it
        return ""
    return f" ({frames[-1].filename}:{frames[-1].lineno})"


def matters(error: BaseException) -> BaseException:
    """The one error of a group, nested ones included, that says what went wrong: one of ours before anything else, and
    of those one that the user can mend, or that ends the run, before the others. Any other error is itself."""
    ranks = (UsageError, (RunFailed, StoreBusy, StoreDamaged), AgentRLError)

    def rank(leaf: BaseException) -> int:
        return next((at for at, kind in enumerate(ranks) if isinstance(leaf, kind)), len(ranks))

    return min(_leaves(error), key=rank)


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    members = cast("BaseExceptionGroup[BaseException]", error).exceptions
    return [leaf for member in members for leaf in _leaves(member)]
