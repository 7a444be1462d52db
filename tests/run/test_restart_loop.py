"""Children that die: started again within a budget, also where they die while they are being started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from agentrl.config import EnvSource, RunConfig
from agentrl.errors import AgentRLError, DiskFull, RunFailed, StoreAway, WeightSyncError, WornOut
from agentrl.run.children.registry import ChildRegistry
from agentrl.run.children.restart_loop import WatchedChild
from agentrl.run.cluster.scaling import NoRoom
from agentrl.run.processes.exit_status import ENDS_THE_RUN
from agentrl.run.processes.launcher import LOCAL
from agentrl.run.processes.restart_budget import RestartBudget
from agentrl.run.processes.supervised_child import Child
from agentrl.run.run_folder import RunDir
from agentrl.store.run_values import RESTARTED

CONFIG = RunConfig(model="unused", env=EnvSource(id="test/none"))


class Values:
    """A store of one value."""

    text: str | None = None

    async def __call__(self, write: Any) -> None:
        write(self)

    def meta(self, key: str) -> str | None:
        return self.text

    def set_meta(self, key: str, value: str) -> None:
        self.text = value


def registry(folder: Path, nursery: trio.Nursery, store: Values) -> ChildRegistry:
    writes: Any = store
    return ChildRegistry(run=RunDir(folder), config=CONFIG, writes=writes, nursery=nursery, mark={}, launcher=LOCAL)


class Mortal(Child):
    """A child that ends so many times with `status`, and lives then. Starting it again brings no process."""

    def __init__(self, deaths: int, status: int = -9) -> None:
        super().__init__("engine-0", [], Path())
        self.deaths, self.status, self.starts, self.ended = deaths, status, 0, 0

    async def wait(self) -> int:
        await trio.lowlevel.checkpoint()
        if not self.deaths:
            await trio.sleep_forever()
        self.deaths -= 1
        return self.status

    def start(self) -> None:
        self.starts += 1

    def failure(self, status: int) -> str:
        return f"{self.name} ended with signal {-status}"

    async def end(self) -> None:
        self.ended += 1


class Engine(WatchedChild):
    """A child whose restart raises `failures`, one after the other; those of the kinds `final` are final."""

    def __init__(self, child: Child, registry: ChildRegistry, *failures: Exception) -> None:
        super().__init__(child, registry)
        self.failures, self.restarted, self.dropped = list(failures), trio.Event(), False
        self.final: tuple[type[AgentRLError], ...] = ()
        self.innocent = False

    async def was_innocent(self, budget: RestartBudget) -> bool:
        return self.innocent

    async def restart(self) -> None:
        assert self.registry.restarting == {self.child.name}
        if self.failures:
            raise self.failures.pop(0)
        self.restarted.set()

    def is_final(self, error: AgentRLError) -> bool:
        return isinstance(error, self.final)

    async def drop(self) -> None:
        self.dropped = True


@pytest.mark.parametrize("failure", [RunFailed("engine-0 was killed"), WeightSyncError("it was killed amid a push")])
async def test_a_child_killed_while_it_is_being_started_again_is_started_once_more(
    failure: Exception, tmp_path: Path, autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    child, store = Mortal(1), Values()
    async with trio.open_nursery() as nursery:
        engine = Engine(child, registry(tmp_path, nursery, store), failure, failure)
        engine.start_keeping()
        await engine.restarted.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert not engine.registry.restarting
        nursery.cancel_scope.cancel()
    assert engine.registry.restarts == {"engine-0": 3}
    assert child.ended == 2, "what hangs half-started is ended first"
    why = ["engine-0 ended with signal 9", str(failure), str(failure)]
    assert capsys.readouterr().err.splitlines() == [f"agentrl: {line}; it is started again" for line in why]
    rows = RESTARTED.of(store.meta)
    assert [(row["process"], row["why"]) for row in rows] == [("engine-0", line) for line in why]


async def raised_by(engine: Engine, nursery: trio.Nursery) -> Exception:
    with pytest.raises(AgentRLError) as raised:
        await engine.keep()
    nursery.cancel_scope.cancel()
    return raised.value


async def test_a_child_that_never_comes_up_again_uses_up_its_budget(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        failures = [RunFailed("engine-0 was not ready")] * 100
        engine = Engine(Mortal(1), registry(tmp_path, nursery, Values()), *failures)
        error = await raised_by(engine, nursery)
    assert isinstance(error, RunFailed)
    assert str(error) == "engine-0 was not ready (started again 5 times, never well for 60 s)"


class Hangs(Mortal):
    """A child that makes `marks` marks, one a second, and then does nothing until it is killed."""

    def __init__(self, marks: int) -> None:
        super().__init__(0)
        self.marks, self.began, self.killed = marks, 0.0, trio.Event()

    def start(self) -> None:
        super().start()
        self.began, self.killed = trio.current_time(), trio.Event()

    async def wait(self) -> int:
        await self.killed.wait()
        return self.status

    def kill(self, why: str) -> None:
        self.killed.set()

    def count(self) -> int:
        return min(self.marks, int(trio.current_time() - self.began))


class Pulsing(WatchedChild):
    def __init__(self, child: Child, registry: ChildRegistry) -> None:
        super().__init__(child, registry)
        self._pulse = registry.pulse(child, silent_s=90, stopped_s=90, names=("silent_s", "stopped_s"))

    async def watch(self, lives: Callable[[], None]) -> None:
        await self._pulse.run(self.child.kill, lives)


@pytest.mark.parametrize("marks", [0, 30])
async def test_law_4_a_child_that_hangs_soon_after_every_start_uses_up_its_budget(
    marks: int, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Its hang is noticed after 90 s, which is longer than the time for which a child has to be well."""
    child = Hangs(marks)
    with trio.fail_after(100_000):
        async with trio.open_nursery() as nursery:
            child.start()
            with pytest.raises(RunFailed):
                await Pulsing(child, registry(tmp_path, nursery, Values())).keep()
            nursery.cancel_scope.cancel()
    assert child.starts == 1 + 5


async def test_a_child_that_works_for_a_while_before_each_hang_is_restarted_for_ever(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    child = Hangs(70)
    async with trio.open_nursery() as nursery:
        child.start()
        nursery.start_soon(Pulsing(child, registry(tmp_path, nursery, Values())).keep)
        await trio.sleep(20 * (70 + 90))
        nursery.cancel_scope.cancel()
    assert child.starts > 10


async def test_after_an_error_that_is_final_there_is_no_other_attempt(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        engine = Engine(Mortal(1), registry(tmp_path, nursery, Values()), WeightSyncError("canary"))
        engine.final = (WeightSyncError,)
        error = await raised_by(engine, nursery)
    assert isinstance(error, WeightSyncError) and engine.registry.restarts == {"engine-0": 1}


@pytest.mark.parametrize(("is_spare", "restarts"), [(True, 1), (False, 2)])
async def test_a_child_for_which_there_is_no_room_is_dropped_if_the_run_goes_on_without_it(
    is_spare: bool, restarts: int, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        engine = Engine(Mortal(1), registry(tmp_path, nursery, Values()), NoRoom("no place"))
        engine.final = (NoRoom,) if is_spare else ()
        nursery.start_soon(engine.keep)
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert engine.dropped == is_spare == (not engine.restarted.is_set())
    assert engine.registry.restarts == {"engine-0": restarts}


async def test_a_child_whose_error_says_that_a_restart_would_not_help_ends_the_run(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        engine = Engine(Mortal(1, ENDS_THE_RUN), registry(tmp_path, nursery, Values()))
        error = await raised_by(engine, nursery)
    assert isinstance(error, RunFailed) and not engine.registry.restarts


@pytest.mark.parametrize("why", [WornOut, DiskFull, StoreAway])
async def test_a_child_that_asks_to_be_started_anew_or_found_the_disk_full_costs_none_of_its_budget(
    why: type[AgentRLError], tmp_path: Path, autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    child = Mortal(100, why.exit_code)
    async with trio.open_nursery() as nursery:
        kept = WatchedChild(child, registry(tmp_path, nursery, Values()))
        nursery.start_soon(kept.keep)
        await trio.sleep(1000)
        nursery.cancel_scope.cancel()
    assert child.starts == 100
    assert kept.registry.restarts["engine-0"] == 100, "it is counted all the same"
    assert not capsys.readouterr().err


async def test_a_death_that_something_else_caused_costs_none_of_the_budget_and_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = Mortal(20)
    async with trio.open_nursery() as nursery:
        engine = Engine(child, registry(tmp_path, nursery, Values()))
        engine.innocent = True
        nursery.start_soon(engine.keep)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert child.starts == 20 and engine.registry.restarts["engine-0"] == 20
    assert len(capsys.readouterr().err.splitlines()) == 20


async def test_a_death_while_the_run_ends_its_children_is_no_failure(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        engine = Engine(Mortal(1), registry(tmp_path, nursery, Values()))
        engine.registry.is_closing = True
        await engine.keep()
    assert not engine.registry.restarts
