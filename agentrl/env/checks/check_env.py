"""`check_env`: does an environment keep the promises of the contract? The checks are in `agentrl.env.checks.checks`.

A report names what is wrong, the line where it lives and how to fix it. The checks run the environment for real:
they step it, cancel it, run eight of it at once and look at what stays behind.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gymnasium

from agentrl.env.checks.checks import CHECKS
from agentrl.env.checks.runner import Broke, Flaw, Skipped, Subject, place_of
from agentrl.errors import EnvCheckFailed, UsageError
from agentrl.registration import make


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise, where it lives (`file:line`), and how to fix it."""

    check: str
    problem: str
    where: str
    hint: str

    def __str__(self) -> str:
        return f"  {self.check}: {self.problem}\n      at   {self.where}\n      hint {self.hint}"


@dataclass(frozen=True, slots=True)
class EnvReport:
    """Report on an environment: the checks and their findings. It is true if there are no findings."""

    name: str
    checks: tuple[str, ...]
    findings: tuple[Finding, ...]
    skipped: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.checks)} checks, {len(self.findings)} findings"]
        lines += [str(finding) for finding in self.findings]
        lines += [f"  not checked: {reason}" for reason in self.skipped]
        return "\n".join(lines)


def check_env(
    env: str | gymnasium.Env[Any, Any] | Callable[[], gymnasium.Env[Any, Any]],
    *,
    actions: Sequence[str] = (),
    seed: int = 0,
    steps: int = 6,
    deadline_s: float = 60.0,
    raises: bool = True,
) -> EnvReport:
    """Check an environment: an id, a class or factory without arguments, or an instance of such a class.

    `actions` are tried in turn by every episode that is played; without them, random calls after the environment's
    own tool schemas. `steps` is how long an episode is played, `deadline_s` how long one play of it may take. Raises
    EnvCheckFailed with the whole report if a check failed and `raises`; must not be called from within trio.

    What it checks: gymnasium's own checker; tool schemas; equal replay; records that JSON can carry; close, again and
    again; cancellation in mid-step; eight instances at once; any text as an action; leaks of processes, descriptors,
    threads and files; snapshots, where there are some."""
    factory, name = _factory(env)
    findings: list[Finding] = []
    skipped: list[str] = []
    ran: list[str] = []
    with _private_temporary_folder() as folder:
        subject = Subject(
            make=factory, actions=tuple(actions), seed=seed, steps=steps, deadline_s=deadline_s, tmp=folder
        )
        for check in CHECKS:
            ran.append(check.__name__)
            flaws, reason = _flaws(check, subject)
            if reason:
                skipped.append(reason)
            findings += [
                Finding(check.__name__, flaw.problem, place_of(factory, flaw), flaw.hint)
                for flaw in dict.fromkeys(flaws)
            ]
            # An environment that cannot start would fail every other check for the same reason, and hide it among their
            # findings.
            if findings and check is CHECKS[0]:
                break
    report = EnvReport(name, tuple(ran), tuple(dict.fromkeys(findings)), tuple(skipped))
    if raises and not report:
        raise EnvCheckFailed(str(report))
    return report


def _flaws(check: Callable[[Subject], Any], subject: Subject) -> tuple[list[Flaw], str]:
    """Run a check. Returns its flaws, and why it was skipped, empty if it was not. An exception that broke the
    environment on the way is a flaw too."""
    flaws: list[Flaw] = []
    try:
        # One by one: a check that breaks half-way keeps the flaws that it has found before.
        for flaw in check(subject):
            flaws.append(flaw)
    except Skipped as reason:
        return flaws, str(reason)
    except Broke as broke:
        flaws.append(Flaw(str(broke), "fix the cause of this exception", broke.method, broke.cause))
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
        flaws.append(Flaw(problem, "fix the cause of this exception", "step", error))
    return flaws, ""


def _factory(env: Any) -> tuple[Callable[[], gymnasium.Env[Any, Any]], str]:
    """How to make fresh instances, and the environment's name."""
    if isinstance(env, str):
        return lambda: make(env), env
    if isinstance(env, gymnasium.Env):
        instance = cast("gymnasium.Env[Any, Any]", env)
        spec, cls = instance.spec, type(instance)
        if spec is not None:
            return lambda: spec.make(), str(spec.id)
        if any(_needed(parameter) for parameter in inspect.signature(cls).parameters.values()):
            raise UsageError(f"check_env makes many instances: give it a function that makes a {cls.__name__}")
        return cls, cls.__name__
    if not callable(env):
        raise UsageError(f"check_env takes an id, a class, a factory or an environment, not {env!r}")
    return cast("Callable[[], gymnasium.Env[Any, Any]]", env), getattr(env, "__name__", "the environment")


def _needed(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic


@contextlib.contextmanager
def _private_temporary_folder() -> Generator[Path]:
    """A temporary folder that only the checked environment writes to, so that what stays in it is its own."""
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="check_env_") as folder:
        # Both: Python has read the variable already, and programs that the environment starts read only the variable.
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before
            if variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = variable
