"""What engines say at `/metrics` reaches the run's folder, each under a deadline of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from agentrl.errors import EngineUnavailable
from agentrl.run.children.engine_metrics import DEADLINE_S, EVERY_S, EngineFigures, EngineMetrics, figures


class Engine:
    """It answers by a function; `closed` counts its clients that were closed."""

    url = "http://10.0.0.7:8000"

    def __init__(self, answer: Callable[[], Awaitable[bytes]]) -> None:
        self._answer, self.closed = answer, 0

    def client(self) -> Any:
        return self

    async def call(self, method: str, path: str, *, deadline_s: float) -> bytes:
        assert (method, path) == ("GET", "/metrics") and deadline_s == DEADLINE_S
        return await self._answer()

    async def aclose(self) -> None:
        self.closed += 1


async def well() -> bytes:
    await trio.sleep(1)
    return b"up 1\n"


async def hangs() -> bytes:
    await trio.sleep_forever()
    raise AssertionError


async def gone() -> bytes:
    raise EngineUnavailable("nobody listens")


async def _inline(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
    return function(*args)


async def test_an_engine_that_hangs_or_is_gone_holds_up_nobody(
    tmp_path: Path, autojump_clock: MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", _inline)  # virtual time does not wait for threads
    engines = {"engine-0": Engine(well), "engine-1": Engine(hangs), "http://there:1/v1": Engine(gone)}
    relay = EngineMetrics(engines, tmp_path / "engines", clock=lambda: 1000 + trio.current_time())
    began = trio.current_time()
    nursery.start_soon(relay.run)
    await trio.sleep(EVERY_S + 2)
    assert [one.engine for one in figures(tmp_path / "engines")] == ["engine-0", "http://there:1/v1"]
    (first, *_) = figures(tmp_path / "engines")
    assert first == EngineFigures("engine-0", pytest.approx(1000 + began + EVERY_S + 1), scrapes=1, text="up 1\n")
    await trio.sleep_until(began + 2 * (EVERY_S + DEADLINE_S) + 1)
    found = {one.engine: (one.scrapes, one.failed, one.text) for one in figures(tmp_path / "engines")}
    assert found == {"engine-0": (2, 0, "up 1\n"), "engine-1": (2, 2, ""), "http://there:1/v1": (2, 2, "")}
    assert {engine.closed for engine in engines.values()} == {2}


def test_a_file_of_something_else_is_left_out(tmp_path: Path) -> None:
    assert figures(tmp_path / "nowhere") == []
    for name, text in {"a": "no json", "b": "[1]", "c": '{"engine": "x", "odd": 1}', "d": '{"engine": "y"}'}.items():
        (tmp_path / f"{name}.json").write_text(text)
    assert figures(tmp_path) == [EngineFigures("y")]
