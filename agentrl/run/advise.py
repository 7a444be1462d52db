"""What to change in a run, from what it measured of itself. Every proposal is simulated with the run's own times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl.config import RunConfig
from agentrl.config.cluster import Split
from agentrl.planning.simulate.measured import MeasuredRun, measure
from agentrl.planning.simulate.sweep import (
    SweepCase,
    SweepRow,
    Wishes,
    advice,
    neighbours,
    not_reproduced,
    plan,
    run_all,
)
from agentrl.run.run_folder import RunDir
from agentrl.run.take_orders import returns_of
from agentrl.store import RunStore

_BUSY = 0.1  # an idle share below this is not worth a change
_STEPS = 24  # of a simulated run
_FEWEST, _EPISODES = 6, 20_000  # steps, and episodes, of one that is simulated while its run goes on


def advise(path: Path, gpus: int = 0) -> Iterator[str]:
    """Lines for a reader. Raises UsageError if the run is too short to say anything."""
    run = RunDir.open(path)
    config = run.config()
    with RunStore.read(run.store_path) as store:
        measured = measure(store, config.buffer, end=config.train.steps, returns=returns_of(config))
        turns = [row.values for row in store.metrics("step")] if config.engine.colocated else []
    yield f"The learner was idle {measured.idle:.0%} of its time."
    if measured.skipped:
        times = 1 / (1 - measured.skipped)
        yield (
            f"{measured.skipped:.0%} of its groups left without signal (buffer.skip_without_signal): a step sampled "
            f"{times:.1f} times the episodes that it trained."
        )
    rows = run_all(plan(config, neighbours(config, steps=_STEPS), measured))
    if other := not_reproduced(rows, measured.idle):
        yield other
        return
    yield advice(rows)
    turns = [step for step in turns if "asleep_s" in step]
    yield _turns(turns) if turns else _side(measured, rows)
    slots = config.rollout.max_running
    more = Wishes(slots=f"{max(config.rollout.group_size, slots // 2)},{2 * slots}", others=False, steps=_STEPS)
    present, *others = _of(run_all(plan(config, more, measured)))
    for row in others:
        name = f"rollout.max_running = {row.case.world.slots}"
        yield f"With {name}, if the engines are as fast then: {_gain(row, present)}"
    groups = config.buffer.groups_per_step
    for count in sorted({max(1, groups // 2), 2 * groups} - {groups}):
        batch = [
            replace(case, world=replace(case.world, groups_per_step=count), present=False)
            for case in plan(config, Wishes(others=False, steps=_STEPS), measured)
            if case.present
        ]
        yield f"With buffer.groups_per_step = {count}: {_gain(run_all(batch)[0], present)}"
    if gpus:
        yield advice(run_all(plan(config, Wishes(gpus=gpus, others=False, steps=_STEPS), measured)))


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
    now = next(case for case in plan(config, Wishes(others=False, steps=steps), measured) if case.present)

    def split_so(split: Split) -> SweepCase:
        slots = max(now.world.group_size, round(now.world.slots * split.engines / present.engines))
        learner = now.world.learner.sped_up(faster(split.ranks))
        return replace(now, world=replace(now.world, slots=slots, learner=learner))

    first, *others = (case.run().useful for case in (now, *map(split_so, beside)))
    return {split: useful / first - 1 if first else 0.0 for split, useful in zip(beside, others, strict=True)}


def _of(rows: list[SweepRow]) -> list[SweepRow]:
    """The run's own row first."""
    return sorted(rows, key=lambda row: not row.case.present)


def _gain(row: SweepRow, present: SweepRow) -> str:
    gain = row.found.episodes_s / present.found.episodes_s - 1
    dropped = f"{row.found.tokens_discarded:.1%} of the tokens dropped instead of {present.found.tokens_discarded:.1%}"
    return f"{gain:+.0%} episodes trained a second, {dropped}, learner idle {row.found.idle:.0%}."


def _turns(steps: Sequence[Mapping[str, Any]]) -> str:
    """What a second GPU would gain where engine and learner take turns on one: then the slower of the two counts, not
    the sum."""

    def mean(*names: str) -> float:
        return fmean(sum(step[name] for name in names) for step in steps)

    learns, asleep = mean("busy_s"), mean("asleep_s")
    alone = mean("sleep_s", "restore_s", "busy_s", "park_s")
    samples = max(0.0, mean("idle_s") - max(0.0, asleep - alone))  # the learner waits for the engines' waking, too
    now, apart = samples + asleep, max(samples, learns)
    return (
        f"Engine and learner take turns on one GPU: a step has {samples:.3g} s of sampling, {learns:.3g} s of learning "
        f"and {asleep - learns:.3g} s in which the engine slept for the swap of {mean('swap_bytes') / 1e9:.2f} GB and "
        f"new weights. With a GPU for each (engine.colocated = false) it would take {apart:.3g} s in place of "
        f"{now:.3g}: {now / apart:.1f} times the steps."
    )


def _side(measured: MeasuredRun, rows: list[SweepRow]) -> str:
    present = next(row for row in rows if row.case.present).found
    if measured.idle > _BUSY and present.idle > _BUSY:
        return "The learner waits for episodes: a GPU more belongs to the engines."
    if present.of_bound < 1 - _BUSY:
        return "Neither side is busy all the time: change lag, quorum or batch before you add GPUs."
    return "The learner is busy: a GPU more belongs to it."
