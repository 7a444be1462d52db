"""How versions reach an engine: proved by what it computes, or the run ends; files go when nobody needs them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio

from agentrl.config import EngineSettings, EnvSource, RunConfig
from agentrl.engine.canary import Canary, probe_tokens
from agentrl.engine.client import EngineClient
from agentrl.engine.launch import EmbeddedEngine, launch_embedded
from agentrl.engine.weights import PushReport
from agentrl.errors import EngineUnavailable, RunFailed, WeightSyncError
from agentrl.runtime import courier as module
from agentrl.runtime.courier import Courier, MemoryParcel, Parcel
from agentrl.runtime.models import model_dir
from agentrl.train.export import export_weights
from agentrl.train.model import PolicyModel

SETTINGS = EngineSettings(kv_cache_mb=16, max_batch=4, start_deadline_s=300.0)
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
    kept = [f"{version}.safetensors{part}" for version in (3, 4) for part in ("", ".canary")]
    assert sorted(path.name for path in weights.scratch.iterdir()) == kept


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


# --- from memory to memory: the transfer itself is tested in tests/engine/test_direct.py


class Memory:
    """Engines at the version of their URL's number, and a transfer whose next pushes fail as `failures` say."""

    def __init__(self, failures: Sequence[str] = ()) -> None:
        self.served: dict[str, int | None] = {"http://1": 1, "http://2": 2}
        self.failures, self.pushes = list(failures), []

    async def push(self, engines: Sequence[Any], snapshot: Any, version: int, **how: Any) -> PushReport:
        self.pushes.append([engine.url for engine in engines])
        assert how == {"deadline_s": 7.0, "clear_cache": True}
        if self.failures:
            raise WeightSyncError(self.failures.pop())
        self.served |= dict.fromkeys(self.pushes[-1], version)
        return PushReport(pause_s=0.5, total_s=0.75, bytes=snapshot.size_bytes)

    def client(self, url: str, **_: object) -> Any:
        async def served_version(deadline_s: float = 5.0) -> int:
            found = self.served[url]
            if found is None:
                raise EngineUnavailable(f"{url} is not there")
            return found

        return SimpleNamespace(url=url, served_version=served_version, aclose=trio.lowlevel.checkpoint)


def memory_courier(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> Courier:
    monkeypatch.setattr(module, "EngineClient", memory.client)
    monkeypatch.setattr(module, "Transfer", lambda sender: memory)
    config = RunConfig.model_validate(
        {
            "model": "unused",
            "env": {"id": "test/none"},
            "engine": {"kind": "vllm", "sync": "nccl", "admin_deadline_s": 7.0, "recompute_kv": True},
            "train": {"device": "cuda:1"},
        }
    )
    return Courier(config, sender=object())  # pyright: ignore[reportArgumentType]


PARCEL = MemoryParcel(version=3, snapshot=SimpleNamespace(size_bytes=12))
URLS = ["http://1", "http://2"]


async def test_from_memory_all_engines_are_tried_again_together_until_they_have_it(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    memory = Memory(["engine 2 is gone", "engine 2 is being started"])
    ours = memory_courier(memory, monkeypatch)
    row = await ours.deliver(URLS, PARCEL)
    assert row == {"pause_s": 0.5, "sync_s": pytest.approx(1.0), "sync_bytes": 12}
    assert memory.pushes == [URLS] * 3
    await ours.tidy(URLS)  # no file lies anywhere


async def test_from_memory_an_engine_that_does_not_come_back_ends_the_delivery(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    memory = Memory(["engine 2 is gone"] * 10_000)
    with pytest.raises(WeightSyncError, match="engine 2 is gone"):
        await memory_courier(memory, monkeypatch).deliver(URLS, PARCEL)
    assert trio.current_time() >= 600  # engine.start_deadline_s


async def test_an_engine_that_came_up_with_older_weights_is_behind_and_one_that_is_away_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory()
    ours = memory_courier(memory, monkeypatch)
    assert await ours.behind(URLS, 2)
    memory.served["http://1"] = None
    assert not await ours.behind(URLS, 2)
    memory.served |= {"http://1": 2}
    assert not await ours.behind(URLS, 2)
