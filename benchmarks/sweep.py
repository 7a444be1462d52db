"""How time and memory of a learner's step grow with the length of its rows and with the number of its groups.

Two members share a prompt of half a row and fork there. Time is CPU seconds, memory the most that was resident in the
step over what was before the model was loaded. `operations` are those of the model; attention makes them grow with the
square of a row's length, memory must grow with the length itself, and with groups time alone.

    agentrl bench sweep [--tokens 1024 4096 16384 32768] [--groups 8 64 512]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

import torch
from _learner_shapes import TASK, VOCAB
from _memory import peak_mb, reset, resident_mb
from learner import save_model

from agentrl.algos.grpo import GRPO
from agentrl.config import EnvSource, Rollout, RunConfig, Train
from agentrl.records import Group, GroupState, Step, StopReason, Trajectory, Turn, VersionSpan
from agentrl.train.learner import Learner
from agentrl.train.machine import operations
from agentrl.train.packing import packs
from agentrl.train.samples import group_rows, weigh

LAYERS, WIDTH, SHORT = 2, 32, 256


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


def measure(folder: Path, groups: list[Group], budget: int, before: float) -> None:
    algo = GRPO(importance="none")
    train = Train(tokens_per_batch=budget, logits_mb=64, lr=1e-9, warmup_steps=0)
    config = RunConfig(
        model=str(folder), env=EnvSource(id="sweep"), algo=algo, rollout=Rollout(max_context=budget), train=train
    )
    learner = Learner(config, folder)
    reset()
    began = time.process_time()
    learner.step(groups, step_of=lambda _: 0)
    cpu, peak = time.process_time() - began, peak_mb() - before
    ready = [group_rows(one, algo, step_of=lambda _: 0, step_now=0, max_lag=0) for one in groups]
    laid = packs(weigh([ready])[0], budget)
    work = sum(operations(learner.model.module, pack) for pack in laid) / 1e9
    rows = sum(len(one.trajectories) for one in groups)
    tokens = groups[0].trajectories[0].turns[0]
    length = len(tokens.prompt_ids) + len(tokens.token_ids)
    print(f"| {length} | {len(groups)} | {rows} | {len(laid)} | {work:.1f} | {cpu:.2f} | {peak:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 64, 512])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_model(folder, LAYERS, WIDTH, VOCAB)
        before = resident_mb()
        print("| tokens a row | groups | rows | passes | GFLOPs | CPU s | peak MiB |\n|---|---|---|---|---|---|---|")
        for number in sorted(chosen.groups):
            measure(folder, [group(id, SHORT) for id in range(number)], 4096, before)
        for tokens in sorted(chosen.tokens):  # a pass holds both rows
            measure(folder, [group(0, tokens)], 2 * tokens, before)


if __name__ == "__main__":
    main()
