"""Verdict of a reward source on a turn: its value, why it is that, and columns of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.tokens.columns import NONE, Columns


@dataclass(frozen=True, slots=True)
class Verdict:
    """A turn's `value`, and `columns` of its tokens (`agentrl.tokens.columns`), which the journal keeps with them.
    `reason` is the source's text for people: why the value is what it is."""

    value: float
    columns: Columns = field(default_factory=lambda: NONE)
    reason: str = ""
