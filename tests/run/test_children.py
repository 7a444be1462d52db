"""The children of a run together: what processes learn of its engines, and which of them the run goes on without."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from agentrl.config import parse
from agentrl.errors import RunFailed, WrongWeights
from agentrl.run.children.engine_health import EngineWatch
from agentrl.run.children.engine_process import SupervisedEngine
from agentrl.run.children.run_children import RunChildren
from agentrl.run.cluster.scaling import NoRoom
from agentrl.run.processes.supervised_child import Child
from agentrl.run.run_folder import RunDir
from agentrl.run.supervisor import _Progress
from agentrl.store import RunStore
from agentrl.store.async_calls import Aside, Looks


class Processes:
    """The processes of a run whose engines serve once `serves` has their name: `die` ends one, and after that none is
    started again, as there is no room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.serves: dict[str, trio.Event] = {}
        self.deaths: dict[str, trio.Event] = {}
        monkeypatch.setattr(Child, "start", lambda _: None)
        monkeypatch.setattr(Child, "wait", lambda child: self._wait(child.name))
        monkeypatch.setattr(Child, "end", never_mind)
        monkeypatch.setattr(SupervisedEngine, "up", lambda engine: self._up(engine.child.name))
        monkeypatch.setattr(SupervisedEngine, "again", lambda engine: self.reserve(engine.child.name))
        monkeypatch.setattr(EngineWatch, "run", never)

    async def _up(self, name: str) -> None:
        await self.serves.setdefault(name, trio.Event()).wait()

    async def _wait(self, name: str) -> int:
        await self.deaths.setdefault(name, trio.Event()).wait()
        return -9

    async def reserve(self, name: str) -> None:
        await trio.lowlevel.checkpoint()
        raise NoRoom(f"{name}: no place")

    def release(self, name: str) -> None: ...


async def never(*_: object) -> None:
    await trio.sleep_forever()


async def never_mind(*_: object) -> None:
    await trio.lowlevel.checkpoint()


@asynccontextmanager
async def family(folder: Path, processes: Processes, **engine: Any) -> AsyncIterator[RunChildren]:
    document = {"model": "unused", "env": {"id": "test/none"}, "rollout": {"workers": 2}, "engine": engine}
    run = RunDir.create(folder / "run", parse(document))
    launcher: Any = processes
    with RunStore.open(run.store_path) as store:
        looks, writes = Looks(store, inline=True), Aside(store, inline=True)
        async with trio.open_nursery() as nursery:
            yield RunChildren(run, run.config(), looks, writes, nursery, {}, launcher)
            nursery.cancel_scope.cancel()


START: Any = None  # no engine reads its weights


@pytest.mark.parametrize(("dropped", "served"), [("worker-1", [0, 1, 2]), ("engine-0", [1, 2])])
async def test_where_engines_serve_is_published_once_all_of_the_start_do_although_a_child_is_dropped_before(
    dropped: str, served: list[int], tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers and learner begin with the first URLs that they see, and would ask engines that do not answer yet."""
    processes = Processes(monkeypatch)
    async with family(tmp_path, processes, replicas=3) as children:

        def published() -> str | None:
            return children.looks._store.meta("engine_urls")  # pyright: ignore[reportPrivateUsage]

        await children.start_workers()
        async with trio.open_nursery() as start:
            start.start_soon(children.start_engines, START)
            await trio.testing.wait_all_tasks_blocked()
            processes.serves["engine-0"].set()
            await trio.testing.wait_all_tasks_blocked()
            processes.deaths[dropped].set()
            await trio.sleep(60)
            assert dropped not in children.registry.children and published() is None
            for name in ("engine-1", "engine-2"):
                processes.serves[name].set()
        urls = json.loads(published() or "")
        assert urls == [children.learning.by_role[None][number].url for number in served]


async def test_nothing_stands_still_while_every_engine_is_being_started(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stood still already says why, where an engine could not be given its weights."""
    processes = Processes(monkeypatch)

    async def take_long(_: SupervisedEngine) -> None:
        await trio.sleep(600)

    monkeypatch.setattr(SupervisedEngine, "up", never_mind)
    monkeypatch.setattr(SupervisedEngine, "again", take_long)
    async with family(tmp_path, processes, replicas=2) as children:
        await children.start_engines(START)
        await trio.testing.wait_all_tasks_blocked()
        progress = _Progress(100.0)

        def look() -> None:
            progress.saw(1, excused=children.engines_are_restarting, children=children)

        processes.deaths["engine-0"].set()
        await trio.sleep(1)
        look()
        processes.deaths["engine-0"] = trio.Event()
        await trio.sleep(90)
        assert not children.engines_are_restarting, "the other one samples"
        processes.deaths["engine-1"].set()
        await trio.sleep(400)
        assert children.engines_are_restarting
        look()
        processes.deaths["engine-1"] = trio.Event()
        await trio.sleep(200)
        assert not children.engines_are_restarting
        children.engines.watches["engine-0"].trouble = "http://engine-0 lacks weight transfer"
        with pytest.raises(RunFailed, match=r"^no turn, score or step for 100 s .*; http://engine-0 lacks weight "):
            look()


@pytest.mark.parametrize("dies", ["worker-0", "engine-0"])
async def test_the_first_worker_and_the_only_engine_are_never_dropped(
    dies: str, tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(monkeypatch)
    monkeypatch.setattr(SupervisedEngine, "up", never_mind)
    with pytest.raises(ExceptionGroup) as raised:
        async with family(tmp_path, processes) as children:
            await children.start_workers()
            await children.start_engines(START)
            await trio.testing.wait_all_tasks_blocked()
            processes.deaths[dies].set()
            await trio.sleep(600)
    (error,) = raised.value.exceptions
    assert isinstance(error, RunFailed)
    assert str(error) == f"{dies}: no place (started again 5 times, never well for 60 s)"


async def test_an_engine_that_comes_back_with_other_weights_is_not_tried_again(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def mistake(engine: SupervisedEngine) -> None:
        raise WrongWeights("engine-0 was started again: canary")

    processes = Processes(monkeypatch)
    monkeypatch.setattr(SupervisedEngine, "up", never_mind)
    monkeypatch.setattr(SupervisedEngine, "again", mistake)
    with pytest.raises(ExceptionGroup) as raised:
        async with family(tmp_path, processes, replicas=2) as children:
            await children.start_engines(START)
            await trio.testing.wait_all_tasks_blocked()
            processes.deaths["engine-0"].set()
            await trio.sleep(600)
    assert isinstance(raised.value.exceptions[0], WrongWeights)
    assert children.restarts == {"engine-0": 1}
