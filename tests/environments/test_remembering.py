"""Answers that are found once, however many ask."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from agentrl_environments.remembering import Remembered


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
