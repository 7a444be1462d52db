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
    turns, column_kinds = trajectory.turns, {**known(), KEPT: column(KEPT)}
    continued = {turn.parent for turn in turns}
    ragged = {name for name, of in column_kinds.items() if of.ragged}
    known_images = images.of_steps(trajectory.start, (turn.step for turn in turns))
    seen: set[int] = set()
    rows: list[Row] = []
    # From the leaves back, since each path to a leaf is one context that an engine had. Rows from the roots would
    # have to be split at every fork.
    for leaf in (turn for turn in turns if turn.index not in continued):
        algo, prepared = algo_of(leaf.role), by_role.get(leaf.role, {})
        token_ids: list[int] = []
        place: list[int] = []
        observed: list[int] = []
        values: dict[str, list[float]] = {name: [] for name in (*BUILT_IN, *prepared, *column_kinds)}
        for turn in _path(turns, leaf):
            token_ids += turn.prompt_ids
            if not token_ids and turn.token_ids:
                raise ValueError(f"episode {trajectory.episode_id}, turn {turn.index}: sampled without any context")
            start = len(token_ids)
            token_ids += turn.token_ids
            # A turn that two leaves share is scored in the first path alone (law 2). Its tokens stay in the other
            # one, as context: the later tokens were sampled after them.
            if turn.index in seen or not turn.learns or _is_masked(turn):
                continue
            seen.add(turn.index)
            place += range(start, len(token_ids))
            if algo.observes and turn.parent is not None:
                observed += (
                    position
                    for position in range(start - len(turn.prompt_ids), start)
                    # Tokens of images are no words: nobody can predict one from a softmax over the vocabulary.
                    if token_ids[position] < images.FIRST
                )
            n = len(turn.token_ids)
            values["behaviour"] += turn.logprobs
            for span in turn.spans:
                values["lag"] += [lag_of(span.version)] * (span.end - span.start)
                values["origin"] += [origin_of(turn, span)] * (span.end - span.start)
            values["episode"] += [trajectory.episode_id] * n
            # A number that depends on the name alone: to count roles as they come would give one role two numbers in
            # two groups of a step. Python's `hash` differs from process to process.
            values["role"] += [crc32(turn.role.encode())] * n
            values["turn"] += [turn.index] * n
            for name, column_T in prepared.items():
                values[name] += [float(column_T[turn.index])] * n
            values["weight"] += [1.0] * n
            for name in column_kinds:
                values[name] += filled(name, turn.columns, n)
        if place:
            rows.append(
                Row(
                    group_id=trajectory.group_id,
                    episode_id=trajectory.episode_id,
                    algo=algo,
                    policy=leaf.role if leaf.role in policies else None,
                    # Behind the last scored token nothing is predicted: the rest would be computed for nobody.
                    token_ids=tuple(token_ids[: place[-1] + 1]),
                    place_S=torch.tensor(place),
                    columns={
                        name: _tensor(name, numbers, column_kinds)
                        for name, numbers in values.items()
                        if name not in ragged
                    },
                    ragged={name: Ragged.of(values[name]) for name in ragged},
                    chosen=expert_records.read_experts((turn.experts for turn in _path(turns, leaf)), place[-1] + 1),
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
