"""How versions reach an engine: proved by what it computes, or the run ends; files go when nobody needs them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trio
from safetensors.numpy import save_file
from trio.testing import MockClock

from agentrl.config import EngineSettings, RunConfig
from agentrl.engine.client import EngineClient
from agentrl.engine.embedded_process import EmbeddedEngine, launch_embedded
from agentrl.engine.weight_sync import gpu_transport
from agentrl.engine.weight_sync import publisher as module
from agentrl.engine.weight_sync.canary import Canary, probe_tokens
from agentrl.engine.weight_sync.publisher import NotDelivered, WeightPublisher
from agentrl.engine.weight_sync.transport import MemoryParcel, Parcel, PushReport
from agentrl.engine.weight_sync.weight_lock import exclusive
from agentrl.errors import RunFailed, WeightSyncError
from agentrl.learner.model.policy import PolicyModel
from agentrl.learner.weight_export import export_weights
from agentrl.models.resolve import model_dir
from tests.parts.vllm_server import FakeVLLM, made_up_logprob

SETTINGS = EngineSettings(kv_cache_mb=16, max_batch=4, start_deadline_s=300.0)
FOLDER = model_dir("agentrl/tiny-coder")
TOKENS = probe_tokens(500, 24)


@pytest.fixture
async def engine() -> AsyncIterator[EmbeddedEngine]:
    async with launch_embedded(FOLDER, SETTINGS, version=1, max_context=64) as engine:
        yield engine


class Weights:
    """A model whose versions each move every weight."""

    def __init__(self, scratch: Path) -> None:
        self.model, self.scratch = PolicyModel(FOLDER), scratch / "weights"
        self.version = 1

    def parcel(self, *, moved_after: float = 0.0) -> Parcel:
        """The next version; with `moved_after`, the canary expects weights that were not sent."""
        self.version += 1
        self._move(0.02)
        file = export_weights(self.model.module, self.scratch / f"{self.version}.safetensors")
        self._move(moved_after)
        canary = Canary(version=self.version, token_ids=TOKENS, logprobs=self.model.score(TOKENS))
        return Parcel(version=self.version, path=file.path, sha256=file.sha256, canary=canary)

    def _move(self, scale: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * scale)


def publisher(sync: str = "full", **engine: object) -> WeightPublisher:
    return WeightPublisher(SETTINGS.model_copy(update=engine), sync)


@pytest.mark.medium
async def test_a_delivery_is_proved_and_only_the_newest_two_files_stay(engine: EmbeddedEngine, tmp_path: Path) -> None:
    weights, ours = Weights(tmp_path), publisher()
    weights.scratch.mkdir()
    (weights.scratch / "0.safetensors").write_bytes(b"of a learner before this one")
    for _ in range(3):
        row = await ours.deliver([engine.url], weights.parcel())
        await ours.tidy([engine.url])
        assert 0 <= row["canary_error"] < 1e-4 and row["canary_s"] > 0
        assert 0 < row["pause_s"] <= row["sync_s"]
    client = EngineClient(engine.url)
    assert await client.served_version() == 4
    await client.aclose()
    kept = [f"{version}.safetensors{part}" for version in (3, 4) for part in ("", ".canary")]
    assert sorted(path.name for path in weights.scratch.iterdir()) == kept


@pytest.mark.medium
async def test_an_engine_that_samples_from_other_weights_ends_the_run(engine: EmbeddedEngine, tmp_path: Path) -> None:
    parcel = Weights(tmp_path).parcel(moved_after=0.02)
    with pytest.raises(RunFailed, match=r"canary: .* says it serves version 2, but the log-prob of probe token \d+ is"):
        await publisher().deliver([engine.url], parcel)


@pytest.mark.medium
async def test_without_a_canary_nothing_is_asked(engine: EmbeddedEngine, tmp_path: Path) -> None:
    parcel = Weights(tmp_path).parcel()
    row = await publisher().deliver([engine.url], Parcel(version=2, path=parcel.path, sha256=parcel.sha256))
    assert row.keys() == {"pause_s", "sync_s", "sync_bytes", "engines_behind"}


# --- several engines, in virtual time


class Fakes:
    """Servers without a model, by URL; every client of the publisher's reaches them without a socket."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        servers = [FakeVLLM(url=f"http://{number}", version="1", script=lambda _: 0) for number in range(count)]
        self.by_url = {server.url: server for server in servers}
        self.urls = list(self.by_url)
        for name in ("EngineClient", "AdapterClient"):
            monkeypatch.setattr(module, name, partial(self.client, getattr(module, name)))

    def client(self, client: Any, url: str, **settings: Any) -> Any:
        return client(url, transport=self.by_url[url], **settings)

    def __getitem__(self, number: int) -> FakeVLLM:
        return self.by_url[self.urls[number]]

    def versions(self) -> list[str]:
        return [server.version for server in self.by_url.values()]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(3, monkeypatch)


def parcel(folder: Path, version: int, *, canary: Canary | None = None) -> Parcel:
    path = folder / "weights" / f"{version}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file({"weight": np.full(8, version, dtype=np.float32)}, path)
    return Parcel(version=version, path=path, sha256="", canary=canary)


def hang(server: FakeVLLM) -> None:
    server.core = "hung"


def stop(server: FakeVLLM) -> None:
    """As SIGSTOP does: connections are taken and nothing is answered."""
    server.silent |= {"/health", "/version", "/weight_info", "/pause", "/init_weight_transfer_engine"}


def die(server: FakeVLLM) -> None:
    server.down = True


@pytest.mark.parametrize("fail", [hang, stop, die])
async def test_the_engines_that_answer_get_new_weights_and_one_that_fails_is_left_behind(
    fail: Callable[[FakeVLLM], None], fakes: Fakes, autojump_clock: MockClock, tmp_path: Path
) -> None:
    ours = publisher(kind="vllm")
    fail(fakes[1])
    row = await ours.deliver(fakes.urls, parcel(tmp_path, 2))
    assert fakes.versions() == ["2", "1", "2"]
    assert row["engines_behind"] == 1
    started = trio.current_time()
    await ours.deliver(fakes.urls, parcel(tmp_path, 3))
    assert fakes.versions() == ["3", "1", "3"]
    assert trio.current_time() - started <= 5, "one that was left behind before costs a question, not a push"


async def test_an_engine_that_answers_again_takes_the_next_delivery(
    fakes: Fakes, autojump_clock: MockClock, tmp_path: Path
) -> None:
    ours = publisher(kind="vllm")
    die(fakes[1])
    await ours.deliver(fakes.urls, parcel(tmp_path, 2))
    fakes[1].restart()
    row = await ours.deliver(fakes.urls, parcel(tmp_path, 3))
    assert fakes.versions() == ["3", "3", "3"] and row["engines_behind"] == 0


async def test_while_no_engine_takes_weights_the_learner_waits_for_them(
    fakes: Fakes, autojump_clock: MockClock, tmp_path: Path
) -> None:
    for server in fakes.by_url.values():
        die(server)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(publisher(kind="vllm").deliver, fakes.urls, parcel(tmp_path, 2))
        await trio.sleep(300)
        fakes[2].restart()
    assert fakes.versions() == ["1", "1", "2"]


@pytest.mark.medium
@pytest.mark.parametrize("fail", [stop, die])
async def test_engines_that_all_stay_away_end_the_wait_with_one_line(
    fail: Callable[[FakeVLLM], None],
    fakes: Fakes,
    autojump_clock: MockClock,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for server in fakes.by_url.values():
        fail(server)
    settings = SETTINGS.model_copy(update={"start_deadline_s": 30.0})
    with pytest.raises(NotDelivered, match=r"^no engine took version 2 within 120 s: http://0 did not [^\n]*http://2"):
        await publisher(kind="vllm", start_deadline_s=30.0).deliver(fakes.urls, parcel(tmp_path, 2))
    assert settings.mending_deadline_s <= trio.current_time()
    assert trio.current_time() < 2 * settings.mending_deadline_s, "the learner's patience with a push ends before it"
    warning = capsys.readouterr().err  # in the learner's log while it waits
    assert (
        warning.startswith("agentrl learner: no engine takes version 2: http://0 did not") and warning.count("\n") == 1
    )


async def test_a_delta_goes_to_those_that_have_its_base_and_the_whole_file_to_the_others(
    fakes: Fakes, tmp_path: Path
) -> None:
    ours = publisher("delta", kind="vllm")
    await ours.deliver(fakes.urls, parcel(tmp_path, 2))
    die(fakes[1])
    await ours.deliver(fakes.urls, parcel(tmp_path, 3))
    fakes[1].restart()
    await ours.deliver(fakes.urls, parcel(tmp_path, 4))
    names = [Path(server.weights).name for server in fakes.by_url.values()]
    assert names == ["4.delta", "4.safetensors", "4.delta"]
    assert not list((tmp_path / "weights").glob("*.delta"))


async def test_an_adapter_is_left_behind_like_a_file_and_old_ones_go_all_the_same(fakes: Fakes, tmp_path: Path) -> None:
    ours = publisher("adapter", kind="vllm")
    die(fakes[1])
    for version in (2, 3, 4, 5):
        folder = tmp_path / "weights" / str(version)
        folder.mkdir(parents=True)
        await ours.deliver(fakes.urls, Parcel(version=version, path=folder))
        await ours.tidy(fakes.urls)
    assert [set(server.adapters) for server in fakes.by_url.values()] == [
        {"policy-4", "policy-5"},
        set(),
        {"policy-4", "policy-5"},
    ]
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {"4", "5"}


async def test_one_engine_of_several_that_samples_from_other_weights_ends_the_run(
    fakes: Fakes, autojump_clock: MockClock, tmp_path: Path
) -> None:
    found = parcel(tmp_path, 2)
    tokens = (5, 6, 7)
    logprobs = tuple(made_up_logprob(str(found.path), at, token) for at, token in enumerate(tokens) if at)
    fakes[1].takes_updates = False
    with pytest.raises(RunFailed, match=r"^canary: http://1 says it serves version 2, but"):
        proof = Canary(version=2, token_ids=tokens, logprobs=logprobs)
        await publisher(kind="vllm").deliver(fakes.urls, replace(found, canary=proof))


async def test_nobody_gives_weights_to_an_engine_that_another_process_is_giving_some(
    fakes: Fakes, autojump_clock: MockClock, tmp_path: Path
) -> None:
    ours = WeightPublisher(SETTINGS, locks=tmp_path)
    async with exclusive(tmp_path, fakes.urls[1], deadline_s=1):
        await ours.deliver(fakes.urls, parcel(tmp_path, 2))
    assert fakes.versions() == ["2", "1", "2"]


async def test_engines_with_the_versions_of_an_undone_future_are_behind(
    fakes: Fakes, autojump_clock: MockClock
) -> None:
    for server in fakes.by_url.values():
        server.version = "4"
    assert not await publisher().behind(fakes.urls, 4)
    fakes[2].version = "9"
    die(fakes[0])
    assert await publisher().behind(fakes.urls, 4)


# --- from memory to memory: the transfer itself is tested in tests/engine/test_direct.py


class Memory:
    """A transfer whose next pushes fail as `failures` say; others have the fakes serve the version."""

    def __init__(self, fakes: Fakes, failures: Sequence[str] = ()) -> None:
        self.fakes, self.failures, self.pushes = fakes, list(failures), list[list[str]]()

    async def push(self, engines: Sequence[Any], snapshot: Any, version: int, **how: Any) -> PushReport:
        self.pushes.append([engine.url for engine in engines])
        assert how == {"deadline_s": 7.0, "clear_cache": True}
        if self.failures:
            raise WeightSyncError(self.failures.pop())
        for url in self.pushes[-1]:
            self.fakes.by_url[url].version = str(version)
        return PushReport(pause_s=0.5, total_s=0.75, bytes=snapshot.size_bytes)


def memory_publisher(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> WeightPublisher:
    monkeypatch.setattr(gpu_transport, "Transfer", lambda sender: memory)
    config = RunConfig.model_validate(
        {
            "model": "unused",
            "env": {"id": "test/none"},
            "engine": {
                "kind": "vllm",
                "sync": "nccl",
                "liveness_deadline_s": 14.0,
                "at_update": "recompute",
                "start_deadline_s": 30,
            },
            "train": {"device": "cuda:1"},
        }
    )
    return WeightPublisher(config.engine, config.sync, sender=object())  # pyright: ignore[reportArgumentType]


PARCEL = MemoryParcel(version=3, snapshot=SimpleNamespace(size_bytes=12))


async def test_from_memory_all_engines_are_tried_again_together_until_they_have_it(
    monkeypatch: pytest.MonkeyPatch, fakes: Fakes, autojump_clock: MockClock
) -> None:
    memory = Memory(fakes, ["engine 2 is gone", "engine 2 is being started"])
    ours = memory_publisher(memory, monkeypatch)
    row = await ours.deliver(fakes.urls, PARCEL)
    assert row == {"pause_s": 0.5, "sync_s": pytest.approx(1.0), "sync_bytes": 12, "engines_behind": 0}
    assert memory.pushes == [fakes.urls] * 3
    await ours.tidy(fakes.urls)  # no file lies anywhere


@pytest.mark.parametrize("fail", [hang, stop, die])
async def test_from_memory_the_engines_that_answer_are_joined_without_one_that_does_not(
    fail: Callable[[FakeVLLM], None], monkeypatch: pytest.MonkeyPatch, fakes: Fakes, autojump_clock: MockClock
) -> None:
    memory = Memory(fakes, ["it hung amid the broadcast"])
    fail(fakes[1])
    row = await memory_publisher(memory, monkeypatch).deliver(fakes.urls, PARCEL)
    assert memory.pushes == [[fakes.urls[0], fakes.urls[2]]] * 2
    assert row["engines_behind"] == 1


async def test_from_memory_engines_that_never_take_it_end_the_delivery(
    monkeypatch: pytest.MonkeyPatch, fakes: Fakes, autojump_clock: MockClock
) -> None:
    memory = Memory(fakes, ["no way leads there"] * 10_000)
    # 14 s until an engine counts as dead, 30 s for its start and 7 s for the request that follows.
    with pytest.raises(NotDelivered, match=r"no engine took version 3 within 51 s: no way leads there$"):
        await memory_publisher(memory, monkeypatch).deliver(fakes.urls, PARCEL)


async def test_an_engine_that_came_up_with_older_weights_is_behind_and_one_that_is_away_is_not(
    fakes: Fakes, autojump_clock: MockClock
) -> None:
    assert await publisher().behind(fakes.urls, 2)
    for number in (1, 2):
        fakes[number].version = "2"
    die(fakes[0])
    assert not await publisher().behind(fakes.urls, 2)
