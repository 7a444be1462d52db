"""How many groups may start now: one pure function, no state, no clock.

It bounds three things at once. Concurrency: a group starts only while fewer than `max_running` episodes run or wait to
run. Workers play no more than that at once, so of the last group some members may wait for a place; if a group had to
wait until all its members have one, places would stand empty behind each straggler. Staleness (law 5): a group is
admitted only if training in the order of admission reaches it at most `max_lag` optimizer steps after the current
weights. Memory: of a buffer that is full of tokens.

Source: AReaL (Fu et al. 2025, arXiv:2505.24298), eq. 3, in the form of its staleness manager, counted in groups:
``min(K - running, (max_lag + step + 1) * B - (accepted + running))``, where a part of a group's places is enough.

Worked example, B = 2 groups a step, max_lag = 1, nothing trained yet: (1 + 0 + 1) * 2 = 4 groups may start. The first
two are for step 1 and sampled by the weights of step 0 (lag 0). The next two are for step 2 and are one step old when
they are trained (lag 1). With max_lag = 0 only the groups of the next step may start: synchronous training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from agentrl.tokens.staleness import lag_in_step, last_step, trains


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionBounds:
    """The bounds of admission in a run file, see `admissible_groups`; `max_replays` is how often at most a task that
    infrastructure lost is played again."""

    group_size: int
    groups_per_step: int
    max_lag: int
    max_running: int
    steps_total: int
    max_replays: int = 0
    max_tokens: int | None = None

    def too_old(self, step: int, made_at: int) -> str:
        """Why optimizer step `step` trains no token of the weights of `made_at`; "" if it does."""
        if trains(lag_in_step(step, made_at), self.max_lag):
            return ""
        return f"older than step {step} may train (buffer.max_lag = {self.max_lag})"


class Room(NamedTuple):
    """How many groups may start now. `replays` of them are tasks that infrastructure lost; the others are the tasks at
    `first`, `first` + 1, …"""

    groups: int
    replays: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work under way. Dropped groups (expired, failed) are not counted, so that other groups take their place."""

    running_episodes: int  # episodes admitted and not ended
    running_groups: int  # groups admitted and not closed
    accepted_groups: int  # closed groups that will be or were trained: scored, taken, trained
    buffered_tokens: int = 0  # sampled, of ended episodes that wait to be trained


def admissible_groups(load: Load, bounds: AdmissionBounds, *, step: int) -> int:
    """How many groups of `group_size` episodes may start now, at least 0.

    `step` is the optimizer step of the weights that sample now, `max_lag` the bound in steps, `max_running` the bound
    in episodes; never more groups than `steps_total` steps of `groups_per_step` need. While `max_tokens` or more are
    buffered, only as many groups may be there as the next step needs, as if `max_lag` were 0: a buffer that were closed
    altogether might hold too few groups for a step, and learner and workers would wait for each other."""
    # Rounded up: a group starts as soon as one place is free. Rounded down, places would stand empty behind each
    # straggler until a whole group fits. Workers hold `max_running` themselves: the rest of the group waits, oldest
    # group first, and no more episodes run than the setting says.
    free_places = math.ceil((bounds.max_running - load.running_episodes) / bounds.group_size)
    # A full buffer narrows the horizon to the next step and does not close admission. If it did, a buffer that is full
    # of groups which the order or the lag bound keeps from this step would leave the learner without enough of them,
    # and nothing would ever drain it.
    is_full = bounds.max_tokens is not None and load.buffered_tokens >= bounds.max_tokens
    horizon_step = min(last_step(step, 0 if is_full else bounds.max_lag), bounds.steps_total)
    # Groups that were dropped are not in the load, so others take their places. Groups that run count as if they were
    # trained in the order of their admission: so counting alone keeps to the bound of law 5. An order that passes old
    # groups over makes them stale, and the buffer drops and counts them.
    remaining_groups = horizon_step * bounds.groups_per_step - (load.accepted_groups + load.running_groups)
    return max(0, min(free_places, remaining_groups))
