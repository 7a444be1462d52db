"""A whole run in which roles have adapters of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.embedded.batching import Batcher, BatchRequest
from agentrl.engine.embedded.lora import read
from agentrl.engine.embedded.model import EmbeddedModel, KVStore, read_weights
from agentrl.engine.rendering.renderer import Renderer
from agentrl.models.resolve import model_dir
from agentrl.records import Message, SamplingParams
from agentrl.run.run_folder import RunDir
from agentrl.run.trainer import Trainer
from agentrl.store import RunStore
from agentrl.store.audit import audit

from .envs import Pair
from .test_run import ENVS, SMALL

STEPS = 10
PAIR: dict[str, Any] = {
    "model": SMALL["model"],
    "rollout": {"group_size": 8, "max_running": 32, "max_tokens_per_turn": 2},
    "engine": {"max_batch": 32, "kv_cache_mb": 64},
    "buffer": {**SMALL["buffer"], "groups_per_step": 4, "max_lag": 0},
    "train": {"steps": STEPS, "checkpoint_every": 5, "lora_rank": 4, "lr": 1e-2, "warmup_steps": 0},
    "roles": [{"name": "short", "adapter": True, "algo": {"kind": "rloo"}}],
    "eval": {"sets": [{"name": "held_out", "n": 4}]},
}


def worth(folder: Path, adapter: Path, role: str) -> float:
    """What a role earns on average with an adapter of the run."""
    architecture, renderer = read_architecture(folder), Renderer(folder)
    batcher = Batcher(
        EmbeddedModel(architecture, read_weights(folder), length=128),
        KVStore(architecture, 64, 128),
        max_batch=64,
        seed=1,
    )
    prompt = renderer.start([Message(role="user", content="write")])
    sampling = SamplingParams(max_tokens=2, stop_token_ids=renderer.stop_token_ids)
    own = read(adapter, architecture, name="own", key=-1)
    asked = [
        BatchRequest(id=str(at), tokens=list(prompt), sampling=sampling, sink=lambda _: None, adapter=own)
        for at in range(64)
    ]
    for request in asked:
        batcher.submit(request)
    while batcher.busy:
        batcher.step()
    texts = [renderer.decode(request.tokens[request.prompt_length :]) for request in asked]
    return sum(Pair.worth(role, text) for text in texts) / len(texts)


@pytest.mark.slow
@pytest.mark.long
def test_two_roles_learn_what_one_policy_cannot(tmp_path: Path) -> None:
    """Both read the same: long texts pay for one, short ones for the other. Each learns its own, on one engine; with
    the adapters swapped both fail. The run is stopped half way, and goes on with both."""
    out = tmp_path / "run"
    first = {**PAIR, "train": {**PAIR["train"], "steps": STEPS // 2}}
    Trainer(env=f"{ENVS}:Pair", config=first, out=out).train()
    summary = Trainer.resume(out, settings=[f"train.steps={STEPS}"])
    assert summary["steps"] == STEPS and summary["eval"]["after"]["n"] == 4
    run = RunDir.open(out)
    with RunStore.open(run.store_path) as store:
        assert audit(store).violations == []
        turns = [turn for one in store.reads.trajectories("train") for turn in one.turns]
        assert {turn.role for turn in turns if turn.learns} == {"long", "short"}
    saved, folder = run.checkpoints / f"step-{STEPS:08d}" / "adapter", model_dir(SMALL["model"])
    own = {"long": worth(folder, saved, "long"), "short": worth(folder, saved / "short", "short")}
    swapped = {"long": worth(folder, saved / "short", "long"), "short": worth(folder, saved, "short")}
    assert min(own.values()) > 0.7, own
    assert max(swapped.values()) < 0.4, swapped
