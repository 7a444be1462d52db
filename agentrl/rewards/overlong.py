"""Soft overlong punishment: a turn pays for each token that brings it near its limit (DAPO, Yu et al. 2025, sec. 3.4).

    reward = 0                                 n <= most - margin
             (most - margin - n) / margin      between
             -1                                n >= most

n are the tokens that the policy sampled in the turn. It is a reward of the turn that earned it, and the policy chooses
n: the gradient is that of the return with it, without bias. That is another return: a policy that would do better with
long turns is kept from them. Knows no store.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.records import Trajectory


@dataclass(frozen=True, slots=True)
class Overlong:
    """The punishment of the last turn of an episode so far, from -1 to 0."""

    most: int
    margin: int

    def __call__(self, seen: Trajectory) -> float:
        over = len(seen.turns[-1].token_ids) - (self.most - self.margin)
        return -min(max(over / self.margin, 0.0), 1.0)
