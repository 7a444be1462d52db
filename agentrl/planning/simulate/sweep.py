"""Many simulated runs beside each other: which ones, the table of what they gave, and one line of advice."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from agentrl.planning.simulate.ideal import best_of_bound
from agentrl.planning.simulate.policies import Policy
from agentrl.planning.simulate.simulation import Found, SimulatedWorld, Simulation

START_UP = 4  # steps beyond max_lag that are not measured: until the buffer has filled
_AS_GOOD = 0.01  # of throughput: less is no reason to change a setting
_MEASURED_EPISODES = 8_000  # of a simulated run, at least
_MEASURED_STEPS = 16  # and of these
_IN_PARALLEL = 200_000  # episodes from which a sweep takes every core


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCase:
    """One simulated run. `present`: it is the one that the run file asks for; `ours`: this project can run it."""

    world: SimulatedWorld
    policy: Policy
    seed: int
    steps: int | None = None
    split: str = ""
    present: bool = False
    ours: bool = False

    @property
    def start_up(self) -> int:
        """Steps that are not measured."""
        return self.policy.max_lag + START_UP

    @property
    def measured_steps(self) -> int:
        """Steps after the start-up."""
        batch = self.world.groups_per_step * self.world.group_size
        return self.steps or max(_MEASURED_STEPS, -(-_MEASURED_EPISODES // batch))

    @property
    def size(self) -> int:
        """Episodes, about."""
        return (self.start_up + self.measured_steps) * self.world.groups_per_step * self.world.group_size

    def run(self) -> Found:
        return Simulation(self.world, self.policy, steps=self._steps, start_up=self.start_up, seed=self.seed).run()

    def best_of_bound(self) -> float:
        """The share of the bound that no schedule exceeds at this lag bound (see `ideal`)."""
        lag = self.policy.max_lag
        return best_of_bound(self.world, lag, steps=self._steps, start_up=self.start_up, seed=self.seed)

    @property
    def _steps(self) -> int:
        """The last groups have to be left by the end: so many steps are not counted with the groups."""
        return self.start_up + self.measured_steps + self.policy.max_lag + 1


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A case and what it gave."""

    case: SweepCase
    found: Found

    def document(self) -> dict[str, Any]:
        """As JSON."""
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
            "of_bound": self.found.of_bound,
            **asdict(self.found),
        }


def run_all(cases: Sequence[SweepCase], on_row: Callable[[SweepRow], None] = lambda _: None) -> list[SweepRow]:
    """Run every case, in order; a large sweep on all cores."""
    rows: list[SweepRow] = []
    if sum(case.size for case in cases) < _IN_PARALLEL or (os.cpu_count() or 1) == 1:
        found = map(SweepCase.run, cases)
        for case, one in zip(cases, found, strict=True):
            rows.append(SweepRow(case, one))
            on_row(rows[-1])
        return rows
    with ProcessPoolExecutor(min(len(cases), os.cpu_count() or 1)) as pool:
        for case, one in zip(cases, pool.map(SweepCase.run, cases), strict=True):
            rows.append(SweepRow(case, one))
            on_row(rows[-1])
    return rows


def table(rows: Sequence[SweepRow]) -> Table:
    """What the cases gave, for a reader."""
    found = Table(title_justify="left")
    split = any(row.case.split for row in rows)
    for name in (*(["GPUs"] if split else []), "slots", "max_lag", "policy"):
        found.add_column(name)
    for name in (
        "episodes/s",
        "of bound",
        "learner idle",
        "age mean, p99",
        "tokens dropped (least)",
        "episodes dropped",
        "outcomes dropped",
        "s played → trained",
    ):
        found.add_column(name, justify="right")
    for row in rows:
        one, policy = row.found, row.case.policy
        found.add_row(
            *([row.case.split] if split else []),
            str(row.case.world.slots),
            str(policy.max_lag),
            policy.name + (" *" if row.case.present else ""),
            f"{one.episodes_s:.3g}",
            f"{one.of_bound:.0%}",
            f"{one.idle:.0%}",
            f"{one.age_mean:.1f}, {one.age_p99}",
            f"{one.tokens_discarded:.1%} ({one.tokens_unavoidable:.1%})",
            f"{one.episodes_discarded:.1%}",
            f"{one.outcomes_discarded:.1%}",
            f"{one.played_s:.3g} → {one.trained_s:.3g}",
        )
    return found


_REPRODUCED = 0.1  # of the time: a simulation that is further from the run's own idle share gives no advice


def not_reproduced(rows: Sequence[SweepRow], idle: float) -> str:
    """Why these simulations of a run say nothing of it: under the run's own settings the learner is idle for another
    share of the time than it was (`idle`). "" if they do."""
    own = next((row.found.idle for row in rows if row.case.present), None)
    if own is None or abs(own - idle) <= _REPRODUCED:
        return ""
    return (
        f"This simulation does not reproduce its run: under the same settings its learner is idle {own:.0%} of the "
        f"time, and the run's was {idle:.0%}. No advice is given: the run would not do as the rows say."
    )


def advice(rows: Sequence[SweepRow]) -> str:
    """What to change in the run file, in plain words; rows with other slots are not compared. Of settings that train
    about as many tokens a second, the one with the smallest max_lag is advised, then the one that drops the fewest."""
    present = next((row for row in rows if row.case.present), None)
    if present is None:
        return ""
    candidates = [row for row in rows if row.case.ours and (row.case.split or row.case.world == present.case.world)]

    most = max(row.found.useful for row in candidates)
    good = [row for row in candidates if row.found.useful >= (1 - _AS_GOOD) * most]
    best = min(good, key=lambda row: (row.case.policy.max_lag, round(row.found.tokens_discarded, 3), -row.found.useful))
    if best.found.useful <= (1 + _AS_GOOD) * present.found.useful:
        least = f"{present.found.idle:.0%} idle, {present.found.tokens_discarded:.0%} of the tokens dropped"
        return (
            f"Leave it as it is: no row trains over {_AS_GOOD:.0%} more tokens a second than your settings ({least})."
        )
    was, now = present.found, best.found
    where = f"GPUs split {best.case.split} (engines + learner), " if best.case.split else ""
    policy = best.case.policy
    close = policy.name.removeprefix("ours, ")
    closing = "groups that wait for all members" if close == "full" else f"a quorum of {close}"
    return (
        f"With {where}max_lag {policy.max_lag} and {closing} the learner would be idle {now.idle:.0%} instead of "
        f"{was.idle:.0%}, and drop {now.tokens_discarded:.0%} of the tokens instead of {was.tokens_discarded:.0%}: "
        f"{now.useful / was.useful - 1:+.0%} tokens trained a second."
    )
