"""What the groups of a step say of play: successes, lengths, spread. Knows no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from agentrl.learner.data.batch import GroupRows, PlayedEpisode


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLengths:
    """Of `episodes` episodes: mean number of turns and of sampled tokens; None if there are none."""

    episodes: int
    turns: float | None
    tokens: float | None


def pass_at_k(n: int, successes: int, k: int) -> float:
    """The chance that one of `k` of `n` members, drawn without replacement, succeeded: 1 - C(n - c, k) / C(n, k), which
    is unbiased for 1 - (1 - p)^k (Chen et al. 2021, section 2.1)."""
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def group_spread(group: GroupRows) -> float | None:
    """The sample deviation of the rewards of its scored members; None with fewer than two, or only late ones."""
    rewards = [one.reward for one in group.members if one.scored]
    return stdev(rewards) if len(rewards) > 1 and not group.taken_before else None


def pass_at(groups: Sequence[GroupRows]) -> dict[str, float]:
    """By k = 1, 2, 4 and so on: the mean of `pass_at_k` over the groups that have as many members told of. Groups of
    which only late members are here are left out."""
    successes = [
        [one.success for one in group.members if one.scored and one.success is not None]
        for group in groups
        if group.members and not group.taken_before
    ]
    found: dict[str, float] = {}
    k = 1
    while chosen := [group for group in successes if len(group) >= k]:
        found[str(k)] = fmean(pass_at_k(len(group), sum(group), k) for group in chosen)
        k *= 2
    return found


def lengths(members: Sequence[PlayedEpisode]) -> ReportedLengths:
    """Of these episodes."""
    return ReportedLengths(
        episodes=len(members),
        turns=fmean(one.turns for one in members) if members else None,
        tokens=fmean(one.tokens for one in members) if members else None,
    )
