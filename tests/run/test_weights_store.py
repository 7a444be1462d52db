"""Weights to an engine that sees nothing of the learner's disk or shared memory, as one on another machine does.

It runs in bubblewrap, where the learner's folder and shared memory are empty.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import Trainer
from agentrl import config as configuration
from agentrl.config.train import Train
from agentrl.engine.client import EngineClient
from agentrl.engine.weight_sync import adapters, canary, uploads
from agentrl.engine.weight_sync.adapters import AdapterClient, always
from agentrl.engine.weight_sync.canary import Canary, probe_tokens
from agentrl.engine.weight_sync.file_transport import push
from agentrl.engine.weight_sync.object_store import ObjectFolder, Outbox, WeightEntry
from agentrl.engine.weight_sync.publisher import WeightPublisher
from agentrl.errors import ConfigError, FilesUnseen, WeightSyncError
from agentrl.learner.model import lora
from agentrl.learner.model.policy import PolicyModel
from agentrl.models.resolve import model_dir
from agentrl.records import WeightVersion
from agentrl.run.children import engine_process
from agentrl.run.children.engine_process import attach
from agentrl.store import RunStore

from .test_publisher import Weights
from .test_run import ENVS, SMALL

pytestmark = pytest.mark.bubblewrap
FOLDER = model_dir("agentrl/tiny-coder")
NONE = engine_process.ServedWeights(
    model=FOLDER, base=WeightVersion(version=0, step=0), current=WeightVersion(version=0, step=0)
)


class Elsewhere:
    """An embedded engine for which `learner` is an empty folder; `store` is one that both see."""

    def __init__(self, path: Path) -> None:
        self.learner, self.store, ready = path / "learner", path / "store", path / "ready.json"
        self.learner.mkdir()
        view = ["bwrap", "--die-with-parent", "--dev-bind", "/", "/"]
        view += [word for hidden in ("/dev/shm", self.learner) for word in ("--tmpfs", str(hidden))]
        engine = [
            sys.executable,
            "-m",
            "agentrl.engine.embedded",
            "--no-key",
            "--model",
            str(FOLDER),
            "--ready-file",
            str(ready),
        ]
        options = ["--lifeline", "--kv-cache-mb", "64", "--max-model-len", "1024", "--served-version", "1"]
        for place in (f"file://{self.store}", path, FOLDER):
            options += ["--weights-from", str(place)]
        self.temporary = path / "tmp"
        self.temporary.mkdir()
        env = {**os.environ, "TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen([*view, *engine, *options], stdin=subprocess.PIPE, env=env)
        deadline = time.monotonic() + 300
        while not ready.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, "the engine did not start"
            time.sleep(0.02)
        self.url: str = json.loads(ready.read_text())["url"]

    def folder(self, name: str) -> ObjectFolder:
        return ObjectFolder(f"file://{self.store}/{name}", deadline_s=60)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    found = Elsewhere(tmp_path_factory.mktemp("elsewhere"))
    yield found
    found.close()


@pytest.mark.medium
async def test_by_path_it_is_refused_with_the_mend(engine: Elsewhere) -> None:
    file = Weights(engine.learner / "refused").parcel().path
    async with aclosing(EngineClient(engine.url)) as client:
        before = await client.served_version()
        with pytest.raises(FilesUnseen, match=r"shares no disk with the learner: set engine\.weights_url to a folder"):
            await push([client], file, 90, deadline_s=60)
        assert await client.served_version() == before and not await client.paused()


class Small(Weights):
    """Versions that differ in one tensor alone."""

    def _move(self, scale: float) -> None:
        with torch.no_grad():
            self.model.module.model.norm.weight.mul_(1 + scale)


@pytest.mark.medium
async def test_versions_reach_it_through_the_store(engine: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is torn is not loaded: the version is put once more, whole."""
    weights, put, torn = Small(engine.learner / "kept"), ObjectFolder.put, list[str]()
    document = {"model": "unused", "env": {"id": "test/none"}, "engine": {"weights_url": f"file://{engine.store}"}}
    config = configuration.parse(document)
    ours = WeightPublisher(config.engine, config.sync, store=engine.folder("kept"))
    client = EngineClient(engine.url)

    def tears(folder: ObjectFolder, stem: str, entry: WeightEntry, data: Path) -> str:
        url = put(folder, stem, entry, data)
        if entry.base is not None and not torn:
            (engine.store / "kept" / entry.object).write_bytes(data.read_bytes()[:-1])
            torn.append(entry.object)
        return url

    sizes: list[float] = []
    async with aclosing(client):
        for version in (2, 3, 4):
            monkeypatch.setattr(ObjectFolder, "put", tears if version == 4 else put)
            row = await ours.deliver([engine.url], weights.parcel())
            assert 0 <= row["canary_error"] < 1e-4
            sizes.append(row["sync_bytes"])
            await ours.tidy([engine.url])
            assert await client.served_version() == version
    assert sizes[1] < 0.03 * sizes[0] and sizes[2] == sizes[0] and torn == ["00000004.delta"]
    left = {path.stem for path in (engine.store / "kept").iterdir()}
    assert left == {"00000002", "00000003", "00000004"}, "3 is a delta against 2"
    await ours.deliver([engine.url], weights.parcel())
    await ours.tidy([engine.url])
    assert {path.stem for path in (engine.store / "kept").iterdir()} == {"00000004", "00000005"}


async def test_a_torn_version_is_not_served(engine: Elsewhere) -> None:
    weights, folder = Small(engine.learner / "torn"), engine.folder("torn")
    first, second = weights.parcel(), weights.parcel()
    outbox = Outbox(folder, deltas=True)
    urls = [outbox.put(90 + n, one.path, one.sha256).url for n, one in enumerate((first, second))]
    async with aclosing(EngineClient(engine.url)) as client:
        await push([client], urls[0], 90, deadline_s=60)
        torn = engine.store / "torn" / "00000091.delta"
        whole = torn.read_bytes()
        torn.write_bytes(whole[:-1])
        with pytest.raises(WeightSyncError, match=r"did not take version 91: .*00000091\.delta is torn or damaged"):
            await push([client], urls[1], 91, deadline_s=60)
        assert await client.served_version() == 90 and not await client.paused()
        torn.write_bytes(whole)
        await push([client], urls[1], 91, deadline_s=60)
        assert await client.served_version() == 91


async def test_an_engine_that_joins_gets_the_current_version(engine: Elsewhere) -> None:
    """From a version of the run, or before there is any from the model's folder."""
    weights, folder = Small(engine.learner / "joins"), engine.folder("joins")
    outbox = Outbox(folder, deltas=True)
    for n, parcel in enumerate([weights.parcel(), weights.parcel()]):
        outbox.put(n + 1, parcel.path, parcel.sha256)
    version = WeightVersion(version=100, step=2)
    config = configuration.parse(
        {"model": "m", "env": {"id": "e"}, "engine": {"weights_url": f"file://{engine.store}"}}
    )
    base = replace(NONE, current=version, store=folder)
    async with aclosing(EngineClient(engine.url)) as client:
        await attach(engine.url, replace(base, file=folder.of_version(2)), config)
        assert await client.served_version() == 100
        probe = probe_tokens(500, 24)
        proof = Canary(version=100, token_ids=probe, logprobs=weights.model.score(probe))
        assert await canary.check([client], proof) < 1e-4
        await attach(engine.url, replace(base, current=WeightVersion(version=101, step=0)), config)
        assert await client.served_version() == 101
        assert (
            await canary.check([client], replace(proof, version=101, logprobs=PolicyModel(FOLDER).score(probe))) < 1e-4
        )
    assert [path.name for path in (engine.store / "joins").glob("whole-*.full")]


@pytest.mark.medium
async def test_adapters_reach_it_by_their_bytes(engine: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its address is that of another machine, or of this one with other folders."""
    model = PolicyModel(FOLDER, adapter=Train(lora_rank=3))
    for name, parameter in model.module.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    folder = lora.save(model.module, engine.learner / "adapter")
    probe = probe_tokens(500, 24)
    async with aclosing(AdapterClient(engine.url, current=always(201))) as client:
        await adapters.load([client], folder, 200, deadline_s=60)
        monkeypatch.setattr(adapters, "is_near", lambda url: False)
        monkeypatch.setattr(uploads, "_PIECE", 10_000)
        report = await adapters.load([client], folder, 201, deadline_s=60)
        assert report.bytes > 2 * 10_000
        proof = Canary(version=201, token_ids=probe, logprobs=model.score(probe))
        assert await canary.check([client], proof) < 1e-4
        (folder / "adapter_model.safetensors").write_bytes(b"no adapter")
        with pytest.raises(WeightSyncError, match="cannot load the adapter"):
            await adapters.load([client], folder, 202, deadline_s=60)
        assert await adapters.loaded(client) == {200, 201}
        await adapters.retire([client], keep=(), deadline_s=60)
    assert [list(path.iterdir()) for path in engine.temporary.glob("agentrl-inbox-*")] == [[]]


def test_what_does_not_arrive_whole_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a"
    source.mkdir()
    (source / "empty").touch()
    (source / "weights").write_bytes(bytes(range(256)) * 50)
    monkeypatch.setattr(uploads, "_PIECE", 1000)
    sent = list(uploads.messages(source, "x-1"))
    place = tmp_path / "agentrl-inbox-1"
    came, beside = uploads.Inbox(str(place)), uploads.Inbox(str(place))
    for message in [*sent[:3], *sent[4:-1]]:
        assert came.receive(message) == {}
    assert "another SHA-256" in came.receive(sent[-1])["error"] and not (place / "x-1").exists()
    assert [came.receive(message) for message in sent][-1] == {"path": str(place / "x-1")}
    assert (place / "x-1" / "weights").read_bytes() == (source / "weights").read_bytes()
    assert place.stat().st_mode & 0o777 == 0o700 and came.holds(str(place / "x-1"))
    second = uploads.Inbox(str(place))  # of another worker, which gets the same
    assert [second.receive(message) for message in sent][-1] == {"path": str(place / "x-1")}
    assert [path.name for path in place.iterdir()] == ["x-1"]
    for bad in ({"folder": "../x", "drop": True}, {"folder": "x", "file": "../../y", "start": 0, "data": ""}, [], {}):
        assert "error" in came.receive(json.dumps(bad))
    assert uploads.forgetting("/etc/x-1") is None
    forget = uploads.forgetting(str(place / "x-1"))
    assert forget is not None and beside.receive(forget) == {} and (place / "x-1").exists(), "it is not its own"
    assert came.receive(forget) == {} and not list(place.iterdir()) and not came.holds(str(place / "x-1"))


def test_an_inbox_that_somebody_else_can_reach_is_not_used(tmp_path: Path) -> None:
    source, message = tmp_path / "a", '{"folder": "x", "file": "f", "start": 0, "data": "AAAA"}'
    source.mkdir()
    open_to_all, link = tmp_path / "open", tmp_path / "link"
    open_to_all.mkdir(mode=0o755)
    link.symlink_to(source)
    for place in (open_to_all, link):
        assert "error" in uploads.Inbox(str(place)).receive(message) and not list(place.iterdir())
    mine = uploads.Inbox(str(tmp_path / "mine"))
    assert mine.receive(message) == {}
    (draft,) = (tmp_path / "mine").iterdir()
    (draft / "g").symlink_to(source / "g")
    assert "error" in mine.receive(message.replace('"f"', '"g"')) and not list(source.iterdir())


@pytest.mark.slow
def test_a_run_trains_with_an_engine_elsewhere(engine: Elsewhere, tmp_path: Path) -> None:
    """All of its weights go through the store, which is empty afterwards; a store that cannot be written is refused."""
    document: dict[str, Any] = {**SMALL, "env": {"id": f"{ENVS}:Vowels"}, "eval": {}, "train": {"steps": 2}}
    wrong = {"urls": [engine.url], "weights_url": "file:///proc/none"}
    with pytest.raises(ConfigError, match=r"engine\.weights_url = 'file:///proc/none': cannot write"):
        Trainer(config={**document, "engine": wrong}, out=tmp_path / "wrong").train()
    there = {"urls": [engine.url], "weights_url": f"file://{engine.store}/runs"}
    summary = Trainer(config={**document, "engine": there}, out=tmp_path / "run").train()
    assert summary["steps"] == 2
    with RunStore.read(tmp_path / "run" / "store.sqlite") as store:
        rows = [row.values for row in store.metrics.values("step")]
        assert len(rows) == 2 and all(row["canary_error"] < 1e-3 and row["sync_bytes"] > 0 for row in rows)
    assert not list((engine.store / "runs").iterdir())
