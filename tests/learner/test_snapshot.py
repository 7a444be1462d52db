"""What a sender reads: whole, named as the folder names it, still while training goes on, gathered before all else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.learner.weight_export import take

from .making import mixture, tiny_qwen3
from .ranks import WORLD

ROOT = Path(__file__).resolve().parents[2]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("make", [tiny_qwen3, mixture])
def test_names_order_and_values_are_those_of_the_folder(make: Any, tmp_path: Path) -> None:
    folder = make(tmp_path)
    source = load_file(folder / "model.safetensors")
    snapshot = take(load(folder), torch.float32)
    assert snapshot is not None
    for _ in range(2):  # a source is read once a send, and again by the next
        sent = dict(snapshot)
        assert sent.keys() == source.keys()
        assert all(torch.equal(tensor, source[name]) and tensor.is_contiguous() for name, tensor in sent.items())
        assert [(d.name, d.dtype, d.shape) for d in snapshot.metadata()] == [
            (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()
        ]
    sizes = [tensor.nbytes for tensor in source.values()]
    assert (snapshot.size_bytes, snapshot.largest_bytes) == (sum(sizes), max(sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_does_not_change_what_was_taken(dtype: torch.dtype, qwen3_dir: Path) -> None:
    model, source = load(qwen3_dir), load_file(qwen3_dir / "model.safetensors")
    snapshot = take(model, dtype)
    assert snapshot is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(tensor, source[name].to(dtype)) for name, tensor in snapshot)


@pytest.mark.medium
def test_all_shards_are_gathered_on_every_rank_before_the_engines_communicator_is_entered(tmp_path: Path) -> None:
    """Rank 0 sends alone, while rank 1 is in the next step already and waits for it there: if the send took part in a
    gather, or began before rank 1 had done its part of one, neither would ever go on."""
    folder = tiny_qwen3(tmp_path / "model")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.learner.ranks", str(rank), str(folder), str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        ended = [(*rank.communicate(timeout=200), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [status for _, _, status in ended] == [0, 0], ended
    facts = json.loads((tmp_path / "facts.json").read_text())
    source = load_file(folder / "model.safetensors")
    assert facts["rank"] == 0 and facts["tensors"] == len(source)
    assert facts["seen"] == WORLD * len(source)  # every tensor, on both ranks, when rank 0 entered
    saved = torch.load(tmp_path / "sent.pt")
    assert saved["sent"].keys() == source.keys()
    assert all(torch.equal(tensor, source[name].bfloat16()) for name, tensor in saved["sent"].items())
    assert saved["described"] == [(name, torch.bfloat16, tuple(t.shape)) for name, t in saved["sent"].items()]
    assert facts["size"] == 2 * sum(tensor.numel() for tensor in source.values())
