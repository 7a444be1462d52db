"""Calls into an environment under deadlines, and names what goes wrong in them, once.

Owns whose time a call takes and what its failure is; never knows turns, journal or engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl import clock
from agentrl.clock import Whose
from agentrl.errors import AgentRLError, EngineError, EnvError, InfrastructureError, PolicyFault, SandboxError, boundary
from agentrl.records import StopReason


class TimeUp(Exception):
    """What the policy asked for took longer than it may."""


@dataclass(slots=True)
class Guard:
    """Calls into the environment `env`, whose own code has `deadline_s` seconds a call. `seconds` is what calls of the
    policy's doing have taken so far."""

    env: str
    deadline_s: float
    seconds: float = 0.0

    async def __call__(self, what: str, call: Callable[[], Any], *, policy_s: float | None = None) -> Any:
        """Call into the environment under its deadline; what its own code raises becomes EnvError, named once.

        With `policy_s` the policy has acted: a fault of its stays one, and TimeUp is raised when what it asked for
        took longer than that."""
        deadline_s, acted, failed = self.deadline_s, policy_s is not None, None
        where, passes = f"{self.env}: {what}", (InfrastructureError, *((PolicyFault,) if acted else ()))
        with clock.watch(own_s=deadline_s, policy_s=policy_s if policy_s is not None else deadline_s) as watch:
            try:
                with boundary(EnvError, f"{where} raised", passes=passes):
                    return await call()
            except AgentRLError as error:
                failed = error
            finally:
                self.seconds += watch.seconds if acted else 0.0
        if watch.over is Whose.POLICY and acted:
            raise TimeUp(f"{where}: what the policy asked for took over {policy_s:g} s") from failed
        if watch.over is not None:
            raise EnvError(f"{where} took over {deadline_s:g} s") from failed
        assert failed is not None
        raise failed


def reason_of(error: InfrastructureError) -> StopReason:
    """How an episode ends by a failure that the policy could not have caused."""
    if isinstance(error, EngineError):
        return StopReason.ENGINE_FAILED
    if isinstance(error, SandboxError):
        return StopReason.SANDBOX_FAILED
    return StopReason.ENV_FAILED


def one_line(error: BaseException | None) -> str:
    """What happened, in one line; errors that are not ours bear the name of their class."""
    text = " ".join(str(error).split())
    return text if isinstance(error, InfrastructureError | TimeUp) else f"{type(error).__name__}: {text}"
