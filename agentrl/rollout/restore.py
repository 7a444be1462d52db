"""Brings an environment to where a journaled episode stood, by repeating the recorded actions.

The observations are compared with the recorded ones: an environment that answers differently is not where the episode
was. It never writes to the store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from agentrl.protocols import AsyncEnv
from agentrl.records import Messages, Step, Turn
from agentrl.store import Claim

Act = Callable[[Turn], Awaitable[Step]]


async def replay(env: AsyncEnv, start: Messages, claim: Claim, act: Act) -> str:
    """Repeat with `act` the answered actions of `claim` in `env`, which was just reset and answered `start`. The result
    is empty, or the reason why the episode must start anew."""
    if claim.turns and not env.replayable:
        return f"{claim.task.env} does not promise to be replayable"
    if start != claim.start:
        return "reset gave another first observation"
    return await _repeat(claim.turns, act)


async def replay_after(env: AsyncEnv, turn: int, claim: Claim, act: Act) -> str:
    """Repeat with `act` the answered actions of `claim` after that of `turn`, where `env` stands. The result is empty,
    or the reason why it cannot go on."""
    later = [played for played in claim.turns[turn + 1 :] if played.step is not None]
    if later and not env.replayable:
        return f"{claim.task.env} does not promise to be replayable"
    return await _repeat(later, act)


async def _repeat(turns: Sequence[Turn], act: Act) -> str:
    for turn in turns:
        if turn.step is None:  # the last one: its answer was not journaled
            break
        step = await act(turn)
        if (step.observation, step.terminated, step.truncated) != (
            turn.step.observation,
            turn.step.terminated,
            turn.step.truncated,
        ):
            return f"turn {turn.index} was answered differently"
    return ""
