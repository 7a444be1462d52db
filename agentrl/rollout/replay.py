"""Brings an environment back to where a journaled episode stood, by repeating the recorded actions.

The observations are compared with the recorded ones: an environment that answers differently is not where the
episode was, and the episode starts anew with the reason said. It never writes to the store.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentrl.env import answers
from agentrl.protocols import AsyncEnv
from agentrl.records import Messages, Turn
from agentrl.store import Claim


@dataclass(frozen=True, slots=True)
class Replayed:
    """`turns` as they stand after the replay. `reason` is set if the episode must start anew.
    `answered_last` says that the last turn's step came from this replay and is not in the journal yet."""

    turns: tuple[Turn, ...] = ()
    reason: str = ""
    answered_last: bool = False


async def replay(env: AsyncEnv, start: Messages, claim: Claim) -> Replayed:
    """Repeat the journaled actions of `claim` in `env`, which was just reset and answered `start`."""
    if claim.turns and not env.replayable:
        return Replayed(reason=f"{claim.task.env} does not promise to be replayable")
    if start != claim.start:
        return Replayed(reason="reset gave another first observation")
    turns: list[Turn] = []
    for turn in claim.turns:
        env.charge_tokens(len(turn.token_ids))
        step = await answers.act(env, turn.text, claim.task)
        if turn.step is None:
            turns.append(replace(turn, step=step))
            return Replayed(tuple(turns), answered_last=True)
        if (step.observation, step.terminated, step.truncated) != (
            turn.step.observation,
            turn.step.terminated,
            turn.step.truncated,
        ):
            return Replayed(reason=f"turn {turn.index} was answered differently")
        turns.append(turn)
    return Replayed(tuple(turns))
