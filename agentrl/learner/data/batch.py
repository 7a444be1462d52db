"""A group becomes rows to train on: its members are judged, turned into rows, and held to the lag bound.

    siblings   who earned how much: the columns of each role's algorithm, by turn
    rows       the turns of each scored member as rows of tokens with their columns
    lag_bound  tokens that are too old leave the loss
    shares     (over all groups of a step) each token's share of the loss

Converts a `records.Group`. Never knows the model, nor how rows are laid out for a pass.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from agentrl.algos.algorithm import Algorithm
from agentrl.algos.importance import Origin
from agentrl.learner.data.lag_bound import drop_tokens_beyond_lag
from agentrl.learner.data.rows import Row, rows_of
from agentrl.learner.data.siblings import turn_columns
from agentrl.records import Group, GroupState, StopReason, Trajectory, Turn, VersionSpan
from agentrl.tokens import staleness

StepOf = Callable[[int], int]
"""The optimizer step that made a weight version."""

Undone = Callable[[int], bool]
"""Whether a restart abandoned the future that a weight version belongs to."""


_LIMITS: Final = frozenset(
    {
        StopReason.TURN_LIMIT,
        StopReason.TOKEN_LIMIT,
        StopReason.CONTEXT_LIMIT,
        StopReason.TIME_LIMIT,
        StopReason.TOOL_TIME_LIMIT,
    }
)


_NO_ROLES: Final[Mapping[str, Algorithm]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """How a member of a group went: its sampled tokens that learn, of which `trained` are in the loss. `scored` says
    whether it takes part (law 3), `limited` whether a limit ended it."""

    env: str
    turns: int
    tokens: int
    trained: int
    scored: bool
    limited: bool
    reward: float
    success: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    """Members of a group, ready to train. `rows` are those of its scored members; members that infrastructure failed
    are only counted in `left_out`. `stale` counts, by lag, sampled tokens beyond the lag bound, which no row scores;
    `members_stale` members have no other tokens, and only report their outcome. `late` members ended after their group
    had closed; if it was `taken_before`, in an earlier step, all are late. `cut` says of each turn whether it ended by
    its length and not by the policy. A `skipped` group trains nothing and only reports; `weight` multiplies the share
    of the loss that its tokens have. `env` is the environment of its task; `members` are all, trained or not.
    `scores` are the values that each reward function of the environment gave an episode (`info["scores"]` of its
    answers), and `scores_late` counts the answers that a function had not judged in time (`info["scores_late"]`)."""

    group_id: int
    env: str
    rows: tuple[Row, ...]
    outcomes: tuple[float, ...]
    process: tuple[float, ...]
    successes: tuple[bool, ...]
    left_out: int
    stale: Counter[int]
    members_stale: int = 0
    late: int = 0
    taken_before: bool = False
    cut: tuple[bool, ...] = ()
    members: tuple[PlayedEpisode, ...] = ()
    skipped: bool = False
    weight: float = 1.0
    scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    scores_late: Mapping[str, int] = field(default_factory=dict[str, int])


def group_rows(
    group: Group,
    algo: Algorithm,
    *,
    step_of: StepOf,
    step_now: int,
    max_lag: int,
    undone: Undone = lambda _: False,
    keeps_kv: bool = True,
    quorum: int | None = None,
    by_role: Mapping[str, Algorithm] = _NO_ROLES,
    policies: Collection[str] = (),
) -> GroupRows:
    """Rows of one group, with the columns that the algorithm prepares from its rewards (laws 3 and 5). `by_role` has
    the algorithms of roles that `algo` does not train, `policies` the roles that have weights of their own.

    A token older than `max_lag` is not scored (`lag_bound`). `keeps_kv`:
    after a weight update engines go on with the keys and values that they have. `quorum`: how many scored members close
    a group (None: all of them)."""

    def lag_of(version: int) -> int:
        return staleness.lag(step_now, step_of(version))

    def origin_of(turn: Turn, span: VersionSpan) -> Origin:
        if undone(span.version):
            return Origin.UNDONE
        # The last place, before this span, from which keys and values were computed anew. From there on they are of
        # one version unless a later span under kept ones says otherwise.
        computed_from = [
            earlier_span
            for earlier_span in turn.spans
            if earlier_span.start <= span.start and (earlier_span.recomputed or earlier_span.start == 0)
        ][-1]
        return Origin.MIXED_KV if keeps_kv and span.version != computed_from.version else Origin.PLAIN

    group_record = group.record
    # Law 3 begins here: a member that infrastructure failed has no rows and judges nobody. A baseline with its reward
    # of 0 in it would punish its siblings for an engine that died.
    trained_members = [member for member in group.trajectories if member.scored]
    counted_members = trained_members + [member for member in group.left_out if member.scored]
    kept_rows: list[Row] = []
    stale_by_lag: Counter[int] = Counter()

    def algo_of(role: str) -> Algorithm:
        return by_role.get(role, algo)

    for trajectory, columns_by_role in zip(group.trajectories, turn_columns(group, algo_of, quorum), strict=True):
        if trajectory.scored:
            for built_row in rows_of(trajectory, algo_of, policies, columns_by_role, lag_of, origin_of):
                fresh_row = drop_tokens_beyond_lag(built_row, max_lag, stale_by_lag)
                if fresh_row is not None:
                    kept_rows.append(fresh_row)
    for member in group.left_out:
        # Tokens of members that the store left out for their age were sampled and dropped. Law 5 wants them counted,
        # or a run that loses its long episodes would look healthy.
        if member.scored and not group.skipped:
            for version_span in (version_span for turn in member.turns if turn.learns for version_span in turn.spans):
                stale_by_lag[lag_of(version_span.version)] += version_span.end - version_span.start
    return GroupRows(
        group_id=group.id,
        env=group.task.env,
        rows=tuple(kept_rows),
        outcomes=tuple(member.outcome or 0.0 for member in counted_members),
        process=tuple(sum(turn.reward for turn in member.turns if turn.learns) for member in counted_members),
        successes=tuple(member.success for member in counted_members if member.success is not None),
        left_out=len(group.trajectories) + len(group.left_out) - len(counted_members),
        stale=stale_by_lag,
        members_stale=0 if group.skipped else len(counted_members) - len(trained_members),
        late=0 if group_record is None else sum(member.member not in group_record for member in trained_members),
        taken_before=group.state is GroupState.EXPIRED or (group.taken_step or math.inf) <= step_now,
        cut=tuple(turn.finish == "length" for member in counted_members for turn in member.turns if turn.learns),
        members=_played(group, kept_rows),
        skipped=group.skipped,
        weight=group.weight,
        scores=_scores(counted_members),
        scores_late=_scores_late(counted_members),
    )


def _scores(counted: Sequence[Trajectory]) -> dict[str, tuple[float, ...]]:
    """By reward function: its sum over the turns of each episode that it scored. Only numbers count."""
    sums_by_function: defaultdict[str, list[float]] = defaultdict(list)
    for member in counted:
        episode_sums: defaultdict[str, float] = defaultdict(float)
        for turn in member.turns:
            # `info` is the environment's own dictionary: anything may stand there, and a report must not end a step.
            turn_scores: object = None if turn.step is None else turn.step.info.get("scores")
            for function_name, function_score in (
                cast("Mapping[str, object]", turn_scores).items() if isinstance(turn_scores, Mapping) else ()
            ):
                if isinstance(function_score, int | float) and math.isfinite(function_score):
                    episode_sums[function_name] += function_score
        for function_name, function_score in episode_sums.items():
            sums_by_function[function_name].append(function_score)
    return {function_name: tuple(episode_scores) for function_name, episode_scores in sorted(sums_by_function.items())}


def _scores_late(counted: Sequence[Trajectory]) -> dict[str, int]:
    """By reward function: how many answers it had not judged in time."""
    late_counts = Counter[str]()
    for turn in (turn for member in counted for turn in member.turns):
        late_names: object = None if turn.step is None else turn.step.info.get("scores_late")
        if isinstance(late_names, list):
            late_counts.update(
                function_name for function_name in cast("list[object]", late_names) if isinstance(function_name, str)
            )
    return dict(sorted(late_counts.items()))


def _played(group: Group, rows: Sequence[Row]) -> tuple[PlayedEpisode, ...]:
    trained_tokens = Counter[int]()
    for member_row in rows:
        trained_tokens[member_row.episode_id] += len(member_row.place_S)
    return tuple(
        PlayedEpisode(
            env=group.task.env,
            turns=len(learning_turns := [turn for turn in member.turns if turn.learns]),
            tokens=sum(len(turn.token_ids) for turn in learning_turns),
            trained=trained_tokens[member.episode_id],
            scored=member.scored,
            limited=member.stop_reason in _LIMITS,
            reward=(member.outcome or 0.0) + sum(turn.reward for turn in learning_turns),
            success=member.success,
        )
        for member in (*group.trajectories, *group.left_out)
    )
