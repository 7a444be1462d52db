"""Transports of new weights: a package brings one, and all that a run asks of a transport is on its class."""

from __future__ import annotations

import ast
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from agentrl import config as configuration
from agentrl import registry
from agentrl.config import EngineSettings, Train
from agentrl.config.weight_sync import transport_of
from agentrl.engine.client import EngineClient
from agentrl.engine.vllm.capabilities import Need, needed
from agentrl.engine.weight_sync import publisher as module
from agentrl.engine.weight_sync.publisher import WeightPublisher
from agentrl.engine.weight_sync.transport import Parcel, Place, PushReport, WeightTransport
from agentrl.errors import ConfigError, WeightSyncError
from tests.parts.vllm_server import FakeVLLM

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = {"model": "unused", "env": {"id": "test/none"}}


class Pigeons(WeightTransport):
    """Of another package: it carries weights to a server whose admin API is its own."""

    flown: list[str]

    def __init__(self, place: Place) -> None:
        Pigeons.flown, self.deadline_s, self.lost = [], place.engine.admin_deadline_s, 1

    @classmethod
    def check(cls, engine: EngineSettings, train: Train, *, on_ray: bool) -> None:
        if on_ray:
            raise ConfigError("engine.sync", "pigeons", "they stay on one host")

    @asynccontextmanager
    async def offer(self, parcel: Parcel, base: Parcel | None) -> AsyncGenerator[None]:
        self.flown.append(f"offer {parcel.version} after {base and base.version}")
        yield
        self.flown.append(f"close {parcel.version}")

    async def deliver(self, engines: Sequence[EngineClient], parcel: Parcel, base: Parcel | None) -> PushReport:
        if self.lost:
            self.lost -= 1
            raise WeightSyncError("lost in a storm")
        for engine in engines:
            body: Any = {"new_version": str(parcel.version)}
            self.flown.append(f"deliver {parcel.version} over {base and base.version}")
            await engine.call("POST", "/update_weight_version", json=body, deadline_s=self.deadline_s)
        return PushReport(pause_s=0.25, total_s=0.5, bytes=3)

    def missed(self, *, by_all: bool) -> None:
        self.flown.append(f"missed {by_all}")

    async def retire(self, engines: Sequence[EngineClient], keep: Sequence[Parcel]) -> frozenset[int]:
        self.flown.append(f"retire all but {[parcel.version for parcel in keep]}")
        return frozenset()


@pytest.fixture
def pigeons(monkeypatch: pytest.MonkeyPatch) -> type[Pigeons]:
    monkeypatch.setitem(registry._registered, ("weight_transports", "pigeons"), Pigeons)
    return Pigeons


async def test_a_package_brings_a_transport_of_its_own(
    pigeons: type[Pigeons], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = configuration.parse({**RUN, "engine": {"sync": "pigeons"}})
    assert config.transport is pigeons and not config.syncs_memory and not config.sends_adapters
    server = FakeVLLM(version="1")
    monkeypatch.setattr(module, "EngineClient", partial(EngineClient, transport=server))
    ours = WeightPublisher(config.engine, config.sync)
    for version in (2, 3):
        (tmp_path / str(version)).write_bytes(b"...")
        row = await ours.deliver([server.url], Parcel(version=version, path=tmp_path / str(version)))
        assert (row["pause_s"], row["sync_bytes"], server.version) == (0.25, 3, str(version))
    await ours.tidy([server.url])
    first = ["offer 2 after None", "close 2", "missed True", "offer 2 after None", "deliver 2 over None", "close 2"]
    second = ["offer 3 after 2", "deliver 3 over 2", "close 3", "retire all but [2, 3]"]
    assert pigeons.flown == first + second


def test_a_transport_refuses_the_settings_that_do_not_fit_it(pigeons: type[Pigeons]) -> None:
    on_ray = {**RUN, "engine": {"sync": "pigeons"}, "cluster": {"launcher": "ray", "store": "postgresql:///runs"}}
    with pytest.raises(ConfigError, match="they stay on one host"):
        configuration.parse(on_ray)


def test_an_unknown_transport_is_refused_with_the_known_ones() -> None:
    known = r"engine\.sync = 'telepathy'.*adapter, delta, full, ipc, nccl; .*; or give 'auto'"
    with pytest.raises(ConfigError, match=known):
        configuration.parse({**RUN, "engine": {"sync": "telepathy"}})
    with pytest.raises(ConfigError, match=r"no adapter is trained: give train\.lora_rank"):
        configuration.parse({**RUN, "engine": {"sync": "adapter", "kind": "vllm"}})


def test_a_server_needs_what_the_transport_asks_of_it() -> None:
    """By hand: the flags of vLLM that docs/how-to/engines.md names for each."""
    plain = {Need.TOKENS, Need.ADMIN, Need.LOGPROBS, Need.PLUGIN}
    more = {"full": Need.WEIGHTS, "delta": Need.WEIGHTS, "nccl": Need.NCCL, "ipc": Need.IPC}
    for name, need in more.items():
        assert needed(transport_of(name)) == plain | {need}
    assert needed(transport_of("adapter")) == plain | {Need.WEIGHTS, Need.LORA}


@pytest.mark.medium
def test_no_part_of_a_run_asks_for_a_transport_by_its_name() -> None:
    """They ask for its `form`: else a new transport would have to be added to each of them."""
    found: list[str] = []
    for path in (ROOT / "agentrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Compare) or "sync" not in ast.unparse(node.left).rpartition(".")[2]:
                continue
            texts = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
            if texts & {"full", "delta", "adapter", "nccl", "ipc"}:
                found.append(str(path.relative_to(ROOT / "agentrl")))
    own = {"engine/weight_sync/adapters.py", "config/gpu_placement.py", "learner/gpu_sender.py"}  # of one transport
    assert set(found) <= own
