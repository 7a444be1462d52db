"""A learner step over prefix trees beside TRL's step, and two other ways, on the same rows of recorded groups.

Ways to get the same gradient (norms are compared first), taking turns so that a slow minute of the machine hits all:

    trees       agentrl's whole step: rows from groups, packing, passes, clipping, AdamW
    TRL         the step of its GRPOTrainer, which pads to the longest row of the step; in a process of its own
    sorted      transformers on micro-batches of rows of similar length, padded to the longest of each
    row by row  transformers on each row alone: no padding, no sharing

The last two do forward and backward only. Shapes: `prompt`, 8 members with one turn, 60% of the tokens a shared prompt;
`forks`, 8 members of 20 turns, each turn forking off from the history without its thoughts; `divided`, 8 members of
1,024 tokens after a prompt of as many, for which `--tokens-per-batch 2048` is one row. There the way `prompt again` is
our step without stems. With `--experts` the model is a mixture of so many, of which a token uses four. A figure is the
median of the rounds, in CPU seconds: they count only what a process was given, which matters on a busy machine. FLOPs
are those of the model, by one formula for all ways, padding included. Memory is the most that was resident in a step,
over what was before the model was loaded.

    make peers
    agentrl bench learner [--shape prompt] [--groups 2] [--rounds 3] [--vocab 512] [--ways trees TRL]
    agentrl bench learner --shape divided --groups 1 --tokens-per-batch 2048 --ways trees "prompt again" [--experts 16]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers
from _learner_shapes import SHAPES
from _memory import peak_mb, reset, resident_mb
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.algos.grpo import GRPO
from agentrl.config import EnvSource, Rollout, RunConfig, Train
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import Pack, packs
from agentrl.learner.data.shares import weigh
from agentrl.learner.flops import operations
from agentrl.learner.learner import Learner
from agentrl.learner.model.models import Models
from agentrl.records import Group

HERE = Path(__file__).resolve().parent
BATCH = 8  # rows of a micro-batch
WAYS = ("trees", "TRL", "sorted", "row by row")
AGAIN = "prompt again"
USED = 4  # experts of a token

transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids, the places of scored tokens, and their advantage."""

    ids: list[int]
    scored: list[int]
    advantage: float


@dataclass(frozen=True, slots=True)
class Once:
    """What a step took, and the norm of its gradient."""

    wall: float
    cpu: float
    norm: float
    peak_mb: float


def rows_of(groups: Sequence[Group], algo: GRPO) -> list[Row]:
    """The rows that the learner makes of groups, in the order of their episodes."""
    ready = [group_rows(group, algo, step_of=lambda _: 0, step_now=0, max_lag=0) for group in groups]
    found: list[Row] = []
    for rows in weigh([ready])[0]:
        for row in rows:
            advantage = algo.advantages(row.columns).get("advantage", row.columns.get("advantage"))
            assert advantage is not None
            found.append(Row(list(row.token_ids), row.place_S.tolist(), float(advantage[0])))
    return found


def save_model(folder: Path, layers: int, width: int, vocab: int, experts: int = 0) -> None:
    """A random Qwen3, or a Qwen3-MoE in which a token's experts are together as wide as the dense model's MLP."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": max(1, width // 64),
        "head_dim": 32,
        "tie_word_embeddings": True,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    if experts:
        mixture = {"num_experts": experts, "num_experts_per_tok": USED, "norm_topk_prob": True}
        made: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **mixture, moe_intermediate_size=3 * width // USED))
    else:
        made = Qwen3ForCausalLM(Qwen3Config(**sizes))
    made.save_pretrained(folder)


def padded(module: Any, batches: Sequence[Sequence[Row]]) -> None:
    """Forward and backward of micro-batches, padded to the longest row of each; logits where tokens were sampled."""
    scored = sum(len(row.scored) for batch in batches for row in batch)
    for batch in batches:
        width, first = max(len(row.ids) for row in batch), min(row.scored[0] for row in batch) - 1
        ids, mask = torch.zeros(2, len(batch), width, dtype=torch.long)
        for at, row in enumerate(batch):
            ids[at, : len(row.ids)] = torch.tensor(row.ids)
            mask[at, : len(row.ids)] = 1
        alone = len(batch) == 1
        logits = module(ids, attention_mask=None if alone else mask, logits_to_keep=width - first).logits
        logprobs = torch.log_softmax(logits, -1)
        loss = torch.zeros(())
        for at, row in enumerate(batch):
            places = torch.tensor(row.scored)
            chosen = logprobs[at, places - 1 - first, torch.tensor(row.ids)[places]]
            loss = loss - row.advantage * chosen.sum() / scored
        loss.backward()


def flops(module: Any, batches: Sequence[Sequence[Row]], *, width: int = 0, first: int = 0) -> float:
    """Of padded micro-batches, by the formula that the learner has for trees. `width` and `first`: those of all
    batches."""
    found = 0.0
    for batch in batches:
        long = width or max(len(row.ids) for row in batch)
        logits = long - (first or min(row.scored[0] for row in batch) - 1)
        branch = SimpleNamespace(start=0, stop=long, path=range(long))
        shape = {"token_ids_N": range(long * len(batch)), "predictors_P": range(logits * len(batch)), "stem": None}
        found += operations(module, SimpleNamespace(branches=[branch] * len(batch), **shape))  # type: ignore[arg-type]
    return found


def batches_of(rows: Sequence[Row], size: int) -> list[Sequence[Row]]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]


@contextlib.contextmanager
def trl_steps(folder: Path, rows: Sequence[Row]) -> Generator[Callable[[], Once]]:
    python = HERE.parent / ".venv-peers" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"no {python}: make peers, or give --ways without TRL")
    (folder / "rows.json").write_text(
        json.dumps([{"ids": r.ids, "scored": r.scored, "advantage": r.advantage} for r in rows])
    )
    argv = [python, HERE / "_learner_trl.py", folder, folder / "rows.json", BATCH]
    with subprocess.Popen(list(map(str, argv)), stdin=-1, stdout=-1, stderr=subprocess.PIPE, text=True) as peer:
        assert peer.stdin is not None and peer.stdout is not None and peer.stderr is not None

        def once() -> Once:
            print(file=peer.stdin, flush=True)
            line = peer.stdout.readline()
            if not line:
                raise SystemExit(f"TRL's side ended: {peer.stderr.read()[-2000:]}")
            said = json.loads(line)
            return Once(said["wall"], said["cpu"], said["norm"], said["peak_mb"])

        try:
            yield once
        finally:
            peer.kill()


def measured(step: Callable[[], float], before: float) -> Once:
    reset()
    wall, cpu = time.perf_counter(), time.process_time()
    norm = step()
    return Once(time.perf_counter() - wall, time.process_time() - cpu, norm, peak_mb() - before)


def ways_of(
    chosen: argparse.Namespace, groups: list[Group], rows: list[Row], folder: Path
) -> tuple[Any, dict[str, Any]]:
    """The module that counts operations, and the steps by their way."""
    before, found = resident_mb(), dict[str, Any]()

    def learner() -> Learner:
        sizes = {"tokens_per_batch": chosen.tokens_per_batch, "logits_mb": chosen.logits_mb}
        sizes |= {"gradient_checkpointing": chosen.checkpointing}
        config = RunConfig(
            model=str(folder),
            env=EnvSource(id="benchmark"),
            algo=GRPO(importance="none"),
            rollout=Rollout(max_context=chosen.tokens_per_batch),
            train=Train(lr=1e-9, grad_clip=1e9, warmup_steps=0, **sizes),
        )
        return Learner(config.learner, folder)

    def trees(of: Learner) -> float:
        now = of.step_index
        return of.step(groups, step_of=lambda _: now).grad_norm or 0.0

    once = learner()
    found["trees"] = lambda: measured(lambda: trees(once), before)
    if AGAIN in chosen.ways:
        again = learner()

        def prompt_again() -> float:
            with patch.object(Models, "prompt_once", False):
                return trees(again)

        found[AGAIN] = lambda: measured(prompt_again, before)
    if {"sorted", "row by row"} & {*chosen.ways}:
        module: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        by_length = sorted(rows, key=lambda row: len(row.ids))

        def plain(size: int) -> float:
            module.zero_grad()
            padded(module, batches_of(by_length, size))
            return float(torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm())

        found["sorted"] = lambda: measured(lambda: plain(BATCH), before)
        found["row by row"] = lambda: measured(lambda: plain(1), before)
    return once.model.module, found


def laid(groups: Sequence[Group], budget: int) -> dict[str, list[Pack]]:
    """The passes of our own ways."""
    algo = GRPO(importance="none")
    ready = [group_rows(group, algo, step_of=lambda _: 0, step_now=0, max_lag=0) for group in groups]
    return {way: packs(weigh([ready])[0], budget, stems=way == "trees") for way in ("trees", AGAIN)}


def counted(module: Any, passes: dict[str, list[Pack]], rows: Sequence[Row]) -> dict[str, float]:
    """Operations of a step, by way."""
    by_length = sorted(rows, key=lambda row: len(row.ids))
    wide = max(row.scored[0] for row in rows)
    width = wide + max(len(row.ids) - row.scored[0] for row in rows)
    return {
        **{way: sum(operations(module, pack) for pack in made) for way, made in passes.items()},
        "TRL": flops(module, batches_of(rows, BATCH), width=width, first=wide - 1),
        "sorted": flops(module, batches_of(by_length, BATCH)),
        "row by row": flops(module, batches_of(by_length, 1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="prompt")
    sizes = {"groups": 2, "rounds": 3, "layers": 4, "width": 128, "vocab": 512, "experts": 0, "tokens-per-batch": 4096}
    for name, default in {**sizes, "logits-mb": Train().logits_mb}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--checkpointing", action="store_true", help="train.gradient_checkpointing")
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, AGAIN), default=WAYS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    groups = SHAPES[chosen.shape](chosen.groups)
    rows = rows_of(groups, GRPO(importance="none"))
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        save_model(folder, chosen.layers, chosen.width, chosen.vocab, chosen.experts)
        module, steps = ways_of(chosen, groups, rows, folder)
        if "TRL" in chosen.ways:
            steps["TRL"] = stack.enter_context(trl_steps(folder, rows))
        found: dict[str, list[Once]] = {way: [] for way in chosen.ways}
        for round_ in range(chosen.rounds + 1):
            for way, runs in found.items():
                runs.append(steps[way]())
                print(f"round {round_}, {way}: {runs[-1]}", file=sys.stderr)
        passes = laid(groups, chosen.tokens_per_batch)
        work = counted(module, passes, rows)
    norms = [runs[0].norm for runs in found.values()]
    if (spread := max(norms) / min(norms) - 1) > 1e-3:
        raise SystemExit(f"the ways do not compute the same gradient: norms {norms}")
    parameters = sum(parameter.numel() for parameter in module.parameters())
    tokens = sum(len(row.ids) for row in rows)
    print(
        f"{parameters / 1e6:.2f}M parameters, vocabulary {chosen.vocab}, {len(groups)} groups, {len(rows)} rows, ",
        end="",
    )
    nodes = {way: round(sum(pack.distinct for pack in made)) for way, made in passes.items()}
    print(f"{tokens} row tokens, nodes {nodes}; gradient norms agree within {spread:.1e}")
    print("| way | CPU s | times | wall s | TFLOPs | times | peak MiB | times |\n|---|---|---|---|---|---|---|---|")
    medians = {
        way: [statistics.median(getattr(one, key) for one in runs[1:]) for key in ("cpu", "wall", "peak_mb")]
        for way, runs in found.items()
    }
    least = medians["trees"]
    for way, (cpu, wall, peak) in medians.items():
        done, times = work[way] / 1e12, (cpu / least[0], work[way] / work["trees"], peak / least[2])
        print(f"| {way} | {cpu:.2f} | {times[0]:.2f} | {wall:.2f} | {done:.4f} | {times[1]:.2f} |", end="")
        print(f" {peak:.0f} | {times[2]:.2f} |")


if __name__ == "__main__":
    main()
