"""The policies that a simulation compares: lag bounds, and ways to close a group."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from agentrl.errors import UsageError
from agentrl.store.buffer.closing import FULL, ClosePolicy, Quorum


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a simulated run treats stragglers. `wait`: of the time of the steps, so much at most the learner waits at the
    lag bound, where groups then close; None: it does neither."""

    name: str
    max_lag: int
    close: ClosePolicy = FULL
    wait: float | None = None

    @property
    def quorum(self) -> int | None:
        """How many scored members close a group; None: all of them."""
        return None if self.close == FULL else self.close.at_least


def parse_close(text: str, group_size: int) -> tuple[str, ClosePolicy]:
    """`full`; `K/N`, the share of a group that closes it, or `K`, so many members; and `@S` for seconds that are then
    waited for the others. Raises UsageError."""
    if text == "full":
        return text, FULL
    close_match = re.fullmatch(r"(\d+)(?:/(\d+))?(?:@(\d+(?:\.\d*)?))?", text)
    if close_match is None or close_match[2] == "0":
        raise UsageError(f"--close {text!r} is not known: give full, 7/8, or 7/8@10 to wait 10 s more")
    is_share = close_match[2] is not None
    quorum_size = math.ceil(int(close_match[1]) * group_size / int(close_match[2])) if is_share else int(close_match[1])
    if is_share and quorum_size == group_size and int(close_match[1]) < int(close_match[2]):
        quorum_size -= 1  # a small group's quorum leaves one out as well
    # One scored member has nobody to be compared with.
    if not 2 <= quorum_size <= group_size:
        raise UsageError(
            f"--close {text!r} makes a quorum of {quorum_size}: it must be from 2 to the group's {group_size}"
        )
    after_s = float(close_match[3] or 0.0)
    return f"{quorum_size} of {group_size}" + (f" + {after_s:g} s" if after_s else ""), Quorum(quorum_size, after_s)


def policies(max_lag: int, closes: list[tuple[str, ClosePolicy]], *, wait: float = math.inf) -> list[Policy]:
    """One policy for each way to close a group; `wait` as `buffer.wait_at_bound`."""
    return [Policy(name=name, max_lag=max_lag, close=close, wait=wait) for name, close in closes]
