"""Engines and workers that come and go: what may be asked for, and how it is brought about."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from each_case import each_case
from trio.testing import MockClock

from agentrl.config import parse
from agentrl.errors import AgentRLError, ConfigError, EngineBroke, EngineTimeout, UsageError, WrongWeights
from agentrl.run import resume_overrides
from agentrl.run.children import engine_process as engines
from agentrl.run.children.engine_process import ServedWeights, SupervisedEngine
from agentrl.run.children.registry import ChildRegistry
from agentrl.run.children.run_children import RunChildren
from agentrl.run.cluster import scale_requests, scaling
from agentrl.run.cluster.scaling import Kind, NoRoom, ScaledChild, Scaler, Size
from agentrl.run.processes.launcher import Local
from agentrl.run.reporting import status
from agentrl.run.run_folder import RunDir
from agentrl.run.scratch_space import ScratchSpace
from agentrl.store import RunStore, run_values
from agentrl.store.async_calls import Aside, Looks
from agentrl.store.run_values import Value

from .test_heartbeat import _runs
from .test_status import typed

URLS = {"kind": "vllm", "urls": ["http://a"]}


def made(folder: Path, **sections: Any) -> RunDir:
    return RunDir.create(folder / "run", parse({"model": "m", "env": {"id": "e"}, **sections}))


def test_what_is_asked_for_counts_before_the_run_file_until_a_resume_says_otherwise(tmp_path: Path) -> None:
    run = made(tmp_path, rollout={"workers": 3})
    done = typed("scale", run.path, "--engines", 2)
    assert done.output == (
        f"{run.path} is not under way; it will have 2 engines and 3 workers: agentrl train --resume {run.path}\n"
    )
    typed("scale", run.path, "--workers", 1)
    with RunStore.read(run.store_path) as store:
        assert scaling.requested_size(run.config(), store.meta) == Size(2, 1)
        assert Size.of(run.config()).at_most(Size(2, 1)) == Size(1, 1), "a run that grew starts small, and grows again"
    with RunStore.open(run.store_path) as store:
        store.versions.confirm_version(store.versions.mint_version(0))
    resume_overrides.change(run, ["rollout.workers=5"])
    with RunStore.read(run.store_path) as store:
        assert scaling.requested_size(run.config(), store.meta) == Size(2, 5)


@each_case(
    ("sections", "words", "told"),
    [
        ({}, [], "say how many: agentrl scale .* --engines N --workers M"),
        ({}, ["--engines", 0], "at least one of each"),
        ({}, ["--workers", -1], "at least one of each"),
        ({"engine": URLS}, ["--engines", 2], r"agentrl train --resume .* --set 'engine.urls="),
        (
            {"engine": {"kind": "vllm", "replicas": [[0], [1]]}},
            ["--engines", 3],
            "names GPUs for 2: .*replicas=",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_mend(
    tmp_path: Path, sections: dict[str, Any], words: list[Any], told: str
) -> None:
    run = made(tmp_path, **sections)
    refused = typed("scale", run.path, *words).exception
    assert isinstance(refused, UsageError | ConfigError)
    with pytest.raises(UsageError, match=told):
        raise refused
    with RunStore.read(run.store_path) as store:
        assert store.meta(run_values.REQUESTED_SIZE.key) is None


def test_each_request_is_another_one_also_if_a_clock_steps_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that was given up is tried again at a request that is not the one at which it failed."""
    run = made(tmp_path)
    seen = list[dict[str, Any]]()
    for now in (2e9, 1e9, 1e9):
        monkeypatch.setattr("time.time", lambda now=now: now)
        scaling.ask(run, engines=2, workers=None)
        with RunStore.read(run.store_path) as store:
            seen.append(scale_requests.requested(store.meta))
    assert seen == [{"engines": 2, "request": number} for number in (1, 2, 3)]


def test_workers_of_a_run_on_engines_of_somebody_else_are_its_own(tmp_path: Path) -> None:
    run = made(tmp_path, engine=URLS)
    assert "it will have 4 workers:" in typed("scale", run.path, "--workers", 4).output


def test_status_shows_what_is_wanted_and_what_is_there(tmp_path: Path) -> None:
    run = made(tmp_path)
    with RunStore.open(run.store_path) as store:
        store.set_meta("engine_urls", '["http://a"]')
        store.set_meta(run_values.WORKERS.key, "[0, 1]")
    scaling.ask(run, engines=3, workers=1)
    with RunStore.open(run.store_path) as store:
        row = {"coming": ["engine-1", "engine-2"], "going": ["worker-1"], "trouble": {"engine-2": "no place"}}
        store.set_meta(run_values.SCALING.key, json.dumps(row))
    with run.lock():
        found = status.status(run)
    assert found["size"]["wanted"] == {"engines": 3, "workers": 1}
    told = list(status.lines(found))
    assert "size      1 of 3 engines, 2 of 1 workers; engine-1, engine-2 to come; worker-1 to leave" in told
    assert "trouble   engine-2: no place" in told


# --- how it is brought about


class Children:
    """`fails` says what a start of a child raises, time after time; others take `start_s`."""

    def __init__(self, engines: int, workers: int) -> None:
        self.there: dict[Kind, set[int]] = {"engine": set(range(engines)), "worker": set(range(workers))}
        self.fails: dict[ScaledChild, list[AgentRLError]] = {}
        self.start_s, self.tries, self.ended = 5.0, 0, list[ScaledChild]()

    def present(self, kind: Kind) -> set[int]:
        return self.there[kind]

    async def join(self, kind: Kind, index: int) -> None:
        self.tries += 1
        await trio.sleep(self.start_s)
        if failures := self.fails.get(ScaledChild(kind, index)):
            raise failures.pop(0)
        self.there[kind].add(index)

    async def leave(self, kind: Kind, index: int) -> None:
        self.there[kind].discard(index)
        await trio.sleep(self.start_s)
        self.ended.append(ScaledChild(kind, index))


class Scene:
    """A supervisor's scaler over children that are none, and what its store says."""

    def __init__(self, engines: int = 1, workers: int = 1) -> None:
        self.config = parse({"model": "m", "env": {"id": "e"}})
        self.rows: dict[str, str] = {}
        self.children = Children(engines, workers)
        store: Any = SimpleNamespace(remote=False, meta=self.rows.get)
        self.scaler = Scaler(self.config, Looks(store), self.children, self.tell)

    async def tell(self, value: Value[Any], to: object) -> None:
        self.rows[value.key] = value.text(to)

    def ask(self, engines: int, workers: int) -> None:
        scale_requests.write(self, lambda _: {"engines": engines, "workers": workers})  # type: ignore[arg-type]

    def meta(self, key: str) -> str | None:
        return self.rows.get(key)

    def swap_meta(self, key: str, before: str, value: str) -> bool:
        assert self.rows.get(key, "") == before
        self.rows[key] = value
        return True

    @property
    def size(self) -> Size:
        return Size(len(self.children.there["engine"]), len(self.children.there["worker"]))

    @property
    def told(self) -> dict[str, Any]:
        return json.loads(self.rows[run_values.SCALING.key])


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    found = Scene()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.scaler.run)
        yield found
        nursery.cancel_scope.cancel()


async def test_children_come_at_once_and_leave_from_the_last(scene: Scene, autojump_clock: MockClock) -> None:
    await trio.sleep(10)
    assert scene.children.tries == 0, "nobody asked"
    scene.ask(4, 3)
    await trio.sleep(7)
    assert scene.size == Size(4, 3), "each was started while the others were"
    scene.ask(1, 1)
    await trio.sleep(2)
    assert scene.told["going"] == ["engine-1", "engine-2", "engine-3", "worker-1", "worker-2"]
    await trio.sleep(10)
    assert scene.size == Size(1, 1)
    assert scene.children.there == {"engine": {0}, "worker": {0}}, "the first worker scores, and stays"


async def test_without_room_a_child_is_asked_for_on_and_on(scene: Scene, autojump_clock: MockClock) -> None:
    scene.children.fails[ScaledChild("engine", 1)] = [NoRoom("no place for 1 GPU within 5 s")] * 20
    scene.ask(2, 2)
    await trio.sleep(100)
    assert scene.size == Size(1, 2)
    assert scene.told["coming"] == ["engine-1"]
    assert scene.told["trouble"] == {"engine-1": "no place for 1 GPU within 5 s"}
    await trio.sleep(400)
    assert scene.size == Size(2, 2), "a node came"
    assert scene.told["trouble"] == {}


async def test_a_child_that_waits_for_room_is_called_off(scene: Scene, autojump_clock: MockClock) -> None:
    scene.children.start_s = 1e6
    scene.ask(2, 1)
    await trio.sleep(5)
    assert scene.told["coming"] == ["engine-1"]
    scene.ask(1, 1)
    await trio.sleep(5)
    assert scene.told == {"coming": [], "going": [], "trouble": {}}


@pytest.mark.parametrize(("failure", "tries"), [(WrongWeights("canary"), 1), (EngineBroke("it broke off"), 3)])
async def test_a_child_that_fails_is_given_up_and_tried_anew_when_somebody_asks_again(
    scene: Scene, autojump_clock: MockClock, failure: AgentRLError, tries: int
) -> None:
    scene.children.fails[ScaledChild("engine", 1)] = [failure] * tries
    scene.ask(2, 1)
    await trio.sleep(300)
    assert (scene.size, scene.children.tries) == (Size(1, 1), tries)
    assert list(scene.told["trouble"]) == ["engine-1"] and scene.told["coming"] == []
    scene.ask(2, 1)
    await trio.sleep(10)
    assert scene.size == Size(2, 1)


async def test_an_engine_that_joins_waits_for_weights_and_proof_but_not_for_ever(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [EngineBroke("the file is gone: a newer one came"), False, True]

    async def fit(*_: Any) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    class Runs:
        name = "engine-1"

        def poll(self) -> int | None:
            return None

    async def start(_: SupervisedEngine) -> None: ...

    def replica() -> SupervisedEngine:
        async def weights() -> ServedWeights:
            raise AssertionError

        deadlines = dict.fromkeys(("start_deadline_s", "liveness_deadline_s"), 1.0)
        config = parse({"model": "m", "env": {"id": "e"}, "engine": deadlines})
        child: Any = Runs()
        return SupervisedEngine(child=child, port=1, scratch=tmp_path, config=config, weights=weights)

    monkeypatch.setattr(engines, "fit", fit)
    monkeypatch.setattr(SupervisedEngine, "_start", start)
    await replica().join()
    assert answers == []
    answers = [WrongWeights("canary")]
    with pytest.raises(WrongWeights):
        await replica().join()
    answers = [False] * 1_000_000
    with pytest.raises(EngineTimeout, match="canary was not answered"):
        await replica().join()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - processes tell no event of ours
        await trio.sleep(0.01)


MARKS = """
import sys, time
from agentrl.run.processes.heartbeat import Heartbeat
beat = Heartbeat.of_process()
while True:
    beat.mark(); time.sleep(0.01)
"""


class Full(Local):
    """A cluster that has no room when it is asked for the `full`-th time."""

    def __init__(self, full: int) -> None:
        self.asked, self.full, self.released = 0, full, list[str]()

    async def reserve(self, name: str) -> None:
        self.asked += 1
        if self.asked == self.full:
            raise NoRoom(f"{name}: no place")

    def release(self, name: str) -> None:
        self.released.append(name)


@asynccontextmanager
async def family(folder: Path, patch: pytest.MonkeyPatch, full: int = 0) -> AsyncIterator[Any]:
    """Processes whose workers mark and know no store, and their launcher."""
    patch.setattr(ChildRegistry, "create", _runs(MARKS, ChildRegistry.create))
    run, launcher = made(folder, engine=URLS, rollout={"step_deadline_s": 0.05}), Full(full)
    ScratchSpace(run).make()
    try:
        with RunStore.open(run.store_path) as store, trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                children = RunChildren(run, run.config(), Looks(store), Aside(store), nursery, {}, launcher)
                await children.start_workers()
                children.follow_size()
                yield children
                await children.stop()
                nursery.cancel_scope.cancel()
    finally:
        ScratchSpace(run).clear()


def there(children: RunChildren) -> list[int]:
    return json.loads(children.looks._store.meta(run_values.WORKERS.key) or "")  # pyright: ignore[reportPrivateUsage]


async def test_real_children_come_and_go_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not leave by itself is ended."""
    async with family(tmp_path, monkeypatch) as children:
        first = children.pids()["worker-0"]
        scaling.ask(children.run, engines=None, workers=2)
        await until(lambda: there(children) == [0, 1] and len(children.pids()) == 2)
        second = children.pids()["worker-1"]
        scaling.ask(children.run, engines=None, workers=1)
        await until(lambda: list(children.pids().values()) == [first])
        assert there(children) == [0] and children.launcher.released == ["worker-1"]
        with pytest.raises(ProcessLookupError):
            os.kill(second, 0)


async def test_a_worker_whose_node_is_lost_is_awaited_while_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with family(tmp_path, monkeypatch, full=2) as children:
        first = children.pids()["worker-0"]
        scaling.ask(children.run, engines=None, workers=2)
        await until(lambda: there(children) == [0, 1] and len(children.pids()) == 2)
        os.kill(children.pids()["worker-1"], signal.SIGKILL)  # to start it again, a place is asked for once more
        await until(lambda: children.launcher.released == ["worker-1"])
        await until(lambda: there(children) == [0, 1] and len(children.pids()) == 2)
        assert children.launcher.asked == 3 and children.pids()["worker-0"] == first
