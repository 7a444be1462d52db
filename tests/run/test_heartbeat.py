"""A hang is a death: who stops, or stands still, is noticed in time; who only works or waits long is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from agentrl.config import EnvSource, Rollout, RunConfig
from agentrl.engine import embedded_process
from agentrl.errors import RunFailed
from agentrl.host.clocks import HostClock
from agentrl.host.platform_checks import is_stopped
from agentrl.run.children.registry import ChildRegistry
from agentrl.run.children.restart_loop import WatchedChild
from agentrl.run.children.run_children import RunChildren
from agentrl.run.processes import heartbeat
from agentrl.run.processes.heartbeat import Heartbeat, Pulse
from agentrl.run.processes.supervised_child import Child
from agentrl.run.run_folder import RunDir
from agentrl.run.scratch_space import ScratchSpace
from agentrl.store import RunStore
from agentrl.store.async_calls import Aside, Looks

DEADLINE_S = 300
HANGS_AFTER_4_S = {"rollout": {"lease_s": 8.0}, "train": {"liveness_deadline_s": 4.0}}
"""Settings under which a process hangs when it makes no mark for 4 s, which a busy machine does to nobody who marks."""
NAMES = ("silent_s", "stopped_s")


@dataclass
class Process(heartbeat.Here):
    """Marks where it is told to."""

    beat: Path
    pid: int = 2**30  # of no process

    def __post_init__(self) -> None:
        heartbeat.prepare(self.beat)
        self.marks = Heartbeat(self.beat)


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path / "beats" / "one")


def pulse(process: Process) -> Pulse:
    return Pulse(process=process, start_s=600.0, silent_s=60.0, stopped_s=30.0, names=NAMES)


async def test_who_marks_now_and_then_lives_and_who_stops_marking_is_noticed_in_time(
    process: Process, autojump_clock: MockClock
) -> None:
    hung: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pulse(process).run, hung.append)
        await trio.sleep(500)  # it is still starting
        for _ in range(20):
            process.marks.mark()
            await trio.sleep(55)
        assert hung == []
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert hung == ["came no further for 60 s (silent_s)"]


async def test_who_never_gets_ready_is_noticed_by_the_deadline_of_a_start(
    process: Process, autojump_clock: MockClock
) -> None:
    hung: list[str] = []
    with trio.move_on_after(590):
        await pulse(process).run(hung.append)
    assert hung == []
    with trio.fail_after(620):
        await pulse(process).run(hung.append)
    assert hung == ["did not get ready for 600 s (engine.start_deadline_s)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], process_group=0) as process:
        yield process
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel says so in /proc")
async def test_a_stopped_process_is_noticed_while_its_work_may_still_take_long(
    process: Process, sleeper: subprocess.Popen[bytes], autojump_clock: MockClock
) -> None:
    """Its last mark is no older than a long pass; the kernel says that nothing will come."""
    process.pid = sleeper.pid
    process.marks.mark()
    long = Pulse(process=process, start_s=600.0, silent_s=3000.0, stopped_s=30.0, names=NAMES)
    hung: list[str] = []
    with trio.move_on_after(100):
        await long.run(hung.append)
    assert hung == []
    sleeper.send_signal(signal.SIGSTOP)
    while not is_stopped(sleeper.pid):  # noqa: ASYNC110 - the kernel tells nobody
        await trio.sleep(0.001)
    with trio.fail_after(40):
        await long.run(hung.append)
    assert hung == ["was stopped for 30 s (stopped_s)"]


class Quick(HostClock):
    """Runs as fast as it is looked at: 0.2 s a look."""

    def __init__(self) -> None:
        self.host_s = 0.0
        super().__init__(self._tick)

    def _tick(self) -> float:
        self.host_s += 0.2
        return self.host_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        super().deadline_to_sleep_time(deadline)
        return 0.0


def test_nobody_is_ended_after_the_machine_was_suspended(process: Process) -> None:
    clock, hung = Quick(), list[str]()

    async def main() -> None:
        process.marks.mark()
        with trio.move_on_after(300):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pulse(process).run, hung.append)
                await trio.sleep(50)
                clock.host_s += 8 * 3600
                await trio.sleep(5)
                assert hung == []
                nursery.cancel_scope.cancel()
                return
        raise AssertionError("the clock stood still")

    trio.run(main, clock=clock)


STANDS = """
import faulthandler, os, time
from functools import partial
from pathlib import Path
from typing import Any, cast
from agentrl.run.processes.heartbeat import DUMP, Heartbeat
faulthandler.register(DUMP)
heartbeat = Heartbeat.of_process()
def stands_still():
    heartbeat.mark()
    while True:
        time.sleep(0.01)
stands_still()
"""


async def test_a_child_that_stands_still_is_killed_with_its_group_and_says_where_it_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_LOOK_S", 0.01)
    monkeypatch.setattr(heartbeat, "_DUMP_S", 0.0)
    other = "import subprocess; subprocess.Popen(['sleep', '600'])\n"
    child = Child("worker-0", ["-c", other + STANDS], tmp_path, beat=tmp_path / "beat")
    child.start()

    def kill(why: str) -> None:
        """Once it has said where it stands, which it was asked for."""
        deadline = time.monotonic() + DEADLINE_S / 2
        while "in stands_still" not in child.log_path.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        child.kill(why)

    with trio.fail_after(DEADLINE_S):
        await Pulse(process=child, start_s=300.0, silent_s=1.0, stopped_s=300.0, names=NAMES).run(kill)
        status = await child.wait()
    assert child.failure(status) == "worker-0: came no further for 1 s (silent_s)"
    assert "in stands_still" in child.log_path.read_text()
    assert child.pid is not None
    assert not embedded_process._lives(child.pid), "but for zombies"


@pytest.mark.medium
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel says so in /proc")
async def test_workers_and_learner_that_are_stopped_are_started_again_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes under the supervisor's own care; they mark, and are stopped in turn."""
    monkeypatch.setattr(heartbeat, "_LOOK_S", 0.01)
    marks = "import time\nfrom agentrl.run.processes.heartbeat import Heartbeat\nbeat = Heartbeat.of_process()\n"
    marks += "while True:\n    beat.mark(); time.sleep(0.01)\n"
    monkeypatch.setattr(ChildRegistry, "create", _runs(marks, ChildRegistry.create))
    config = RunConfig.model_validate({"model": "unused", "env": {"id": "test/none"}, **HANGS_AFTER_4_S})
    run = RunDir.create(tmp_path / "run", config)
    ScratchSpace(run).make()
    try:
        with RunStore.open(run.store_path) as store, trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                children = RunChildren(run, config, Looks(store), Aside(store), nursery, mark={})
                await children.start_workers()
                children.start_learner()
                for name in ("worker-0", "learner"):
                    child = children.registry.children[name]
                    assert child.beat is not None
                    while not heartbeat.read(child.beat):  # noqa: ASYNC110 - it marks in a file
                        await trio.sleep(0.01)
                    assert child.pid is not None
                    os.kill(child.pid, signal.SIGSTOP)
                    while not children.restarts.get(name):  # noqa: ASYNC110
                        await trio.sleep(0.01)
                await children.stop()
                nursery.cancel_scope.cancel()
    finally:
        ScratchSpace(run).clear()
    assert children.restarts.keys() == {"worker-0", "learner"}


def _runs(code: str, make: Callable[..., Child]) -> Callable[..., Child]:
    def create(self: ChildRegistry, name: str, argv: list[str], *, threads: int, **_: object) -> Child:
        return make(self, name, ["-c", code], threads=threads)

    return create


async def test_what_never_stops_hanging_uses_up_its_budget(tmp_path: Path, autojump_clock: MockClock) -> None:
    class Hangs(heartbeat.Here):
        name, pid, beat = "worker-0", 2**30, tmp_path / "beat"

        def __init__(self) -> None:
            self.dead = trio.Event()
            self.start()

        def start(self) -> None:
            heartbeat.prepare(self.beat)
            Heartbeat(self.beat).mark()
            self.dead = trio.Event()

        def kill(self, why: str) -> None:
            self.why = why
            self.dead.set()

        async def wait(self) -> int:
            await self.dead.wait()
            return -9

        def failure(self, status: int) -> str:
            return f"{self.name}: {self.why}"

    async def unheard(write: object) -> None: ...

    config = RunConfig(model="unused", env=EnvSource(id="test/none"))
    child = Hangs()
    with pytest.raises(ExceptionGroup) as raised:
        async with trio.open_nursery() as nursery:
            children = RunChildren(RunDir(tmp_path), config, None, unheard, nursery, mark={})  # type: ignore[arg-type]
            kept = WatchedChild(cast("Any", child), children.registry)
            pulse = Pulse(process=child, start_s=60.0, silent_s=30.0, stopped_s=30.0, names=NAMES)
            kept.watch = partial(pulse.run, child.kill)
            nursery.start_soon(kept.keep)
    (error,) = raised.value.exceptions
    assert isinstance(error, RunFailed)
    assert "came no further for 30 s" in str(error) and "started again 5 times" in str(error)


def test_a_worker_is_ended_before_another_may_claim_what_blocks_it() -> None:
    """A lease is renewed at a third: it lapses two thirds of it after the loop has stood still at the earliest."""
    assert Rollout().hang_deadline_s == 60.0
    for lease_s in (3.0, 30.0, 120.0, 1000.0):
        assert Rollout(lease_s=lease_s).hang_deadline_s < lease_s * 2 / 3


def test_who_waits_for_the_stores_lock_says_so(tmp_path: Path) -> None:
    """That wait has a deadline of its own, two minutes; nobody is to blame for it."""
    config = RunConfig(model="unused", env=EnvSource(id="test/none"))
    run = RunDir.create(tmp_path / "run", config)
    process = Process(tmp_path / "beats" / "one")
    with RunStore.open(run.store_path) as one, RunStore.open(run.store_path) as other:
        process.marks.mark_while(lambda: one.waits)
        writes = threading.Thread(target=one.set_meta, args=("a", "b"))
        with other._db.write():
            writes.start()
            deadline = time.monotonic() + DEADLINE_S
            while heartbeat.read(process.beat) < 1:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        writes.join(DEADLINE_S)
        assert one.meta("a") == "b" and not one.waits
