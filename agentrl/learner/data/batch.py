"""Groups become rows of tokens: the scored tokens, what their turns earned, and the versions that sampled them.

Converts a `records.Group` to per-token tensors. Never knows the model, nor how rows are laid out for a pass.

A row is a path through an episode's turns, from a turn that starts anew to one that no turn extends; a fork makes
two rows, and turns that share a parent share its tokens. A token that the policy sampled is scored in the first row
that holds it and is context in any other, so that it enters the loss once. Turns of frozen policies and masked turns
are context only.

Roles that take turns in one episode may have algorithms of their own, and are judged apart, each against the same role
of the siblings, by its own outcome and its own process rewards; a reward that a role gets at another's turn counts for
its own turn before. Siblings are those of the group's record: they judge even if none of their tokens is trained in
this step, or ever.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, cast
from zlib import crc32

import torch
from torch import Tensor

from agentrl.algos.algorithm import ROUNDING, Algorithm, Siblings
from agentrl.algos.importance import Origin
from agentrl.algos.losses import Normalise, token_weights
from agentrl.learner.data.ragged import Ragged
from agentrl.learner.moe import expert_records
from agentrl.records import ENV, UNKNOWN, Group, GroupState, MemberRecord, StopReason, Trajectory, Turn, VersionSpan
from agentrl.tokens import images, staleness
from agentrl.tokens.columns import KEPT, Column, column, filled, known
from agentrl.tokens.images import Image

StepOf = Callable[[int], int]
"""The optimizer step that made a weight version."""

Undone = Callable[[int], bool]
"""Whether a restart abandoned the future that a weight version belongs to."""


BUILT_IN: Final = {
    "behaviour": torch.float32,  # log-prob in nats under the policy that sampled
    "lag": torch.int64,  # optimizer steps since the weights that sampled
    "origin": torch.int64,  # of `corrections.Origin`
    "episode": torch.int64,  # its id
    "role": torch.int64,  # number of the role that acted, the same in every episode
    "turn": torch.int64,  # index within the episode
    "weight": torch.float32,  # share of the loss; 1 until `weigh` has seen all rows of a step
}
"""The columns that the learner makes itself, by name."""


_LIMITS: Final = frozenset(
    {StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.CONTEXT_LIMIT, StopReason.TIME_LIMIT}
)


_NO_ROLES: Final[Mapping[str, Algorithm]] = {}

Prepared = dict[str, dict[str, Tensor]]
"""The columns that the algorithm of each role gives to an episode's turns, by role and column: [T] each, 0 for turns of
other roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence to train on. `_S` are its scored tokens, in order; `place_S` their indices in `token_ids`.
    `observed_O` are those of the tokens that a scored turn answers and its parent led to, if the algorithm predicts
    them.

    Worked example, prompt P P, sampled A, tool answer O, sampled B: token_ids = (P, P, A, O, B), place = (2, 4)."""

    group_id: int
    episode_id: int
    algo: Algorithm  # what trains it
    policy: str | None = None  # the role whose own weights it trains; None: those of all other roles
    token_ids: tuple[int, ...]
    place_S: Tensor  # int64
    columns: Mapping[str, Tensor]  # [S, ...] by name: `BUILT_IN`, the algorithm's, those of `agentrl.tokens.columns`
    ragged: Mapping[str, Ragged] = field(
        default_factory=dict[str, Ragged]
    )  # the ragged ones of `agentrl.tokens.columns`
    chosen: Tensor | None = None  # [T, L, K], the experts of each token if a turn told them, see `routes.told`
    observed_O: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    images: Mapping[int, Image] = field(default_factory=dict[int, Image])  # those of its tokens, by token
    observed_weight: float = 1.0  # share of the loss on observations that each of them has

    def having(self, **columns: Tensor) -> Row:
        """The row with these columns, [S, ...] each."""
        return replace(self, columns={**self.columns, **columns})

    @property
    def has_signal(self) -> bool:
        """Whether any token has an advantage beyond rounding, or may get one in the passes."""
        advantage_S = self.columns.get("advantage")
        return advantage_S is None or bool((advantage_S.abs() > ROUNDING).any())


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
    `scores` are what each reward function of the environment said of an episode (`info["scores"]` of its answers)."""

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

    A token older than `max_lag` is not scored (`agentrl.tokens.staleness`). `keeps_kv`:
    after a weight update engines go on with the keys and values that they have. `quorum`: how many scored members close
    a group (None: all of them)."""

    def lag_of(version: int) -> int:
        return staleness.lag(step_now, step_of(version))

    def origin_of(turn: Turn, span: VersionSpan) -> Origin:
        if undone(span.version):
            return Origin.UNDONE
        began = [
            earlier
            for earlier in turn.spans
            if earlier.start <= span.start and (earlier.recomputed or earlier.start == 0)
        ][-1]
        return Origin.MIXED_KV if keeps_kv and span.version != began.version else Origin.PLAIN

    record = group.record
    trained = [member for member in group.trajectories if member.scored]
    counted = trained + [member for member in group.left_out if member.scored]
    rows: list[Row] = []
    stale: Counter[int] = Counter()

    def algo_of(role: str) -> Algorithm:
        return by_role.get(role, algo)

    for trajectory, prepared in zip(group.trajectories, _prepared(group, algo_of, quorum), strict=True):
        if trajectory.scored:
            for row in _rows(trajectory, algo_of, policies, prepared, lag_of, origin_of):
                fresh = _within(row, max_lag, stale)
                if fresh is not None:
                    rows.append(fresh)
    for member in group.left_out:
        if member.scored and not group.skipped:
            for span in (span for turn in member.turns if turn.learns for span in turn.spans):
                stale[lag_of(span.version)] += span.end - span.start
    return GroupRows(
        group_id=group.id,
        env=group.task.env,
        rows=tuple(rows),
        outcomes=tuple(member.outcome or 0.0 for member in counted),
        process=tuple(sum(turn.reward for turn in member.turns if turn.learns) for member in counted),
        successes=tuple(member.success for member in counted if member.success is not None),
        left_out=len(group.trajectories) + len(group.left_out) - len(counted),
        stale=stale,
        members_stale=0 if group.skipped else len(counted) - len(trained),
        late=0 if record is None else sum(member.member not in record for member in trained),
        taken_before=group.state is GroupState.EXPIRED or (group.taken_step or math.inf) <= step_now,
        cut=tuple(turn.finish == "length" for member in counted for turn in member.turns if turn.learns),
        members=_played(group, rows),
        skipped=group.skipped,
        weight=group.weight,
        scores=_scores(counted),
    )


def _scores(counted: Sequence[Trajectory]) -> dict[str, tuple[float, ...]]:
    """By reward function: its sum over the turns of each episode that it scored. Only numbers count."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for member in counted:
        own: defaultdict[str, float] = defaultdict(float)
        for turn in member.turns:
            scores: object = None if turn.step is None else turn.step.info.get("scores")
            for name, value in cast("Mapping[str, object]", scores).items() if isinstance(scores, Mapping) else ():
                if isinstance(value, int | float) and math.isfinite(value):
                    own[name] += value
        for name, value in own.items():
            found[name].append(value)
    return {name: tuple(values) for name, values in sorted(found.items())}


def _played(group: Group, rows: Sequence[Row]) -> tuple[PlayedEpisode, ...]:
    trained = Counter[int]()
    for row in rows:
        trained[row.episode_id] += len(row.place_S)
    return tuple(
        PlayedEpisode(
            env=group.task.env,
            turns=len(own := [turn for turn in member.turns if turn.learns]),
            tokens=sum(len(turn.token_ids) for turn in own),
            trained=trained[member.episode_id],
            scored=member.scored,
            limited=member.stop_reason in _LIMITS,
            reward=(member.outcome or 0.0) + sum(turn.reward for turn in own),
            success=member.success,
        )
        for member in (*group.trajectories, *group.left_out)
    )


def weigh(parts: Sequence[Sequence[GroupRows]]) -> list[list[list[Row]]]:
    """The rows of each group of each update of a step, with their tokens' shares of the loss. The losses of the updates
    average to the loss of the step, however it is divided. A group's weight multiplies the shares of its tokens.
    Observations have the same share each, whatever the algorithm's normalisation.

    Rows whose algorithms normalise alike are normalised together, whatever else is in the step; where algorithms
    differ in it, each part of the step has the share of the loss that it has of the episodes. If roles of an episode
    have different algorithms, the turns of each algorithm count as an episode. Rows of different policies share no
    loss: those of each are weighed as if there were no others."""
    rows = [row for part in parts for group in part for row in group.rows]
    alike: dict[tuple[str | None, Normalise, int], list[int]] = {}
    algos: list[Algorithm] = []
    numbers: dict[tuple[int, int], int] = {}
    episode: list[int] = []  # of each row
    for at, row in enumerate(rows):
        algo = row.algo
        divisor = algo.divisor if algo.normalise == "constant" else 0
        alike.setdefault((row.policy, algo.normalise, divisor), []).append(at)
        if algo not in algos:
            algos.append(algo)
        episode.append(numbers.setdefault((row.episode_id, algos.index(algo)), len(numbers)))
    episodes = {key: len({episode[at] for at in places}) for key, places in alike.items()}
    weights: list[Tensor] = [torch.zeros(0)] * len(rows)
    for (policy, normalise, divisor), places in alike.items():
        own = [rows[at] for at in places]
        of_token = torch.cat([torch.full((len(rows[at].place_S),), episode[at]) for at in places])
        shares = token_weights(of_token, normalise, divisor)
        beside = sum(count for (of, *_), count in episodes.items() if of == policy)
        shares = shares * (episodes[policy, normalise, divisor] / beside) * len(parts)
        for at, weight in zip(places, shares.split([len(row.place_S) for row in own]), strict=True):
            weights[at] = weight
    found = iter(weights)
    of_observed = len(parts) / max(sum(len(row.observed_O) for row in rows), 1)

    def weighed(row: Row, weight: float) -> Row:
        return replace(row.having(weight=next(found) * weight), observed_weight=of_observed * weight)

    return [[[weighed(row, group.weight) for row in group.rows] for group in part] for part in parts]


def _prepared(group: Group, algo_of: Callable[[str], Algorithm], quorum: int | None) -> list[Prepared]:
    """The columns that the algorithms give to each trajectory's turns.

    Members in the record are judged against each other; a late one, which is not in it, against all of these. If groups
    close with a `quorum` of k, everyone is judged against the k - 1 others that ended first: however many more the
    record has, and whether or not the judged one is in it, both of which depend on its own length."""
    record = group.record
    if record is None or quorum is None or len(record) < quorum:
        return _judged(group, algo_of, record)
    first = list(record.items())[:quorum]  # as they ended
    prepared = _judged(group, algo_of, dict(first))
    if all(member.member in dict(first) for member in group.trajectories):
        return prepared
    of_others = _judged(group, algo_of, dict(first[:-1]))
    return [
        own if member.member in dict(first) else other
        for member, own, other in zip(group.trajectories, prepared, of_others, strict=True)
    ]


def _judged(
    group: Group, algo_of: Callable[[str], Algorithm], record: Mapping[int, MemberRecord] | None
) -> list[Prepared]:
    """The algorithms' columns of the trajectories if those in `record` form the baseline (None: all of them)."""
    members = group.trajectories
    if record is None:
        size, places = len(members), range(len(members))
        judges = {place: member.record for place, member in enumerate(members) if member.scored}
    else:
        size, places, judges = group.size, [member.member for member in members], dict(record)
    judged = {place: member.record for place, member in zip(places, members, strict=True) if member.scored}
    records = judged | judges
    scored_G, judges_G = (torch.tensor([place in those for place in range(size)]) for those in (records, judges))
    prepared: list[Prepared] = [{} for _ in members]
    for role in dict.fromkeys(turn.role for member in members for turn in member.turns if turn.learns):
        rewards = [records[place].rewards.get(role, ()) if place in records else () for place in range(size)]
        turns_G = torch.tensor([len(own) for own in rewards])
        rewards_GT = torch.zeros(size, int(turns_G.max()), dtype=torch.float64)
        for place, own in enumerate(rewards):
            rewards_GT[place, : len(own)] = torch.tensor(own, dtype=torch.float64)
        states_GT = torch.full(rewards_GT.shape, UNKNOWN)
        for place, of_member in records.items():
            own = of_member.states.get(role, ())
            states_GT[place, : len(own)] = torch.tensor(own, dtype=torch.long)
        outcomes = [records[place].outcome_of(role) if place in records else 0.0 for place in range(size)]
        siblings = Siblings(
            outcomes_G=torch.tensor(outcomes, dtype=torch.float64),
            rewards_GT=rewards_GT,
            turns_G=turns_G,
            scored_G=scored_G,
            judges_G=judges_G,
            states_GT=states_GT,
            **_streams(records, next((judge.weights for judge in (judges or records).values()), {}), role, rewards_GT),
        )
        for name, of_role_GT in algo_of(role).prepare(siblings).items():
            for place, member, by_role in zip(places, members, prepared, strict=True):
                column_T = torch.zeros(len(member.turns), dtype=torch.float64)
                by_role.setdefault(role, {})[name] = column_T
                own = [turn.index for turn in member.turns if turn.role == role]
                if place in records:
                    column_T[own] = of_role_GT[place, : len(own)]
    return prepared


def _streams(
    records: Mapping[int, MemberRecord], weights: Mapping[str, float], role: str, rewards_GT: Tensor
) -> dict[str, Tensor]:
    """The rewards of a role's turns by source, and the weights of the sources, which are the same for all judges."""
    weights = {ENV: 1.0, **weights}
    streams_KGT = torch.zeros(len(weights), *rewards_GT.shape, dtype=torch.float64)
    for place, record in records.items():
        streams = record.streams_of(role)
        for stream_GT, source in zip(streams_KGT, weights, strict=True):
            own = streams.get(source, ())
            stream_GT[place, : len(own)] = torch.tensor(own, dtype=torch.float64)
    return {"streams_KGT": streams_KGT, "weights_K": torch.tensor(list(weights.values()), dtype=torch.float64)}


def _rows(
    trajectory: Trajectory,
    algo_of: Callable[[str], Algorithm],
    policies: Collection[str],
    by_role: Prepared,
    lag_of: Callable[[int], int],
    origin_of: Callable[[Turn, VersionSpan], Origin],
) -> list[Row]:
    """All rows of an episode. Raises ValueError for a turn without any context: nothing predicts its first token."""
    turns, named = trajectory.turns, {**known(), KEPT: column(KEPT)}
    continued = {turn.parent for turn in turns}
    ragged = {name for name, of in named.items() if of.ragged}
    known_images = images.of_steps(trajectory.start, (turn.step for turn in turns))
    seen: set[int] = set()
    rows: list[Row] = []
    for leaf in (turn for turn in turns if turn.index not in continued):
        algo, prepared = algo_of(leaf.role), by_role.get(leaf.role, {})
        token_ids: list[int] = []
        place: list[int] = []
        observed: list[int] = []
        values: dict[str, list[float]] = {name: [] for name in (*BUILT_IN, *prepared, *named)}
        for turn in _path(turns, leaf):
            token_ids += turn.prompt_ids
            if not token_ids and turn.token_ids:
                raise ValueError(f"episode {trajectory.episode_id}, turn {turn.index}: sampled without any context")
            start = len(token_ids)
            token_ids += turn.token_ids
            if turn.index in seen or not turn.learns or _is_masked(turn):
                continue
            seen.add(turn.index)
            place += range(start, len(token_ids))
            if algo.observes and turn.parent is not None:
                observed += (at for at in range(start - len(turn.prompt_ids), start) if token_ids[at] < images.FIRST)
            n = len(turn.token_ids)
            values["behaviour"] += turn.logprobs
            for span in turn.spans:
                values["lag"] += [lag_of(span.version)] * (span.end - span.start)
                values["origin"] += [origin_of(turn, span)] * (span.end - span.start)
            values["episode"] += [trajectory.episode_id] * n
            values["role"] += [crc32(turn.role.encode())] * n
            values["turn"] += [turn.index] * n
            for name, column_T in prepared.items():
                values[name] += [float(column_T[turn.index])] * n
            values["weight"] += [1.0] * n
            for name in named:
                values[name] += filled(name, turn.columns, n)
        if place:
            rows.append(
                Row(
                    group_id=trajectory.group_id,
                    episode_id=trajectory.episode_id,
                    algo=algo,
                    policy=leaf.role if leaf.role in policies else None,
                    token_ids=tuple(token_ids[: place[-1] + 1]),
                    place_S=torch.tensor(place),
                    columns={
                        name: _tensor(name, numbers, named) for name, numbers in values.items() if name not in ragged
                    },
                    ragged={name: Ragged.of(values[name]) for name in ragged},
                    chosen=expert_records.told((turn.experts for turn in _path(turns, leaf)), place[-1] + 1),
                    observed_O=torch.tensor(observed, dtype=torch.int64),
                    images={image.token: image for image in images.shown(token_ids, known_images)},
                )
            )
    return rows


def _tensor(name: str, numbers: Sequence[float], named: Mapping[str, Column]) -> Tensor:
    if name not in named:
        return torch.tensor(numbers, dtype=BUILT_IN.get(name, torch.float32))
    column = named[name]
    return torch.tensor(numbers, dtype=getattr(torch, column.dtype)).reshape(-1, *column.shape)


def _is_masked(turn: Turn) -> bool:
    """Whether the environment keeps the turn out of the loss (a parse failure under such a policy, say)."""
    return turn.step is not None and turn.step.masked


def _path(turns: Sequence[Turn], leaf: Turn) -> list[Turn]:
    """The turns from a start to `leaf`, in order."""
    path = [leaf]
    while (parent := path[-1].parent) is not None:
        path.append(turns[parent])
    return path[::-1]


def _within(row: Row, max_lag: int, stale: Counter[int]) -> Row | None:
    """The row with only tokens of lag <= max_lag scored (None if none is left); the others are counted in `stale`."""
    lag_S = row.columns["lag"]
    keep_S = staleness.trains(lag_S, max_lag)
    if bool(keep_S.all()):
        return row
    stale.update(lag_S[~keep_S].tolist())
    if not bool(keep_S.any()):
        return None
    place_S, turn_S = row.place_S[keep_S], row.columns["turn"]
    answered_O = turn_S[torch.searchsorted(row.place_S, row.observed_O)]  # the turn that each comes before
    return replace(
        row,
        token_ids=row.token_ids[: int(place_S[-1]) + 1],
        place_S=place_S,
        observed_O=row.observed_O[torch.isin(answered_O, turn_S[keep_S])],
        columns={name: column[keep_S] for name, column in row.columns.items()},
        ragged={name: column.only(keep_S) for name, column in row.ragged.items()},
        chosen=None if row.chosen is None else row.chosen[: int(place_S[-1]) + 1],
    )
