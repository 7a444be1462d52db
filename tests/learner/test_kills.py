"""SIGKILL at any file operation of a checkpoint's write, with two models and a reference in the learner: what is found
then is a whole checkpoint, and going on from it is bit-equal."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algos.ppo import PPO
from agentrl.config import Train
from agentrl.learner import weight_export as of_export
from agentrl.learner.checkpoints import checkpoint as of_parts
from agentrl.learner.checkpoints.folders import newest, step_of
from agentrl.learner.learner import Learner
from agentrl.learner.model import lora as of_adapter

from .making import run_config
from .test_checkpoint import Killed
from .test_critic import SHORT, train, whole
from .test_learner import same

OPERATIONS: list[tuple[Any, str]] = [
    *((Path, name) for name in ("mkdir", "rename", "replace", "unlink", "write_text")),
    *((shutil, name) for name in ("copyfile", "rmtree")),
    *((os, name) for name in ("open", "fsync")),
    *((module, "save_file") for module in (of_parts, of_export, of_adapter)),
    (torch, "save"),
]


WRITTEN = {"copyfile": 1, "save_file": 1, "save": 1, "write_text": 0}  # which argument is the file that it writes


class Killer:
    """Counts file operations, and dies at number `at`: before it, or (`torn`) when it has written half of its file."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, *, torn: bool) -> None:
        self.at, self.torn, self.done, self.dead = at, torn, list[str](), False
        self.thread = threading.get_ident()
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, does: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:  # of another test's: it is not the one that dies
                return does(*args, **kwargs)
            if self.dead:
                raise Killed  # a dead process cleans nothing up
            self.done.append(name)
            if len(self.done) - 1 != self.at:
                return None if name == "fsync" else does(*args, **kwargs)  # SIGKILL takes nothing from the disk
            self.dead = True
            if self.torn and name in WRITTEN:
                does(*args, **kwargs)
                path = Path(args[WRITTEN[name]])
                os.truncate(path, path.stat().st_size // 2)
            raise Killed

        return operation


@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=pytest.mark.slow)], ids=["two models", "adapters"])
@pytest.mark.long
def test_a_kill_at_any_file_operation_leaves_a_whole_checkpoint(rank: int, qwen3_dir: Path, tmp_path: Path) -> None:
    algo = PPO(critic_warmup_steps=0, kl_weight=0.1)
    settings = run_config(algo=algo, train=Train(keep_checkpoints=1, lora_rank=rank), rollout=SHORT, seed=3)
    learner, again = Learner(settings.learner, qwen3_dir), Learner(settings.learner, qwen3_dir)
    train(learner, 0)
    learner.save(tmp_path / "good")
    states = {1: whole(learner)}
    train(learner, 1)
    states[2] = whole(learner)
    trained, before = learner.trained, learner.state.checkpoint_step

    def saved(root: Path, at: int, *, torn: bool) -> str:
        """The operation that died; empty if all were done before number `at`."""
        with pytest.MonkeyPatch.context() as patch:
            killer = Killer(patch, at, torn=torn)
            learner.state.trained, learner.state.checkpoint_step = trained, before
            try:
                write = learner.copy(root)
                assert write is not None and not WRITTEN.keys() & set(killer.done)
                write(lambda: None)
            except Killed:
                return killer.done[-1]
            return ""

    killed: dict[str, int] = {}
    found: list[int] = []
    name = ""
    for at, torn in ((at, torn) for at in range(1000) for torn in (False, True)):
        if torn and name not in WRITTEN:
            continue
        root = tmp_path / f"{at}-{torn}"
        shutil.copytree(tmp_path / "good", root)
        name = saved(root, at, torn=torn)
        if not name:
            break
        folder = newest(root)
        assert folder is not None
        again.load(folder)
        found.append(again.step_index)
        assert step_of(folder) == again.step_index and same(states[again.step_index], whole(again)), (name, torn)
        if again.step_index == 1 and name not in killed:  # the write is made anew, over what the dead one left
            assert saved(root, 1000, torn=False) == ""
            again.load(root / "step-00000002")
            assert same(states[2], whole(again))
        killed[name] = at
        shutil.rmtree(root)
    assert set(found) == {1, 2} and found == sorted(found)  # 2: it died as it removed the one before
    assert killed.keys() >= {"mkdir", "copyfile", "save_file", "replace", "save", "write_text", "fsync", "rename"}
    assert "rmtree" in killed
