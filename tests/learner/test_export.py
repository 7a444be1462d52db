"""The weight file: complete, named as the model's folder names it, whole or not there."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from agentrl.errors import RunFailed
from agentrl.learner import weight_export
from agentrl.learner.learner import Learner

from .making import run_config, tiny_qwen3


@pytest.mark.parametrize("tie", [True, False])
def test_names_and_values_are_those_of_the_folder(tie: bool, tmp_path: Path) -> None:
    folder = tiny_qwen3(tmp_path / "model", tie=tie)
    learner = Learner(run_config().learner, folder)
    file = learner.export(tmp_path / "shm" / "v1.safetensors")
    got, source = load_file(file.path), load_file(folder / "model.safetensors")
    assert got.keys() == source.keys() == set(file.names)
    assert ("lm_head.weight" in got) is not tie
    assert all(torch.equal(tensor, source[name]) for name, tensor in got.items())
    assert file.sha256 == hashlib.sha256(file.path.read_bytes()).hexdigest()
    assert file.size_bytes == file.path.stat().st_size
    with safe_open(file.path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "0"}


def test_it_can_be_cast(qwen3_dir: Path, tmp_path: Path) -> None:
    learner = Learner(run_config().learner, qwen3_dir)
    file = learner.export(tmp_path / "half.safetensors", dtype=torch.bfloat16)
    whole = learner.export(tmp_path / "whole.safetensors")
    matrices, vectors = {torch.bfloat16}, {torch.float32}  # an engine may need a router's biases in float32
    for tensor in load_file(file.path).values():
        assert tensor.dtype in (matrices if tensor.dim() > 1 else vectors)
    assert file.size_bytes < 0.55 * whole.size_bytes
    assert all(parameter.dtype == torch.float32 for parameter in learner.model.parameters())


def test_a_folder_without_room_is_refused_before_a_byte_is_written(
    qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(run_config().learner, qwen3_dir)
    size = learner.export(tmp_path / "first.safetensors").size_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=size // 2))
    with pytest.raises(RunFailed, match=r"MiB left, and the weights take .* scratch_dir"):
        learner.export(tmp_path / "second.safetensors")
    assert [entry.name for entry in tmp_path.iterdir()] == ["first.safetensors"]


def test_a_failed_write_leaves_the_old_file(qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(run_config().learner, qwen3_dir)
    path = tmp_path / "weights.safetensors"
    old = learner.export(path)

    def torn(tensors: object, target: Path, metadata: object) -> None:
        target.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(weight_export, "save_file", torn)
    with pytest.raises(OSError, match="No space"):
        learner.export(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == old.sha256
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.safetensors"]
