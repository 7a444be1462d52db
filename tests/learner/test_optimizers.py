"""Optimizers by name: each beside a second implementation, and what all of them must do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case
from torch import Tensor, nn

from agentrl.algos.grpo import GRPO
from agentrl.config import Rollout, RunConfig, Train
from agentrl.errors import ConfigError
from agentrl.learner.learner import Learner
from agentrl.learner.optimizers import master_weights, optimizers
from agentrl.learner.optimizers.optimizers import ParameterwiseOptimizer, make, rounded

from .making import random_group, run_config, tiny_qwen3
from .test_learner import STEP_OF

SHORT = Rollout(max_context=30, max_tokens_per_turn=16)
KINDS = ("adamw", "muon", "sgd")
LR, DECAY = 0.05, 0.1


def config(algo: Any = None, **train: Any) -> RunConfig:
    given = {"lr": 1e-2, "warmup_steps": 0, "weight_decay": DECAY, **train}
    return run_config(algo=algo or GRPO(), rollout=SHORT, train=Train.model_validate(given), seed=3)


def trained(learner: Learner, steps: int, first: int = 0) -> Learner:
    for step in range(first, first + steps):
        learner.step([random_group(10 * step + at, 10 * step + at) for at in range(3)], step_of=STEP_OF)
    return learner


def sgd(weight: Tensor, grads: list[Tensor], matrix: bool) -> Tensor:
    for grad in grads:
        weight = weight - LR * (grad + DECAY * (weight.dim() > 1) * weight)
    return weight


def adamw(weight: Tensor, grads: list[Tensor], matrix: bool) -> Tensor:
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, grad in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        update = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        weight = weight - LR * (update + DECAY * (weight.dim() > 1) * weight)
    return weight


def muon(weight: Tensor, grads: list[Tensor], matrix: bool) -> Tensor:
    """Jordan's polynomial on the singular values themselves."""
    if not matrix:
        return adamw(weight, grads, matrix)
    mean = torch.zeros_like(weight)
    for grad in grads:
        mean = 0.95 * mean + 0.05 * grad
        u, s, vt = torch.linalg.svd(0.05 * grad + 0.95 * mean, full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        scale = 0.2 * math.sqrt(max(weight.shape))
        weight = weight - LR * (scale * u @ s.diag() @ vt + DECAY * weight)
    return weight


@each_case(("kind", "oracle", "apart"), [("adamw", adamw, 1e-5), ("sgd", sgd, 1e-5), ("muon", muon, 2e-2)])
@each_case("offload", [False, True])
def test_an_optimizer_is_that_of_its_paper(kind: str, oracle: Any, apart: float, offload: bool) -> None:
    """Torch computes Muon's polynomial in bfloat16."""
    torch.manual_seed(0)
    start = [torch.randn(12, 8), torch.randn(8), torch.randn(10, 8)]  # a matrix, a vector, an embedding
    grads = [[torch.randn_like(one) for one in start] for _ in range(4)]
    own = [nn.Parameter(one.clone()) for one in start]
    train = Train(
        optimizer=kind,  # type: ignore[arg-type]
        weight_decay=DECAY,
        betas=(0.9, 0.95),
        offload_optimizer=offload,
    )
    optimizer = make(train, own, LR, outer={id(own[2])})
    for step in grads:
        for parameter, grad in zip(own, step, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
    for at, (parameter, matrix) in enumerate(zip(own, (True, False, False), strict=True)):
        expected = oracle(start[at].double(), [step[at].double() for step in grads], matrix)
        assert float((parameter.detach() - expected).norm() / (expected - start[at]).norm()) < apart


@pytest.mark.medium
def test_moments_of_eight_bits_are_nearly_those_of_32() -> None:
    torch.manual_seed(0)
    start = torch.randn(64, 80)
    with torch.compiler.set_stance("force_eager"):
        found = {}
        for kind in ("adamw", "adamw8bit"):
            one = nn.Parameter(start.clone())
            optimizer = make(Train(optimizer=kind, weight_decay=DECAY), [one], LR)  # type: ignore[arg-type]
            optimizers.set_lr(optimizer, LR / 2)
            assert optimizers.lr_of(optimizer) == pytest.approx(LR / 2)
            random = torch.Generator().manual_seed(1)
            for _ in range(6):
                one.grad = torch.randn(start.shape, generator=random)
                optimizer.step()
            found[kind] = one.detach() - start
    whole, narrow = found.values()
    assert 0 < float((whole - narrow).norm() / whole.norm()) < 0.05


def test_an_optimizer_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"train\.optimizer.*adamw8bit.*pip install '.*\[adamw8bit\]'"):
        make(Train(optimizer="adamw8bit"), [nn.Parameter(torch.ones(2, 2))], LR)


WAYS: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon"},
    "sgd": {"optimizer": "sgd"},
    "adamw, away": {"offload_optimizer": True},
    "muon, away": {"optimizer": "muon", "offload_optimizer": True},
    "masters": {"dtype": "bfloat16", "weights": "bfloat16"},
    "masters, away": {"dtype": "bfloat16", "weights": "bfloat16", "offload_optimizer": True},
    "at random": {"dtype": "bfloat16", "weights": "bfloat16_alone"},
    "8 bits": {"optimizer": "adamw8bit"},
    "8 bits, masters": {"optimizer": "adamw8bit", "dtype": "bfloat16", "weights": "bfloat16"},
}


# torchao's update of 8-bit moments is compiled
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.compiler, pytest.mark.slow] if "8 bits" in way else []) for way in WAYS],
)
def test_a_learner_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    way: str, qwen3_dir: Path, tmp_path: Path
) -> None:
    settings = config(GRPO(kl_weight=0.1, reference=2), lr_schedule="cosine", steps=4, **WAYS[way])
    folder = tiny_qwen3(tmp_path / "wide", hidden=128) if "8 bits" in way else qwen3_dir  # smaller ones keep 32 bits
    straight = trained(Learner(settings.learner, folder), 2)
    kinds = {type(one).__name__ for state in straight.optimizer.state.values() for one in state.values()}
    assert ("OptimState8bit" in kinds) == ("8 bits" in way)
    write, hashes = straight.copy(tmp_path), straight.hashes()
    trained(straight, 2, 2)  # while the copy of before is yet to be written
    assert write is not None
    begun = Learner(settings.learner, folder)
    assert begun.hashes() != hashes
    begun.load(write(lambda: None))
    assert begun.hashes() == hashes
    assert trained(begun, 2, 2).hashes() == straight.hashes()
    tokens = (3, 1, 4, 1, 5)
    assert begun.score(tokens) == straight.score(tokens)


@pytest.mark.medium
@each_case("optimizer", KINDS)
@each_case("weights", ["float32", "bfloat16"])
def test_offloaded_optimizers_compute_the_same_bits(optimizer: str, weights: str, qwen3_dir: Path) -> None:
    settings = {"optimizer": optimizer, "dtype": "bfloat16", "weights": weights}
    here = trained(Learner(config(**settings).learner, qwen3_dir), 3)
    there = trained(Learner(config(**settings, offload_optimizer=True).learner, qwen3_dir), 3)
    assert there.hashes() == here.hashes()
    assert here.models.away() == []
    assert sum(one.numel() for one in there.models.away()) > 0 or optimizer == "sgd"


def test_bfloat16_weights_with_masters_train_as_float32_weights(qwen3_dir: Path, tmp_path: Path) -> None:
    """Bit by bit: a pass rounds float32 weights to what the others are held in."""
    wide = trained(Learner(config(dtype="bfloat16").learner, qwen3_dir), 3)
    narrow = trained(Learner(config(dtype="bfloat16", weights="bfloat16").learner, qwen3_dir), 3)
    assert narrow.hashes() == wide.hashes()
    held = {parameter.dtype for parameter in narrow.model.parameters() if parameter.dim() > 1}
    assert held == {torch.float32, torch.bfloat16}  # the embedding, and all others
    assert narrow.export(tmp_path / "a").fingerprints == wide.export(tmp_path / "a").fingerprints
    for dtype in (torch.float32, torch.bfloat16):
        assert narrow.score((3, 1, 4, 1), dtype) == wide.score((3, 1, 4, 1), dtype)
    for one in (wide, narrow):
        one.save(tmp_path / str(id(one)))
    crossed = Learner(config(dtype="bfloat16", weights="bfloat16").learner, qwen3_dir)
    crossed.model.load_weights(tmp_path / str(id(wide)) / "step-00000003")
    assert crossed.hashes() == narrow.hashes()


def test_updates_of_a_millionth_of_a_weight_add_up_in_its_master() -> None:
    weight, updates = 1.0, 1000
    for kept in (True, False):
        one = nn.Parameter(torch.full((4, 4), weight, dtype=torch.bfloat16))
        master_weights.give(one, torch.full((4, 4), weight) if kept else None)
        optimizer = ParameterwiseOptimizer([one], torch.optim.SGD([master_weights.master(one)], lr=1e-6), offload=False)
        bare = torch.full((4, 4), weight, dtype=torch.bfloat16)
        for _ in range(updates):
            one.grad = torch.full((4, 4), weight)
            optimizer.step()
            bare -= 1e-6  # what there would be without either
        assert torch.equal(bare, torch.full_like(bare, weight))
        if kept:
            torch.testing.assert_close(
                master_weights.master(one), torch.full((4, 4), 0.999), atol=3e-5, rtol=0
            )  # as float32 adds
        else:
            assert not torch.equal(one.detach(), bare)


def test_rounding_at_random_is_exact_in_the_mean() -> None:
    value = 1.0 + 2**-7 / 5  # a fifth of the way to the next bfloat16
    found = rounded(torch.full((100_000,), value), torch.bfloat16, seed=(1, 0))
    assert set(found.float().tolist()) == {1.0, 1.0 + 2**-7}
    assert float(found.float().mean()) == pytest.approx(value, abs=4 * 2**-7 * 0.4 / math.sqrt(100_000))
    exact = torch.tensor([0.0, -1.5, 2.0**-100, -0.0])
    assert torch.equal(rounded(exact, torch.bfloat16, seed=(2, 1)).float(), exact)
    mirrored = rounded(torch.full((1000,), -value), torch.bfloat16, seed=(1, 0))
    assert set(mirrored.float().tolist()) == {-1.0, -1.0 - 2**-7}


NARROW = {"weights": "bfloat16", "dtype": "bfloat16"}


@each_case(
    ("given", "says"),
    [
        ({"weights": "bfloat16"}, r"train\.weights.*train\.dtype"),
        ({**NARROW, "lora_rank": 2}, r"train\.weights.*adapter"),
        ({"optimizer": "adamw8bit", "offload_optimizer": True}, r"train\.offload_optimizer.*8 bits.*'adamw'"),
        (
            {"optimizer": "adamw8bit", "parallel": {"ranks": 2}},
            r"train\.optimizer.*2 ranks.*'adamw' with train\.offload_optimizer = true, or 'muon'",
        ),
        ({**NARROW, "parallel": {"ranks": 2}}, r"train\.weights.*gathered in bfloat16.*leave it out"),
        ({**NARROW, "weights": "bfloat16_alone", "parallel": {"ranks": 2}}, r"train\.weights.*leave it out"),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Train.model_validate(given)


@each_case(
    "given", [{"optimizer": "muon", "offload_optimizer": True}, {"offload_optimizer": True}, {"dtype": "bfloat16"}]
)
def test_what_these_refusals_say_instead_is_taken(given: dict[str, Any]) -> None:
    Train.model_validate({**given, "parallel": {"ranks": 2}})


def test_a_checkpoint_goes_on_with_and_without_offloading(qwen3_dir: Path, tmp_path: Path) -> None:
    """Matrices have another optimizer than what lies between them."""
    begun = trained(Learner(config(optimizer="muon").learner, qwen3_dir), 2)
    folder, found = begun.save(tmp_path / "0"), [trained(begun, 1, 2).hashes()]
    for at in (1, 2):
        learner = Learner(config(optimizer="muon", offload_optimizer=at == 1).learner, qwen3_dir)
        learner.load(folder)
        folder = learner.save(tmp_path / str(at))
        found.append(trained(learner, 1, 2).hashes())
    assert found[0] == found[1] == found[2]


@each_case("kind", KINDS)
def test_decay_is_of_matrices_alone(kind: str) -> None:
    """Without a gradient nothing but the decay moves a weight."""
    held = [nn.Parameter(torch.ones(size)) for size in ((4,), (4, 3), (3,), (2, 3, 4), (4, 4))]
    optimizer = make(Train.model_validate({"optimizer": kind, "weight_decay": DECAY}), held, LR)
    for one in held:
        one.grad = torch.zeros_like(one)
    optimizer.step()
    assert [float(one.detach().mean()) < 1 for one in held] == [False, True, False, True, True]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_state_from_when_decay_reached_vectors_is_gone_on_from(kind: str) -> None:
    held = [nn.Parameter(torch.ones(size)) for size in ((4,), (4, 3), (3,), (4, 4))]
    old: torch.optim.Optimizer = (
        torch.optim.AdamW(held, lr=LR, weight_decay=DECAY)
        if kind == "adamw"
        else torch.optim.SGD(held, lr=LR, weight_decay=DECAY)
    )
    for at, one in enumerate(held):
        one.grad = torch.full_like(one, at + 1.0)
    old.step()
    new = make(Train.model_validate({"optimizer": kind, "weight_decay": DECAY}), held, LR)
    new.load_state_dict(optimizers.regrouped(old.state_dict(), new))
    for one in held:
        for name, value in old.state[one].items():
            assert torch.equal(torch.as_tensor(new.state[one][name]), torch.as_tensor(value))
    decays = {at: group["weight_decay"] for group in new.param_groups for at in map(id, group["params"])}
    assert [decays[id(one)] for one in held] == [0.0, DECAY, 0.0, DECAY]
    again = torch.optim.AdamW(held, lr=LR) if kind == "adamw" else torch.optim.SGD(held, lr=LR)
    again.load_state_dict(optimizers.regrouped(new.state_dict(), again))
