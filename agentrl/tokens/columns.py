"""Named per-token columns: what an engine says of each sampled token besides its log-prob and weight version.

A column is registered once, and travels by itself from the engine's chunks through turn, journal and rows to the loss:
the log-probs of a teacher, say, or what a server adds to a token. Log-probs and versions have fields of their own in
`agentrl.records`, since laws 1 and 5 check them; the experts of a mixture have one because they cover the prompt too.
A *ragged* column holds for each token as many numbers as that token needs.

A package offers its columns under the entry-point group `agentrl.columns`; a program may `register` one. Never knows
what a column means.

Worked example: `TEACHER = Column(name="teacher_logprobs", default=0.0)` under the entry point `teacher_logprobs =
"my_package:TEACHER"`. An engine sets `Chunk(..., columns={"teacher_logprobs": (-0.5, -1.25)})`, or its server adds
`"teacher_logprobs"` to the entries of `logprobs.content`; the loss reads `tokens["teacher_logprobs"]`, a tensor [K].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Literal, cast

from agentrl import registry
from agentrl.errors import UsageError

Dtype = Literal["float32", "float64", "int32", "int64", "uint8"]

Columns = Mapping[str, tuple[float, ...]]
"""By column, the values of some tokens, one token after the other: `width` numbers for each or, in a ragged column, a
head and as many numbers as it says, whatever its sign."""

NONE: Final[Columns] = {}

KEPT: Final = "kept"
"""The column of `agentrl.tokens.sampling_mask`: every process knows it."""

_TAKEN: Final = frozenset(
    {"behaviour", "lag", "origin", "episode", "role", "turn", "weight", "advantage", "proximal", "values"}
)
"""Columns that the learner makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A value, an array of `shape` or, if `ragged`, a head and its numbers for each sampled token. It is kept as
    `dtype`, in the journal and in tensors; `default` stands for it where no value came, for a ragged one a head 0."""

    name: str
    dtype: Dtype = "float32"
    shape: tuple[int, ...] = ()
    # NaN by default, so that a loss that reads a token without a value shows it at once; a 0 would be a log-prob of
    # 1.
    default: float = math.nan
    ragged: bool = False

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or len(self.name) > 255:
            raise UsageError(f"column {self.name!r}: give it a name of letters, digits and underscores")
        if self.name in _TAKEN or (self.name == KEPT and not self.ragged):
            raise UsageError(f"column {self.name!r}: the learner makes one of that name: give it another name")
        if self.ragged and (self.shape or self.default or "float" in self.dtype):
            raise UsageError(f"column {self.name!r}: a ragged one holds whole numbers, with default 0 and no shape")
        if "float" not in self.dtype and not isinstance(self.default, int):
            raise UsageError(f"column {self.name!r}: {self.dtype} has no {self.default}: give it a whole default")

    @property
    def width(self) -> int:
        """Numbers per token, of one that is not ragged."""
        return math.prod(self.shape)

    def size(self, values: Sequence[float], count: int) -> int:
        """How many of `values` belong to the first `count` tokens. They may be fewer than it says."""
        if not self.ragged:
            return count * self.width
        position = 0
        for _ in range(count):
            position += 1 + abs(int(values[position])) if position < len(values) else 1
        return position


_KEPT: Final = Column(name=KEPT, dtype="int32", default=0, ragged=True)


TEACHER: Final = Column(name="teacher", default=1.0)
"""Log-prob in nats of each token under a teacher; 1, which is none, if it did not score the token."""


def register(column: Column) -> None:
    """Offer a column for this process. Every process of a run needs it: a package uses an entry point instead."""
    registry.register("columns", column.name, lambda: column)


def known() -> dict[str, Column]:
    """All registered columns by name, without our own."""
    return {column_name: column(column_name) for column_name in registry.ids("columns")}


def column(name: str) -> Column:
    """A registered column. Raises UnknownIdError."""
    # Answered without the registry, for speed: where top_p, top_k or min_p cut, every chunk of tokens has this column.
    if name == KEPT:
        return _KEPT
    registered = cast(Any, registry.resolve("columns", name))
    return registered if isinstance(registered, Column) else registered()


def check(columns: Columns, n: int) -> None:
    """Raises ValueError if a column does not have its numbers for each of `n` tokens, UnknownIdError if one is not
    registered."""
    for column_name, column_values in columns.items():
        if len(column_values) != (expected_count := column(column_name).size(column_values, n)):
            raise ValueError(
                f"column {column_name!r} has {len(column_values)} numbers for {n} tokens, should have {expected_count}"
            )


def joined(parts: Sequence[tuple[int, Columns]]) -> Columns:
    """The columns of tokens that came in parts, each a number of tokens and their columns. A column that some of them
    lack has its default there."""
    column_names = dict.fromkeys(chain.from_iterable(part_columns for _, part_columns in parts))
    return {
        column_name: tuple(
            chain.from_iterable(filled(column_name, part_columns, token_count) for token_count, part_columns in parts)
        )
        for column_name in column_names
    }


def filled(name: str, columns: Columns, n: int) -> tuple[float, ...]:
    """The values of a column for `n` tokens, or its default for each of them."""
    if name in columns:
        return columns[name]
    named_column = column(name)
    return (named_column.default,) * (n * named_column.width)


def first(columns: Columns, count: int) -> Columns:
    """The columns of the first `count` tokens."""
    return {
        column_name: column_values[: column(column_name).size(column_values, count)]
        for column_name, column_values in columns.items()
    }
