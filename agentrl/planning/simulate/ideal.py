"""How close any schedule of a simulated run can come to the bound: one to which groups cost nothing, and lag little.

A free slot begins the next episode at once. As soon as a step's episodes have ended, of whichever groups, the learner
trains them. As many may wait for it as the steps can train in which their newest tokens are within the lag bound; one
that ends beyond them keeps its slot until there is a place, where a real run would drop it. So no schedule that does
not know beforehand how long an episode takes trains more of the same episodes in the same time. Never knows a group, a
token or a close policy.
"""

from __future__ import annotations

import heapq
from random import Random

from agentrl.planning.simulate.service import Play
from agentrl.planning.simulate.simulation import SimulatedWorld


def best_of_bound(world: SimulatedWorld, max_lag: int, *, steps: int, start_up: int, seed: int = 0) -> float:
    """The share of the bound that such a schedule reaches, in the terms of `Simulation` with the same arguments: the
    episodes take the same times."""
    plays_chance, learner_chance = Random(seed), Random(seed + 1)
    batch, plays = world.groups_per_step * world.group_size, list[Play]()
    ends = list[float]()  # a heap: when the running episodes end
    now = learner_free = measured_from = busy_s = 0.0
    began = ended = taken = 0  # episodes that began, and those that ended and wait for the learner; steps
    while taken < steps or now < learner_free:
        idle = now >= learner_free
        if idle and ended >= batch:
            tokens = sum(play.tokens for play in plays[taken * batch : (taken + 1) * batch])
            step_s = world.learner.seconds(tokens, learner_chance) + world.between_s
            taken, ended, learner_free, idle = taken + 1, ended - batch, now + step_s, False
            busy_s += step_s if taken > start_up else 0.0
        kept = max(0, ended - (max_lag + idle) * batch)  # slots of episodes without a place
        while len(ends) + kept < world.slots:
            if began == len(plays):
                plays += world.episodes.group(world.group_size, plays_chance)
            heapq.heappush(ends, now + plays[began].duration_s)
            began += 1
        now = ends[0] if idle or (ends and ends[0] < learner_free) else learner_free
        while ends and ends[0] <= now:
            heapq.heappop(ends)
            ended += 1
        if now == learner_free and taken == start_up:
            measured_from = now
    cohort = plays[start_up * batch : (steps - max_lag - 1) * batch]
    played_s = sum(play.duration_s for play in cohort) / len(cohort)
    bound_s = min(world.slots / played_s, batch * (steps - start_up) / busy_s)
    return (steps - start_up) * batch / (now - measured_from) / bound_s
