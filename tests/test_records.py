"""Plain data keeps its own promises."""

from __future__ import annotations

import pytest
from each_case import each_case

from agentrl.records import Step, StopReason, Task, Trajectory, Turn, VersionSpan, context_ids


def turn(index: int, parent: int | None, prompt: tuple[int, ...], sampled: tuple[int, ...], version: int = 0) -> Turn:
    spans = (VersionSpan(version, 0, len(sampled)),) if sampled else ()
    return Turn(
        index=index,
        parent=parent,
        prompt_ids=prompt,
        token_ids=sampled,
        logprobs=(-0.5,) * len(sampled),
        spans=spans,
        finish="stop",
        text="",
        step=Step(observation=(), reward=0.25 * (index + 1)),
    )


def test_a_context_follows_parents_and_a_fork_starts_anew() -> None:
    turns = (turn(0, None, (1, 2), (3,)), turn(1, 0, (4,), (5, 6)), turn(2, None, (9,), (8,)), turn(3, 1, (7,), (1,)))
    assert context_ids(turns, 0) == (1, 2)
    assert context_ids(turns, 1) == (1, 2, 3, 4)
    assert context_ids(turns, 2) == (9,)
    assert context_ids(turns, 3) == (1, 2, 3, 4, 5, 6, 7)


def test_law_1_every_token_has_a_log_prob_and_a_version() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 log-probs"):
        Turn(index=0, parent=None, prompt_ids=(), token_ids=(1, 2), logprobs=(0.0,), spans=(), finish="stop", text="")
    for spans in ((VersionSpan(0, 0, 1),), (VersionSpan(0, 1, 2),), (VersionSpan(0, 0, 1), VersionSpan(1, 0, 2))):
        with pytest.raises(ValueError, match="spans"):
            Turn(
                index=0,
                parent=None,
                prompt_ids=(),
                token_ids=(1, 2),
                logprobs=(0.0, 0.0),
                spans=spans,
                finish="stop",
                text="",
            )


def test_versions_expand_spans_token_by_token() -> None:
    mixed = Turn(
        index=0,
        parent=None,
        prompt_ids=(),
        token_ids=(1, 2, 3),
        logprobs=(0.0,) * 3,
        spans=(VersionSpan(4, 0, 2), VersionSpan(7, 2, 3)),
        finish="stop",
        text="",
    )
    assert mixed.versions == (4, 4, 7)


@each_case(
    ("reason", "outcome", "scored"),
    [
        (StopReason.DONE, 1.0, True),
        (StopReason.TURN_LIMIT, 0.0, True),
        (StopReason.PARSE_FAILURE, 0.0, True),
        (StopReason.DONE, None, False),
        (StopReason.ENGINE_FAILED, 0.0, False),
        (StopReason.SANDBOX_FAILED, 0.0, False),
        (StopReason.ENV_FAILED, 0.0, False),
        (StopReason.EXPIRED, 0.0, False),
        (None, 0.0, False),
    ],
)
def test_law_3_only_the_policys_own_doing_is_scored(
    reason: StopReason | None, outcome: float | None, scored: bool
) -> None:
    trajectory = Trajectory(
        episode_id=1,
        group_id=1,
        member=0,
        task=Task(index=0, env="e", seed=0),
        start=(),
        turns=(turn(0, None, (1,), (2,), version=5), turn(1, 0, (3,), (4,), version=3)),
        stop_reason=reason,
        outcome=outcome,
    )
    assert trajectory.scored is scored
    assert trajectory.rewards == (0.25, 0.5)
