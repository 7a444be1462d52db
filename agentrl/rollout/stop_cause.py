"""The cause that ended an episode."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.errors import InfrastructureError, Tracebacks
from agentrl.records import StopReason
from agentrl.rollout.env_calls import one_line, reason_of
from agentrl.store import Claim


@dataclass(frozen=True, slots=True)
class StopCause:
    """The cause that ended an episode. `detail` is the cause of a failure in one line, `error` a failure that the
    policy could not have caused."""

    stop_reason: StopReason
    detail: str = ""
    error: InfrastructureError | None = field(default=None, compare=False)


def failure(
    error: InfrastructureError, claim: Claim, tracebacks: Tracebacks, culprit: Exception | None = None
) -> StopCause:
    """The cause of an episode that ended by a failure which the policy could not have caused (law 3). The first of each
    kind is logged with its traceback, which is that of `culprit` if there is one."""
    stop_cause, task = StopCause(reason_of(error), one_line(error), error), claim.task
    episode_label = f"{task.env}, seed {task.seed} (task {task.index}, episode {claim.episode_id})"
    tracebacks.log(culprit or error, f"{episode_label}: {stop_cause.detail}")
    return stop_cause
