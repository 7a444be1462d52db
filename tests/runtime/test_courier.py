"""How versions reach an engine: proved by what it computes, or the run ends; files go when nobody needs them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from agentrl.config import EngineSettings, EnvSource, RunConfig
from agentrl.engine.canary import Canary, probe_tokens
from agentrl.engine.client import EngineClient
from agentrl.engine.launch import EmbeddedEngine, launch_embedded
from agentrl.errors import RunFailed, WeightSyncError
from agentrl.runtime.courier import Courier, Parcel
from agentrl.runtime.models import model_dir
from agentrl.train.export import export_weights
from agentrl.train.model import PolicyModel

SETTINGS = EngineSettings(kv_cache_mb=16, max_batch=4, start_deadline_s=60.0)
FOLDER = model_dir("agentrl/tiny-coder")
TOKENS = probe_tokens(500, 24)


@pytest.fixture
async def engine() -> AsyncIterator[EmbeddedEngine]:
    async with launch_embedded(FOLDER, SETTINGS, version=1, max_context=64) as engine:
        yield engine


class Weights:
    """A model whose versions each move every weight."""

    def __init__(self, scratch: Path) -> None:
        self.model, self.scratch = PolicyModel(FOLDER), scratch / "weights"
        self.version = 1

    def parcel(self, *, moved_after: float = 0.0) -> Parcel:
        """The next version; with `moved_after`, the canary expects weights that were not sent."""
        self.version += 1
        self._move(0.02)
        file = export_weights(self.model.module, self.scratch / f"{self.version}.safetensors")
        self._move(moved_after)
        canary = Canary(version=self.version, token_ids=TOKENS, logprobs=self.model.score(TOKENS))
        return Parcel(version=self.version, path=file.path, sha256=file.sha256, canary=canary)

    def _move(self, scale: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * scale)


def courier(**engine: object) -> Courier:
    settings = SETTINGS.model_copy(update=engine)
    return Courier(RunConfig(model="unused", env=EnvSource(id="test/none"), engine=settings))


async def test_a_delivery_is_proved_and_only_the_newest_two_files_stay(engine: EmbeddedEngine, tmp_path: Path) -> None:
    weights, ours = Weights(tmp_path), courier()
    weights.scratch.mkdir()
    (weights.scratch / "0.safetensors").write_bytes(b"of a learner before this one")
    for _ in range(3):
        row = await ours.deliver([engine.url], weights.parcel())
        await ours.tidy([engine.url])
        assert 0 <= row["canary_error"] < 1e-4 and row["canary_s"] > 0
        assert 0 < row["pause_s"] <= row["sync_s"]
    client = EngineClient(engine.url)
    assert await client.served_version() == 4
    await client.aclose()
    assert sorted(path.name for path in weights.scratch.iterdir()) == ["3.safetensors", "4.safetensors"]


async def test_an_engine_that_samples_from_other_weights_ends_the_run(engine: EmbeddedEngine, tmp_path: Path) -> None:
    parcel = Weights(tmp_path).parcel(moved_after=0.02)
    with pytest.raises(RunFailed, match=r"canary: .* says it serves version 2, but the log-prob of probe token \d+ is"):
        await courier().deliver([engine.url], parcel)


async def test_without_a_canary_nothing_is_asked(engine: EmbeddedEngine, tmp_path: Path) -> None:
    parcel = Weights(tmp_path).parcel()
    row = await courier().deliver([engine.url], Parcel(version=2, path=parcel.path, sha256=parcel.sha256))
    assert row.keys() == {"pause_s", "sync_s", "sync_bytes"}


async def test_an_engine_that_does_not_come_back_is_named(tmp_path: Path) -> None:
    async with launch_embedded(FOLDER, SETTINGS, version=1, max_context=64) as engine:
        pass
    with pytest.raises(WeightSyncError, match=f"{engine.url} did not take version 2"):
        await courier(start_deadline_s=0.5).deliver([engine.url], Weights(tmp_path).parcel())
