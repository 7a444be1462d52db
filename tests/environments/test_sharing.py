"""What episodes share: a backend that is closed when the last has left, and answers that are found once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio
import trio.testing

from agentrl import registry
from agentrl.errors import SandboxError
from agentrl.protocols import SandboxSpec
from agentrl.testing.fake_sandbox import FakeBackend
from agentrl_environments.remembering import Remembered
from agentrl_environments.sharing import SharedBackend


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


class Finder:
    """Gives `answer` after a second, and counts how often it was asked."""

    def __init__(self, answer: str, *, lasting: bool = True) -> None:
        self.answer, self.lasting, self.asked = answer, lasting, 0

    async def __call__(self) -> tuple[str, bool]:
        self.asked += 1
        await trio.sleep(1)
        return self.answer, self.lasting


async def ask_at_once(remembered: Remembered[str], find: Finder, times: int) -> list[str]:
    answers: list[str] = []

    async def ask() -> None:
        answers.append(await remembered.get(b"key", find))

    async with trio.open_nursery() as nursery:
        for _ in range(times):
            nursery.start_soon(ask)
    return answers


async def test_an_answer_is_found_once(autojump_clock: trio.testing.MockClock) -> None:
    find = Finder("yes")
    remembered = Remembered[str](2)
    assert await ask_at_once(remembered, find, 5) == ["yes"] * 5
    assert await remembered.get(b"key", find) == "yes" and find.asked == 1


@pytest.mark.parametrize(("most", "lasting"), [(2, False), (0, True)])
async def test_what_does_not_last_is_found_anew(
    most: int, lasting: bool, autojump_clock: trio.testing.MockClock
) -> None:
    find = Finder("yes", lasting=lasting)
    remembered = Remembered[str](most)
    assert await ask_at_once(remembered, find, 3) == ["yes"] * 3
    assert find.asked == 3 and len(remembered) == 0


async def test_the_answer_used_longest_ago_is_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    find = Finder("yes")
    remembered = Remembered[str](2)
    for key in (b"a", b"b", b"a", b"c"):
        await remembered.get(key, find)
    assert (len(remembered), find.asked) == (2, 3)
    await remembered.get(b"a", find)
    assert find.asked == 3
    await remembered.get(b"b", find)
    assert find.asked == 4
