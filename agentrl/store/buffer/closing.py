"""When a group closes: small objects with one rule each, cheap for any number of stragglers.

A group closes by itself once all its members have ended. A policy may close it sooner; the members that still run go on
as late members, and a later step trains them against the group's record. A policy sees only when the scored members
ended; it never knows the store or a token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class ClosePolicy(Protocol):
    """Decides whether a group closes before all its members have ended."""

    @property
    def at_least(self) -> int:
        """A group with fewer scored members than this never closes early, and `closes` is not asked."""
        ...

    def closes(self, scored_s: Sequence[float], now: float) -> bool:
        """Whether a group closes at `now`; `scored_s`: when its scored members ended, earliest first. Seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Full:
    """Wait for every member. Each member is judged against all its siblings; the slowest one sets the pace."""

    @property
    def at_least(self) -> int:
        return sys.maxsize

    def closes(self, scored_s: Sequence[float], now: float) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Quorum:
    """Close once `k` members are scored and `after_s` seconds have passed since the k-th of them ended.

    The baseline then comes from the fast members: of each episode from the first `k` - 1 others that ended, so that it
    depends neither on the episode it judges nor on when that one ended, and leave-one-out stays unbiased (see
    `train.samples`). Late members are trained too, so no length is favoured."""

    k: int
    after_s: float

    @property
    def at_least(self) -> int:
        return self.k

    def closes(self, scored_s: Sequence[float], now: float) -> bool:
        return len(scored_s) >= self.k and now - scored_s[self.k - 1] >= self.after_s


FULL = Full()


def close_policy(quorum: int | None, *, after_s: float) -> ClosePolicy:
    """The policy of a run whose groups close with so many scored members (None: with the last one); `after_s` is the
    setting `buffer.quorum_after_s`."""
    return FULL if quorum is None else Quorum(quorum, after_s)
