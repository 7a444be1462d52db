"""Children that die: started again within a budget, also where they die while they are being started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from agentrl.config import EnvSource, RunConfig
from agentrl.errors import AgentRLError, DiskFull, RunFailed, WeightSyncError, WornOut
from agentrl.run.processes.engine_process import WrongWeights
from agentrl.run.processes.processes import RunProcesses
from agentrl.run.run_folder import RunDir
from agentrl.run.supervisor import _Progress
from agentrl.store.run_values import RESTARTED

CONFIG = RunConfig(model="unused", env=EnvSource(id="test/none"))


class Mortal:
    """A child that dies so many times, each time by a signal, and lives then."""

    def __init__(self, deaths: int) -> None:
        self.name, self.pid, self.deaths, self.ended = "engine-0", 1, deaths, 0

    async def wait(self) -> int:
        if not self.deaths:
            await trio.sleep_forever()
        self.deaths -= 1
        return -9

    def kill(self, why: str) -> None: ...

    def failure(self, status: int) -> str:
        return f"{self.name} ended with signal {-status}"

    async def end(self) -> None:
        self.ended += 1


class Starts:
    """How a child is started again: as often as there are `failures`, not at all."""

    def __init__(self, *failures: Exception) -> None:
        self.failures, self.done = list(failures), trio.Event()

    async def __call__(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.done.set()


class Kept:
    """A store of one value."""

    text: str | None = None

    async def __call__(self, write: Any) -> None:
        write(self)

    def meta(self, key: str) -> str | None:
        return self.text

    def set_meta(self, key: str, value: str) -> None:
        self.text = value


class Slow:
    """A start that takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def __call__(self) -> None:
        await trio.sleep(self.seconds)


async def never(hangs: object) -> None:
    await trio.sleep_forever()


async def keep(tmp_path: Path, child: Mortal, starts: Starts, kept: Kept | None = None) -> RunProcesses:
    """A processes that keeps the child, until it was started again."""
    processes, kept = None, kept or Kept()
    async with trio.open_nursery() as nursery:
        processes = RunProcesses(RunDir(tmp_path), CONFIG, None, kept, nursery, mark={})  # type: ignore[arg-type]
        nursery.start_soon(processes._keep, child, starts)
        await starts.done.wait()
        nursery.cancel_scope.cancel()
    return processes


@pytest.mark.parametrize("failure", [RunFailed("engine-0 was killed"), WeightSyncError("it was killed amid a push")])
async def test_an_engine_killed_while_it_is_being_started_again_is_started_once_more(
    failure: Exception, tmp_path: Path, autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    child, starts, kept = Mortal(1), Starts(failure, failure), Kept()
    processes = await keep(tmp_path, child, starts, kept)
    assert processes.restarts == {"engine-0": 3}
    assert child.ended == 2, "what hangs half-started is ended first"
    why = ["engine-0 ended with signal 9", str(failure), str(failure)]
    assert capsys.readouterr().err.splitlines() == [f"agentrl: {one}; it is started again" for one in why]
    assert [(row["process"], row["why"]) for row in RESTARTED.of(kept.meta)] == [("engine-0", one) for one in why]


async def test_an_engine_that_never_comes_up_again_uses_up_its_budget(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await keep(tmp_path, Mortal(1), Starts(*[RunFailed("engine-0 was not ready")] * 100))
    (error,) = raised.value.exceptions
    assert isinstance(error, RunFailed)
    assert str(error) == "engine-0 was not ready (started again 5 times, never well for 60 s)"


async def test_an_engine_that_comes_back_with_other_weights_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await keep(tmp_path, Mortal(1), Starts(WrongWeights("engine-0 was started again: canary")))
    assert isinstance(raised.value.exceptions[0], WrongWeights)


@pytest.mark.parametrize("why", [WornOut, DiskFull])
async def test_a_child_that_asks_to_be_started_anew_or_found_the_disk_full_costs_none_of_its_budget(
    tmp_path: Path, autojump_clock: MockClock, why: type[AgentRLError]
) -> None:
    class Tired(Mortal):
        starts = 0

        async def wait(self) -> int:
            await trio.lowlevel.checkpoint()
            return why.exit_code

        def start(self) -> None:
            self.starts += 1
            if self.starts == 100:
                enough.set()

    enough, child = trio.Event(), Tired(1)
    async with trio.open_nursery() as nursery:
        processes = RunProcesses(RunDir(tmp_path), CONFIG, None, None, nursery, mark={})  # pyright: ignore[reportArgumentType]
        nursery.start_soon(processes._keep, child)
        await enough.wait()
        nursery.cancel_scope.cancel()
    assert processes.restarts["engine-0"] >= 100, "it is counted all the same"


async def test_nothing_stands_still_while_every_engine_is_being_started(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """What stood still already says why, where an engine could not be given its weights."""
    async with trio.open_nursery() as nursery:
        processes: Any = RunProcesses(RunDir(tmp_path), CONFIG, None, Kept(), nursery, mark={})  # type: ignore[arg-type]
        processes._watches = {
            name: SimpleNamespace(weights=lambda: None, trouble="", run=never) for name in ("engine-0", "b")
        }
        progress = _Progress(100.0)
        nursery.start_soon(processes._keep, Mortal(1), Slow(600.0), processes._watches["engine-0"])
        await trio.sleep(1)
        progress.saw(1, excused=processes.engines_start, processes=processes)
        await trio.sleep(90)
        assert not processes.engines_start, "the other one samples"
        del processes._watches["b"]
        await trio.sleep(400)
        assert processes.engines_start
        progress.saw(1, excused=processes.engines_start, processes=processes)
        await trio.sleep(200)
        assert not processes.engines_start
        processes._watches["engine-0"].trouble = "http://engine-0 lacks weight transfer"
        with pytest.raises(
            RunFailed, match=r"^no turn, score or step for 100 s .*; http://engine-0 lacks weight transfer; "
        ):
            progress.saw(1, excused=processes.engines_start, processes=processes)
        nursery.cancel_scope.cancel()
