"""Where an interrupted episode goes on, by `rollout.resume`:

    tokens     all that was sampled: the default, and law 1
    turns      its whole turns; the turn under way is sampled anew
    episode    nothing: it starts anew
    group      nothing: it starts anew with all members of its group, ended ones included

All but the first lose tokens on purpose, for comparisons with runs that cannot do better; the store counts them. A fork
goes on from its tokens in any case: nobody can play the turns before it again. A late member starts anew alone, as its
group has closed; so does a member of a group that started anew `rollout.max_replays` times. Never knows what
interrupted the episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from agentrl.config import Rollout
from agentrl.errors import LeaseLost
from agentrl.rollout.generate_turn import BrokenOff
from agentrl.store import Claim
from agentrl.store.interfaces import EpisodeStore

_T = TypeVar("_T")
_BREAKS = 3  # of one claim's turns: then it goes on from tokens, and the fleet judges whether the request is to blame


async def resumed(
    claim: Claim, store: EpisodeStore, settings: Rollout, play: Callable[[Claim, bool], Awaitable[_T]]
) -> _T:
    """Call `play` with that part of the claim from which the run goes on, and with whether each turn must come from one
    engine; call it again when it raises BrokenOff. Raises LeaseLost if the episode's group starts anew."""
    break_count = 0
    while True:
        claim = await _going_on(claim, store, settings)
        loses_tokens = settings.resume != "tokens" and claim.fork_turn is None
        try:
            # A request that breaks every engine it meets would be begun anew for ever if its tokens were always thrown
            # away. After a few breaks it goes on from tokens like any other, and then the fleet's own rule for such
            # requests ends it.
            return await play(claim, loses_tokens and break_count < _BREAKS)
        except BrokenOff:
            break_count += 1
            claim = await store.reload(claim)


async def _going_on(claim: Claim, store: EpisodeStore, settings: Rollout) -> Claim:
    resume_mode = settings.resume
    if not claim.resumed or claim.fork_turn is not None or resume_mode == "tokens":
        return claim
    if resume_mode == "turns":
        if claim.partial is not None:
            await store.discard_turn(claim.episode_id, claim.fence)
        return replace(claim, partial=None)
    # False means that the group could not start anew, because it has closed, is a fork's, or did so too often. Then
    # this episode alone starts anew, below: the mode promises what is lost, and it never holds up the run.
    if resume_mode == "group" and await store.restart_group(claim.episode_id, claim.fence, settings.max_replays):
        raise LeaseLost(f"episode {claim.episode_id} starts anew with its group {claim.group_id}")
    await store.restart_episode(claim.episode_id, claim.fence, f"it was interrupted (rollout.resume = {resume_mode!r})")
    return await store.reload(claim)
