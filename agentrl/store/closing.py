"""When a group closes: small objects, one rule each, that any number of stragglers cannot make expensive.

A group closes by itself once all its members have ended. A policy may close it sooner; the members that still run go on
as late members, and are trained in a later step against what the group's record says. A policy sees when the scored
members ended and nothing else; it never knows the store, nor a token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


class ClosePolicy(Protocol):
    """Decides whether a group closes before all its members have ended."""

    @property
    def at_least(self) -> int:
        """Scored members below which no group closes early: only groups with so many are looked at."""
        ...

    def closes(self, scored_s: Sequence[float], now: float) -> bool:
        """Whether a group closes at `now`; `scored_s` says when its scored members ended, earliest first. Seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Full:
    """Wait for every member. Nothing is judged against fewer siblings than it has; the slowest one sets the pace."""

    @property
    def at_least(self) -> int:
        return sys.maxsize

    def closes(self, scored_s: Sequence[float], now: float) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Quorum:
    """Close once `k` members are scored and `after_s` seconds went by since the k-th of them ended.

    The members that judge are then the fast ones: with leave-one-out that biases no gradient (a baseline never depends
    on the episode it judges), and as late members are trained too, no length is favoured."""

    k: int
    after_s: float

    @property
    def at_least(self) -> int:
        return self.k

    def closes(self, scored_s: Sequence[float], now: float) -> bool:
        return len(scored_s) >= self.k and now - scored_s[self.k - 1] >= self.after_s


FULL = Full()


def close_policy(kind: Literal["full", "quorum"], *, quorum: int, after_s: float) -> ClosePolicy:
    """The policy that the settings `buffer.close`, `buffer.quorum` and `buffer.quorum_after_s` name."""
    return FULL if kind == "full" else Quorum(quorum, after_s)
