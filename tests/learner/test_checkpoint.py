"""Checkpoints: going on from one is as if nothing had happened, and a torn one is never read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config import Train
from agentrl.errors import LeaseLost, ModelError, RunFailed
from agentrl.learner.checkpoints import checkpoint, folders
from agentrl.learner.checkpoints.folders import complete, newest
from agentrl.learner.learner import Learner

from .making import random_group, run_config, tiny_llama
from .test_learner import STEP_OF, same, state_of

CONFIG = run_config(train=Train(minibatches=2, keep_checkpoints=2), seed=3)


def train(learner: Learner, step: int) -> None:
    learner.step([random_group(10 * step + id, seed=10 * step + id) for id in range(3)], step_of=STEP_OF)


def episodes(step: int) -> tuple[int, ...]:
    """The four members of each of the groups that `train` trains."""
    return tuple(100 * (10 * step + id) + member for id in range(3) for member in range(4))


def test_going_on_from_a_checkpoint_is_going_on(qwen3_dir: Path, tmp_path: Path) -> None:
    straight = Learner(CONFIG.learner, qwen3_dir)
    train(straight, 1)
    train(straight, 2)
    folder = straight.save(tmp_path)
    train(straight, 3)

    again = Learner(CONFIG.learner, qwen3_dir)
    state = again.load(folder)
    assert (state.step, state.previous_step, state.episodes) == (2, 0, (episodes(1), episodes(2)))
    assert again.step_index == 2
    train(again, 3)
    assert same(state_of(straight), state_of(again))
    next_state = checkpoint.read_state(again.save(tmp_path))
    assert (next_state.step, next_state.previous_step, next_state.episodes) == (3, 2, (episodes(3),))


def test_a_checkpoint_is_a_model_folder(qwen3_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(qwen3_dir, source)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    learner = Learner(CONFIG.learner, source)
    train(learner, 1)
    folder = learner.save(tmp_path / "checkpoints")
    assert folder.name == "step-00000001"
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"} <= {
        path.name for path in folder.iterdir()
    }
    served = AutoModelForCausalLM.from_pretrained(folder)
    assert same(state_of(learner), served.state_dict())
    resumed = Learner(CONFIG.learner, folder)  # from the folder itself, and again from there
    resumed.load(folder)
    train(resumed, 2)
    second = resumed.save(tmp_path / "checkpoints")
    assert (second / "chat_template.jinja").is_file()
    assert checkpoint.read_state(second).step == 2


def test_only_the_newest_are_kept(qwen3_dir: Path, tmp_path: Path) -> None:
    learner = Learner(CONFIG.learner, qwen3_dir)
    for step in range(1, 5):
        train(learner, step)
        learner.save(tmp_path)
    assert [folder.name for folder in complete(tmp_path)] == ["step-00000003", "step-00000004"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert newest(tmp_path) == tmp_path / "step-00000004"


def test_saving_twice_writes_once(qwen3_dir: Path, tmp_path: Path) -> None:
    learner = Learner(CONFIG.learner, qwen3_dir)
    train(learner, 1)
    first = learner.save(tmp_path)
    stamp = (first / "state.json").stat().st_mtime_ns
    assert learner.save(tmp_path) == first
    assert (first / "state.json").stat().st_mtime_ns == stamp


def test_another_lineages_checkpoint_is_not_overwritten(qwen3_dir: Path, tmp_path: Path) -> None:
    for attempt in range(2):
        learner = Learner(CONFIG.learner, qwen3_dir)
        train(learner, 1)
        if attempt == 0:
            learner.save(tmp_path)
        else:
            with pytest.raises(RunFailed, match="exists already"):
                learner.save(tmp_path)
            assert learner.trained == [episodes(1)]


def test_law_2_a_checkpoint_of_a_learner_that_was_followed_does_not_appear(qwen3_dir: Path, tmp_path: Path) -> None:
    """It was stopped while it wrote; its successor has begun, and has saved the same step, when it goes on."""
    fences, kept = list[str](), list[bytes]()

    def follow() -> None:
        if not fences:
            fences.append("another learner has begun")
            train(second, 4)
            kept.append((second.save(tmp_path) / "model.safetensors").read_bytes())

    def may_save() -> None:
        if fences:
            raise LeaseLost(fences[0])

    second = Learner(CONFIG.learner, qwen3_dir)
    first = Learner(CONFIG.learner, qwen3_dir, progress=follow, may_save=may_save)
    fences.append("not yet")
    train(first, 1)
    fences.clear()
    with pytest.raises(LeaseLost, match="another learner has begun"):
        first.save(tmp_path)
    with pytest.raises(LeaseLost):
        first.save(tmp_path)
    assert [path.name for path in complete(tmp_path)] == ["step-00000001"]
    assert (tmp_path / "step-00000001" / "model.safetensors").read_bytes() == kept[0]
    assert checkpoint.read_state(tmp_path / "step-00000001").episodes == (episodes(4),)


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code under test catches it."""


@pytest.mark.parametrize(
    "victim",
    ["copyfile", "write_weights", "save", "write_state", "_sync", "rename"],
)
def test_a_torn_checkpoint_is_never_read(
    victim: str, qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(CONFIG.learner, qwen3_dir)
    train(learner, 1)
    good = learner.save(tmp_path)
    train(learner, 2)

    def killed(*args: object, **kwargs: object) -> None:
        raise Killed

    owner = {
        "copyfile": shutil,
        "write_weights": checkpoint,
        "save": torch,
        "write_state": folders,
        "_sync": checkpoint,
        "rename": Path,
    }[victim]
    with monkeypatch.context() as patch:
        patch.setattr(owner, victim, killed)
        with pytest.raises(Killed):
            learner.save(tmp_path)
    assert newest(tmp_path) == good
    assert learner.trained == [episodes(2)]  # still to be recorded
    folder = learner.save(tmp_path)
    assert checkpoint.read_state(folder).episodes == (episodes(2),)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_kill_while_an_old_one_is_removed(qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(CONFIG.learner, qwen3_dir)
    for step in (1, 2):
        train(learner, step)
        learner.save(tmp_path)
    train(learner, 3)

    def killed(path: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            learner.save(tmp_path)
    assert [folder.name for folder in complete(tmp_path)] == ["step-00000002", "step-00000003"]


def test_weights_of_another_architecture(qwen3_dir: Path, tmp_path: Path) -> None:
    learner = Learner(CONFIG.learner, qwen3_dir)
    with pytest.raises(ModelError, match="do not fit"):
        learner.load(tiny_llama(tmp_path / "llama"))
