"""`agentrl fleet`: its file, its engines' lives, and a run that attaches to it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from agentrl import config as configuration
from agentrl.config.shared_engines import Tenant
from agentrl.engine.router.gateway import SharedEngine
from agentrl.errors import ConfigError, EngineUnavailable, UsageError, matters
from agentrl.records import EngineKey
from agentrl.run.serving import shared_engines

from .test_run import ENVS


def test_a_run_at_a_shared_fleet_sends_its_adapter_alone() -> None:
    run = {"model": "agentrl/tiny-coder", "env": {"id": f"{ENVS}:Vowels"}, "train": {"lora_rank": 4}}
    engine: dict[str, Any] = {"shared": True, "urls": ["http://127.0.0.1:1/alice/0"]}
    assert configuration.parse({**run, "engine": engine}).sync == "adapter"
    for section, said in (
        ({"engine": {"shared": True}}, "engine.urls"),
        ({"engine": {**engine, "kind": "vllm", "sync": "full"}}, "only adapters travel"),
        ({"engine": engine, "train": {}}, "train.lora_rank"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            configuration.parse({**run, **section})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ('name = "bob"', "a name of its own"),
        ('name = "../x"', "tenants.1.name"),
        ('name = "a.b"', "tenants.1.name"),
        ('name = "carol"\nweight = 0', "tenants.1.weight"),
        ('name = "carol"\nwieght = 2', "did you mean 'weight'"),
    ],
)
def test_a_wrong_fleet_file_is_one_line(tmp_path: Path, changed: str, said: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f'model = "m"\n[[tenants]]\nname = "bob"\n[[tenants]]\n{changed}\n')
    with pytest.raises(ConfigError, match=re.escape(said)):
        shared_engines.load(file)
    with pytest.raises(UsageError, match="cannot read"):
        shared_engines.load(tmp_path / "gone.toml")


class Engines:
    """Stands for `running_engine`: engines whose processes end, stand still or do not start when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self.ends, self.fails, self.alive = 0, trio.Event(), False, True
        monkeypatch.setattr(shared_engines, "running_engine", self._running)
        monkeypatch.setattr(shared_engines, "model_dir", Path)
        monkeypatch.setattr(shared_engines.EngineClient, "alive", self._alive)

    @asynccontextmanager
    async def _running(self, *_: object, **__: object) -> AsyncIterator[tuple[str, Any]]:
        if self.fails:
            raise EngineUnavailable("it does not start")
        self.started, self.ends, self.alive = self.started + 1, trio.Event(), True
        yield f"http://engine-{self.started}", SimpleNamespace(wait=self._wait, kill=self.ends.set)

    async def _wait(self) -> int:
        await self.ends.wait()
        return -9

    async def _alive(self, *, deadline_s: float) -> bool:
        return self.alive


CONFIG = shared_engines.FleetConfig(model="m", tenants=[Tenant(name="alice")])


async def test_an_engine_that_dies_or_hangs_is_started_again(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, engine = Engines(monkeypatch), SharedEngine(CONFIG.tenants, places=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(shared_engines._keep, CONFIG, 0, engine, EngineKey.fresh())
        assert engine.url == "http://engine-1"
        await trio.sleep(100)
        assert engines.started == 1
        engines.ends.set()
        await trio.sleep(1)
        assert engine.url == "http://engine-2"
        engines.alive = False
        await trio.sleep(CONFIG.engine.liveness_deadline_s / 2)
        assert engine.url == "http://engine-2"
        await trio.sleep(CONFIG.engine.liveness_deadline_s)
        assert engine.url == "http://engine-3"
        engines.fails = True
        engines.ends.set()
        await trio.sleep(1)
        assert engine.url is None  # its tenants are told that it is not there
        engines.fails = False
        await trio.sleep(20)
        assert engine.url == "http://engine-4"
        nursery.cancel_scope.cancel()


async def test_an_engine_that_never_starts_ends_the_fleet(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    Engines(monkeypatch).fails = True
    config = CONFIG.model_copy(update={"port": 0})
    with pytest.raises(BaseExceptionGroup) as caught:
        await shared_engines.serve(config, print)
    assert str(matters(caught.value)) == "it does not start"
