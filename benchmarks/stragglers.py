"""What stragglers cost: learner idle time, what is dropped, and whether long episodes are trained as often as played.

    agentrl bench stragglers [--steps 60] [--lags 0 1 2 4 8] [--sigma 1.5] [--seed 1]

The real store admits, hands out, closes and takes; time is virtual. An episode samples tokens at a steady rate for a
lognormal time of mean 1 s, each under the weights of its moment; a step takes the learner 2 s, and its weights are
served at once. What is compared are the members of the groups that closed or expired up to the last step: those that
still run then may end, and are trained as late members of a drained run are. "least" is the
share of tokens that were too old already when their own episode ended. Prints the table of stragglers.md.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from agentrl.env.tasks import Seeds
from agentrl.records import Group, GroupState, Messages, Step, StopReason, Turn, VersionSpan
from agentrl.rollout.admitter import Admitter
from agentrl.store import Bounds, Claim, RunStore
from agentrl.store.closing import FULL, ClosePolicy, Quorum

GROUP_SIZE, GROUPS = 8, 8  # members of a group, groups of a step
STEP_S = 2.0
TOKENS_S = 20.0  # sampled in a second of an episode
DEADLINE_S = 600.0
START: Messages = ({"role": "user", "content": ""},)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of a simulated run. Shares are of what was played; durations are means in seconds."""

    idle: float
    groups_dropped: int
    members_dropped: float
    tokens_dropped: float
    unavoidable: float  # tokens too old already for the step after the end of their own episode
    played_s: float
    trained_s: float


@dataclass(slots=True)
class Simulation:
    """A run of `steps` steps in virtual time. `durations` gives the seconds of one episode after the other."""

    store: RunStore
    durations: Iterator[float]
    max_lag: int
    steps: int
    policy: ClosePolicy
    now: float = 0.0
    idle_s: float = 0.0
    step: int = 0
    busy: bool = False
    waits_since: float = 0.0
    versions: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])  # since, version, step
    seconds: dict[int, float] = field(default_factory=dict[int, float])
    began: dict[int, float] = field(default_factory=dict[int, float])
    trained_tokens: int = 0
    too_old: dict[int, int] = field(default_factory=dict[int, int])
    events: list[tuple[float, int, Claim | None]] = field(default_factory=list[tuple[float, int, Claim | None]])
    order: Iterator[int] = field(default_factory=itertools.count)
    admitter: Admitter = field(init=False)

    def run(self) -> Found:
        """Play to the last step, then drain."""
        bounds = Bounds(
            group_size=GROUP_SIZE,
            groups_per_step=GROUPS,
            max_lag=self.max_lag,
            max_running=1 << 20,
            steps_total=1 << 20,  # the run's end changes nothing that is measured
        )
        self.admitter = Admitter(self.store, Seeds("simulated"), bounds)
        self._serve()
        self._fill()
        while self.step < self.steps:
            self._next()
        idle = self.idle_s / self.now
        left = (GroupState.TAKEN, GroupState.EXPIRED, GroupState.FAILED)
        dropped = sum(self.store.counts().get(state, 0) for state in left[1:])
        played = [row.id for row in self.store.episodes("train", limit=1 << 20) if row.group_state in left]
        while self.events:
            self._next()
        while (groups := self.store.take(self.step + 1, 0, max_lag=self.max_lag)) is not None:
            self.step += 1
            self._count(groups)
        return self._found(idle, dropped, played)

    def _next(self) -> None:
        self.now, _, claim = heapq.heappop(self.events)
        if claim is not None:
            self._end(claim)
        elif self.busy and self.now >= self.waits_since:
            self.busy = False
            self._serve()
        self.store.expire(self.now, DEADLINE_S, close_policy=self.policy)
        if self.step < self.steps:
            self._fill()
            self._take()

    def _at(self, time_s: float, claim: Claim | None = None) -> None:
        heapq.heappush(self.events, (time_s, next(self.order), claim))

    def _serve(self) -> None:
        version = self.store.mint_version(self.step)
        self.store.confirm_version(version)
        self.versions.append((self.now, version.version, self.step))

    def _fill(self) -> None:
        self.admitter.admit(1 << 20)
        for claim in self.store.claim("worker", 1 << 20, lease_s=1e9, now=self.now):
            duration = next(self.durations)
            self.seconds[claim.episode_id], self.began[claim.episode_id] = duration, self.now
            self.store.begin(claim.episode_id, claim.fence, START)
            self._at(self.now + duration, claim)

    def _end(self, claim: Claim) -> None:
        began, n = self.began[claim.episode_id], tokens_of(self.seconds[claim.episode_id])
        times = [since for since, *_ in self.versions[1:]]
        cuts = [min(n, max(0, math.ceil((since - began) / (self.now - began) * n))) for since in times]
        spans = tuple(
            VersionSpan(version, start, end)
            for (_, version, _), (start, end) in zip(self.versions, pairwise([0, *cuts, n]), strict=True)
            if end > start
        )
        turn = Turn(
            index=0,
            parent=None,
            prompt_ids=(1,),
            token_ids=(2,) * n,
            logprobs=(-1.0,) * n,
            spans=spans,
            finish="stop",
            text="",
            step=Step(observation=(), terminated=True),
        )
        self.store.journal_turn(claim.episode_id, claim.fence, turn)
        self.too_old[claim.episode_id] = n - self._fresh(spans, self.step)
        self.store.finish(claim.episode_id, claim.fence, stop_reason=StopReason.DONE, outcome=1.0, success=True)
        if isinstance(self.policy, Quorum):
            self._at(self.now + self.policy.after_s)

    def _take(self) -> None:
        if self.busy:
            return
        groups = self.store.take(self.step + 1, GROUPS, max_lag=self.max_lag)
        if groups is None:
            return
        self.idle_s += self.now - self.waits_since
        self.step += 1
        self._count(groups)
        self.busy, self.waits_since = True, self.now + STEP_S
        self._at(self.waits_since)

    def _count(self, groups: Sequence[Group]) -> None:
        turns = (turn for group in groups for one in group.trajectories for turn in one.turns)
        self.trained_tokens += sum(self._fresh(turn.spans, self.step - 1) for turn in turns)

    def _fresh(self, spans: Sequence[VersionSpan], step: int) -> int:
        """How many tokens a learner whose weights are of `step` may still train."""
        made_at = {version: made for _, version, made in self.versions}
        return sum(span.end - span.start for span in spans if step - made_at[span.version] <= self.max_lag)

    def _found(self, idle: float, dropped: int, played: Sequence[int]) -> Found:
        trained = {id for step in range(1, self.step + 1) for id in self.store.lineage(step)}
        tokens = sum(tokens_of(self.seconds[id]) for id in played)
        return Found(
            idle=idle,
            groups_dropped=dropped,
            members_dropped=1 - len(trained) / len(played),
            tokens_dropped=1 - self.trained_tokens / tokens,
            unavoidable=sum(self.too_old[id] for id in played) / tokens,
            played_s=statistics.mean(self.seconds[id] for id in played),
            trained_s=statistics.mean(self.seconds[id] for id in trained),
        )


def tokens_of(seconds: float) -> int:
    return max(1, round(seconds * TOKENS_S))


def simulate(durations: Iterator[float], *, max_lag: int, steps: int, policy: ClosePolicy, folder: Path) -> Found:
    """One run, with its store in `folder`."""
    clock = itertools.count()
    with RunStore.create(folder / "store.sqlite", "{}", clock=lambda: simulation.now + 1e-9 * next(clock)) as store:
        simulation = Simulation(store, durations, max_lag, steps, policy)
        return simulation.run()


def lognormal(seed: int, sigma: float) -> Iterator[float]:
    """Durations of mean 1 s."""
    numbers = random.Random(seed)
    while True:
        yield numbers.lognormvariate(-sigma * sigma / 2, sigma)


def main() -> None:
    parser = argparse.ArgumentParser(prog="agentrl bench stragglers", description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--sigma", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    print("| max_lag | close | idle | groups dropped | members dropped | tokens dropped (least) | s played → trained |")
    print("|---|---|---|---|---|---|---|")
    policies = {"full": FULL, "7 of 8": Quorum(7, 0.0), "6 of 8": Quorum(6, 0.0)}
    for lag, (name, policy) in itertools.product(chosen.lags, policies.items()):
        with tempfile.TemporaryDirectory() as folder:
            found = simulate(
                lognormal(chosen.seed, chosen.sigma),
                max_lag=lag,
                steps=chosen.steps,
                policy=policy,
                folder=Path(folder),
            )
        print(
            f"| {lag} | {name} | {found.idle:.0%} | {found.groups_dropped} | {found.members_dropped:.1%}"
            f" | {found.tokens_dropped:.1%} ({found.unavoidable:.1%}) | {found.played_s:.2f} → {found.trained_s:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
