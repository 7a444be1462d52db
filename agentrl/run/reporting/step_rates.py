"""How fast and how busy a learner was, from the rows of its steps: one definition for every screen.

The learner's time is the wall clock from one recorded step to the next. `busy_s` is its step, `idle_s` its wait for
groups or engines; checkpoints, exports, proofs of delivery and records belong to neither, so that busy and idle alone
add up to four fifths of the time in some runs. A token is trained if it was scored in a step that changed the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
"""The values of a step."""


def wall_s(row: Row) -> float:
    """The seconds of a step, from the record of the step before to its own; pauses of the run are left out."""
    return float(row.get("wall_s") or 0.0) or float(row.get("busy_s") or 0.0) + float(row.get("idle_s") or 0.0)


def trained_tokens(row: Row) -> int:
    """The sampled tokens that a step trained: none if it did not change the weights."""
    return int(row.get("tokens_scored") or 0) if row.get("updated") else 0


def idle_share(rows: Iterable[Row]) -> float:
    """The share of the learner's time in which it waited, in [0, 1]; 0 without steps."""
    time_pairs = [(float(step_row.get("idle_s") or 0.0), wall_s(step_row)) for step_row in rows]
    total_s = sum(step_wall_s for _, step_wall_s in time_pairs)
    return sum(idle_s for idle_s, _ in time_pairs) / total_s if total_s else 0.0


def trained_per_s(rows: Iterable[Row]) -> float:
    """Trained tokens per second of the learner's time; 0 without steps."""
    token_pairs = [(trained_tokens(step_row), wall_s(step_row)) for step_row in rows]
    total_s = sum(step_wall_s for _, step_wall_s in token_pairs)
    return sum(token_count for token_count, _ in token_pairs) / total_s if total_s else 0.0
