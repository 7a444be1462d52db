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
        member_records = {member_place: member.record for member_place, member in enumerate(members) if member.scored}
        return _judged(members, range(len(members)), len(members), member_records, member_records, algo_of)
    group_record, member_places = group.record, [member.member for member in members]
    # A late member's record is built anew from its trajectory. That of any other member is the one that the store made
    # when the group closed: siblings that were trained in an earlier step were judged by it, and it holds the rewards
    # of members whose trajectories are not here.
    judged_records = {
        member.member: member.record if (packed_record := group_record.get(member.member)) is None else packed_record
        for member in members
        if member.scored
    }
    # An algorithm prepares all turns of a group at once, over one set of judges. With a quorum there are two sets (see
    # `panel`), so it runs at most twice, and each member takes its columns from the run with its own judges.
    member_panels = [panel(list(group_record), member_place, quorum) for member_place in member_places]
    by_panel = dict[tuple[int, ...], list[TurnColumns]]()
    for judge_panel in dict.fromkeys(member_panels):
        panel_records = {judge_place: group_record[judge_place] for judge_place in judge_panel}
        by_panel[judge_panel] = _judged(
            members, member_places, group.size, judged_records | panel_records, panel_records, algo_of
        )
    return [by_panel[judge_panel][member_index] for member_index, judge_panel in enumerate(member_panels)]


def _judged(
    members: Sequence[Trajectory],
    places: Sequence[int],
    size: int,
    records: Mapping[int, MemberRecord],
    judges: Mapping[int, MemberRecord],
    algo_of: Callable[[str], Algorithm],
) -> list[TurnColumns]:
    """The columns of the trajectories, each at its place among `size` siblings, if `judges` form the baseline."""
    scored_G, judges_G = (
        torch.tensor([member_place in by_place for member_place in range(size)]) for by_place in (records, judges)
    )
    prepared_columns: list[TurnColumns] = [{} for _ in members]
    for role in dict.fromkeys(turn.role for member in members for turn in member.turns if turn.learns):
        role_rewards = [
            records[member_place].rewards.get(role, ()) if member_place in records else ()
            for member_place in range(size)
        ]
        turns_G = torch.tensor([len(rewards_T) for rewards_T in role_rewards])
        rewards_GT = torch.zeros(size, int(turns_G.max()), dtype=torch.float64)
        for member_place, rewards_T in enumerate(role_rewards):
            rewards_GT[member_place, : len(rewards_T)] = torch.tensor(rewards_T, dtype=torch.float64)
        states_GT = torch.full(rewards_GT.shape, UNKNOWN)
        for member_place, member_record in records.items():
            states_T = member_record.states.get(role, ())
            states_GT[member_place, : len(states_T)] = torch.tensor(states_T, dtype=torch.long)
        role_outcomes = [
            records[member_place].outcome_of(role) if member_place in records else 0.0 for member_place in range(size)
        ]
        siblings = Siblings(
            outcomes_G=torch.tensor(role_outcomes, dtype=torch.float64),
            rewards_GT=rewards_GT,
            turns_G=turns_G,
            scored_G=scored_G,
            judges_G=judges_G,
            states_GT=states_GT,
            **_streams(
                records,
                next((judge_record.weights for judge_record in (judges or records).values()), {}),
                role,
                rewards_GT,
            ),
        )
        for column_name, column_GT in algo_of(role).prepare(siblings).items():
            for member_place, member, columns_by_role in zip(places, members, prepared_columns, strict=True):
                column_T = torch.zeros(len(member.turns), dtype=torch.float64)
                columns_by_role.setdefault(role, {})[column_name] = column_T
                role_turns = [turn.index for turn in member.turns if turn.role == role]
                if member_place in records:
                    column_T[role_turns] = column_GT[member_place, : len(role_turns)]
    return prepared_columns


def _streams(
    records: Mapping[int, MemberRecord], weights: Mapping[str, float], role: str, rewards_GT: Tensor
) -> dict[str, Tensor]:
    """The rewards of a role's turns by source, and the weights of the sources, which are the same for all judges."""
    weights = {ENV: 1.0, **weights}
    streams_KGT = torch.zeros(len(weights), *rewards_GT.shape, dtype=torch.float64)
    for member_place, member_record in records.items():
        reward_streams = member_record.streams_of(role)
        for stream_GT, source in zip(streams_KGT, weights, strict=True):
            rewards_T = reward_streams.get(source, ())
            stream_GT[member_place, : len(rewards_T)] = torch.tensor(rewards_T, dtype=torch.float64)
    return {"streams_KGT": streams_KGT, "weights_K": torch.tensor(list(weights.values()), dtype=torch.float64)}
