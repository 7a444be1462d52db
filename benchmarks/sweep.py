"""How time and memory of a learner's step grow with the length of its rows and with the number of its groups.

Two members share a prompt of half a row and fork there. Time is CPU seconds, memory the most that was resident in the
step over what was before the model was loaded. `operations` are those of the model; attention makes them grow with the
square of a row's length, memory must grow with the length itself, and with groups time alone. With `--ranks` the
longest row and the most groups once more over so many processes (gloo): a long row is divided over all (context
parallel), groups are dealt out. CPU and memory are then those of the rank that has most, and how even the ranks are.

    agentrl bench sweep [--tokens 1024 4096 16384 32768] [--groups 8 64 512] [--ranks 1 2 4]
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from _learner_shapes import TASK, VOCAB
from _memory import peak_mb, reset, resident_mb
from learner import save_model

from agentrl.algos.grpo import GRPO
from agentrl.config import EnvSource, Rollout, RunConfig, Train
from agentrl.config.train import ParallelPlan
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.data.shares import weigh
from agentrl.learner.flops import operations
from agentrl.learner.learner import Learner
from agentrl.learner.parallel.ranks import ALONE, Leader
from agentrl.records import Group, GroupState, Step, StopReason, Trajectory, Turn, VersionSpan

LAYERS, WIDTH, SHORT = 2, 32, 256
DEADLINE_S = 600.0  # of a collective, and of a rank's start


def group(id: int, tokens: int) -> Group:
    rng = random.Random(id)
    half = tokens // 2
    asked = tuple(rng.randrange(VOCAB) for _ in range(half))
    trajectories: list[Trajectory] = []
    for member in range(2):
        said = tuple(rng.randrange(VOCAB) for _ in range(tokens - half))
        turn = Turn(
            index=0,
            parent=None,
            prompt_ids=asked,
            token_ids=said,
            logprobs=(-6.2,) * len(said),
            spans=(VersionSpan(0, 0, len(said)),),
            finish="stop",
            text="",
            step=Step(observation=()),
        )
        trajectories.append(
            Trajectory(
                episode_id=2 * id + member,
                group_id=id,
                member=member,
                task=TASK,
                start=(),
                turns=(turn,),
                stop_reason=StopReason.DONE,
                outcome=float(member),
            )
        )
    return Group(id=id, task=TASK, state=GroupState.TAKEN, size=2, trajectories=tuple(trajectories))


ALGO = GRPO(importance="none")
ONE = ParallelPlan()


def configured(folder: Path, budget: int, parallel: ParallelPlan = ONE) -> RunConfig:
    train = Train(tokens_per_batch=budget, logits_mb=64, lr=1e-9, warmup_steps=0, parallel=parallel)
    rollout = Rollout(max_context=budget)
    return RunConfig(model=str(folder), env=EnvSource(id="sweep"), algo=ALGO, rollout=rollout, train=train)


def measure(folder: Path, groups: list[Group], budget: int, before: float) -> None:
    learner = Learner(configured(folder, budget).learner, folder)
    reset()
    began = time.process_time()
    learner.step(groups, step_of=lambda _: 0)
    cpu, peak = time.process_time() - began, peak_mb() - before
    ready = [group_rows(one, ALGO, step_of=lambda _: 0, step_now=0, max_lag=0) for one in groups]
    laid = packs(weigh([ready])[0], budget, stems=True)
    work = sum(operations(learner.model.module, pack) for pack in laid) / 1e9
    rows = sum(len(one.trajectories) for one in groups)
    tokens = groups[0].trajectories[0].turns[0]
    length = len(tokens.prompt_ids) + len(tokens.token_ids)
    print(f"| {length} | {len(groups)} | {rows} | {len(laid)} | {work:.1f} | {cpu:.2f} | {peak:.0f} |", flush=True)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def over_ranks(folder: Path, groups: list[Group], budget: int, plan: ParallelPlan) -> None:
    """A row of the table: the step over the ranks of `plan`. The first step is not measured: it makes what later ones
    find made."""
    with ExitStack() as stack:
        ranks = None
        if plan.ranks > 1:
            ranks = Leader([torch.device("cpu")] * plan.ranks, deadline_s=DEADLINE_S, start_s=DEADLINE_S)
            stack.enter_context(closing(ranks))
        learner = Learner(configured(folder, budget, plan).learner, folder, ranks=ranks or ALONE)
        learner.step(groups, step_of=lambda _: 0)
        processes = [os.getpid(), *(ranks.processes if ranks else ())]
        rest, used = [resident_mb(pid) for pid in processes], [cpu_s(pid) for pid in processes]
        for pid in processes:
            reset(pid)
        learner.step(groups, step_of=lambda _: 0)
        used = [cpu_s(pid) - before for pid, before in zip(processes, used, strict=True)]
        peaks = [peak_mb(pid) - before for pid, before in zip(processes, rest, strict=True)]
    tokens = len(groups[0].trajectories[0].turns[0].prompt_ids) * 2
    even = f"{max(used):.2f} | {sum(used):.2f} | {max(peaks):.0f}"
    print(f"| {tokens} | {len(groups)} | {plan.ranks} | {plan.context} | {even} |", flush=True)


def sweep_ranks(folder: Path, sizes: Sequence[int], tokens: int, groups: int) -> None:
    print("\n| tokens a row | groups | ranks | context | CPU s, most of a rank | of all | peak MiB, most of a rank |")
    print("|---|---|---|---|---|---|---|")
    many = [group(id, SHORT) for id in range(groups)]
    for size in sizes:
        over_ranks(folder, many, 4096, ParallelPlan(ranks=size))
    for size in sizes:
        over_ranks(folder, [group(0, tokens)], 2 * tokens, ParallelPlan(ranks=size, context=size))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--ranks", type=int, nargs="+", default=[])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the other ranks
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_model(folder, LAYERS, WIDTH, VOCAB)
        before = resident_mb()
        print("| tokens a row | groups | rows | passes | GFLOPs | CPU s | peak MiB |\n|---|---|---|---|---|---|---|")
        for number in sorted(chosen.groups):
            measure(folder, [group(id, SHORT) for id in range(number)], 4096, before)
        for tokens in sorted(chosen.tokens):  # a pass holds both rows
            measure(folder, [group(0, tokens)], 2 * tokens, before)
        if chosen.ranks:
            sweep_ranks(folder, sorted(chosen.ranks), max(chosen.tokens), max(chosen.groups))


if __name__ == "__main__":
    main()
