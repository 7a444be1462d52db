"""How far log-probs of vLLM and of the learner differ: of a dense model, and of a mixture with and without replay.

`python benchmarks/routing.py` starts a real vLLM (its CPU build will do) for each model and dtype, samples episodes of
two turns from it, and makes one learner step on them at lag 0 with each value of `engine.routed_experts`. What it
prints are the step's own metrics `mismatch` (fresh tokens, in nats) and `routing`.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trio
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.config import EngineSettings, EnvSource, RunConfig, Train
from agentrl.engine.client import EngineClient
from agentrl.engine.vllm.launch import VLLMServer, find_build, running
from agentrl.learner.learner import Learner
from agentrl.learner.step_report import StepReport
from agentrl.protocols import GenerateRequest
from agentrl.records import Group, GroupState, SamplingParams, StopReason, Task, Trajectory, Turn

VOCAB, LAYERS, EXPERTS, PER_TOKEN = 512, 4, 16, 4
GROUPS, MEMBERS, PROMPT, SAMPLED, ANSWER = 6, 4, 48, 32, 12
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
}
START_S = 500.0


def make_model(folder: Path, kind: str) -> Path:
    """A random Qwen3, or a Qwen3-MoE in which a token's experts are together as wide as the dense model's MLP."""
    torch.manual_seed(0)
    if kind == "dense":
        model: Any = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    else:
        width = SIZES["intermediate_size"] // PER_TOKEN
        mixture = {"num_experts": EXPERTS, "num_experts_per_tok": PER_TOKEN, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **mixture, moe_intermediate_size=width))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{id}": id for id in range(VOCAB)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


async def play(client: EngineClient, task: Task, group: int, member: int, *, routed: bool) -> Trajectory:
    """An episode of two turns over the prompt of its group."""
    same, own = random.Random(group), random.Random(f"{group}/{member}")
    context: tuple[int, ...] = ()
    turns: list[Turn] = []
    for index in range(2):
        rng, size = (same, PROMPT) if index == 0 else (own, ANSWER)
        prompt = tuple(rng.randrange(VOCAB) for _ in range(size))
        request = GenerateRequest(
            request_id=f"{group}-{member}-{index}",
            session=str(group),
            token_ids=context + prompt,
            sampling=SamplingParams(max_tokens=SAMPLED),
            deadline_s=120.0,
            experts_from=max(0, len(context) - 1) if routed else None,
        )
        told = await client.generate(request)
        turns.append(
            Turn(
                index=index,
                parent=index - 1 if index else None,
                prompt_ids=prompt,
                token_ids=told.token_ids,
                logprobs=told.logprobs,
                spans=told.spans,
                finish=told.finish,
                text="",
                experts=told.experts,
            )
        )
        context += prompt + told.token_ids
    return Trajectory(
        episode_id=group * MEMBERS + member,
        group_id=group,
        member=member,
        task=task,
        start=(),
        turns=tuple(turns),
        stop_reason=StopReason.DONE,
        outcome=float(member % 2),
        success=bool(member % 2),
    )


async def sampled(folder: Path, scratch: Path, dtype: str, *, routed: bool) -> list[Group]:
    server = VLLMServer(
        model=folder,
        open=True,
        port=0,
        plugin_folder=scratch / "plugin",
        build=find_build(),
        max_model_len=512,
        max_batch=GROUPS * MEMBERS,
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        kv_cache_bytes=64 << 20,
        routed_experts=routed,
    ).on_free_port()
    groups: list[Group] = []
    async with running(server, log=scratch / "vllm.log", deadline_s=START_S):
        client = EngineClient(server.url)
        try:
            for number in range(GROUPS):
                task = Task(index=number, env="bench/none", seed=number)
                found: dict[int, Trajectory] = {}

                async def one(member: int, number: int = number, task: Task = task, found: Any = found) -> None:
                    found[member] = await play(client, task, number, member, routed=routed)

                async with trio.open_nursery() as nursery:
                    for member in range(MEMBERS):
                        nursery.start_soon(one, member)
                members = tuple(found[member] for member in range(MEMBERS))
                groups.append(Group(id=number, task=task, state=GroupState.TAKEN, size=MEMBERS, trajectories=members))
        finally:
            await client.aclose()
    return groups


def stepped(folder: Path, groups: list[Group], dtype: Any, replay: str) -> StepReport:
    config = RunConfig(
        model=str(folder),
        env=EnvSource(id="bench/none"),
        engine=EngineSettings(kind="vllm", routed_experts="required" if replay == "on" else False),
        train=Train.model_validate({"dtype": dtype}),
    )
    return Learner(config.learner, folder).step(groups, step_of=lambda _: 0)


def row(model: str, dtype: str, replay: str, report: StepReport, dense: float | None) -> str:
    fresh, routing = report.mismatch["fresh"], report.routing
    told = (
        ["-"] * 3
        if routing is None
        else [f"{routing.replayed:,}", str(routing.missing), f"{routing.agreement:.4f}" if routing.agreement else "-"]
    )
    times = "1" if dense is None else f"{fresh.mean / dense:.2f}"
    cells = [model, dtype, replay, f"{report.tokens_computed:,}", f"{fresh.mean:.3g}", times, f"{fresh.max:.3g}", *told]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtypes", default="float32,bfloat16")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    print("| model | dtype | replay | tokens | mismatch, mean | of dense | max | replayed | missing | agreement |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as name:
        for dtype in args.dtypes.split(","):
            dense: float | None = None
            for kind in ("dense", "mixture"):
                scratch = Path(name) / f"{kind}-{dtype}"
                folder = make_model(scratch / "model", kind)
                groups = trio.run(lambda f=folder, s=scratch, d=dtype, k=kind: sampled(f, s, d, routed=k != "dense"))
                for replay in ("off",) if kind == "dense" else ("on", "off"):
                    report = stepped(folder, groups, dtype, replay)
                    print(row(kind, dtype, replay, report, dense), flush=True)
                    dense = report.mismatch["fresh"].mean if kind == "dense" else dense


if __name__ == "__main__":
    main()
