"""A whole run whose environment shows pictures: trained, killed, resumed, and its journal read by the learner."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run.test_run import DEADLINE_S, command, started, wait_for_step
from safetensors.torch import load_file

from agentrl.algos.grpo import GRPO
from agentrl.config.train import Train
from agentrl.errors import ConfigError
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.model.policy import PolicyModel
from agentrl.run.run_folder import RunDir
from agentrl.run.trainer import Trainer
from agentrl.store import RunStore
from agentrl.store.audit import audit
from agentrl.tokens import images
from agentrl_environments.picture_grid import PictureGrid
from tests.parts.tiny_vision import make_tiny_vision

RUN = """
model = "{model}"

[env]
id = "agentrl/PictureGrid-v0"

[rollout]
workers = 1
group_size = 4
max_tokens_per_turn = 4
max_context = 400

[engine]
max_batch = 8

[buffer]
groups_per_step = 2

[train]
steps = 3
lr = 1e-3
tokens_per_batch = 400
checkpoint_every = 1

[[rewards]]
source = "noise"
kind = "callable"
call = "agentrl.offline.tiny_run:noise"
"""


@pytest.mark.medium
def test_a_run_with_pictures_is_killed_and_resumed_and_trains_what_was_seen(tmp_path: Path) -> None:
    model, file, run = make_tiny_vision(tmp_path / "model"), tmp_path / "run.toml", RunDir(tmp_path / "run")
    file.write_text(RUN.format(model=model))
    with started("train", file, "--out", run.path) as process:
        wait_for_step(run.path, 1, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)
    done = subprocess.run(
        command("train", "--resume", run.path), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    with RunStore.open(run.store_path) as store:
        assert audit(store).violations == []
        assert [len(store.lineage.episodes_of(step)) for step in (1, 2, 3)] == [8, 8, 8]
        seen = set[str]()
        for trajectory in store.reads.trajectories("train"):
            said = (trajectory.start, *(turn.step.observation for turn in trajectory.turns if turn.step))
            shown = [image.digest for messages in said for image in images.of_messages(messages)]
            assert shown == pictures(trajectory.task.seed)[: len(shown)]
            seen |= {*shown}
        kept = store._db.rows("SELECT digest FROM images")  # pyright: ignore[reportPrivateUsage]
        assert seen <= {digest for (digest,) in kept} and len(kept) == len({*kept}) <= 9, "each picture is stored once"
        journal_is_the_learners(store, model)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run.checkpoints / "step-00000003"))
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert any(name.startswith("visual.") for name in moved) and any(name.startswith("model.") for name in moved)


def pictures(seed: int) -> list[str]:
    """The digests of what the environment shows for a seed."""
    env = PictureGrid()
    messages, _ = env.reset(seed=seed)
    messages = [*messages, *env.step("")[0]]
    return [images.from_url(message["content"][1]["image_url"]["url"]).digest for message in messages]


def journal_is_the_learners(store: RunStore, model: Path) -> None:
    """What the engine said of tokens that the first weights sampled, the learner computes from the journal."""
    policy, compared = PolicyModel(model), 0
    for group in (store.reads.group(id) for id in {one.group_id for one in store.reads.trajectories("train")}):
        rows = group_rows(group, GRPO(), step_of=store.versions.step_of, step_now=0, max_lag=0).rows
        rows = [row for row in rows if bool((row.columns["lag"] == 0).all())]
        for pack in packs([rows], 10_000) if rows else ():
            with torch.no_grad():
                learned = policy.logprobs(pack, temperature=1.0)[0]
            torch.testing.assert_close(learned, pack.columns["behaviour"], atol=1e-4, rtol=0)
            compared += len(learned)
    assert compared > 50


@pytest.mark.medium
def test_a_model_that_reads_no_images_is_refused_before_the_run_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model = 'agentrl/tiny-coder': .*PictureGrid.* shows images: .*reads no"):
        Trainer(env="agentrl/PictureGrid-v0", config={"model": "agentrl/tiny-coder"}, out=tmp_path / "run").train()


@pytest.mark.medium
def test_what_was_never_tried_with_images_is_refused_by_name(tmp_path: Path) -> None:
    model = make_tiny_vision(tmp_path / "model")
    settings = {"model": str(model), "engine": {"kind": "vllm"}}
    with pytest.raises(ConfigError, match=r"engine.kind = 'vllm' is sent no images so far"):
        Trainer(env="agentrl/PictureGrid-v0", config=settings, out=tmp_path / "run").train()
    with pytest.raises(ConfigError, match=r"train.lora_rank = 4: a model that reads images is trained whole: give 0"):
        PolicyModel(model, adapter=Train(lora_rank=4))
    two: Any = SimpleNamespace(size=2)
    with pytest.raises(ConfigError, match=r"train.parallel.ranks = 2: a model that reads images is trained by one"):
        PolicyModel(model, ranks=two)
