"""Calls into an environment under deadlines; names each failure once.

Owns to whom a call's time counts and which error its failure becomes; never knows turns, journal or engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from agentrl import registry
from agentrl.env import as_async, sync_async
from agentrl.errors import AgentRLError, EngineError, EnvError, InfrastructureError, PolicyFault, SandboxError, boundary
from agentrl.host import clocks
from agentrl.host.clocks import Whose
from agentrl.protocols import AsyncEnv, Rewarder
from agentrl.records import LARGEST, StopReason, Task, Trajectory


def make_env(task: Task) -> AsyncEnv:
    """The environment of a task, by its id or `module:attribute` reference; a plain gymnasium.Env is wrapped."""
    return as_async(registry.resolve("environments", task.env)(**task.kwargs))


ENDS_A_PROCESS: Final = (SystemExit, asyncio.CancelledError)
"""Errors beside Exception that an author's code may raise: a parser of arguments exits, asyncio cancels its own tasks.
Either would end the worker with all its episodes. `trio.Cancelled` and KeyboardInterrupt are not the author's."""


class TimeUp(Exception):
    """The policy's action took too long."""


@dataclass(slots=True)
class EnvCalls:
    """Calls into the environment `env`, whose own code has `deadline_s` seconds per call. `seconds` is the time that
    calls for the policy's actions have taken so far."""

    env: str
    deadline_s: float
    seconds: float = 0.0

    async def __call__(self, what: str, call: Callable[[], Any], *, policy_s: float | None = None) -> Any:
        """Call into the environment under its deadline; an error of its own code becomes EnvError, named once.

        Give `policy_s` if the policy has acted: then a PolicyFault passes through, and TimeUp is raised if its action
        took longer than `policy_s`."""
        deadline_s, has_acted, call_error = self.deadline_s, policy_s is not None, None
        # A PolicyFault before the policy has acted is a mistake of the environment, whatever its class says: nothing in
        # a reset can be the policy's doing.
        call_label, passed_errors = f"{self.env}: {what}", (InfrastructureError, *((PolicyFault,) if has_acted else ()))
        with clocks.watch(own_s=deadline_s, policy_s=policy_s if policy_s is not None else deadline_s) as stopwatch:
            try:
                with boundary(EnvError, f"{call_label} raised", passes=passed_errors, place=True):
                    return await call()
            except AgentRLError as error:
                call_error = error
            except ENDS_A_PROCESS as error:
                call_error = EnvError(f"{call_label} raised {one_line(error)}")
            finally:
                self.seconds += stopwatch.seconds if has_acted else 0.0
        # The clock that ran out decides, not the error that came out: code that is cut off at its deadline raises
        # whatever it likes, and an author may catch the cancellation and raise something else. Whose time it was is law
        # 3.
        if stopwatch.over is Whose.POLICY and has_acted:
            raise TimeUp(f"{call_label}: the policy's action took over {policy_s:g} s") from call_error
        if stopwatch.over is not None:
            raise EnvError(f"{call_label} took over {deadline_s:g} s") from call_error
        assert call_error is not None
        raise call_error


async def rewarded(rewarder: Rewarder, trajectory: Trajectory, guard: EnvCalls) -> float:
    """The outcome that a rewarder gives an episode, within the guard's deadline. Raises TimeUp if the policy's work
    cannot be judged in time, InfrastructureError for a failure of the rewarder, also from its PolicyFault."""

    async def reward() -> float:
        reward_value = float(await sync_async.call(rewarder, trajectory, blocking=False))
        # Written as "not at most", since every comparison with NaN is false: the other way round NaN would pass.
        if not abs(reward_value) <= LARGEST:
            raise EnvError(f"{guard.env}: reward gave {reward_value}: give a number within {LARGEST:g} of 0")
        return reward_value

    try:
        return await guard("reward", reward, policy_s=guard.deadline_s)
    except PolicyFault as fault:
        raise EnvError(f"{guard.env}: reward raised {one_line(fault)}") from fault


def reason_of(error: InfrastructureError) -> StopReason:
    """The stop reason of a failure that the policy could not have caused."""
    if isinstance(error, EngineError):
        return StopReason.ENGINE_FAILED
    if isinstance(error, SandboxError):
        return StopReason.SANDBOX_FAILED
    return StopReason.ENV_FAILED


def one_line(error: BaseException | None) -> str:
    """The error in one line; with the name of its class, unless it is an InfrastructureError or TimeUp."""
    error_text = " ".join(str(error).split())
    return error_text if isinstance(error, InfrastructureError | TimeUp) else f"{type(error).__name__}: {error_text}"
