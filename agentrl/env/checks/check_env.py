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
        report_lines = [f"{self.name}: {len(self.checks)} checks, {len(self.findings)} findings"]
        report_lines += [str(finding) for finding in self.findings]
        report_lines += [f"  not checked: {skip_reason}" for skip_reason in self.skipped]
        return "\n".join(report_lines)


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
    env_factory, env_name = _factory(env)
    findings: list[Finding] = []
    skip_reasons: list[str] = []
    check_names: list[str] = []
    with _private_temporary_folder() as temporary_folder:
        subject = Subject(
            make=env_factory,
            actions=tuple(actions),
            seed=seed,
            steps=steps,
            deadline_s=deadline_s,
            tmp=temporary_folder,
        )
        for check_function in CHECKS:
            check_names.append(check_function.__name__)
            check_flaws, skip_reason = _flaws(check_function, subject)
            if skip_reason:
                skip_reasons.append(skip_reason)
            findings += [
                Finding(check_function.__name__, flaw.problem, place_of(env_factory, flaw), flaw.hint)
                for flaw in dict.fromkeys(check_flaws)
            ]
            # An environment that cannot start would fail every other check for the same reason, and hide it among their
            # findings.
            if findings and check_function is CHECKS[0]:
                break
    env_report = EnvReport(env_name, tuple(check_names), tuple(dict.fromkeys(findings)), tuple(skip_reasons))
    if raises and not env_report:
        raise EnvCheckFailed(str(env_report))
    return env_report


def _flaws(check: Callable[[Subject], Any], subject: Subject) -> tuple[list[Flaw], str]:
    """Run a check. Returns its flaws, and why it was skipped, empty if it was not. An exception that broke the
    environment on the way is a flaw too."""
    check_flaws: list[Flaw] = []
    try:
        # One by one: a check that breaks half-way keeps the flaws that it has found before.
        for flaw in check(subject):
            check_flaws.append(flaw)
    except Skipped as skip_reason:
        return check_flaws, str(skip_reason)
    except Broke as env_failure:
        check_flaws.append(
            Flaw(str(env_failure), "fix the cause of this exception", env_failure.method, env_failure.cause)
        )
    except Exception as check_error:
        problem = f"{type(check_error).__name__}: {' '.join(str(check_error).split())}"[:400]
        check_flaws.append(Flaw(problem, "fix the cause of this exception", "step", check_error))
    return check_flaws, ""


def _factory(env: Any) -> tuple[Callable[[], gymnasium.Env[Any, Any]], str]:
    """How to make fresh instances, and the environment's name."""
    if isinstance(env, str):
        return lambda: make(env), env
    if isinstance(env, gymnasium.Env):
        instance = cast("gymnasium.Env[Any, Any]", env)
        env_spec, env_class = instance.spec, type(instance)
        if env_spec is not None:
            return lambda: env_spec.make(), str(env_spec.id)
        if any(_needed(parameter) for parameter in inspect.signature(env_class).parameters.values()):
            raise UsageError(f"check_env makes many instances: give it a function that makes a {env_class.__name__}")
        return env_class, env_class.__name__
    if not callable(env):
        raise UsageError(f"check_env takes an id, a class, a factory or an environment, not {env!r}")
    return cast("Callable[[], gymnasium.Env[Any, Any]]", env), getattr(env, "__name__", "the environment")


def _needed(parameter: inspect.Parameter) -> bool:
    is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_variadic


@contextlib.contextmanager
def _private_temporary_folder() -> Generator[Path]:
    """A temporary folder that only the checked environment writes to, so that what stays in it is its own."""
    former_folder, former_variable = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="check_env_") as private_folder:
        # Both: Python has read the variable already, and programs that the environment starts read only the variable.
        tempfile.tempdir = os.environ["TMPDIR"] = private_folder
        try:
            yield Path(private_folder)
        finally:
            tempfile.tempdir = former_folder
            if former_variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = former_variable
