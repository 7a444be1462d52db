"""An engine that is started again in the middle of a run: with which weights, and the proof that it has them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import EngineSettings, EnvSource, Rollout, RunConfig
from agentrl.engine import canary
from agentrl.engine.canary import Canary, probe_tokens
from agentrl.engine.client import EngineClient
from agentrl.engine.weights import push
from agentrl.errors import CanaryMismatch, RunFailed
from agentrl.ports import free_port
from agentrl.records import WeightVersion
from agentrl.runtime.checkpoints import StartPoint
from agentrl.runtime.engines import Replica, Weights, current_weights
from agentrl.runtime.models import model_dir
from agentrl.runtime.supervise import Child
from agentrl.store import RunStore
from agentrl.train.export import export_weights
from agentrl.train.model import PolicyModel

FOLDER = model_dir("agentrl/tiny-coder")
TOKENS = probe_tokens(500, 24)
CONFIG = RunConfig(
    model="unused",
    env=EnvSource(id="test/none"),
    engine=EngineSettings(kv_cache_mb=16, max_batch=4, start_deadline_s=300.0),
    rollout=Rollout(max_context=64, max_tokens_per_turn=8),
)
FIRST, SECOND = WeightVersion(version=1, step=0), WeightVersion(version=2, step=1)
Start = Callable[[Weights], Replica]


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Start]:
    """`replica(weights)` is one that has not been started; it ends with the test."""
    child = Child("engine-0", [], tmp_path)
    yield lambda weights: Replica(
        child=child, port=free_port(), scratch=tmp_path, config=CONFIG, weights=lambda: weights
    )
    await child.stop()


@pytest.fixture
def second(tmp_path: Path) -> Weights:
    """Version 2 in a file, and what it was proved by."""
    model, path = PolicyModel(FOLDER), tmp_path / "2.safetensors"
    _move(model)
    export_weights(model.module, path)
    proof = Canary(version=2, token_ids=TOKENS, logprobs=model.score(TOKENS))
    return Weights(model=FOLDER, base=FIRST, current=SECOND, file=path, canary=proof)


def _move(model: PolicyModel) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


async def serves(replica: Replica) -> int:
    client = EngineClient(replica.url)
    try:
        return await client.served_version()
    finally:
        await client.aclose()


async def test_what_was_proved_of_a_version_lies_beside_its_weights(tmp_path: Path, second: Weights) -> None:
    assert second.file is not None and second.canary is not None
    start = StartPoint(model=FOLDER, checkpoint=None, version=FIRST)
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        store.confirm_version(store.mint_version(0))
        assert current_weights(CONFIG, store, start).canary is None  # nothing was sent yet
        store.confirm_version(store.mint_version(1, second.file))
        assert current_weights(CONFIG, store, start) == replace(second, canary=None)
        second.canary.write(canary.beside(second.file))
        assert current_weights(CONFIG, store, start) == second


async def test_an_engine_started_again_is_proved(replica: Start, second: Weights, monkeypatch: Any) -> None:
    found: list[float] = []
    check = canary.check

    async def noted(*args: Any, **kwargs: Any) -> float:
        found.append(await check(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(canary, "check", noted)
    engine = replica(second)
    await engine.up()
    assert await serves(engine) == 2
    assert len(found) == 1 and found[0] < 1e-4


async def test_an_engine_that_comes_back_with_other_weights_ends_the_run(replica: Start, second: Weights) -> None:
    left_out = replace(second, file=None)  # it says that it serves version 2, with the weights of version 1
    says = r"engine-0 was started again: canary: .* says it serves version 2, but the log-prob of probe token \d+ is"
    with pytest.raises(RunFailed, match=says):
        await replica(left_out).up()


@pytest.mark.parametrize("when", ["before it is asked", "while it is asked"])
async def test_the_learner_may_have_been_faster(
    when: str, replica: Start, second: Weights, tmp_path: Path, monkeypatch: Any
) -> None:
    """What it sends it proves itself; the canary of the version before is nobody's any more."""
    engine = replica(replace(second, file=None))  # the canary of version 2 cannot hold
    check = canary.check

    async def overtaken(*args: Any, **kwargs: Any) -> float:
        async def send() -> None:
            await push([engine.url], FOLDER / "model.safetensors", 3)

        if when == "before it is asked":
            await send()
        try:
            return await check(*args, **kwargs)
        except CanaryMismatch:
            await send()
            raise

    monkeypatch.setattr(canary, "check", overtaken)
    await engine.up()
    assert await serves(engine) == 3
