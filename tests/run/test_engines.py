"""An engine that is started again in the middle of a run: with which weights, and the proof that it has them."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from agentrl.config import EngineSettings, EnvSource, Rollout, RunConfig
from agentrl.engine.client import EngineClient
from agentrl.engine.vllm import launch
from agentrl.engine.vllm.launch import Build
from agentrl.engine.weight_sync import canary
from agentrl.engine.weight_sync.canary import Canary, probe_tokens
from agentrl.engine.weight_sync.file_transport import push
from agentrl.errors import CanaryMismatch, RunFailed
from agentrl.host.janitor import OwnedFolder
from agentrl.host.ports import free_port
from agentrl.learner.checkpoints.folders import write_state
from agentrl.learner.model.policy import PolicyModel
from agentrl.learner.weight_export import export_weights
from agentrl.models.resolve import model_dir
from agentrl.records import WeightVersion
from agentrl.run.children.engine_process import ServedWeights, SupervisedEngine, current_weights
from agentrl.run.children.learning_engines import LearningEngines
from agentrl.run.children.run_children import RunChildren
from agentrl.run.processes.supervised_child import Child
from agentrl.run.run_folder import LOCKS, RunDir
from agentrl.run.scratch_space import ScratchSpace
from agentrl.run.start_point import StartPoint, start_point
from agentrl.store import RunStore
from agentrl.store.async_calls import Aside, Looks

FOLDER = model_dir("agentrl/tiny-coder")
TOKENS = probe_tokens(500, 24)
CONFIG = RunConfig(
    model="unused",
    env=EnvSource(id="test/none"),
    engine=EngineSettings(kv_cache_mb=16, max_batch=4, start_deadline_s=300.0),
    rollout=Rollout(max_context=64, max_tokens_per_turn=8),
)
FIRST, SECOND = WeightVersion(version=1, step=0), WeightVersion(version=2, step=1)
Start = Callable[[ServedWeights], SupervisedEngine]


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder whose path is short."""
    with closing(OwnedFolder()) as owner:
        yield owner.path


@pytest.fixture
async def replica(tmp_path: Path, sockets: Path) -> AsyncIterator[Start]:
    """`replica(weights)` is one that has not been started; it ends with the test."""
    child = Child("engine-0", [], tmp_path)
    (tmp_path / LOCKS).mkdir()

    def make(weights: ServedWeights) -> SupervisedEngine:
        async def own() -> ServedWeights:
            return weights

        place = sockets / "engine-0.sock"
        return SupervisedEngine(
            child=child, port=free_port(), scratch=tmp_path, config=CONFIG, weights=own, socket=place
        )

    yield make
    await child.stop()


@pytest.fixture
def second(tmp_path: Path) -> ServedWeights:
    """Version 2 in a file, and what it was proved by."""
    model, path = PolicyModel(FOLDER), tmp_path / "2.safetensors"
    _move(model)
    export_weights(model.module, path)
    proof = Canary(version=2, token_ids=TOKENS, logprobs=model.score(TOKENS))
    return ServedWeights(model=FOLDER, base=FIRST, current=SECOND, file=path, canary=proof)


def _move(model: PolicyModel) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


async def serves(replica: SupervisedEngine) -> int:
    client = EngineClient(replica.url)
    try:
        return await client.served_version()
    finally:
        await client.aclose()


async def test_what_was_proved_of_a_version_lies_beside_its_weights(tmp_path: Path, second: ServedWeights) -> None:
    assert second.file is not None and second.canary is not None
    start = StartPoint(model=FOLDER, checkpoint=None, version=FIRST)
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        store.versions.confirm_version(store.versions.mint_version(0))
        assert current_weights(CONFIG, store, start).canary is None  # nothing was sent yet
        store.versions.confirm_version(store.versions.mint_version(1, second.file))
        assert current_weights(CONFIG, store, start) == replace(second, canary=None)
        second.canary.write(canary.beside(second.file))
        assert current_weights(CONFIG, store, start) == second


@dataclass
class Going:
    """A run whose engines were told to start, and the replica that was."""

    run: RunDir
    store: RunStore
    replica: SupervisedEngine

    def checkpoint(self, step: int) -> Path:
        """The learner's checkpoint of `step`, its version confirmed; it keeps one."""
        for old in self.run.checkpoints.iterdir():
            shutil.rmtree(old)
        folder = self.run.checkpoints / f"step-{step:08d}"
        folder.mkdir()
        write_state(folder, {})
        return folder

    def version(self, step: int, *, kept: bool) -> WeightVersion:
        """A confirmed version, whose file lies in scratch as long as it is `kept`."""
        path = self.run.path / f"{step}.safetensors"
        if kept:
            path.touch()
        version = self.store.versions.mint_version(step, path)
        self.store.versions.confirm_version(version)
        return version


@pytest.fixture
async def going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[], Going]]:
    """`going()` starts a run, or resumes it where its newest checkpoint is, up to the start of an engine's process."""
    started: list[SupervisedEngine] = []

    async def serve(_: LearningEngines, replica: SupervisedEngine, limiter: trio.CapacityLimiter) -> None:
        started.append(replica)

    monkeypatch.setattr(LearningEngines, "_serve", serve)
    run = RunDir.create(tmp_path / "run", CONFIG.model_copy(update={"model": str(FOLDER)}))
    with RunStore.open(run.store_path) as store:
        async with trio.open_nursery() as nursery:

            async def start() -> Going:
                children = RunChildren(run, run.config(), Looks(store), Aside(store), nursery, mark={})
                await children.start_engines(start_point(run, store))
                return Going(run, store, started[-1])

            yield start  # pyright: ignore[reportReturnType]
            nursery.cancel_scope.cancel()  # what a run keeps for as long as it goes


async def test_an_engine_started_again_takes_the_checkpoint_of_now_and_not_the_one_resumed_from(going: Any) -> None:
    found = await going()
    found.version(5, kept=True)
    found.checkpoint(5)
    resumed = await going()
    ahead = [resumed.version(step, kept=True) for step in (6, 7, 8)][-1]
    newest = resumed.checkpoint(7)  # the one resumed from is gone
    weights = await resumed.replica.weights()
    assert (weights.model, weights.base.step) == (newest, 7)
    assert (weights.current, weights.file) == (ahead, resumed.run.path / "8.safetensors")


async def test_a_version_whose_file_was_tidied_is_taken_from_the_checkpoint_that_has_the_same_weights(
    going: Any,
) -> None:
    """The learner died two versions after its checkpoint: the run stands at a version of which no file is left."""
    found = await going()
    kept = found.version(5, kept=False)
    folder = found.checkpoint(5)
    for step in (6, 7):
        found.version(step, kept=True)
    assert start_point(found.run, found.store).version == kept  # as the next learner does
    weights = await found.replica.weights()
    assert (weights.model, weights.base, weights.current, weights.file) == (folder, kept, kept, None)


async def test_a_version_that_is_nowhere_is_said_to_be_gone(going: Any) -> None:
    found = await going()
    found.checkpoint(5)
    found.version(5, kept=False)
    found.version(6, kept=False)
    with pytest.raises(RunFailed, match="the weights of version 3 are gone: go on with --resume"):
        await found.replica.weights()


async def test_weights_that_the_learner_removes_as_they_are_looked_for_give_way_to_the_next(
    going: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await going()
    found.checkpoint(5)
    removed, newest = found.version(6, kept=False), found.version(7, kept=True)
    versions = type(found.store.versions)
    seen, current = [removed], versions.current_version
    monkeypatch.setattr(versions, "current_version", lambda store: seen.pop() if seen else current(store))
    assert (await found.replica.weights()).current == newest
    assert not seen


@pytest.mark.medium
async def test_an_engine_started_again_is_proved(replica: Start, second: ServedWeights, monkeypatch: Any) -> None:
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


@pytest.mark.medium
async def test_a_weight_file_that_is_gone_before_an_engine_has_started_is_nobodys_loss(
    replica: Start, second: ServedWeights
) -> None:
    """Steps may be faster than a start: the file of the version that was current by then is no more."""
    assert second.file is not None
    engine, asked = replica(second), list[int]()

    async def moved_on() -> ServedWeights:
        asked.append(1)
        if len(asked) == 1:
            return replace(second, file=Path("/nonexistent/2.safetensors"))
        return second

    engine.weights = moved_on
    await engine.again()
    assert await serves(engine) == 2
    second.file.unlink()
    await engine.child.end()
    await engine.again()
    assert await serves(engine) == 1, "whoever watches over it gives it the next"


@pytest.mark.medium
async def test_an_engine_that_comes_back_with_other_weights_ends_the_run(replica: Start, second: ServedWeights) -> None:
    left_out = replace(
        second, base=SECOND, file=None
    )  # it says that it serves version 2, with the weights of version 1
    says = r"engine-0 was started again: canary: .* says it serves version 2, but the log-prob of probe token \d+ is"
    with pytest.raises(RunFailed, match=says):
        await replica(left_out).up()


@pytest.mark.medium
@pytest.mark.parametrize("when", ["before it is asked", "while it is asked"])
async def test_the_learner_may_have_been_faster(
    when: str, replica: Start, second: ServedWeights, tmp_path: Path, monkeypatch: Any
) -> None:
    """What it sends it proves itself; the canary of the version before is nobody's any more."""
    engine = replica(replace(second, base=SECOND, file=None))  # the canary of version 2 cannot hold
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


async def test_each_replica_is_started_on_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the start of vLLM's interpreter, in whose place is one that ends at once."""
    monkeypatch.setattr(launch, "find_build", lambda **_: Build(python=Path("/bin/false"), version="0.32.0", cpu=False))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    started: list[tuple[str, str | None]] = []

    async def serve(_: LearningEngines, replica: SupervisedEngine, limiter: trio.CapacityLimiter) -> None:
        with pytest.raises(RunFailed, match="vLLM ended before it was ready"):
            await replica.up()
        started.append((replica.child.name, replica.child.env.get("CUDA_VISIBLE_DEVICES")))

    monkeypatch.setattr(LearningEngines, "_serve", serve)
    for name, engine in (("a", {"replicas": [[1], [2, 3]]}), ("b", {"replicas": 1})):
        config = CONFIG.model_copy(update={"engine": EngineSettings.model_validate({"kind": "vllm", **engine})})
        run = RunDir.create(tmp_path / name, config)
        with run.lock() as lock, ScratchSpace(run).owned(lock), RunStore.open(run.store_path) as store:
            first = store.versions.mint_version(0)
            store.versions.confirm_version(first)
            async with trio.open_nursery() as nursery:
                children = RunChildren(run, config, Looks(store), Aside(store), nursery, mark={})
                await children.start_engines(StartPoint(model=FOLDER, checkpoint=None, version=first))
                nursery.cancel_scope.cancel()
    assert sorted(started[:2]) == [("engine-0", "1"), ("engine-1", "2,3")] and started[2:] == [("engine-0", None)]
