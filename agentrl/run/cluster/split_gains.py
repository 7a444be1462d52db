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
    step_episodes = config.rollout.group_size * config.buffer.groups_per_step
    step_count = min(_STEPS, max(_FEWEST, _EPISODES // step_episodes))
    present_case = next(
        sweep_case for sweep_case in plan(config, Wishes(steps=step_count), measured) if sweep_case.present
    )

    def split_so(split: Split) -> SweepCase:
        # Places in proportion to engines: with more of them each gets as many episodes as before. To keep the places as
        # they are would show a gain of none, since the same number of episodes would merely be spread.
        slot_count = max(
            present_case.world.group_size, round(present_case.world.slots * split.engines / present.engines)
        )
        faster_learner = present_case.world.learner.sped_up(faster(split.ranks))
        return replace(present_case, world=replace(present_case.world, slots=slot_count, learner=faster_learner))

    present_useful, *other_useful = (sweep_case.run().useful for sweep_case in (present_case, *map(split_so, beside)))
    return {
        neighbour: split_useful / present_useful - 1 if present_useful else 0.0
        for neighbour, split_useful in zip(beside, other_useful, strict=True)
    }
