"""Outcome rewards of trajectories that are there already, by a function or a judge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import trio

from agentrl.errors import ConfigError, InfrastructureError, Tracebacks
from agentrl.protocols import Rewarder
from agentrl.records import Trajectory
from agentrl.rollout.env_calls import EnvCalls, TimeUp, reason_of, rewarded


async def score(
    trajectories: Iterable[Trajectory], reward: Rewarder, *, concurrency: int = 16, deadline_s: float = 60.0
) -> list[Trajectory]:
    """The trajectories, in their order, with the outcome that `reward` gives each: a function `trajectory -> float`,
    plain or async, or an `agentrl.rewards.Judge`. What infrastructure ended before stays as it is.

    If the rewarder fails, the trajectory gets a stop reason that keeps it out of loss and baseline, and the traceback
    is logged; work that it cannot judge within `deadline_s` is worth 0. Raises ConfigError for a bad argument."""
    if concurrency < 1:
        raise ConfigError("concurrency", concurrency, "give 1 or more")
    if not deadline_s > 0:
        raise ConfigError("deadline_s", deadline_s, "give seconds above 0")
    scored_trajectories, tracebacks = list(trajectories), Tracebacks()
    limiter = trio.CapacityLimiter(concurrency)

    async def score_one(at: int, trajectory: Trajectory) -> None:
        async with limiter:
            try:
                outcome = await rewarded(reward, trajectory, EnvCalls(trajectory.task.env, deadline_s))
            # Zero and no failure: the judge was there, and it was the work that it could not get through. A rewarder
            # that fails by itself is below, and then nobody is scored (law 3).
            except TimeUp:
                outcome = 0.0
            except InfrastructureError as error:
                tracebacks.log(error, f"{trajectory.task.env}, seed {trajectory.task.seed}: {error}")
                scored_trajectories[at] = replace(trajectory, stop_reason=reason_of(error), outcome=None, success=None)
                return
            scored_trajectories[at] = replace(trajectory, outcome=outcome)

    async with trio.open_nursery() as nursery:
        for position, trajectory in enumerate(scored_trajectories):
            if trajectory.stop_reason is not None and trajectory.stop_reason.by_policy:
                nursery.start_soon(score_one, position, trajectory)
    return scored_trajectories
