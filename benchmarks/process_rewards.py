"""Process rewards: what a slow source costs the learner, and what credit over turns gains.

    agentrl bench process_rewards [--part latency credit] [--seeds 1 2 3 4 5] [--steps 60]

latency: the real store, admission, journal and scorer in virtual time, once with a source and once without, from the
same seeds. A turn takes 1 s on average (lognormal, sigma 0.5), a call of the source 1 s in the median and 10 s at the
99th percentile (lognormal). An episode has four turns; 64 run at once; a step trains 4 groups of 8.

credit: `agentrl/Combination-v0` with eight dials, from examples/tiny_locksmith.toml, synchronously: the outcome alone
(`algo.process_weight=0`), process rewards with GRPO, and with PPO at the level of turns; and after how many steps these
are where the outcome alone ends. Rates are means over the last 8 steps (128 episodes). Prints the tables of
process_rewards.md.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import trio
from trio.testing import MockClock

from agentrl.config.sections import RewardSource
from agentrl.env.tasks import Seeds
from agentrl.records import Messages, Step, StopReason, Trajectory, Turn, VersionSpan
from agentrl.rewards.scorer import Scorer
from agentrl.rollout.admitter import Admitter
from agentrl.store import AdmissionBounds, Claim, Ending, RunStore, Source
from agentrl.store.buffer.closing import FULL, ClosePolicy, Quorum
from agentrl.store.journal_writer import JournalWriter

GROUP_SIZE, GROUPS, SLOTS, TURNS = 8, 4, 64, 4
TURN_SIGMA = 0.5
P99_TURNS = 10.0
CALL_SIGMA = math.log(P99_TURNS) / statistics.NormalDist().inv_cdf(0.99)
WARM_UP = 10
LOOK_S = 0.02
START: Messages = ({"role": "user", "content": ""},)
SOURCE = RewardSource(
    source="slow", kind="callable", call="none:none", concurrency=256, call_deadline_s=300.0, deadline_s=400.0
)
WINDOW = 8
POLICIES: dict[str, ClosePolicy] = {"full": FULL, "6 of 8": Quorum(6, 0.0)}
BY_TURN = ["algo.kind=ppo", "algo.level=turn", "algo.gae_lambda=0.8", "algo.discount=0.5", "algo.critic_warmup_steps=0"]
CREDIT = {"process rewards": list[str](), "with PPO by turn": BY_TURN}
CASES = ((1, "full"), (2, "full"), (4, "full"), (4, "6 of 8"), (8, "full"))


@dataclass(slots=True)
class Run:
    """A run of `steps` steps in virtual time."""

    store: RunStore
    seed: int
    max_lag: int
    step_s: float
    steps: int
    policy: ClosePolicy = FULL
    began: list[float] = field(default_factory=list[float])  # when each step began
    numbers: random.Random = field(init=False)
    running: int = 0

    async def play(self, slow: bool) -> float:
        """Seconds per step after the warm-up."""
        self.numbers = random.Random(f"{self.seed}/calls")
        bounds = AdmissionBounds(
            group_size=GROUP_SIZE,
            groups_per_step=GROUPS,
            max_lag=self.max_lag,
            max_running=SLOTS,
            steps_total=1 << 20,
        )
        self._serve()
        if slow:
            self.store.scores.declare_sources([Source(name="slow", deadline_s=SOURCE.deadline_s)])
        async with trio.open_nursery() as nursery:
            if slow:
                nursery.start_soon(Scorer(SOURCE, JournalWriter(self.store, inline=True), self._asked).serve)
            nursery.start_soon(self._fill, Admitter(self.store, Seeds("simulated"), bounds), nursery)
            await self._learn()
            nursery.cancel_scope.cancel()
        return (self.began[-1] - self.began[WARM_UP]) / (len(self.began) - 1 - WARM_UP)

    def _serve(self) -> None:
        self.store.versions.confirm_version(self.store.versions.mint_version(len(self.began)).version)

    async def _learn(self) -> None:
        while len(self.began) < self.steps:
            if self.store.buffer.take(len(self.began) + 1, GROUPS, max_lag=self.max_lag) is None:
                await trio.sleep(LOOK_S)
                continue
            self.began.append(trio.current_time())
            await trio.sleep(self.step_s)
            self._serve()

    async def _fill(self, admitter: Admitter, nursery: trio.Nursery) -> None:
        while True:
            self.store.buffer.expire(trio.current_time(), 1e6, close_policy=self.policy)
            if self.running < SLOTS:
                admitter.admit(GROUPS)
                for claim in self.store.leases.claim(
                    "worker", SLOTS - self.running, lease_s=1e9, now=trio.current_time()
                ):
                    self.running += 1
                    nursery.start_soon(self._episode, claim)
            await trio.sleep(LOOK_S)

    async def _episode(self, claim: Claim) -> None:
        lengths = random.Random(f"{self.seed}/{claim.episode_id}")
        self.store.journal.begin(claim.episode_id, claim.fence, START)
        for index in range(TURNS):
            version = self.store.versions.current_version().version
            await trio.sleep(lengths.lognormvariate(-(TURN_SIGMA**2) / 2, TURN_SIGMA))
            self.store.journal.journal_turn(claim.episode_id, claim.fence, turn(index, version, str(claim.episode_id)))
        self.store.journal.finish(
            claim.episode_id, claim.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
        )
        self.running -= 1

    async def _asked(self, seen: Trajectory) -> float:
        await trio.sleep(self.numbers.lognormvariate(0.0, CALL_SIGMA))
        return float(len(seen.turns))


def turn(index: int, version: int, text: str) -> Turn:
    return Turn(
        index=index,
        parent=index - 1 if index else None,
        prompt_ids=(1,),
        token_ids=(2,) * 8,
        logprobs=(-1.0,) * 8,
        spans=(VersionSpan(version, 0, 8),),
        finish="stop",
        text=text,
        step=Step(observation=(), terminated=index == TURNS - 1),
    )


def seconds_per_step(
    *, slow: bool, seed: int, max_lag: int, step_s: float, steps: int, policy: ClosePolicy = FULL
) -> float:
    """One run, with or without the slow source."""
    clock = itertools.count()

    async def main() -> float:
        with (
            tempfile.TemporaryDirectory() as folder,
            RunStore.create(
                Path(folder) / "store.sqlite", "{}", clock=lambda: trio.current_time() + 1e-9 * next(clock)
            ) as store,
        ):
            return await Run(store, seed, max_lag, step_s, steps, policy).play(slow)

    return trio.run(main, clock=MockClock(autojump_threshold=0))


def latency(steps: int, seeds: list[int]) -> Iterator[str]:
    """The table of what the source costs."""
    yield "| max_lag | closes | learner's step, s | s a step without | with the source | throughput lost |"
    yield "|---|---|---|---|---|---|"
    for step_s, (max_lag, name) in itertools.product((10.0, 3.0), CASES):
        without, with_source = (
            statistics.fmean(
                seconds_per_step(
                    slow=slow, seed=seed, max_lag=max_lag, step_s=step_s, steps=steps, policy=POLICIES[name]
                )
                for seed in seeds
            )
            for slow in (False, True)
        )
        lost = 1 - without / with_source
        yield f"| {max_lag} | {name} | {step_s:g} | {without:.3f} | {with_source:.3f} | {lost:.1%} |"


def credit(steps: int, seeds: list[int]) -> Iterator[str]:
    """The table of what credit over turns gains over the outcome alone."""
    import torch
    from _turn_credit import learn, smoothed, steps_until

    torch.set_num_threads(1)
    columns = ["seed", f"outcome alone, {steps} steps"]
    columns += [column for way in CREDIT for column in (f"{way}, {steps} steps", "there after")]
    yield "| " + " | ".join(columns) + " |"
    yield "|---" * len(columns) + "|"
    margins: dict[str, list[float]] = {way: [] for way in CREDIT}
    for seed in seeds:
        alone = smoothed(learn(seed, steps, ["algo.process_weight=0"]), WINDOW)[-1]
        cells = [f"{seed}", f"{alone:.2f}"]
        for way, settings in CREDIT.items():
            rates = learn(seed, steps, settings)
            last = smoothed(rates, WINDOW)[-1]
            margins[way].append(last - alone)
            cells += [f"{last:.2f}", str(steps_until(rates, alone, WINDOW) or "never")]
        yield "| " + " | ".join(cells) + " |"
    ends = [f"{min(own):+.2f}, {statistics.median(own):+.2f} | |" for own in margins.values()]
    yield "| least and median margin | | " + " ".join(ends)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="agentrl bench process_rewards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=["latency", "credit"], default=["latency", "credit"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args()
    for part in chosen.part:
        for line in (latency if part == "latency" else credit)(chosen.steps, chosen.seeds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
