"""What starts beside what: workers beside engines, engines beside each other, and the learner beside them, unless they
share a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from each_case import each_case

from agentrl.config import RunConfig
from agentrl.config.gpu_placement import start_together, starts_apart
from agentrl.run import supervisor
from agentrl.run.children.engine_process import SupervisedEngine
from agentrl.run.children.learning_engines import LearningEngines
from agentrl.run.children.run_children import RunChildren
from agentrl.run.run_folder import RunDir
from agentrl.run.start_point import StartPoint
from agentrl.run.supervisor import Supervisor
from agentrl.run.telemetry import Telemetry
from agentrl.store import RunStore
from agentrl.store.async_calls import Aside, Looks

from .test_learner import Scene

DEADLINE_S = 120.0
TWO = {"kind": "vllm", "replicas": [[0], [1]]}


def config(engine: dict[str, Any], device: str = "cpu", **sections: Any) -> RunConfig:
    document = {"model": "unused", "env": {"id": "test/none"}, "engine": engine, "train": {"device": device}}
    return RunConfig.model_validate({**document, **sections})


@each_case(
    ("settings", "together", "apart"),
    [
        (config({"kind": "embedded", "replicas": 2}), True, True),
        (config({"kind": "vllm"}), True, True),  # of a learner on the CPU
        (config({"kind": "vllm"}, "cuda:0"), True, False),
        (config({"kind": "vllm"}, "cuda:1"), True, True),
        (config(TWO, "cuda:1"), True, False),
        (config(TWO, "cuda:2"), True, True),
        (config({"kind": "vllm", "replicas": [[0, 1], [1]]}, "cuda:2"), False, True),
        (config({"kind": "vllm", "replicas": 2}, "cuda:1"), False, True),  # both on the first GPU
        (config({"kind": "vllm", "colocated": True}, "cuda"), True, False),
        (config({"kind": "vllm"}, "cuda", cluster={"launcher": "ray", "learner": {"gpus": 1}}), True, True),
    ],
)
def test_nothing_starts_beside_what_it_shares_a_gpu_with(settings: RunConfig, together: bool, apart: bool) -> None:
    engine, on_ray = settings.engine, settings.cluster.on_ray
    assert start_together(engine, on_ray=on_ray) == together
    assert starts_apart(engine, settings.train, on_ray=on_ray) == apart


class Enough(Exception):
    """The run has started."""


class Start:
    """The start of a run whose processes do nothing, up to its first evaluation: what happened, in its order."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, settings: RunConfig, before: str | None) -> None:
        self.said: list[str] = []
        self.here, self.most = 0, 0  # engines that are starting, and the most at once
        self.run = RunDir.create(folder / "run", settings)
        self.config = settings
        self.before = before
        monkeypatch.setattr(SupervisedEngine, "up", lambda replica: self._up(replica))
        monkeypatch.setattr(LearningEngines, "_keep", lambda *_: None)
        monkeypatch.setattr(RunChildren, "start_workers", self._workers)
        monkeypatch.setattr(RunChildren, "follow_size", lambda _: None)
        monkeypatch.setattr(RunChildren, "start_learner", lambda _: self._learner())
        monkeypatch.setattr(Supervisor, "evaluate", self._evaluate)
        monkeypatch.setattr(supervisor, "check_room", lambda *_: None)

    async def _up(self, replica: SupervisedEngine) -> None:
        self.here += 1
        self.most = max(self.most, self.here)
        await trio.testing.wait_all_tasks_blocked()
        self.here -= 1
        self.said.append(replica.child.name)

    async def _workers(self) -> None:
        self.said.append("workers")

    def _learner(self) -> trio.Event:
        self.said.append("learner")
        self.told = {key: self.store.meta(key) for key in ("engine_urls", "phase")}
        return trio.Event()

    async def _evaluate(self, when: str) -> None:
        raise Enough

    async def go(self) -> list[str]:
        with RunStore.open(self.run.store_path) as self.store, trio.fail_after(DEADLINE_S):
            self.store.set_meta("engine_urls", '["http://before"]')
            if self.before is not None:
                self.store.set_meta("phase", self.before)
            writes = Aside[RunStore](self.store)
            start = StartPoint(model=Path(), checkpoint=None, version=self.store.versions.mint_version(0))
            async with trio.open_nursery() as nursery:
                children = RunChildren(self.run, self.config, Looks(self.store), writes, nursery, mark={})
                telemetry = Telemetry(self.store, self.run.metrics, "supervisor")
                one = Supervisor(
                    self.run, self.config, self.store, writes, telemetry, children, start, on_tick=lambda _: None
                )
                with pytest.raises(Enough):
                    await one.train()
                nursery.cancel_scope.cancel()
            return self.said


@pytest.mark.parametrize("before", [None, "stop"])
async def test_a_learner_starts_with_the_engines_and_sees_none_of_before(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Start(tmp_path, monkeypatch, config({"kind": "embedded", "replicas": 3}), before)
    first, second, *engines = await start.go()
    assert (first, second) == ("learner", "workers")
    assert sorted(engines) == ["engine-0", "engine-1", "engine-2"] and start.most == 3
    assert start.told == {"engine_urls": "[]", "phase": before and "eval"}, "or it would end, as a run that stopped"
    with RunStore.open(start.run.store_path) as store:
        assert len(json.loads(store.meta("engine_urls") or "")) == 3


async def test_engines_on_one_gpu_start_one_after_the_other_and_then_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config({"kind": "vllm", "replicas": 2}, "cuda:0")
    start = Start(tmp_path, monkeypatch, settings, None)
    workers, *engines, learner = await start.go()
    assert (sorted(engines), workers, learner) == (["engine-0", "engine-1"], "workers", "learner")
    assert start.most == 1
    assert start.told["phase"] == "eval"


def test_a_learner_that_is_there_first_waits_for_engines(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    waits: list[int] = []

    async def wait() -> None:
        waits.append(len(scene.pushes.steps))

    scene.urls = lambda: "[]" if len(waits) < 3 else '["http://engine"]'
    scene.wait = wait
    scene.train(steps=1)
    assert waits == [0, 0, 0] and scene.pushes.steps
