"""A checkpoint of some ranks goes on under any other number of them, however they cut the model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.learner.learner import Learner
from agentrl.learner.parallel.ranks import ALONE, Leader
from tests.closeness import assert_gradients_alike

from .making import mixture
from .saved import moments
from .test_ranks import STEP_OF, after, config, groups
from .updates import everywhere, updated

PLANS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "shards": ({"ranks": 2}, {"ranks": 4}),
    "tensor": ({"ranks": 2, "tensor": 2}, {"ranks": 4, "tensor": 2}),
    "context": ({"ranks": 2, "context": 2}, {"ranks": 4, "tensor": 2, "context": 2}),
    "adapter": ({"ranks": 2, "tensor": 2}, {"ranks": 4, "tensor": 2}),
    "experts": ({"ranks": 2, "expert": 2}, {"ranks": 4, "tensor": 2, "expert": 4}),
}
"""Of two ranks, and of four."""


@contextmanager
def started(size: int) -> Generator[Leader]:
    ranks = Leader([torch.device("cpu")] * size, deadline_s=120, start_s=200)
    try:
        yield ranks
    finally:
        ranks.close()


@pytest.mark.slow
def test_a_checkpoint_goes_from_two_ranks_to_four_to_one_bit_for_bit(qwen3_dir: Path, tmp_path: Path) -> None:
    mixed = mixture(tmp_path / "mixture", layers=2, kv_heads=2)
    models = {**dict.fromkeys(PLANS, qwen3_dir), "experts": mixed}
    settings: dict[str, dict[str, Any]] = {kind: {"lora_rank": 2 if kind == "adapter" else 0} for kind in PLANS}
    saved: dict[str, list[Path]] = {}
    hashes: dict[str, list[dict[str, str]]] = {}
    stepped: dict[str, Any] = {}

    def save(kind: str, learner: Learner) -> None:
        learner.state.trained = [()]  # else nothing is to be saved
        saved.setdefault(kind, []).append(learner.save(tmp_path / f"{kind} {len(saved.get(kind, []))}"))
        hashes.setdefault(kind, []).append(learner.hashes())

    with started(2) as two:
        for kind, (plan, _) in PLANS.items():
            learner = Learner(config(**settings[kind], parallel=plan).learner, models[kind], ranks=two)
            learner.step(groups(3), step_of=STEP_OF)
            save(kind, learner)
    with started(4) as four:
        for kind, (_, plan) in PLANS.items():
            learner = Learner(config(**settings[kind], parallel=plan).learner, models[kind], ranks=four)
            learner.load(saved[kind][0])
            save(kind, learner)
            stepped[kind] = learner.step(groups(3, 1), step_of=STEP_OF)
        steep = {"optimizer": "sgd", "lr": 1.0, "grad_clip": None}  # weights differ as gradients do
        work = partial(updated, 4, tensor=2, offload=True)
        for one, other in zip(updated(1), everywhere(four, learner, work), strict=True):
            torch.testing.assert_close(other, one, atol=1e-5, rtol=0)
        (report,), apart = after(config(**steep, parallel={"ranks": 4, "expert": 4}), mixed, four, steps=1)
    for kind, model in models.items():
        alone = Learner(config(**settings[kind]).learner, model)
        alone.load(saved[kind][1])
        assert alone.hashes() == hashes[kind][0] == hashes[kind][1]
        save(kind, alone)
        two_s, four_s, one_s = (moments(folder) for folder in saved[kind])
        assert two_s.keys() == four_s.keys() == one_s.keys()
        assert all(torch.equal(two_s[key], four_s[key]) and torch.equal(two_s[key], one_s[key]) for key in two_s)
        one = alone.step(groups(3, 1), step_of=STEP_OF)
        assert one.loss == pytest.approx(stepped[kind].loss, abs=1e-5)
        assert one.grad_norm == pytest.approx(stepped[kind].grad_norm, rel=1e-5)
    (one,), whole = after(config(**steep), mixed, ALONE, steps=1)
    assert report.loss == pytest.approx(one.loss, abs=1e-5)
    assert_gradients_alike(apart, whole, norm=one.grad_norm)
