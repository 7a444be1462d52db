"""What the groups of a step say of their environments: successes, lengths, spread. Knows no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from agentrl.train.samples import GroupRows, Played


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of `episodes` episodes: mean number of turns and of sampled tokens; None if there are none."""

    episodes: int
    turns: float | None
    tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvReport:
    """One environment in a step. `limited` is the share of its episodes that a limit ended. `pass_at` has, by k, the
    mean over groups of the chance that one of k members succeeds, see `pass_at_k`. `dropped` are the episodes of
    `played` of which no token is trained; the others are `trained`."""

    limited: float
    pass_at: Mapping[str, float]
    played: Lengths
    trained: Lengths
    dropped: Lengths


def by_env(ready: Sequence[GroupRows]) -> dict[str, EnvReport]:
    """Of each environment that the groups are of."""
    members: dict[str, list[Played]] = {}
    successes: dict[str, list[list[bool]]] = {}
    for group in (group for group in ready if group.members):
        env = group.members[0].env
        members.setdefault(env, []).extend(group.members)
        if not group.taken_before:  # else only late members are here
            told = [one.success for one in group.members if one.scored and one.success is not None]
            successes.setdefault(env, []).append(told)
    return {
        env: EnvReport(
            limited=fmean(one.limited for one in played),
            pass_at=_pass_at(successes.get(env, [])),
            played=_lengths(played),
            trained=_lengths([one for one in played if one.trained]),
            dropped=_lengths([one for one in played if not one.trained]),
        )
        for env, played in members.items()
    }


def pass_at_k(n: int, successes: int, k: int) -> float:
    """The chance that one of `k` of `n` members, drawn without replacement, succeeded: 1 - C(n - c, k) / C(n, k), which
    is unbiased for 1 - (1 - p)^k (Chen et al. 2021, section 2.1)."""
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def group_spread(group: GroupRows) -> float | None:
    """The sample deviation of the rewards of its scored members; None with fewer than two, or only late ones."""
    rewards = [one.reward for one in group.members if one.scored]
    return stdev(rewards) if len(rewards) > 1 and not group.taken_before else None


def _pass_at(groups: Sequence[Sequence[bool]]) -> dict[str, float]:
    """By k = 1, 2, 4 and so on: over the groups that have as many members."""
    found: dict[str, float] = {}
    k = 1
    while chosen := [group for group in groups if len(group) >= k]:
        found[str(k)] = fmean(pass_at_k(len(group), sum(group), k) for group in chosen)
        k *= 2
    return found


def _lengths(members: Sequence[Played]) -> Lengths:
    return Lengths(
        episodes=len(members),
        turns=fmean(one.turns for one in members) if members else None,
        tokens=fmean(one.tokens for one in members) if members else None,
    )
