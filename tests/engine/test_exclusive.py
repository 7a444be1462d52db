"""Who gives weights to an engine is alone with it, and nobody waits for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from agentrl.engine.weight_sync.weight_lock import exclusive
from agentrl.errors import WeightSyncError

URL = "http://engine"
HOLD = """
import sys, trio
from pathlib import Path
from agentrl.engine.weight_sync.weight_lock import exclusive

async def hold():
    async with exclusive(Path(sys.argv[1]), "http://engine/", deadline_s=60):
        print("held", flush=True)
        await trio.sleep_forever()

trio.run(hold)
"""


async def test_the_second_waits_until_the_first_is_done(tmp_path: Path, autojump_clock: MockClock) -> None:
    order: list[str] = []

    async def give(name: str, takes_s: float) -> None:
        async with exclusive(tmp_path, URL, deadline_s=30):
            order.append(f"{name} begins")
            await trio.sleep(takes_s)
            order.append(f"{name} ends")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give, "first", 10)
        await trio.sleep(1)
        nursery.start_soon(give, "second", 1)
    assert order == ["first begins", "first ends", "second begins", "second ends"]


async def test_two_engines_are_given_weights_at_once(tmp_path: Path) -> None:
    async with exclusive(tmp_path, URL, deadline_s=0), exclusive(tmp_path, "http://other", deadline_s=0):
        pass


async def test_waiting_has_a_deadline(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with exclusive(tmp_path, URL, deadline_s=1):
        with pytest.raises(WeightSyncError, match=r"http://engine was taking other weights for 30 s"):
            async with exclusive(tmp_path, URL, deadline_s=30):
                raise AssertionError


def test_a_killed_process_lets_go(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"

    async def take() -> None:
        async with exclusive(tmp_path, URL, deadline_s=0):
            pass

    with pytest.raises(WeightSyncError):
        trio.run(take)
    holder.kill()
    holder.communicate(timeout=60)
    trio.run(take)
