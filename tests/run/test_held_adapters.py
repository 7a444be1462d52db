"""The adapters that a training server's engine holds: at most so many, each with its files for as long, in turns."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from agentrl.engine.client import EngineClient
from agentrl.errors import UsageError
from agentrl.run.training_server import kept_engine
from agentrl.run.training_server.held_adapters import HeldAdapters
from agentrl.run.training_server.kept_engine import KeptEngine
from tests.parts.vllm_server import FakeVLLM


@pytest.fixture
def fake() -> FakeVLLM:
    return FakeVLLM()


@pytest.fixture
async def held(fake: FakeVLLM, tmp_path: Path) -> AsyncIterator[HeldAdapters]:
    client = EngineClient(fake.url, transport=fake)
    yield HeldAdapters(client, tmp_path / "held", most=2)
    await client.aclose()


def adapter(folder: Path, number: int) -> tuple[str, Path]:
    place = folder / "weights" / str(number)
    place.mkdir(parents=True)
    (place / "adapter_config.json").write_text(f'{{"r": {number}}}')
    return f"w{number}", place


async def test_an_adapter_outlives_its_folder_for_as_long_as_the_engine_has_it(
    held: HeldAdapters, fake: FakeVLLM, tmp_path: Path
) -> None:
    """vLLM reads the files again when its cache has dropped them."""
    name, folder = adapter(tmp_path, 1)
    async with held.held((name, folder)) as asked_for:
        assert asked_for == name
        place = Path(fake.adapters[name])
        shutil.rmtree(folder)
        async with held.held((name, folder)):  # another call, after the session ended
            assert (place / "adapter_config.json").read_text() == '{"r": 1}'
    assert fake.calls == ["POST /v1/load_lora_adapter"]
    for number in (2, 3):
        async with held.held(adapter(tmp_path, number)):
            pass
    assert list(fake.adapters) == ["w2", "w3"] and not await trio.Path(place).exists()
    with pytest.raises(UsageError, match="the weights of this sampling client are gone: its session ended"):
        async with held.held((name, folder)):
            raise AssertionError("there is no such adapter")


async def until(done: Callable[[], bool]) -> None:
    """Threads link the files of an adapter: that no task runs does not say that they have."""
    with trio.fail_after(60):
        while not done():  # noqa: ASYNC110 - it is a list that grows
            await trio.sleep(0.001)


async def test_more_adapters_than_the_engine_holds_wait_in_their_order(
    held: HeldAdapters, fake: FakeVLLM, tmp_path: Path
) -> None:
    came, leave = list[str](), {number: trio.Event() for number in range(1, 5)}

    async def use(number: int, one: tuple[str, Path]) -> None:
        async with held.held(one) as name:
            assert name in fake.adapters
            came.append(str(name))
            await leave[number].wait()

    adapters = {number: adapter(tmp_path, number) for number in leave}
    async with trio.open_nursery() as nursery:
        for number, one in adapters.items():
            nursery.start_soon(use, number, one)
            await until(lambda number=number: len(came) == min(number, 2))
            await wait_all_tasks_blocked()  # the others stand in line
        assert len(fake.adapters) == 2 and came == ["w1", "w2"]
        async with held.held(None) as name:  # the base model waits for nobody
            assert name is None
        for number, waits in ((2, "w3"), (1, "w4")):
            leave[number].set()
            await until(lambda waits=waits: came[-1] == waits)
            assert f"w{number}" not in fake.adapters and len(fake.adapters) == 2
        leave[3].set()
        leave[4].set()
    assert sorted(path.name for path in (tmp_path / "held").iterdir()) == ["w3", "w4"]


class DeadBehindItsFrontEnd:
    """A process that a signal ends."""

    def __init__(self) -> None:
        self.killed = trio.Event()

    def kill(self) -> None:
        self.killed.set()

    async def wait(self) -> int:
        await self.killed.wait()
        return -9


@pytest.mark.parametrize("core", ["dead", "hung"])
async def test_an_engine_that_is_dead_behind_its_front_end_is_ended(
    core: Literal["dead", "hung"], fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A call that broke off looks whether its engine lives: one that does is kept."""
    processes = list[DeadBehindItsFrontEnd]()

    @asynccontextmanager
    async def start() -> AsyncIterator[object]:
        fake.restart()
        processes.append(DeadBehindItsFrontEnd())
        yield fake.url, processes[-1]

    monkeypatch.setattr(kept_engine, "EngineClient", partial(EngineClient, transport=fake))
    engine = KeptEngine(start, vocabulary=8, patience_s=600.0)  # pyright: ignore[reportArgumentType]
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        client = await engine.client()
        assert not await engine.has_ended(client) and not processes[0].killed.is_set()
        fake.core = core
        assert await engine.has_ended(client) and processes[0].killed.is_set()
        assert await engine.client() is not client and len(processes) == 2
        nursery.cancel_scope.cancel()
