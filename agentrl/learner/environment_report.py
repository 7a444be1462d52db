"""Report of a step by environment: successes, lengths and spread of each one in the mix.

Owns the numbers by environment. Never computes anything that training needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

from agentrl.algos.pass_at_k import pass_at_k
from agentrl.learner.data.batch import GroupRows, PlayedEpisode
from agentrl.learner.data.prefix_trees import Pack


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLengths:
    """Mean number of turns and of sampled tokens of `episodes` episodes; None if there are none."""

    episodes: int
    turns: float | None
    tokens: float | None


def group_spread(group: GroupRows) -> float | None:
    """The sample deviation of the rewards of its scored members; None with fewer than two, or only late ones."""
    scored_rewards = [played_episode.reward for played_episode in group.members if played_episode.scored]
    return stdev(scored_rewards) if len(scored_rewards) > 1 and not group.taken_before else None


def pass_at(groups: Sequence[GroupRows]) -> dict[str, float]:
    """By k = 1, 2, 4 and so on: the mean of `pass_at_k` over the groups with as many members here. Groups of which only
    late members are here are left out. An unbiased estimate where groups close whole; where a quorum closes them, the
    members that end first are counted, and if success is quick the figure is too high."""
    successes = [
        [
            played_episode.success
            for played_episode in group_rows.members
            if played_episode.scored and played_episode.success is not None
        ]
        for group_rows in groups
        if group_rows.members and not group_rows.taken_before
    ]
    success_rates: dict[str, float] = {}
    attempt_count = 1
    while large_groups := [group_successes for group_successes in successes if len(group_successes) >= attempt_count]:
        success_rates[str(attempt_count)] = fmean(
            pass_at_k(len(group_successes), sum(group_successes), attempt_count) for group_successes in large_groups
        )
        # Powers of two: enough for a curve, and few enough for a row of metrics.
        attempt_count *= 2
    return success_rates


def lengths(members: Sequence[PlayedEpisode]) -> ReportedLengths:
    """Compute the mean lengths of `members`."""
    return ReportedLengths(
        episodes=len(members),
        turns=fmean(member.turns for member in members) if members else None,
        tokens=fmean(member.tokens for member in members) if members else None,
    )


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)


Computed = tuple[Pack, Tensor, Tensor, Tensor]
"""A pass, and of its tokens [K]: the proximal log-prob, the entropy, whether a clip cut the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReport:
    """The groups of one environment in a step. `share` is its share of the loss: the sum of its tokens' weights over
    that of all tokens. `kl_k1`, `entropy` and `clip_fraction` are over the tokens that were computed, as in
    `StepReport`; `lag_mean` is over all scored ones. `pass_at` has, by k, the mean over groups of the chance that one
    of k members succeeds. `limited` is the share of all episodes that a limit ended; `dropped` are the episodes of
    `played` of which no token is trained, the others are `trained`. A mean over nothing is None."""

    episodes: int
    outcome_mean: float | None
    reward_mean: float | None
    success_mean: float | None
    pass_at: Mapping[str, float]
    limited: float | None
    played: ReportedLengths
    trained: ReportedLengths
    dropped: ReportedLengths
    groups_without_signal: int
    tokens_scored: int
    tokens_computed: int
    share: float | None
    lag_mean: float | None
    kl_k1: float | None
    entropy: float | None
    clip_fraction: float | None


def by_environment(
    ready: Sequence[GroupRows], laid: Sequence[Pack], computed: Sequence[Computed]
) -> dict[str, EnvironmentReport]:
    """By the environment's id. `laid` are the step's passes, `computed` those that were run: one of `epochs` for each
    pass."""
    return {
        environment_id: _report(
            [group_rows for group_rows in ready if group_rows.env == environment_id], laid, computed
        )
        for environment_id in _ids(ready)
    }


def _ids(ready: Sequence[GroupRows]) -> list[str]:
    return list(dict.fromkeys(group_rows.env for group_rows in ready))


def _report(own: Sequence[GroupRows], laid: Sequence[Pack], computed: Sequence[Computed]) -> EnvironmentReport:
    member_rows = [member_row for group_rows in own for member_row in group_rows.rows]
    played_episodes = [played_episode for group_rows in own for played_episode in group_rows.members]
    episodes_E = torch.tensor(sorted({member_row.episode_id for member_row in member_rows}), dtype=torch.long)

    def of(pack: Pack, column_K: Tensor) -> Tensor:
        return column_K[torch.isin(pack.columns["episode"], episodes_E.to(column_K.device))]

    weight_sum = sum(float(pack.columns["weight"].sum()) for pack in laid)
    outcomes = [outcome for group_rows in own for outcome in group_rows.outcomes]
    process_rewards = [episode_reward for group_rows in own for episode_reward in group_rows.process]
    return EnvironmentReport(
        episodes=sum(
            0 if group_rows.skipped else len(group_rows.outcomes) - group_rows.members_stale for group_rows in own
        ),
        outcome_mean=_mean(outcomes),
        reward_mean=_mean([outcome + process for outcome, process in zip(outcomes, process_rewards, strict=True)]),
        success_mean=_mean([float(success) for group_rows in own for success in group_rows.successes]),
        pass_at=pass_at(own),
        limited=_mean([float(played_episode.limited) for played_episode in played_episodes]),
        played=lengths(played_episodes),
        trained=lengths([played_episode for played_episode in played_episodes if played_episode.trained]),
        dropped=lengths([played_episode for played_episode in played_episodes if not played_episode.trained]),
        groups_without_signal=sum(
            not any(member_row.has_signal for member_row in group_rows.rows)
            for group_rows in own
            if not group_rows.taken_before
        ),
        tokens_scored=sum(len(member_row.place_S) for member_row in member_rows),
        tokens_computed=sum(len(of(pack, pack.target_K)) for pack, *_ in computed),
        share=sum(float(of(pack, pack.columns["weight"]).sum()) for pack in laid) / weight_sum if weight_sum else None,
        lag_mean=_mean_of([member_row.columns["lag"] for member_row in member_rows]),
        kl_k1=_mean_of([of(pack, pack.columns["behaviour"] - proximal_K) for pack, proximal_K, _, _ in computed]),
        entropy=_mean_of([of(pack, entropy_K) for pack, _, entropy_K, _ in computed]),
        clip_fraction=_mean_of([of(pack, clipped_K) for pack, _, _, clipped_K in computed]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _mean_of(columns: Sequence[Tensor]) -> float | None:
    """The mean over all elements of tensors [K]."""
    all_T = torch.cat(list(columns)) if columns else torch.zeros(0)
    return float(all_T.double().mean()) if len(all_T) else None
