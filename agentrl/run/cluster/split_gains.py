"""The gain of another split of the GPUs, by simulation with the run's own times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from agentrl.config import RunConfig
from agentrl.config.cluster import Split
from agentrl.planning.simulate.measured import MeasuredRun
from agentrl.planning.simulate.sweep import SweepCase, Wishes, plan

_STEPS = 24  # of a simulated run
_FEWEST, _EPISODES = 6, 20_000  # steps, and episodes, of one that is simulated while its run goes on


def gains(
    config: RunConfig,
    measured: MeasuredRun,
    present: Split,
    beside: Sequence[Split],
    *,
    faster: Callable[[int], float],
) -> dict[Split, float]:
    """By split, the share of more tokens that would be trained a second than with the `present` one, with which the run
    `measured`; `faster` says how many times as fast the learner is over so many ranks."""
    batch = config.rollout.group_size * config.buffer.groups_per_step
    steps = min(_STEPS, max(_FEWEST, _EPISODES // batch))
    now = next(case for case in plan(config, Wishes(steps=steps), measured) if case.present)

    def split_so(split: Split) -> SweepCase:
        # Places in proportion to engines: with more of them each gets as many episodes as before. To keep the places as
        # they are would show a gain of none, since the same number of episodes would merely be spread.
        slots = max(now.world.group_size, round(now.world.slots * split.engines / present.engines))
        learner = now.world.learner.sped_up(faster(split.ranks))
        return replace(now, world=replace(now.world, slots=slots, learner=learner))

    first, *others = (case.run().useful for case in (now, *map(split_so, beside)))
    return {split: useful / first - 1 if first else 0.0 for split, useful in zip(beside, others, strict=True)}
