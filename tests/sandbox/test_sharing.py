"""A backend that episodes share is closed when the last has left; boxes are made ahead where that was asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio
import trio.testing

from agentrl import registry
from agentrl.errors import ConfigError, SandboxError
from agentrl.protocols import SandboxSpec
from agentrl.sandbox.shared_backend import SharedBackend, shared
from agentrl.testing.fake_sandbox import FakeBackend, FakeSandbox


class SlowToClose(FakeBackend):
    async def aclose(self) -> None:
        await trio.sleep(1)
        await super().aclose()


@pytest.fixture
def opened() -> Iterator[list[FakeBackend]]:
    """All backends that were opened, in order."""
    made: list[FakeBackend] = []

    def make() -> FakeBackend:
        made.append(SlowToClose())
        return made[-1]

    registry.register("sandboxes", "shared-fake", make)
    yield made
    del registry._registered["sandboxes", "shared-fake"]  # pyright: ignore[reportPrivateUsage]


async def test_the_last_user_closes_it(opened: list[FakeBackend], autojump_clock: trio.testing.MockClock) -> None:
    shared = SharedBackend("shared-fake")
    await shared.enter()
    await shared.enter()
    assert opened == []  # nobody has asked for a box yet
    await shared.create(SandboxSpec())
    await shared.leave()
    await shared.create(SandboxSpec())
    assert [(backend.closed, len(backend.boxes)) for backend in opened] == [(False, 2)]
    await shared.leave()
    assert opened[0].closed


async def test_who_comes_while_it_closes_gets_a_new_one(
    opened: list[FakeBackend], autojump_clock: trio.testing.MockClock
) -> None:
    shared = SharedBackend("shared-fake")
    await shared.enter()
    await shared.create(SandboxSpec())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shared.leave)
        await trio.testing.wait_all_tasks_blocked()
        await shared.enter()
        assert opened[0].closed
        await shared.create(SandboxSpec())
    assert [(backend.closed, len(backend.boxes)) for backend in opened] == [(True, 1), (False, 1)]
    await shared.leave()


async def test_a_cancelled_user_still_closes_it(
    opened: list[FakeBackend], autojump_clock: trio.testing.MockClock
) -> None:
    shared = SharedBackend("shared-fake")
    await shared.enter()
    await shared.create(SandboxSpec())
    with trio.CancelScope() as scope:
        scope.cancel()
        await shared.leave()
    assert opened[0].closed


async def test_nobody_gets_a_box_without_entering(opened: list[FakeBackend]) -> None:
    with pytest.raises(SandboxError, match="enter it first"):
        await SharedBackend("shared-fake").create(SandboxSpec())
    assert opened == []


async def test_who_asks_for_the_same_gets_the_same() -> None:
    assert shared("shared-fake") is shared("shared-fake") is not shared("shared-fake", ready=1)
    for ready, said in ((-1, "ready = -1"), ("many", "ready = 'many'")):
        with pytest.raises(ConfigError, match=said):
            shared("shared-fake", ready=ready)  # pyright: ignore[reportArgumentType]


async def test_boxes_made_ahead_outlive_who_opened_the_backend_and_end_with_the_last_user(
    opened: list[FakeBackend], autojump_clock: trio.testing.MockClock
) -> None:
    boxes = SharedBackend("shared-fake", ready=2)
    await boxes.enter()
    with trio.CancelScope() as first:
        box = await boxes.create(SandboxSpec(files={"a": b"1"}))
        first.cancel()
    assert isinstance(box, FakeSandbox) and box.files == {"a": b"1"}
    await boxes.enter()
    await boxes.leave()
    await trio.sleep(1)  # virtual: the pool fills
    (backend,) = opened
    assert [each.files for each in backend.boxes] == [{"a": b"1"}, {}, {}]
    second = await boxes.create(SandboxSpec(files={"b": b"2"}))
    assert second is backend.boxes[1] and second.files == {"b": b"2"}  # a warm one, whatever is laid in it
    await box.close()
    await second.close()
    await boxes.leave()
    assert backend.closed and all(each.closed for each in backend.boxes)
    await boxes.enter()
    await boxes.create(SandboxSpec())
    assert len(opened) == 2
    await boxes.leave()
