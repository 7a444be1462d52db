"""In which dtype weights are held: as wide as the optimizer needs, and no wider than a pass computes in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.algos.grpo import GRPO
from agentrl.config import Rollout, Train
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.learner import Learner
from agentrl.learner.model.policy import PolicyModel

from .making import mixture, random_group, run_config, tiny_qwen3
from .test_model import some_groups

SHORT = Rollout(max_context=30, max_tokens_per_turn=16)


def bytes_of(policy: PolicyModel, *, trained: bool) -> dict[torch.dtype, int]:
    found: dict[torch.dtype, int] = {}
    for parameter in policy.module.parameters():
        if parameter.requires_grad == trained:
            found[parameter.dtype] = found.get(parameter.dtype, 0) + parameter.nbytes
    return found


@pytest.mark.parametrize("make", [tiny_qwen3, mixture])
def test_frozen_weights_take_two_bytes_where_passes_compute_in_bfloat16(make, tmp_path: Path) -> None:
    """Vectors and the embedding aside: they enter a pass as float32."""
    folder = make(tmp_path / "model")
    whole = PolicyModel(folder)
    frozen = PolicyModel(folder, dtype=torch.bfloat16, frozen=True)
    matrices = sum(p.numel() for p in whole.module.parameters() if p.dim() > 1) - (
        whole.module.get_input_embeddings().weight.numel()
    )
    assert bytes_of(frozen, trained=True) == {}
    assert bytes_of(frozen, trained=False)[torch.bfloat16] == 2 * matrices
    assert bytes_of(whole, trained=True) == {torch.float32: 4 * sum(p.numel() for p in whole.module.parameters())}


@pytest.mark.parametrize("make", [tiny_qwen3, mixture])
def test_an_adapter_is_trained_in_float32_over_weights_in_bfloat16(make, tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    train = Train(lora_rank=2, dtype="bfloat16", warmup_steps=0, lr=1e-2)
    learner = Learner(run_config(train=train, rollout=SHORT).learner, folder)
    below, own = (bytes_of(learner.model, trained=trained) for trained in (False, True))
    assert below[torch.bfloat16] > below[torch.float32] and set(own) == {torch.float32}
    before = learner.hashes()
    report = learner.step([random_group(1, seed=1)], step_of=lambda _: 0)
    assert report.updated and learner.hashes() != before
    tokens = [3, 1, 4, 1, 5]
    assert learner.score(tokens) == pytest.approx(learner.score(tokens, torch.bfloat16), abs=0.3)


@pytest.mark.parametrize(("make", "apart"), [(tiny_qwen3, 0.0), (mixture, 0.06)])
def test_a_frozen_model_says_what_the_same_weights_in_float32_say(make, apart: float, tmp_path: Path) -> None:
    """Bit by bit, so that the KL of a policy to the reference that it began as is 0. But a pass computes the experts of
    a mixture in the dtype in which they are held."""
    folder = make(tmp_path / "model")
    (pack,) = packs(some_groups(0), 4096)
    wide, narrow = (PolicyModel(folder, dtype=torch.bfloat16, frozen=frozen) for frozen in (False, True))
    with torch.no_grad():
        expected, found = (model.logprobs(pack, temperature=0.7)[0] for model in (wide, narrow))
    torch.testing.assert_close(found, expected, atol=apart, rtol=0.0)


def test_a_reference_is_held_in_the_dtype_of_a_pass(qwen3_dir: Path) -> None:
    for dtype, expected in (("bfloat16", {torch.bfloat16, torch.float32}), ("float32", {torch.float32})):
        train = Train(dtype=dtype, warmup_steps=0)  # type: ignore[arg-type]
        learner = Learner(run_config(algo=GRPO(kl_weight=0.1), train=train, rollout=SHORT).learner, qwen3_dir)
        reference = learner.models.frozen["reference"]
        assert reference is not None and set(bytes_of(reference, trained=False)) == expected
        report = learner.step([random_group(1, seed=1)], step_of=lambda _: 0)
        assert report.measures is not None and report.measures.kl_reference == 0.0
