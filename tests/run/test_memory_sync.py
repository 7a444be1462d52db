"""Weights that no file holds: who sends them, when, and to which engines, and what is refused before a run starts."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from agentrl import config as configuration
from agentrl.config import RunConfig
from agentrl.config.weight_sync import transport_of
from agentrl.engine.vllm import launch
from agentrl.engine.vllm.vllm_dialect import VLLMDialect
from agentrl.engine.weight_sync import weight_file
from agentrl.engine.weight_sync.transport import MemoryParcel, Parcel
from agentrl.errors import ConfigError
from agentrl.learner import build_learner
from agentrl.learner.model.policy import PolicyModel
from agentrl.learner.weight_export import WeightFile, export_weights, take
from agentrl.models.resolve import model_dir
from agentrl.records import WeightVersion
from agentrl.run.children import engine_process
from agentrl.run.learning.weight_parcels import ParcelMaker
from agentrl.run.learning.weight_push import WeightPush
from agentrl.run.start_point import StartPoint
from agentrl.run.telemetry import Telemetry
from agentrl.run.trainer import Trainer, evaluate
from agentrl.store import RunStore

from .loop_parts import InlineCalls, InlineTorch, LoopScene

URLS = ["http://a:1", "http://b:1"]
START = StartPoint(model=Path("/model"), checkpoint=None, version=WeightVersion(version=1, step=0))


def run_config(**engine: object) -> RunConfig:
    document = {
        "model": "agentrl/tiny-coder",
        "env": {"id": "agentrl/Calculator-v0"},
        "engine": {"kind": "vllm", "sync": "nccl", "urls": URLS, "dtype": "bfloat16", **engine},
        "train": {"device": "cuda"},
    }
    return configuration.parse(document)


class Scene:
    """Pushes of a learner at step 4 whose engines serve what `behind` says; no process, no engine."""

    def __init__(self, folder: Path, store: RunStore) -> None:
        self.folder, self.store, self.behind, self.asked = folder, store, False, list[int]()
        for step in range(5):
            self.store.versions.confirm_version(self.store.versions.mint_version(step))
        self.model = PolicyModel(model_dir("agentrl/tiny-coder"))
        self.learner: Any = SimpleNamespace(
            step_index=4,
            model=self.model,
            models=SimpleNamespace(of=lambda role: self.model),
            score=lambda token_ids, dtype, *, role: self.model.score(token_ids, dtype),
            snapshot=partial(take, self.model.module),
            export=self._export,
        )
        self.sent: list[Parcel | MemoryParcel] = []
        self.config, self.mark = run_config(), lambda: None

    def _export(self, path: Path, dtype: torch.dtype, role: None) -> WeightFile:
        return export_weights(self.model.module, path, dtype=dtype)

    @asynccontextmanager
    async def pushes(self) -> AsyncGenerator[WeightPush]:
        """Pushes as the run's configuration says; at the end all of them are over."""
        config, calls = self.config, InlineCalls(self.store)
        publisher: Any = SimpleNamespace(
            behind=self._behind, deliver=self._deliver, tidy=trio.lowlevel.checkpoint, end=lambda: None
        )
        parcels = ParcelMaker(
            self.learner,
            self.folder,
            lambda: None,
            engine=config.engine,
            train=config.train,
            roles=(),
            adapted=(),
            sends_adapters=False,
            most_tokens=config.rollout.max_context - 1,
        )
        async with trio.open_nursery() as nursery:
            yield WeightPush(
                parcels,
                publisher,
                calls,
                InlineTorch(),
                nursery,
                Telemetry(self.store, self.folder / "metrics.jsonl", "learner"),
                lambda: self.mark(),
                pin=lambda version, weights: None,
                in_memory=config.syncs_memory,
                patience_s=60.0,
            )

    async def _behind(self, version: int) -> bool:
        self.asked.append(version)
        return self.behind

    async def _deliver(self, parcels: dict[None, Parcel | MemoryParcel], held: object) -> dict[str, float]:
        assert held is None, "no engine shares the learner's device"
        self.sent.append(parcels[None])
        return {"sync_s": 0.5}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        yield Scene(tmp_path, store)


async def test_law_4_a_learner_that_ends_and_waits_for_its_push_gives_signs_of_life(
    scene: Scene, autojump_clock: MockClock
) -> None:
    marked, scene.mark = trio.Event(), lambda: None

    async def deliver(parcels: object, held: object) -> dict[str, float]:
        scene.mark = marked.set
        with trio.move_on_after(100):
            await marked.wait()
        return {}

    scene._deliver = deliver  # pyright: ignore[reportAttributeAccessIssue]
    async with scene.pushes() as pushes:
        await pushes.start({})
        await pushes.end()
    assert marked.is_set()


async def test_a_step_is_sent_as_a_copy_in_the_engines_dtype(scene: Scene) -> None:
    async with scene.pushes() as pushes:
        version = await pushes.start({"loss": 1.0})
        assert version == WeightVersion(version=6, step=4) and scene.store.versions.weights_path(6) is None
        assert scene.store.versions.current_version().version == 5, "no engine has it"
        await pushes.settle()
    (parcel,) = scene.sent
    assert isinstance(parcel, MemoryParcel) and parcel.canary is not None
    assert scene.store.versions.current_version() == version
    (row,) = scene.store.metrics.values("step")
    assert (row.step, row.values) == (4, {"loss": 1.0, "sync_s": 0.5, "version": 6})
    before = {name: tensor.clone() for name, tensor in parcel.snapshot}
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    with torch.no_grad():
        for parameter in scene.model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in parcel.snapshot)
    assert (parcel.canary.version, parcel.canary.dtype) == (6, "bfloat16")


def test_a_step_is_told_which_versions_a_restart_abandoned(scene: Scene) -> None:
    told: list[tuple[bool, bool]] = []

    class Seen(Exception):
        pass

    def step(groups: object, *, step_of: Any, undone: Any, max_lag: int) -> None:
        told.append((undone(gone.version), undone(5)))
        raise Seen

    gone = scene.store.versions.mint_version(9)
    scene.store.lineage.checkpoint(4, 5, "/checkpoints/4")
    scene.store.lineage.rollback(4)
    scene.store.set_meta("engine_urls", json.dumps(URLS))
    scene.learner.step = step
    loop = LoopScene(scene.folder, scene.learner, scene.store)
    with pytest.raises(Seen):
        loop.run(scene.config)
    assert told == [(True, False)]


async def test_a_file_is_written_in_the_engines_dtype(scene: Scene) -> None:
    sizes: list[float] = []
    for dtype in ("float32", "bfloat16"):
        scene.config = run_config(sync="full", dtype=dtype)
        async with scene.pushes() as pushes:
            await pushes.start({})
        parcel = scene.sent[-1]
        assert isinstance(parcel, Parcel) and parcel.canary is not None
        assert weight_file.width(weight_file.open_bytes(parcel.path)) == (2 if dtype == "bfloat16" else 4)
        assert (parcel.sha256, parcel.canary.dtype) == (weight_file.digest(weight_file.open_bytes(parcel.path)), dtype)
        sizes.append(parcel.path.stat().st_size)
    assert sizes[1] < 0.55 * sizes[0]


async def test_an_engine_that_was_started_again_gets_the_current_version_from_a_learner_that_waits(
    scene: Scene, autojump_clock: MockClock
) -> None:
    async with scene.pushes() as pushes:
        await pushes.look()
        assert scene.asked == [5] and pushes.under_way is None
        scene.behind = True
        await pushes.look()
        assert scene.asked == [5], "they were asked a moment ago"
        await trio.sleep(1.0)
        await pushes.look()
        assert pushes.under_way is not None
    (parcel,) = scene.sent
    assert parcel.version == 5 and scene.store.metrics.values("step") == []


async def test_weights_of_another_step_are_never_sent_as_the_current_version(scene: Scene) -> None:
    scene.behind, scene.learner.step_index = True, 3
    async with scene.pushes() as pushes:
        await pushes.look()
    assert not scene.sent


def test_an_engine_starts_from_what_the_run_began_with_as_no_file_holds_what_came_after(scene: Scene) -> None:
    weights = engine_process.current_weights(run_config(), scene.store, START)
    assert (weights.model, weights.base, weights.current) == (START.model, START.version, START.version)
    assert weights.file is None and weights.adapter is None


async def test_an_attached_engine_samples_nothing_before_the_learner_sent_its_weights(
    monkeypatch: pytest.MonkeyPatch, scene: Scene
) -> None:
    calls: list[object] = []

    class Client:
        dialect = VLLMDialect()

        def __init__(self, url: str, **_: object) -> None: ...

        async def call(self, method: str, path: str, **how: Any) -> bytes:
            calls.append((path, how.get("params") or how.get("json")))
            return b"{}"

        async def aclose(self) -> None: ...

    async def probe(client: object, **_: object) -> object:
        return SimpleNamespace(require=lambda needs, **_: calls.append(needs))

    monkeypatch.setattr(engine_process, "EngineClient", Client)
    monkeypatch.setattr(engine_process, "probe", probe)
    config = run_config()
    await engine_process.attach(URLS[0], engine_process.current_weights(config, scene.store, START), config)
    needs, *rest = calls
    assert needs == engine_process.needed(transport_of("nccl"))
    assert rest == [
        ("/pause", {"mode": "keep", "clear_cache": "true"}),
        ("/update_weight_version", {"new_version": "0"}),
    ]


def test_a_run_whose_learner_has_no_vllm_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(name: str) -> str:
        raise launch.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(launch.metadata, "version", none)
    with pytest.raises(ConfigError, match=r"engine\.sync = 'nccl': .*install vllm==0\.32\.0"):
        Trainer(config=run_config(), out=tmp_path / "run").train()
    assert not (tmp_path / "run").exists()


def test_an_evaluation_has_no_learner_to_send_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.urls = .*no learner is there"):
        evaluate(run_config(), out=tmp_path / "run")


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert build_learner.device_of(run_config().train) == torch.device("cuda", 0)
    train = {"train": run_config().train.model_copy(update={"device": "cuda:1"})}
    with pytest.raises(ConfigError, match=r"train\.device = 'cuda:1': torch sees 1 CUDA devices"):
        build_learner.device_of(run_config().model_copy(update=train).train)
