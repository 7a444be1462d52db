"""What stragglers cost, and how a group should close: simulated runs over sizes, distributions and seeds.

    agentrl bench simulate [--slots 8 64 512] [--close full 7/8 6/8] [--max-lag 4] [--seeds 1 2 3] [--loads 0.8 1 1.25]

Episodes take 1 s in the mean, and a step takes as many of them as there are slots. A load is the learner's seconds for
such a step: below 1 the slots are the bound, above it the learner. Each row is the worst over seeds and loads. "Any
schedule" is the share that none exceeds which does not know how long an episode will take, the least of these runs too.
`--measured` sets the steps of a run that count. Prints a table of simulate.md.
"""

from __future__ import annotations

import argparse

from agentrl.planning.simulate.policies import Policy, parse_close, policies
from agentrl.planning.simulate.service import Constant, parse_episodes
from agentrl.planning.simulate.simulation import SimulatedWorld, SimulationResult
from agentrl.planning.simulate.sweep import SweepCase, run_all

SIZE = 8
DEADLINE_S = 300.0


def case(spec: str, slots: int, load: float, seed: int, policy: Policy, measured: int | None = None) -> SweepCase:
    world = SimulatedWorld(
        episodes=parse_episodes(spec, deadline_s=DEADLINE_S),
        learner=Constant(load),
        slots=slots,
        group_size=SIZE,
        groups_per_step=slots // SIZE,
        group_deadline_s=2 * DEADLINE_S,
    )
    return SweepCase(world=world, policy=policy, seed=seed, steps=measured)


def row(name: str, cases: list[SweepCase], lockstep: list[SimulationResult]) -> str:
    """The worst of several runs, each beside the synchronous one of the same times."""
    found = [one.result for one in run_all(cases)]
    bound, best = min(one.of_bound for one in found), min(case.best_of_bound() for case in cases)
    faster = min(one.episodes_s / other.episodes_s for one, other in zip(found, lockstep, strict=True))
    excess = max(one.tokens_discarded - one.tokens_unavoidable for one in found)
    least = max(one.tokens_unavoidable for one in found)
    episodes = max(one.episodes_discarded for one in found)
    outcomes = max(one.outcomes_discarded for one in found)
    off = max((one.trained_s / one.played_s - 1 for one in found), key=abs)
    return (
        f"| {name} | {bound:.1%} ({min(best, 1.0):.1%}) | {faster:.1f}x | {max(0.0, excess):.1%} ({least:.0%})"
        f" | {episodes:.2%} | {outcomes:.2%} | {off:+.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="agentrl bench simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--episodes", nargs="+", default=["lognormal:1", "pareto:1.5", "lognormal:1*lognormal:1"])
    parser.add_argument("--close", nargs="+", default=["full", "7/8", "6/8"])
    parser.add_argument("--max-lag", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 1.0, 1.25])
    parser.add_argument("--measured", type=int, help="steps of a run that count; the default is 8,000 episodes' and 16")
    chosen = parser.parse_args()
    print(
        "| episodes | slots | close | of bound (any schedule) | synchronous | dropped beyond the least (least) ",
        end="",
    )
    print("| episodes dropped | outcomes dropped | s trained against played |\n|---|---|---|---|---|---|---|---|---|")
    for spec in chosen.episodes:
        for slots in chosen.slots:
            for text in ("", *chosen.close):
                close = parse_close(text or "full", SIZE)
                policy = policies(chosen.max_lag, [close])[0] if text else Policy(name="synchronous", max_lag=0)
                times = [(load, seed) for load in chosen.loads for seed in chosen.seeds]
                cases = [case(spec, slots, load, seed, policy, chosen.measured) for load, seed in times]
                if not text:
                    lockstep = [one.result for one in run_all(cases)]
                    continue
                print(row(f"{spec} | {slots:,} | {close[0]}", cases, lockstep), flush=True)


if __name__ == "__main__":
    main()
