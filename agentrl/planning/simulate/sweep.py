"""Many simulated runs beside each other: a run file, a finished run and the user's wishes become the cases of a sweep,
and their results a table and one line of advice.

`best_of_bound` says how close to the bound any schedule can come at all. Never knows the rules by which groups close
and leave.
"""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from rich.table import Table

from agentrl.config import RunConfig
from agentrl.errors import UsageError
from agentrl.planning.simulate.measured import START_UP, MeasuredRun
from agentrl.planning.simulate.policies import Policy, parse_close, policies
from agentrl.planning.simulate.service import Constant, Episodes, Play, parse_episodes
from agentrl.planning.simulate.simulation import SimulatedWorld, Simulation, SimulationResult


def best_of_bound(world: SimulatedWorld, max_lag: int, *, steps: int, start_up: int, seed: int = 0) -> float:
    """The share of the bound that the best schedule reaches: one to which groups cost nothing, and lag little. The
    arguments are those of `Simulation`, and its episodes take the same times.

    A free slot begins the next episode at once. As soon as a step's episodes have ended, of whichever groups, the
    learner trains them. As many may wait for it as the steps can train in which their newest tokens are within the lag
    bound; one that ends beyond them keeps its slot until there is a place, where a real run would drop it. So no
    schedule that does not know beforehand how long an episode takes trains more of the same episodes in the same time.
    """
    plays_chance, learner_chance = Random(seed), Random(seed + 1)
    batch_size, plays = world.groups_per_step * world.group_size, list[Play]()
    episode_ends = list[float]()  # a heap: when the running episodes end
    now = learner_free = measured_from = busy_s = 0.0
    # Episodes that began, those that ended and wait for the learner, and steps.
    began_count = ended_count = taken_steps = 0
    while taken_steps < steps or now < learner_free:
        is_idle = now >= learner_free
        if is_idle and ended_count >= batch_size:
            step_tokens = sum(play.tokens for play in plays[taken_steps * batch_size : (taken_steps + 1) * batch_size])
            step_s = world.learner.seconds(step_tokens, learner_chance) + world.between_s
            taken_steps, ended_count = taken_steps + 1, ended_count - batch_size
            learner_free, is_idle = now + step_s, False
            busy_s += step_s if taken_steps > start_up else 0.0
        # An episode without a place in a batch within the lag bound keeps its slot, where a real run would drop it:
        # so the ideal never trains fewer, and the bound stays one.
        kept_slots = max(0, ended_count - (max_lag + is_idle) * batch_size)  # slots of episodes without a place
        while len(episode_ends) + kept_slots < world.slots:
            if began_count == len(plays):
                plays += world.episodes.group(world.group_size, plays_chance)
            heapq.heappush(episode_ends, now + plays[began_count].duration_s)
            began_count += 1
        now = episode_ends[0] if is_idle or (episode_ends and episode_ends[0] < learner_free) else learner_free
        while episode_ends and episode_ends[0] <= now:
            heapq.heappop(episode_ends)
            ended_count += 1
        if now == learner_free and taken_steps == start_up:
            measured_from = now
    cohort = plays[start_up * batch_size : (steps - max_lag - 1) * batch_size]
    played_s = sum(play.duration_s for play in cohort) / len(cohort)
    bound_s = min(world.slots / played_s, batch_size * (steps - start_up) / busy_s)
    return (steps - start_up) * batch_size / (now - measured_from) / bound_s


_AS_GOOD = 0.01  # of throughput: less is no reason to change a setting
# `longest`, the hundredth that straggles, is then over eighty episodes at least.
_MEASURED_EPISODES = 8_000  # of a simulated run, at least
_MEASURED_STEPS = 16  # and of these
# Starting processes takes longer than a smaller sweep.
_IN_PARALLEL = 200_000  # episodes from which a sweep takes every core


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCase:
    """One simulated run. `present`: it is the one that the run file asks for."""

    world: SimulatedWorld
    policy: Policy
    seed: int
    steps: int | None = None
    split: str = ""
    present: bool = False

    @property
    def start_up(self) -> int:
        """Steps that are not measured."""
        return self.policy.max_lag + START_UP

    @property
    def measured_steps(self) -> int:
        """Steps after the start-up."""
        batch_size = self.world.groups_per_step * self.world.group_size
        return self.steps or max(_MEASURED_STEPS, -(-_MEASURED_EPISODES // batch_size))

    @property
    def size(self) -> int:
        """Episodes, about."""
        return (self.start_up + self.measured_steps) * self.world.groups_per_step * self.world.group_size

    def run(self) -> SimulationResult:
        return Simulation(self.world, self.policy, steps=self._steps, start_up=self.start_up, seed=self.seed).run()

    def best_of_bound(self) -> float:
        """The share of the bound that no schedule exceeds at this lag bound (see `best_of_bound`)."""
        max_lag = self.policy.max_lag
        return best_of_bound(self.world, max_lag, steps=self._steps, start_up=self.start_up, seed=self.seed)

    @property
    def _steps(self) -> int:
        """The last groups have to be left by the end: so many steps are not counted with the groups."""
        return self.start_up + self.measured_steps + self.policy.max_lag + 1


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A case and what it gave."""

    case: SweepCase
    result: SimulationResult

    def document(self) -> dict[str, Any]:
        """Return the row as a JSON document."""
        world, policy = self.case.world, self.case.policy
        return {
            "slots": world.slots,
            "split": self.case.split or None,
            "groups_per_step": world.groups_per_step,
            "group_size": world.group_size,
            "max_lag": policy.max_lag,
            "policy": policy.name,
            "present": self.case.present,
            "seed": self.case.seed,
            "steps": self.case.measured_steps,
            "of_bound": self.result.of_bound,
            **asdict(self.result),
        }


def run_all(cases: Sequence[SweepCase], on_row: Callable[[SweepRow], None] = lambda _: None) -> list[SweepRow]:
    """Run every case, in order; a large sweep on all cores."""
    sweep_rows: list[SweepRow] = []
    if sum(sweep_case.size for sweep_case in cases) < _IN_PARALLEL or (os.cpu_count() or 1) == 1:
        results = map(SweepCase.run, cases)
        for sweep_case, case_result in zip(cases, results, strict=True):
            sweep_rows.append(SweepRow(sweep_case, case_result))
            on_row(sweep_rows[-1])
        return sweep_rows
    # Processes, since a simulation is Python from its first event to its last.
    with ProcessPoolExecutor(min(len(cases), os.cpu_count() or 1)) as process_pool:
        for sweep_case, case_result in zip(cases, process_pool.map(SweepCase.run, cases), strict=True):
            sweep_rows.append(SweepRow(sweep_case, case_result))
            on_row(sweep_rows[-1])
    return sweep_rows


def table(rows: Sequence[SweepRow]) -> Table:
    """Return a table of the cases' results for a reader."""
    rich_table = Table(title_justify="left")
    has_splits = any(row.case.split for row in rows)
    for column_name in (*(["GPUs"] if has_splits else []), "slots", "max_lag", "groups close"):
        rich_table.add_column(column_name)
    for column_name in (
        "episodes/s",
        "of bound",
        "learner idle",
        "age mean, p99",
        "tokens dropped (least)",
        "episodes dropped",
        "outcomes dropped",
        "s played → trained",
    ):
        rich_table.add_column(column_name, justify="right")
    for row in rows:
        result, policy = row.result, row.case.policy
        rich_table.add_row(
            *([row.case.split] if has_splits else []),
            str(row.case.world.slots),
            str(policy.max_lag),
            policy.name + (" *" if row.case.present else ""),
            f"{result.episodes_s:.3g}",
            f"{result.of_bound:.0%}",
            f"{result.idle:.0%}",
            f"{result.age_mean:.1f}, {result.age_p99}",
            f"{result.tokens_discarded:.1%} ({result.tokens_unavoidable:.1%})",
            f"{result.episodes_discarded:.1%}",
            f"{result.outcomes_discarded:.1%}",
            f"{result.played_s:.3g} → {result.trained_s:.3g}",
        )
    return rich_table


_REPRODUCED = 0.1  # of the time: a simulation that is further from the run's own idle share gives no advice


def not_reproduced(rows: Sequence[SweepRow], idle: float) -> str:
    """Why these simulations of a run say nothing of it: under the run's own settings the learner is idle for another
    share of the time than it was (`idle`). "" if they do."""
    simulated_idle = next((row.result.idle for row in rows if row.case.present), None)
    # A model of a run that does not give the run's own figures is no model of it. Silence about that would sell the
    # other rows as a forecast.
    if simulated_idle is None or abs(simulated_idle - idle) <= _REPRODUCED:
        return ""
    return (
        f"This simulation does not reproduce its run: under the same settings its learner is idle {simulated_idle:.0%} "
        f"of the time, and the run's was {idle:.0%}. No advice is given: the run would not do as the rows say."
    )


def advice(rows: Sequence[SweepRow]) -> str:
    """Advise in plain words what to change in the run file; rows with other slots are not compared. Of settings that
    train about as many tokens a second, the one with the smallest max_lag is advised, then the one that drops the
    fewest."""
    present_row = next((row for row in rows if row.case.present), None)
    if present_row is None:
        return ""
    # Rows with more slots train more because they have more engines, which is no advice about a setting.
    candidates = [row for row in rows if row.case.split or row.case.world == present_row.case.world]
    most_useful = max(row.result.useful for row in candidates)
    good_rows = [row for row in candidates if row.result.useful >= (1 - _AS_GOOD) * most_useful]
    # Among equals the freshest data, since staleness costs learning that no simulation of times can see.
    best_row = min(
        good_rows, key=lambda row: (row.case.policy.max_lag, round(row.result.tokens_discarded, 3), -row.result.useful)
    )
    if best_row.result.useful <= (1 + _AS_GOOD) * present_row.result.useful:
        losses = f"{present_row.result.idle:.0%} idle, {present_row.result.tokens_discarded:.0%} of the tokens dropped"
        return (
            f"Leave it as it is: no row trains over {_AS_GOOD:.0%} more tokens a second than your settings ({losses})."
        )
    was, now = present_row.result, best_row.result
    split_text = f"GPUs split {best_row.case.split} (engines + learner), " if best_row.case.split else ""
    policy = best_row.case.policy
    closing_text = "groups that wait for all members" if policy.name == "full" else f"a quorum of {policy.name}"
    return (
        f"With {split_text}max_lag {policy.max_lag} and {closing_text} the learner would be idle {now.idle:.0%} "
        f"instead of {was.idle:.0%}, and drop {now.tokens_discarded:.0%} of the tokens instead of "
        f"{was.tokens_discarded:.0%}: {now.useful / was.useful - 1:+.0%} tokens trained a second."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Settings that the user wants compared, as he wrote them; empty texts mean the run file's own."""

    episode: str = ""
    step_s: float | None = None
    slots: str = ""
    max_lag: str = ""
    close: str = "full"
    gpus: int = 0
    scale_batch: bool = False
    steps: int | None = None
    seed: int = 0


def plan(config: RunConfig, wishes: Wishes, measured: MeasuredRun | None) -> list[SweepCase]:
    """The cases in the order of their rows: by slots or split, lag and policy. That of the run file is among them.
    Raises UsageError."""
    present_world, sweep_cases = _world(config, wishes, measured), list[SweepCase]()
    group_size, present_lag, step_count = config.rollout.group_size, config.buffer.max_lag, wishes.steps
    swept_lags = _numbers("--max-lag", wishes.max_lag, least=0) or [present_lag]
    swept_closes = [parse_close(close_text.strip(), group_size) for close_text in wishes.close.split(",")]
    present_close = parse_close(_closes(config), group_size)
    for split, world, is_own in _worlds(config, wishes, present_world):
        for each_lag in sorted({*swept_lags, present_lag} if is_own else swept_lags):
            is_present = is_own and each_lag == present_lag
            row_closes = swept_closes if each_lag in swept_lags else []
            if is_present and present_close not in row_closes:
                row_closes = [*row_closes, present_close]
            sweep_cases += [
                SweepCase(
                    world=world,
                    policy=policy,
                    seed=wishes.seed,
                    steps=step_count,
                    split=split,
                    present=is_present and close == present_close,
                )
                for close, policy in zip(
                    row_closes, policies(each_lag, row_closes, wait=config.buffer.patience), strict=True
                )
            ]
    return sweep_cases


def limits(config: RunConfig, measured: MeasuredRun | None) -> Iterator[str]:
    """Yield a line for each part of the run file that a simulation of `measured` episodes, or of others, leaves out."""
    if config.buffer.order != "oldest":
        yield f"not simulated: buffer.order = {config.buffer.order!r}; the rows take the oldest groups first"
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
    learner_steps = measured.steps if measured is not None and wishes.step_s is None else Constant(wishes.step_s or 0.0)
    return SimulatedWorld(
        episodes=episodes,
        learner=learner_steps,
        slots=config.rollout.max_running,
        group_size=config.rollout.group_size,
        groups_per_step=config.buffer.groups_per_step,
        group_deadline_s=config.rollout.group_deadline_s,
        push_s=0.0 if measured is None else measured.push_s,
        between_s=0.0 if measured is None else measured.between_s,
        skip_at_most=1.0 if config.buffer.skips else 0.0,
    )


def _worlds(config: RunConfig, wishes: Wishes, own: SimulatedWorld) -> Iterator[tuple[str, SimulatedWorld, bool]]:
    """Each world with its split of GPUs, and whether it is the run file's own, which is always there."""
    if wishes.gpus:
        if wishes.slots:
            raise UsageError(f"--slots {wishes.slots}: with --gpus the slots follow from the split; leave one out")
        if wishes.gpus < 2:
            raise UsageError(f"--gpus {wishes.gpus}: engines and learner need one each; give at least 2")
        engine_count = max(1, sum(len(place) for place in config.engine.places))
        for engine_gpus in range(1, wishes.gpus):
            learner_gpus = wishes.gpus - engine_gpus
            # A run with fewer slots than a group has members could never finish one.
            slot_count = max(own.group_size, round(own.slots * engine_gpus / engine_count))
            world = replace(own, slots=slot_count, learner=own.learner.sped_up(learner_gpus))
            yield f"{engine_gpus} + {learner_gpus}", world, (engine_gpus, learner_gpus) == (engine_count, 1)
        if engine_count + 1 != wishes.gpus:
            yield f"{engine_count} + 1", own, True
        return
    for slot_count in sorted({*_numbers("--slots", wishes.slots, least=1), own.slots}):
        group_count = own.groups_per_step
        if wishes.scale_batch:
            group_count = max(1, round(group_count * slot_count / own.slots))
        yield "", replace(own, slots=slot_count, groups_per_step=group_count), slot_count == own.slots


def _numbers(option: str, text: str, *, least: int) -> list[int]:
    try:
        whole_numbers = sorted({int(number_text) for number_text in text.split(",")}) if text else []
    except ValueError:
        raise UsageError(f"{option} {text!r}: write whole numbers as {least},{least + 1}") from None
    if whole_numbers and whole_numbers[0] < least:
        raise UsageError(f"{option} {text!r}: no number may be below {least}")
    return whole_numbers


def _closes(config: RunConfig) -> str:
    """The run file's way to close groups, as `parse_close` reads it."""
    return "full" if config.quorum is None else f"{config.quorum}@{config.buffer.quorum_after_s:g}"
