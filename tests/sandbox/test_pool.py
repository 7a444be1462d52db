"""The warm pool: ready boxes, checked at hand-out, made at a bounded rate, and none left behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from agentrl.errors import SandboxError
from agentrl.protocols import ExecResult, SandboxSpec
from agentrl.sandbox.backend_pool import Pool, Setup, kind_of
from agentrl.sandbox.bubblewrap.backend import Bubblewrap
from agentrl.testing.fake_sandbox import FakeBackend, FakeSandbox

SPEC = SandboxSpec()


class SlowBackend(FakeBackend):
    """Takes a second (of virtual time) a box and counts how many are on the way at once."""

    def __init__(self) -> None:
        super().__init__()
        self.on_the_way = self.most_at_once = 0
        self.began: list[float] = []

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        self.began.append(trio.current_time())
        self.on_the_way += 1
        self.most_at_once = max(self.most_at_once, self.on_the_way)
        await trio.sleep(1.0)
        self.on_the_way -= 1
        return await super().create(spec)


async def test_taken_box_is_warm_and_replaced(autojump_clock: MockClock) -> None:
    backend = SlowBackend()
    async with Pool(backend, ready=3, creating=1) as pool:
        await pool.fill(SPEC)
        before = trio.current_time()
        box = await pool.take(SPEC)
        assert trio.current_time() == before
        assert (pool.counts.warm, pool.counts.cold) == (1, 0)
        await pool.fill(SPEC)
        assert len(backend.boxes) == 4
        await box.close()
    assert all(each.closed for each in backend.boxes) and backend.closed


async def test_creation_is_bounded_in_number_and_rate(autojump_clock: MockClock) -> None:
    backend = SlowBackend()
    async with Pool(backend, ready=10, creating=3, per_second=2.0) as pool:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(pool.take, SPEC)
        await pool.fill(SPEC)
        assert backend.most_at_once <= 3
        gaps = [later - earlier for earlier, later in zip(backend.began, backend.began[1:], strict=False)]
        assert min(gaps) >= 0.5 - 1e-9
        for box in backend.boxes:
            await box.close()


async def test_dead_box_is_not_handed_out(autojump_clock: MockClock) -> None:
    backend = FakeBackend()
    async with Pool(backend, ready=2) as pool:
        await pool.fill(SPEC)
        backend.boxes[0].broken = True
        box = await pool.take(SPEC)
        assert box is backend.boxes[1]
        assert (pool.counts.dead, pool.counts.warm) == (1, 1)
        assert backend.boxes[0].closed
        await box.close()


async def test_law_4_a_box_whose_taker_was_cancelled_meanwhile_is_closed(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: object, **__: object) -> ExecResult:
        await trio.sleep_forever()
        raise AssertionError

    backend = FakeBackend()
    async with Pool(backend, ready=1) as pool:
        await pool.fill(SPEC)
        monkeypatch.setattr(backend.boxes[0], "exec", silent)
        with trio.move_on_after(1.0) as scope:
            await pool.take(SPEC)
        assert scope.cancelled_caught and backend.boxes[0].closed


async def test_setup_is_done_before_and_keys_the_box(autojump_clock: MockClock) -> None:
    backend = FakeBackend()
    setup = Setup(files={"a": b"1"}, commands=[["make"]])
    assert kind_of(SPEC, setup) != kind_of(SPEC, Setup(files={"a": b"2"}, commands=[["make"]]))
    assert kind_of(SPEC, setup) == kind_of(SandboxSpec(), Setup(files={"a": b"1"}, commands=(("make",),)))
    assert kind_of(SPEC, setup) != kind_of(SandboxSpec(network=True), setup)
    async with Pool(backend, ready=1) as pool:
        box = await pool.take(SPEC, setup)
        assert isinstance(box, FakeSandbox)
        assert (box.files, box.commands[0]) == ({"a": b"1"}, ["make"])
        await box.close()


async def test_failing_setup_names_the_command(autojump_clock: MockClock) -> None:
    backend = FakeBackend(lambda argv, files: ExecResult(exit_code=2, stdout=b"", stderr=b"no rule"))
    async with Pool(backend, ready=1) as pool:
        with pytest.raises(SandboxError, match=r"\['make'\] ended with 2: no rule"):
            await pool.take(SPEC, Setup(commands=[["make"]]))
    assert all(box.closed for box in backend.boxes)


async def test_broken_backend_is_asked_ever_more_rarely(autojump_clock: MockClock) -> None:
    backend = FakeBackend()
    async with Pool(backend, ready=1) as pool:
        backend.failure = SandboxError("host is full")
        with pytest.raises(SandboxError, match="host is full"):
            await pool.take(SPEC)
        await trio.sleep(60)
        assert 4 < pool.counts.failed < 12
        backend.failure = None
        await pool.fill(SPEC)


class Strange(FakeBackend):
    """Somebody's own, whose box cannot be made, asked or closed."""

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        if "no" in (spec.image or ""):
            raise KeyError("image")
        return StrangeBox(spec)


class StrangeBox(FakeSandbox):
    async def exec(self, *_: object, **__: object) -> ExecResult:
        raise OSError("no such box")

    async def close(self) -> None:
        raise OSError("no such box")


async def test_what_a_backend_of_ones_own_raises_fails_a_box_and_not_the_pool(autojump_clock: MockClock) -> None:
    async with Pool(Strange(), ready=1) as pool:
        with pytest.raises(SandboxError, match=r"the backend 'fake': KeyError: 'image'"):
            await pool.take(SandboxSpec(image="no"))
        await pool.fill(SPEC)
        await pool.take(SPEC)
        assert pool.counts.dead == 1 and pool.counts.cold == 1


async def test_kinds_taken_longest_ago_give_way(autojump_clock: MockClock) -> None:
    backend = FakeBackend()
    specs = [SandboxSpec(env={"n": str(number)}) for number in range(4)]
    async with Pool(backend, ready=2, most=4) as pool:
        for spec in specs:
            await pool.fill(spec)
            await trio.testing.wait_all_tasks_blocked()
        open_boxes = [box.spec.env["n"] for box in backend.boxes if not box.closed]
        assert sorted(open_boxes) == ["2", "2", "3", "3"]


async def test_pool_must_be_open() -> None:
    with pytest.raises(SandboxError, match="async with"):
        await Pool(FakeBackend()).take(SPEC)


def left_behind() -> list[Path]:
    """Folders and control groups that this process made and did not remove."""
    left = [*Path("/dev/shm").glob(f"agentrl-boxes-*/{os.getpid()}.*")]
    return [*left, *Path("/sys/fs/cgroup").glob(f"**/agentrl-boxes.{os.getpid()}.*")]


@pytest.mark.medium
@pytest.mark.bubblewrap
@pytest.mark.timeout(300)
async def test_three_hundred_boxes_leave_nothing() -> None:
    """No process, folder, control group, descriptor; also boxes that broke, were cancelled or never closed."""

    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    def children() -> int:
        task = Path(f"/proc/self/task/{os.getpid()}/children")
        return len(task.read_text().split())

    gc.collect()  # what earlier tests forgot is not to be closed meanwhile
    descriptors_before, children_before, before = descriptors(), children(), set(left_behind())
    backend = Bubblewrap()
    async with Pool(backend, ready=4, per_second=1000) as pool:
        for number in range(300):
            if number % 4:  # else most might be made while they are waited for, on a busy machine
                await pool.fill(SPEC, Setup(files={"f": b"1"}))
            box = await pool.take(SPEC, Setup(files={"f": b"1"}))
            if number % 10 == 0:
                assert (await box.exec(["cat", "f"])).stdout == b"1"
            if number % 50 == 1:
                await box.start(["sleep", "60"])
            if number % 50 == 2:
                with trio.move_on_after(0.05):
                    await box.exec(["sleep", "60"])
            if number % 50 != 3:
                await box.close()
        assert pool.counts.warm > 200
    assert descriptors() <= descriptors_before
    assert children() <= children_before
    assert set(left_behind()) <= before  # other tests of this process may keep a backend open
