"""Weights that no file holds: who sends them, when, and to which engines, and what is refused before a run starts."""

from __future__ import annotations

import json
import math
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl import config as configuration
from agentrl.config import RunConfig
from agentrl.config.weight_sync import transport_of
from agentrl.engine.vllm import launch
from agentrl.engine.vllm.vllm_dialect import VLLMDialect
from agentrl.engine.weight_sync import weight_file
from agentrl.engine.weight_sync.transport import MemoryParcel
from agentrl.errors import ConfigError
from agentrl.learner import build_learner
from agentrl.learner.model.policy import PolicyModel
from agentrl.learner.weight_export import WeightFile, export_weights, take
from agentrl.models.resolve import model_dir
from agentrl.records import WeightVersion
from agentrl.run.alarms import LagBound
from agentrl.run.processes import engine_process, learner_process
from agentrl.run.processes.heartbeat import Heartbeat
from agentrl.run.start_point import StartPoint
from agentrl.run.trainer import Trainer, evaluate
from agentrl.store import Patience, RunStore

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


class Pushes:
    """What the learner hands to its thread; here everything is done at once."""

    def __init__(self) -> None:
        self.made: list[tuple[WeightVersion, MemoryParcel, dict[str, Any]]] = []

    def submit(
        self, _: object, version: WeightVersion, parcels: Any, row: dict[str, Any], held: object = None
    ) -> Future[None]:
        assert held is None, "no engine shares the learner's device"
        self.made.append((version, parcels[None], row))
        done: Future[None] = Future()
        done.set_result(None)
        return done


class Scene:
    """A learner at step 4 whose engines serve what `behind` says; no process, no engine."""

    def __init__(self, tmp_path: Path) -> None:
        self.behind, self.asked = False, []
        self.store = RunStore.create(tmp_path / "store.sqlite", "{}")
        for step in range(5):
            self.store.versions.confirm_version(self.store.versions.mint_version(step))
        self.store.set_meta("engine_urls", json.dumps(URLS))
        self.model = PolicyModel(model_dir("agentrl/tiny-coder"))
        self.pushes = Pushes()
        self.learning: Any = object.__new__(learner_process._Learning)
        self.learning.__dict__.update(
            _heartbeat=Heartbeat(),
            _held=Patience(math.inf),
            _config=run_config(),
            _bound=LagBound(full=4, now=4),
            _store=self.store,
            _learner=SimpleNamespace(
                step_index=4,
                model=self.model,
                models=SimpleNamespace(of=lambda role: self.model),
                score=lambda token_ids, dtype, *, role: self.model.score(token_ids, dtype),
                snapshot=partial(take, self.model.module),
            ),
            _publisher=SimpleNamespace(behind=self._behind),
            _pushes=self.pushes,
            _push=None,
            _watch_at=0.0,
        )

    async def _behind(self, version: int) -> bool:
        self.asked.append(version)
        return self.behind


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_step_is_sent_as_a_copy_in_the_engines_dtype(scene: Scene) -> None:
    version = scene.learning._publish({"loss": 1.0})
    ((sent, parcel, row),) = scene.pushes.made
    assert sent == version == WeightVersion(version=6, step=4) and row == {"loss": 1.0}
    assert scene.store.versions.weights_path(6) is None
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
    scene.learning._learner.step, scene.learning._take = step, lambda: ([], 0.0)
    with pytest.raises(Seen):
        scene.learning.run()
    assert told == [(True, False)]


def test_a_file_is_written_in_the_engines_dtype(scene: Scene, tmp_path: Path) -> None:
    def export(path: Path, dtype: torch.dtype, role: None) -> WeightFile:
        return export_weights(scene.model.module, path, dtype=dtype)

    scene.learning._learner.export = export
    scene.learning._run = SimpleNamespace(scratch=tmp_path)
    sizes: list[float] = []
    for dtype in ("float32", "bfloat16"):
        scene.learning._config = run_config(sync="full", dtype=dtype)
        scene.learning._publish({})
        _, parcel, _ = scene.pushes.made[-1]
        assert weight_file.width(weight_file.open_bytes(parcel.path)) == (2 if dtype == "bfloat16" else 4)
        assert (parcel.sha256, parcel.canary.dtype) == (weight_file.digest(weight_file.open_bytes(parcel.path)), dtype)
        sizes.append(parcel.path.stat().st_size)
    assert sizes[1] < 0.55 * sizes[0]


def test_an_engine_that_was_started_again_gets_the_current_version_from_a_learner_that_waits(scene: Scene) -> None:
    scene.learning._send_again()
    assert scene.asked == [5] and not scene.pushes.made
    scene.behind = True
    scene.learning._send_again()
    ((sent, parcel, row),) = scene.pushes.made
    assert (sent, parcel.version, row) == (WeightVersion(version=5, step=4), 5, {})


def test_weights_of_another_step_are_never_sent_as_the_current_version(scene: Scene) -> None:
    scene.behind, scene.learning._learner.step_index = True, 3
    scene.learning._send_again()
    assert not scene.pushes.made


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
    assert build_learner.device_of(run_config().train) == torch.device("cuda")
    train = {"train": run_config().train.model_copy(update={"device": "cuda:1"})}
    with pytest.raises(ConfigError, match=r"train\.device = 'cuda:1': torch sees 1 CUDA devices"):
        build_learner.device_of(run_config().model_copy(update=train).train)
