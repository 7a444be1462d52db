"""The weight file: complete, named as the model's folder names it, whole or not there."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from agentrl.train import export
from agentrl.train.learner import Learner

from .making import run_config, tiny_qwen3


@pytest.mark.parametrize("tie", [True, False])
def test_names_and_values_are_those_of_the_folder(tie: bool, tmp_path: Path) -> None:
    folder = tiny_qwen3(tmp_path / "model", tie=tie)
    learner = Learner(run_config(), folder)
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
    learner = Learner(run_config(), qwen3_dir)
    file = learner.export(tmp_path / "half.safetensors", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(file.path).values()} == {torch.bfloat16}
    assert all(parameter.dtype == torch.float32 for parameter in learner.model.parameters())


def test_a_failed_write_leaves_the_old_file(qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(run_config(), qwen3_dir)
    path = tmp_path / "weights.safetensors"
    old = learner.export(path)

    def torn(tensors: object, target: Path, metadata: object) -> None:
        target.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(export, "save_file", torn)
    with pytest.raises(OSError, match="No space"):
        learner.export(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == old.sha256
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.safetensors"]
