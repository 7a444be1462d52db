"""Turns of an episode become rows of tokens: the scored tokens and their columns.

A row is a path through an episode's turns, from a turn that starts anew to one that no turn extends; a fork makes
two rows, and turns that share a parent share its tokens. A token that the policy sampled is scored in the first row
that holds it and is context in any other, so that it enters the loss once. Turns of frozen policies and masked turns
are context only.

Never knows a group, nor how a row is laid out for a pass.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from zlib import crc32

import torch
from torch import Tensor

from agentrl.algos.algorithm import ROUNDING, Algorithm
from agentrl.algos.importance import Origin
from agentrl.learner.data.ragged import Ragged
from agentrl.learner.data.siblings import TurnColumns
from agentrl.learner.moe import expert_records
from agentrl.records import Trajectory, Turn, VersionSpan
from agentrl.tokens import images
from agentrl.tokens.columns import KEPT, Column, column, filled, known
from agentrl.tokens.images import Image

BUILT_IN: Final = {
    "behaviour": torch.float32,  # log-prob in nats under the policy that sampled
    "lag": torch.int64,  # optimizer steps since the weights that sampled
    "origin": torch.int64,  # of `importance.Origin`
    "episode": torch.int64,  # its id
    "role": torch.int64,  # number of the role that acted, the same in every episode
    "turn": torch.int64,  # index within the episode
    "weight": torch.float32,  # share of the loss; 1 until `weigh` has seen all rows of a step
}
"""The columns that the learner makes itself, by name."""


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
    chosen: Tensor | None = None  # [T, L, K], the experts of each token if a turn has any, see `expert_records`
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


def rows_of(
    trajectory: Trajectory,
    algo_of: Callable[[str], Algorithm],
    policies: Collection[str],
    by_role: TurnColumns,
    lag_of: Callable[[int], int],
    origin_of: Callable[[Turn, VersionSpan], Origin],
) -> list[Row]:
    """All rows of an episode, with every token that learns, however old: see `lag_bound`. Raises ValueError for a turn
    without any context: nothing predicts its first token."""
    episode_turns, column_kinds = trajectory.turns, {**known(), KEPT: column(KEPT)}
    continued = {turn.parent for turn in episode_turns}
    ragged_names = {name for name, column_kind in column_kinds.items() if column_kind.ragged}
    known_images = images.of_steps(trajectory.start, (turn.step for turn in episode_turns))
    scored_turns: set[int] = set()
    built_rows: list[Row] = []
    # From the leaves back, since each path to a leaf is one context that an engine had. Rows from the roots would
    # have to be split at every fork.
    for leaf in (turn for turn in episode_turns if turn.index not in continued):
        algorithm, prepared_columns = algo_of(leaf.role), by_role.get(leaf.role, {})
        token_ids: list[int] = []
        scored_places: list[int] = []
        observed_places: list[int] = []
        column_values: dict[str, list[float]] = {name: [] for name in (*BUILT_IN, *prepared_columns, *column_kinds)}
        for turn in (leaf_path := _path(episode_turns, leaf)):
            token_ids += turn.prompt_ids
            if not token_ids and turn.token_ids:
                raise ValueError(f"episode {trajectory.episode_id}, turn {turn.index}: sampled without any context")
            first_place = len(token_ids)
            token_ids += turn.token_ids
            # A turn that two leaves share is scored in the first path alone (law 2). Its tokens stay in the other
            # one, as context: the later tokens were sampled after them.
            if turn.index in scored_turns or not turn.learns or _is_masked(turn):
                continue
            scored_turns.add(turn.index)
            scored_places += range(first_place, len(token_ids))
            if algorithm.observes and turn.parent is not None:
                observed_places += (
                    position
                    for position in range(first_place - len(turn.prompt_ids), first_place)
                    # Tokens of images are no words: nobody can predict one from a softmax over the vocabulary.
                    if token_ids[position] < images.FIRST
                )
            token_count = len(turn.token_ids)
            column_values["behaviour"] += turn.logprobs
            for span in turn.spans:
                column_values["lag"] += [lag_of(span.version)] * (span.end - span.start)
                column_values["origin"] += [origin_of(turn, span)] * (span.end - span.start)
            column_values["episode"] += [trajectory.episode_id] * token_count
            # A number that depends on the name alone: to count roles as they come would give one role two numbers in
            # two groups of a step. Python's `hash` differs from process to process.
            column_values["role"] += [crc32(turn.role.encode())] * token_count
            column_values["turn"] += [turn.index] * token_count
            for name, column_T in prepared_columns.items():
                column_values[name] += [float(column_T[turn.index])] * token_count
            column_values["weight"] += [1.0] * token_count
            for name in column_kinds:
                column_values[name] += filled(name, turn.columns, token_count)
        if scored_places:
            built_rows.append(
                Row(
                    group_id=trajectory.group_id,
                    episode_id=trajectory.episode_id,
                    algo=algorithm,
                    policy=leaf.role if leaf.role in policies else None,
                    # Behind the last scored token nothing is predicted: the rest would be computed for nobody.
                    token_ids=tuple(token_ids[: scored_places[-1] + 1]),
                    place_S=torch.tensor(scored_places),
                    columns={
                        name: _tensor(name, numbers, column_kinds)
                        for name, numbers in column_values.items()
                        if name not in ragged_names
                    },
                    ragged={name: Ragged.of(column_values[name]) for name in ragged_names},
                    chosen=expert_records.read_experts((turn.experts for turn in leaf_path), scored_places[-1] + 1),
                    observed_O=torch.tensor(observed_places, dtype=torch.int64),
                    images={image.token: image for image in images.shown(token_ids, known_images)},
                )
            )
    return built_rows


def _tensor(name: str, numbers: Sequence[float], named: Mapping[str, Column]) -> Tensor:
    if name not in named:
        return torch.tensor(numbers, dtype=BUILT_IN.get(name, torch.float32))
    column_kind = named[name]
    return torch.tensor(numbers, dtype=getattr(torch, column_kind.dtype)).reshape(-1, *column_kind.shape)


def _is_masked(turn: Turn) -> bool:
    """Whether the environment keeps the turn out of the loss (a parse failure under such a policy, say)."""
    return turn.step is not None and turn.step.masked


def _path(turns: Sequence[Turn], leaf: Turn) -> list[Turn]:
    """The turns from a start to `leaf`, in order."""
    turns_upwards = [leaf]
    while (parent_index := turns_upwards[-1].parent) is not None:
        turns_upwards.append(turns[parent_index])
    return turns_upwards[::-1]
