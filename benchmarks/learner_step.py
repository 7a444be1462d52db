"""A learner step over prefix trees beside the same rows computed by transformers alone.

Four ways to get the same gradients, taking turns in one process so that a slow minute of the machine hits all:

    trees       agentrl's whole step: rows from groups, packing, passes, clipping, AdamW
    row by row  forward and backward of each row alone: no padding, no sharing
    sorted      micro-batches of rows of similar length, padded to the longest of each
    padded      micro-batches in the order in which episodes came, padded to the longest of the step (as TRL does)

The peers do forward and backward only. The figure of a way is the median of its rounds; gradients are compared first.
On a busy machine read the CPU seconds: they count only what this process was given.

    python benchmarks/learner_step.py [--groups 16] [--members 8] [--prompt 192] [--rounds 3] [--threads 1]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.algos.grpo import GRPO
from agentrl.config import EnvSource, Rollout, RunConfig, Train
from agentrl.records import Group, GroupState, Step, StopReason, Task, Trajectory, Turn, VersionSpan
from agentrl.train.learner import Learner
from agentrl.train.samples import Row, group_rows, weigh

VOCAB = 512
MEAN_COMPLETION, LONGEST = 128, 584
TASK = Task(index=0, env="benchmark", seed=0)
MICRO_BATCH = 8

transformers.utils.logging.disable_progress_bar()


def save_model(folder: Path, layers: int, width: int) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=max(1, width // 64),
        head_dim=32,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_groups(groups: int, members: int, prompt: int) -> list[Group]:
    """Episodes of one turn whose lengths are spread as those of real ones: many short, a few long."""
    rng = random.Random(0)
    made: list[Group] = []
    for g in range(groups):
        shared = tuple(rng.randrange(VOCAB) for _ in range(prompt))
        trajectories: list[Trajectory] = []
        for m in range(members):
            length = max(8, min(LONGEST, round(rng.lognormvariate(0, 0.6) * MEAN_COMPLETION / 1.2)))
            turn = Turn(
                index=0,
                parent=None,
                prompt_ids=shared,
                token_ids=tuple(rng.randrange(VOCAB) for _ in range(length)),
                logprobs=(-6.2,) * length,
                spans=(VersionSpan(0, 0, length),),
                finish="stop",
                text="",
                step=Step(observation=()),
            )
            trajectories.append(
                Trajectory(
                    episode_id=g * members + m,
                    group_id=g,
                    member=m,
                    task=TASK,
                    start=(),
                    turns=(turn,),
                    stop_reason=StopReason.DONE,
                    outcome=rng.random(),
                )
            )
        made.append(Group(id=g, task=TASK, state=GroupState.TAKEN, size=members, trajectories=tuple(trajectories)))
    return made


def padded_passes(module: torch.nn.Module, batches: Sequence[Sequence[Row]], width: int | None) -> None:
    """Forward and backward of micro-batches; the on-policy loss of the rows, logits where tokens were sampled."""
    for batch in batches:
        longest = width or max(len(row.token_ids) for row in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros(len(batch), longest, dtype=torch.long)
        for at, row in enumerate(batch):
            ids[at, : len(row.token_ids)] = torch.tensor(row.token_ids)
            mask[at, : len(row.token_ids)] = 1
        first = min(int(row.place_S[0]) for row in batch) - 1
        whole = len(batch) == 1
        logits = module(ids, attention_mask=None if whole else mask, logits_to_keep=longest - first).logits
        logprobs = torch.log_softmax(logits, -1)
        loss = torch.zeros(())
        for at, row in enumerate(batch):
            chosen = logprobs[at, row.place_S - 1 - first, torch.tensor(row.token_ids)[row.place_S]]
            loss = loss - (row.columns["weight"] * row.columns["advantage"] * chosen).sum()
        loss.backward()


def chunks(rows: Sequence[Row]) -> list[Sequence[Row]]:
    return [rows[at : at + MICRO_BATCH] for at in range(0, len(rows), MICRO_BATCH)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in {"groups": 16, "members": 8, "prompt": 192, "rounds": 3, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens-per-batch", type=int, default=Train().tokens_per_batch)
    chosen = parser.parse_args()
    algo = GRPO(importance="none")
    groups = make_groups(chosen.groups, chosen.members, chosen.prompt)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), chosen.layers, chosen.width)
        config = RunConfig(
            model=folder,
            env=EnvSource(id="benchmark"),
            algo=algo,
            rollout=Rollout(max_context=chosen.tokens_per_batch),
            train=Train(threads=chosen.threads, tokens_per_batch=chosen.tokens_per_batch, lr=1e-9, grad_clip=1e9),
        )
        learner = Learner(config, Path(folder))
        module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    ready = [group_rows(group, algo, step_of=lambda _: 0, step_now=0, max_lag=0) for group in groups]
    rows = [row for part in weigh([ready])[0] for row in part]
    by_length = sorted(rows, key=lambda row: len(row.token_ids))
    longest = len(by_length[-1].token_ids)
    reports = []

    def trees() -> None:
        now = learner.step_index
        reports.append(learner.step(groups, step_of=lambda _: now))

    ways: dict[str, Callable[[], None]] = {
        "trees": trees,
        "row by row": lambda: padded_passes(module, [[row] for row in rows], None),
        "sorted": lambda: padded_passes(module, chunks(by_length), None),
        "padded": lambda: padded_passes(module, chunks(rows), longest),
    }
    norms: dict[str, float] = {}
    for name, way in ways.items():  # also the warm-up
        module.zero_grad()
        way()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        norms[name] = float(torch.cat([g.flatten() for g in gradients]).norm()) if gradients else 0.0
    norms["trees"] = reports[0].grad_norm or 0.0
    spread = max(norms.values()) / min(norms.values()) - 1
    if spread > 1e-3:
        raise SystemExit(f"the ways do not compute the same gradient: norms {norms}")
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(chosen.rounds):
        for name, way in ways.items():
            module.zero_grad()
            started, used = time.perf_counter(), time.process_time()
            way()
            wall[name].append(time.perf_counter() - started)
            cpu[name].append(time.process_time() - used)
    report = reports[-1]
    parameters = sum(parameter.numel() for parameter in module.parameters())
    share = report.tokens_distinct / report.tokens_row
    print(f"{parameters / 1e6:.2f}M parameters, {chosen.threads} thread(s), {chosen.groups} x {chosen.members} rows,")
    print(f"{report.tokens_row} row tokens, {report.tokens_distinct} distinct ({share:.0%}), longest row {longest}")
    print(f"gradient norms agree within {spread:.1e}; seconds of the last step by part: ", end="")
    print({part: round(value, 3) for part, value in report.seconds.items()})
    print("| way | wall s | CPU s | row tokens per CPU s | CPU of trees times |\n|---|---|---|---|---|")
    base = statistics.median(cpu["trees"])
    for name in ways:
        used = statistics.median(cpu[name])
        took = statistics.median(wall[name])
        print(f"| {name} | {took:.2f} | {used:.2f} | {report.tokens_row / used:,.0f} | {used / base:.2f} |")


if __name__ == "__main__":
    main()
