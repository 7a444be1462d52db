"""From a run file, a finished run and the user's wishes to the cases of a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from agentrl.config import RunConfig
from agentrl.errors import UsageError
from agentrl.planning.simulate.measured import MeasuredRun
from agentrl.planning.simulate.policies import others, ours, parse_close
from agentrl.planning.simulate.service import Constant, Episodes, parse_episodes
from agentrl.planning.simulate.simulation import SimulatedWorld
from agentrl.planning.simulate.sweep import SweepCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user asks to be compared, as he wrote it; empty texts mean the run file's own."""

    episode: str = ""
    step_s: float | None = None
    slots: str = ""
    max_lag: str = ""
    close: str = "full"
    gpus: int = 0
    scale_batch: bool = False
    others: bool = True
    steps: int | None = None
    seed: int = 0


def plan(config: RunConfig, wishes: Wishes, measured: MeasuredRun | None) -> list[SweepCase]:
    """The cases in the order of their rows: by slots or split, lag and policy. That of the run file is among them.
    Raises UsageError."""
    own, found = _world(config, wishes, measured), list[SweepCase]()
    size, lag, steps = config.rollout.group_size, config.buffer.max_lag, wishes.steps
    lags = _numbers("--max-lag", wishes.max_lag, least=0) or [lag]
    closes = [parse_close(text.strip(), size) for text in wishes.close.split(",")]
    present = parse_close(_closes(config), size)
    for split, world, is_own in _worlds(config, wishes, own):
        if wishes.others:
            for policy in others(lags[0], size)[:1]:  # synchronous, whatever the lag bound
                found.append(SweepCase(world=world, policy=policy, seed=wishes.seed, steps=steps, split=split))
        for one in sorted({*lags, lag} if is_own else lags):
            if wishes.others and one in lags:
                found += [
                    SweepCase(world=world, policy=policy, seed=wishes.seed, steps=steps, split=split)
                    for policy in others(one, size)[1:]
                ]
            is_present = is_own and one == lag
            mine = closes if one in lags else []
            if is_present and present not in mine:
                mine = [*mine, present]
            found += [
                SweepCase(
                    world=world,
                    policy=policy,
                    seed=wishes.seed,
                    steps=steps,
                    split=split,
                    present=is_present and close == present,
                    ours=True,
                )
                for close, policy in zip(mine, ours(one, mine, wait=config.buffer.patience), strict=True)
            ]
    return found


def limits(config: RunConfig, measured: MeasuredRun | None) -> Iterator[str]:
    """What of the run file a simulation of `measured` episodes leaves out, or of others, one line each."""
    if config.buffer.order != "oldest":
        yield f"not simulated: buffer.order = {config.buffer.order!r}; rows of ours take the oldest groups first"
    if config.buffer.max_tokens is not None:
        yield f"not simulated: buffer.max_tokens = {config.buffer.max_tokens}; groups wait however long they are"
    if measured is None and config.buffer.skip_without_signal is True:
        yield "not simulated: buffer.skip_without_signal; every group counts as one with signal"


def _world(config: RunConfig, wishes: Wishes, measured: MeasuredRun | None) -> SimulatedWorld:
    """The run file's own world."""
    episodes: Episodes
    if wishes.episode:
        episodes = parse_episodes(wishes.episode, deadline_s=config.rollout.episode_deadline_s)
    elif measured is not None:
        episodes = measured.episodes
    else:
        raise UsageError("no times: give a finished run (--from RUN), or --episode lognormal:1 with --step-s SECONDS")
    if wishes.step_s is None and measured is None:
        raise UsageError("no time of an optimizer step: give --step-s SECONDS, or a finished run (--from RUN)")
    if wishes.step_s is not None and not 0 < wishes.step_s < math.inf:
        raise UsageError(f"--step-s {wishes.step_s:g}: must be a number of seconds above 0, such as 30")
    learner = measured.steps if measured is not None and wishes.step_s is None else Constant(wishes.step_s or 0.0)
    return SimulatedWorld(
        episodes=episodes,
        learner=learner,
        slots=config.rollout.max_running,
        group_size=config.rollout.group_size,
        groups_per_step=config.buffer.groups_per_step,
        group_deadline_s=config.rollout.group_deadline_s,
        push_s=0.0 if measured is None else measured.push_s,
        between_s=0.0 if measured is None else measured.between_s,
        skip_at_most=config.buffer.skip_at_most if config.buffer.skips else 0.0,
    )


def _worlds(config: RunConfig, wishes: Wishes, own: SimulatedWorld) -> Iterator[tuple[str, SimulatedWorld, bool]]:
    """Each world with its split of GPUs, and whether it is the run file's own, which is always there."""
    if wishes.gpus:
        if wishes.slots:
            raise UsageError(f"--slots {wishes.slots}: with --gpus the slots follow from the split; leave one out")
        if wishes.gpus < 2:
            raise UsageError(f"--gpus {wishes.gpus}: engines and learner need one each; give at least 2")
        engines = max(1, sum(len(place) for place in config.engine.places))
        for mine in range(1, wishes.gpus):
            learners = wishes.gpus - mine
            slots = max(own.group_size, round(own.slots * mine / engines))
            world = replace(own, slots=slots, learner=own.learner.sped_up(learners))
            yield f"{mine} + {learners}", world, (mine, learners) == (engines, 1)
        if engines + 1 != wishes.gpus:
            yield f"{engines} + 1", own, True
        return
    for slots in sorted({*_numbers("--slots", wishes.slots, least=1), own.slots}):
        groups = own.groups_per_step
        if wishes.scale_batch:
            groups = max(1, round(groups * slots / own.slots))
        yield "", replace(own, slots=slots, groups_per_step=groups), slots == own.slots


def _numbers(option: str, text: str, *, least: int) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")}) if text else []
    except ValueError:
        raise UsageError(f"{option} {text!r}: write whole numbers as {least},{least + 1}") from None
    if found and found[0] < least:
        raise UsageError(f"{option} {text!r}: no number may be below {least}")
    return found


def _closes(config: RunConfig) -> str:
    """The run file's way to close groups, as `parse_close` reads it."""
    return "full" if config.quorum is None else f"{config.quorum}@{config.buffer.quorum_after_s:g}"
