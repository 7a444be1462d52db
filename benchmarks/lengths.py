"""Which lengths are trained: the share of episodes and tokens by quarter of length, and of the longest hundredth.

    agentrl bench lengths [--lags 0 1 2 3 4] [--step-s 1.3 3] [--steps 120] [--seed 1]

Simulated in virtual time, so that the numbers are the same on every machine: the episodes of `_waiting_env.py`, which
sample in two short moments and wait long for their actions (4 s in the mean, lognormal), one in 64 of which hangs until
the time limit of a step, 20 s. 96 at once, groups of 8, 4 groups a step. Prints the table of lengths.md.
"""

from __future__ import annotations

import argparse
import math
from random import Random

from agentrl.planning.simulate.policies import Policy
from agentrl.planning.simulate.service import Constant, Play
from agentrl.planning.simulate.simulation import SimulatedWorld, Simulation
from agentrl.store import FULL, ClosePolicy, Quorum

SIZE, GROUPS, SLOTS = 8, 4, 96
MEAN_S, TURNS, TURN_S, TOKENS = 4.0, 2, 0.2, 16
HANGS, LIMIT_S = 1 / 64, 20.0


class Waiting:
    """Episodes of two turns, each followed by an action that takes a lognormal time."""

    def __init__(self, sigma: float) -> None:
        self._sigma = sigma

    def group(self, size: int, chance: Random) -> list[Play]:
        return [self._play(chance) for _ in range(size)]

    def _play(self, chance: Random) -> Play:
        at, turns = 0.0, list[tuple[float, float, int]]()
        for turn in range(TURNS):
            turns.append((at, at + TURN_S, TOKENS))
            waits = MEAN_S / TURNS * chance.lognormvariate(-(self._sigma**2) / 2, self._sigma)
            hangs = turn == TURNS - 1 and chance.random() < HANGS
            at += TURN_S + (LIMIT_S if hangs else min(waits, LIMIT_S))
        return Play(at, tuple(turns), TURNS * TOKENS)


RULES: list[tuple[str, ClosePolicy, float | None]] = [
    ("full, neither", FULL, None),
    ("full, always", FULL, math.inf),
    ("quorum, neither", Quorum(6, 10.0), None),
    ("quorum, 0", Quorum(6, 10.0), 0.0),
    ("quorum, 1", Quorum(6, 10.0), 1.0),
    ("quorum, always", Quorum(6, 10.0), math.inf),
]
"""Close policy and `buffer.wait_at_bound`; "neither" waits for no episode at the bound, and closes no group there."""


def row(
    sigma: float, step_s: float, lag: int, rule: tuple[str, ClosePolicy, float | None], args: argparse.Namespace
) -> str:
    name, close, wait = rule
    world = SimulatedWorld(
        episodes=Waiting(sigma),
        learner=Constant(step_s),
        slots=SLOTS,
        group_size=SIZE,
        groups_per_step=GROUPS,
        group_deadline_s=60.0,
        push_s=0.2,
    )
    policy = Policy(name=name, max_lag=lag, close=close, wait=wait)
    found = Simulation(world, policy, steps=args.steps, start_up=lag + 4, seed=args.seed).run()
    shares = (*found.by_length, found.longest)
    episodes, tokens = (" ".join(f"{value:.2f}" for value in part) for part in list(zip(*shares, strict=True))[:2])
    return (
        f"| {sigma:g} | {step_s:g} s | {lag} | {name} | {episodes} | {tokens} | {found.tokens_discarded:.1%} | "
        f"{found.idle:.0%} ({found.held:.0%}) | {found.useful * TURNS * TOKENS:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="agentrl bench lengths", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--sigmas", type=float, nargs="+", default=[1.0, 1.5])
    parser.add_argument("--step-s", type=float, nargs="+", default=[1.3, 3.0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("| sigma | a step | lag | close, wait | episodes trained | tokens trained | dropped ", end="")
    print("| idle (at the bound) | tokens/s |\n|---|---|---|---|---|---|---|---|---|")
    for sigma, step_s in zip(args.sigmas, reversed(args.step_s), strict=True):
        for lag in args.lags:
            for rule in RULES:
                print(row(sigma, step_s, lag, rule, args), flush=True)


if __name__ == "__main__":
    main()
