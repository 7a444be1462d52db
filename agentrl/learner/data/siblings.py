"""The siblings of a group as tensors, and the columns that each role's algorithm makes of them.

Roles that take turns in one episode may have algorithms of their own, and are judged apart, each against the same role
of the siblings, by its own outcome and its own process rewards; a reward that a role gets at another's turn counts for
its own turn before. Siblings are those of the group's record: they judge even if none of their tokens is trained in
this step, or ever. Who judges whom is `algos.judging`'s. Never knows a token.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from agentrl.algos.algorithm import Algorithm, Siblings
from agentrl.algos.judging import panel
from agentrl.records import ENV, UNKNOWN, Group, MemberRecord, Trajectory

TurnColumns = dict[str, dict[str, Tensor]]
"""The columns that the algorithm of each role gives to an episode's turns, by role and column: [T] each, 0 for turns of
other roles."""


def turn_columns(group: Group, algo_of: Callable[[str], Algorithm], quorum: int | None) -> list[TurnColumns]:
    """The columns that the algorithms give to the turns of each trajectory, in the order of `group.trajectories`.

    Each trajectory is judged by the members that `panel` names, by their records: that of the store for a member in the
    group's record, which never changes, else the trajectory's own. A group without a record is judged by itself."""
    members = group.trajectories
    if group.record is None:
        records = {place: member.record for place, member in enumerate(members) if member.scored}
        return _judged(members, range(len(members)), len(members), records, records, algo_of)
    record, places = group.record, [member.member for member in members]
    # A late member's record is built anew from its trajectory. That of any other member is the one that the store made
    # when the group closed: siblings that were trained in an earlier step were judged by it, and it holds the rewards
    # of members whose trajectories are not here.
    judged = {
        member.member: member.record if (packed := record.get(member.member)) is None else packed
        for member in members
        if member.scored
    }
    # An algorithm prepares all turns of a group at once, over one set of judges. With a quorum there are two sets (see
    # `panel`), so it runs at most twice, and each member takes its columns from the run with its own judges.
    panels = [panel(list(record), place, quorum) for place in places]
    by_panel = dict[tuple[int, ...], list[TurnColumns]]()
    for judging in dict.fromkeys(panels):
        judges = {judge: record[judge] for judge in judging}
        by_panel[judging] = _judged(members, places, group.size, judged | judges, judges, algo_of)
    return [by_panel[judging][number] for number, judging in enumerate(panels)]


def _judged(
    members: Sequence[Trajectory],
    places: Sequence[int],
    size: int,
    records: Mapping[int, MemberRecord],
    judges: Mapping[int, MemberRecord],
    algo_of: Callable[[str], Algorithm],
) -> list[TurnColumns]:
    """The columns of the trajectories, each at its place among `size` siblings, if `judges` form the baseline."""
    scored_G, judges_G = (torch.tensor([place in by_place for place in range(size)]) for by_place in (records, judges))
    prepared: list[TurnColumns] = [{} for _ in members]
    for role in dict.fromkeys(turn.role for member in members for turn in member.turns if turn.learns):
        rewards = [records[place].rewards.get(role, ()) if place in records else () for place in range(size)]
        turns_G = torch.tensor([len(rewards_T) for rewards_T in rewards])
        rewards_GT = torch.zeros(size, int(turns_G.max()), dtype=torch.float64)
        for place, rewards_T in enumerate(rewards):
            rewards_GT[place, : len(rewards_T)] = torch.tensor(rewards_T, dtype=torch.float64)
        states_GT = torch.full(rewards_GT.shape, UNKNOWN)
        for place, record in records.items():
            states_T = record.states.get(role, ())
            states_GT[place, : len(states_T)] = torch.tensor(states_T, dtype=torch.long)
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
        for name, column_GT in algo_of(role).prepare(siblings).items():
            for place, member, by_role in zip(places, members, prepared, strict=True):
                column_T = torch.zeros(len(member.turns), dtype=torch.float64)
                by_role.setdefault(role, {})[name] = column_T
                role_turns = [turn.index for turn in member.turns if turn.role == role]
                if place in records:
                    column_T[role_turns] = column_GT[place, : len(role_turns)]
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
            rewards_T = streams.get(source, ())
            stream_GT[place, : len(rewards_T)] = torch.tensor(rewards_T, dtype=torch.float64)
    return {"streams_KGT": streams_KGT, "weights_K": torch.tensor(list(weights.values()), dtype=torch.float64)}
