"""Plays one scripted policy on one task, and says whether it won, or why nobody can tell.

Owns what counts as won, and whose fault a play without a verdict is. Knows nothing of what must win.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from agentrl.env.checks import oracles
from agentrl.env.checks.oracles import Oracle, OracleResult, outcome_of, say
from agentrl.env.checks.tasks.verdicts import Finding
from agentrl.errors import ConfigError, EnvError, InfrastructureError, UnknownIdError, boundary
from agentrl.protocols import AsyncEnv
from agentrl.records import StopReason

UNTOUCHED: Final = Oracle("untouched", 0.0, say(""))
"""No action at all: the driver ends the episode, and the environment judges the task as it stood."""

EVIDENCE: Final = 600  # characters of an evidence
_CLOSE_S: Final = 60.0
_KILLS: Final = frozenset({137, 143, -9, -15})  # exit codes after SIGKILL and SIGTERM, which no test sends itself


@dataclass(frozen=True, slots=True)
class Play:
    """An oracle's episode. `failure` says why it has no verdict; then it may have no result either."""

    oracle: Oracle
    result: OracleResult | None = None
    failure: Finding | None = None

    @property
    def won(self) -> bool | None:
        """Whether it wins, as far as its grader came to a verdict; None: no verdict."""
        return None if self.failure is not None else self.wins

    @property
    def wins(self) -> bool | None:
        """Whether the environment calls it a success, or an outcome of 1 where it says nothing; None: no result."""
        if self.result is None:
            return None
        is_success = self.result.info.get("success")
        return is_success if isinstance(is_success, bool) else (self.result.got or 0.0) >= 1.0

    @property
    def grader_s(self) -> float:
        """Seconds of the last step, which grades; 0 without a result."""
        return 0.0 if self.result is None else self.result.last_step_s


async def play(
    make: Callable[[], AsyncEnv],
    seed: int,
    oracle: Oracle,
    index: int,
    oracles_of: Callable[[AsyncEnv], Sequence[Oracle]],
    deadline_s: float | None,
) -> Play:
    """Play an oracle in an environment of its own, whose oracles have it at `index`. Raises UnknownIdError, as every
    task would."""
    task_env: AsyncEnv | None = None
    try:
        with boundary(EnvError, f"seed {seed}, oracle {oracle.name}: raised", place=True):
            task_env = make()
            messages, episode_info = await task_env.areset(seed=seed)
            if oracle is UNTOUCHED:
                episode_info = await task_env.aend(StopReason.TURN_LIMIT)
                oracle_result = OracleResult(oracle.name, 0.0, outcome_of(episode_info), 0, info=dict(episode_info))
            else:
                oracle_result = await oracles.play(
                    task_env, oracles_of(task_env)[index], messages, str(episode_info.get("task", ""))
                )
    except UnknownIdError:
        raise
    except Exception as play_error:
        return Play(oracle, failure=failure_of(play_error))
    finally:
        if task_env is not None:
            await close(task_env)
    return Play(oracle, oracle_result, not_judged(oracle_result, deadline_s) if oracle.outcome >= 1.0 else None)


async def close(env: AsyncEnv) -> None:
    """Close an environment, also where the deadline of its task has passed: a cancelled wait would leave its box open
    until the command ends."""
    with trio.move_on_after(_CLOSE_S, shield=True):
        await env.aclose()


def failure_of(error: Exception) -> Finding:
    """Name whose fault the exception of a play is: the task's own where it gives a value that cannot be, else that of
    this machine or of the environment's code."""
    if isinstance(error, ConfigError):
        failure_reason = "cannot-be-played"
    elif isinstance(error, InfrastructureError) and not isinstance(error, EnvError):
        failure_reason = "infrastructure"
    else:
        failure_reason = "raised"
    return Finding(failure_reason, str(error)[:EVIDENCE])


def not_judged(result: OracleResult, deadline_s: float | None) -> Finding | None:
    """Why the grader of an honest solution came to no verdict, None where it did. Its outcome is then a 0 that says
    nothing about the task."""
    result_info = result.info
    seconds_text = f"{result.last_step_s:.1f} s"
    if result_info.get("scores_late"):
        return Finding("grader-late", f"its reward functions had not judged after {seconds_text}")
    if "not_graded" in result_info:
        is_late = deadline_s is not None and result.last_step_s >= deadline_s
        return Finding(
            "grader-late" if is_late else "not-graded", f"{result_info['not_graded']} ({seconds_text})"[:EVIDENCE]
        )
    if result_info.get("grader_exit") in _KILLS and not result.got:
        return Finding(
            "grader-killed", f"the grader ended with exit code {result_info['grader_exit']} after {seconds_text}"
        )
    return None
