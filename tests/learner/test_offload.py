"""Activations that wait in host memory: the same gradients, and what is moved is what layers began with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.model.policy import PolicyModel

from .test_model import some_groups


class Counted(torch.autograd.graph.saved_tensors_hooks):
    """In the place of torch's: on a CPU that one moves nothing."""

    moved: list[Tensor]

    def __init__(self, pin_memory: bool) -> None:
        assert not pin_memory
        super().__init__(self.pack, lambda kept: kept.clone())

    def pack(self, tensor: Tensor) -> Tensor:
        self.moved.append(tensor)
        return tensor.clone()


def test_offloading_moves_the_inputs_of_layers_and_changes_no_gradient(
    qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Counted.moved = []
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Counted)
    (pack,) = packs(some_groups(0), 4096)
    found = []
    for offloading in (False, True):
        policy = PolicyModel(qwen3_dir, checkpointing=True, offloading=offloading)
        logprobs_K, _ = policy.logprobs(pack, temperature=0.7)
        assert bool(Counted.moved) == offloading
        logprobs_K.sum().backward()
        found.append([parameter.grad for parameter in policy.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))  # type: ignore[arg-type]
    nodes, width = len(pack.token_ids_N), 32
    assert sum(one.shape == (1, nodes, width) for one in Counted.moved) >= 2  # one for each layer
    layers = {id(parameter) for name, parameter in policy.module.named_parameters() if ".layers." in name}
    assert not layers & {id(one) for one in Counted.moved}
    with torch.no_grad():
        before = len(Counted.moved)
        policy.logprobs(pack, temperature=0.7)
    assert len(Counted.moved) == before
