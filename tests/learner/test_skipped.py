"""Groups without signal report their outcomes and train nothing; a group's weight multiplies its share of the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from each_case import each_case

from agentrl.algos.grpo import GRPO
from agentrl.algos.judging import Returns, advantages, strength
from agentrl.algos.losses import Normalise
from agentrl.learner.data.batch import GroupRows, group_rows
from agentrl.learner.data.shares import weigh
from agentrl.learner.learner import Learner
from agentrl.records import Group, GroupState

from .making import episode, group_of, random_group, run_config, tiny_qwen3, turn


def rows_of(group: Group, *, quorum: int | None = None, **algo: object) -> GroupRows:
    settings = GRPO.model_validate(algo)
    return group_rows(group, settings, step_of=lambda version: 0, step_now=0, max_lag=9, quorum=quorum)


def solved(id: int) -> Group:
    members = [episode(member, [turn(0, [1], [2, 3])], 1.0, group=id) for member in (0, 1)]
    return group_of(members, id=id)


@each_case(("discount", "quorum"), [(1.0, None), (0.8, None), (1.0, 2), (0.8, 3)])
@each_case("seed", range(5))
def test_the_stores_advantages_are_those_that_the_learner_computes(
    seed: int, discount: float, quorum: int | None
) -> None:
    group = random_group(1, seed)
    record = {one.member: one.record for one in group.trajectories[:-1]}
    late = {one.member: one.record for one in group.trajectories[-1:]}
    found = advantages(record, Returns(process_weight=0.5, discount=discount, quorum=quorum), late)
    rows = rows_of(replace(group, record=record), quorum=quorum, process_weight=0.5, discount=discount).rows
    for row in rows:
        turns = group.trajectories[row.episode_id - 100].turns
        expected = [found[row.episode_id - 100][one.index] for one in turns for _ in one.token_ids]
        assert row.columns["advantage"].tolist() == pytest.approx(expected, abs=1e-6)
    whole = {one.member: one.record for one in group.trajectories}
    assert (strength(whole, Returns()) > 0) == any(row.has_signal for row in rows_of(group).rows)


def test_a_skipped_group_counts_in_the_means_and_in_nothing_else(tmp_path: Path) -> None:
    """One group of outcomes 1 and 0, one skipped of outcomes 1 and 1: their mean is 0.75."""
    learner = Learner(run_config().learner, tiny_qwen3(tmp_path))
    taken = group_of([episode(member, [turn(0, [1], [2, 3])], float(member)) for member in (0, 1)])
    other = solved(2)
    skipped = replace(other, state=GroupState.EXPIRED, trajectories=(), left_out=other.trajectories, skipped=True)
    report = learner.step([taken, skipped], step_of=lambda version: 0)
    assert (report.outcome_mean, report.success_mean) == (0.75, 0.75)
    assert (report.group_count, report.groups_without_signal, report.groups_skipped) == (1, 0, 1)
    assert (report.episodes, report.episodes_stale, report.episodes_late, report.tokens_stale) == (2, 0, 0, 0)
    assert report.tokens_scored == 4
    assert learner.trained == [(100, 101)]


def test_skipped_groups_leave_the_minibatches_even(tmp_path: Path) -> None:
    learner = Learner(run_config().learner, tiny_qwen3(tmp_path))
    other = solved(2)
    skipped = replace(other, trajectories=(), left_out=other.trajectories, skipped=True)
    assert learner.step([skipped], step_of=lambda version: 0).updated is False


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_a_groups_weight_multiplies_its_share_of_the_loss(kind: Normalise) -> None:
    pairs = [(random_group(id, seed=id), weight) for id, weight in ((1, 1.0), (2, 2.5))]
    groups = [rows_of(replace(group, weight=weight), normalise=kind) for group, weight in pairs]
    (plain,) = weigh([[rows_of(group, normalise=kind) for group, _ in pairs]])
    for weight, rows, without in zip((1.0, 2.5), weigh([groups])[0], plain, strict=True):
        for row, one in zip(rows, without, strict=True):
            torch.testing.assert_close(row.columns["weight"], weight * one.columns["weight"])
