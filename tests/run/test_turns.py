"""Engine and learner take turns on one GPU. A turn is a lease: whatever happens to the learner, the engine wakes."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock

from agentrl import config as configuration
from agentrl.config import EngineSettings, RunConfig
from agentrl.engine.auth import bearer
from agentrl.engine.client import EngineClient
from agentrl.engine.vllm import launch
from agentrl.engine.weight_sync import weight_lock as locks
from agentrl.engine.weight_sync.publisher import NotDelivered, WeightPublisher
from agentrl.engine.weight_sync.weight_lock import exclusive, hold, name_of
from agentrl.errors import ConfigError, UsageError
from agentrl.records import EngineKey
from agentrl.run.run_folder import RunDir
from agentrl.run.weights import gpu_turns as module
from agentrl.run.weights.gpu_turns import Turns
from agentrl.store import RunStore
from tests.parts.vllm_server import FakeVLLM

from .gate import Gate
from .loop_parts import InlineTorch
from .test_publisher import Fakes, parcel
from .test_publisher import fakes as fakes
from .test_run import DEADLINE_S, ENVS, assert_lawful, assert_nothing_remains, child, run_file, started, wait_until
from .test_watch import ADAPTERS, FILES, Scene
from .test_watch import often as often
from .test_watch import scene as scene

GPU = name_of("", colocated=True)


def colocated(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"engine": config.engine.model_copy(update={"colocated": True})})


class Parked:
    """In the place of a learner's models."""

    bytes = 7

    def __init__(self, order: list[str]) -> None:
        self.order = order

    def back(self) -> None:
        self.order.append("learner comes")

    def leave(self) -> None:
        self.order.append("learner leaves")


class Table:
    """Turns at one fake engine; `order` is what happened."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, config: RunConfig = FILES) -> None:
        self.server, self.order, self.folder = FakeVLLM(version="3", sleeps=True), list[str](), folder
        self.server.calls = self.order
        kind = partial(EngineClient, transport=self.server)
        monkeypatch.setattr(module, "EngineClient", kind)
        monkeypatch.setattr(module, "_RETRY_S", 0.01)
        self.turns = Turns(
            colocated(config).engine,
            folder,
            InlineTorch(),
            lambda: self.order.append("waits"),
            level=1 if config.sends_adapters else 2,
        )
        self.turns.parking = Parked(self.order)  # type: ignore[assignment]

    def free(self) -> bool:
        try:
            hold(self.folder, GPU, deadline_s=0, waits=lambda: None).let_go()
        except Exception:
            return False
        return True

    def urls(self) -> list[str]:
        return [self.server.url]


async def test_the_learner_comes_when_engines_sleep_and_the_lock_outlives_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path, monkeypatch)
    await table.turns.begin(table.urls)
    assert table.order == ["POST /sleep", "GET /is_sleeping", "learner comes"]
    assert table.server.asleep == {"weights", "kv_cache"} and table.server.weights == "garbage" and not table.free()
    held = await table.turns.end()
    assert table.order[-1] == "learner leaves" and table.server.asleep and not table.free()
    held.let_go()
    cost = table.turns.cost()
    assert table.free() and cost["swap_bytes"] == 7
    assert set(cost) == {"turn_wait_s", "sleep_s", "restore_s", "park_s", "swap_bytes", "asleep_s"}


async def test_engines_that_get_no_weights_keep_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(tmp_path, monkeypatch, ADAPTERS)
    await table.turns.begin(table.urls)  # adapters go over weights that stay
    (await table.turns.end()).let_go()
    table = Table(tmp_path, monkeypatch)
    await table.turns.begin(table.urls, weights_follow=False)
    assert not table.free()
    await table.turns.without_weights(table.urls)
    assert table.order[-2:] == ["learner leaves", "POST /wake_up"] and table.free()
    assert table.server.weights == "base" and not table.server.paused
    await table.turns.begin(table.urls, weights_follow=False)
    table.server.down = True
    await table.turns.without_weights(table.urls)  # the watch's business
    assert table.free()


async def test_an_engine_that_cannot_sleep_is_tried_again_and_may_be_mended_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path, monkeypatch)
    table.server.down = True
    looks = list[bool]()

    def waits() -> None:
        looks.append(table.free())
        table.server.down = len(looks) < 3

    table.turns._waits = waits
    await table.turns.begin(table.urls)
    assert looks == [True, True, True] and table.server.asleep
    (await table.turns.end()).let_go()
    table.turns._settings = EngineSettings(liveness_deadline_s=0.02, start_deadline_s=0.05)
    table.server.mend()
    table.server.answers["/sleep"] = 500, b"{}"
    with pytest.raises(
        NotDelivered, match=r"the engines did not sleep within 0\.08 s, so the learner has no room: http"
    ):
        await table.turns.begin(table.urls)
    assert table.free() and table.order[-1] != "learner comes"


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("base", [FILES, ADAPTERS])
async def test_an_engine_sleeps_for_as_long_as_the_learners_turn_and_wakes_if_that_dies(
    base: RunConfig, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, taken = list[int](), locks._taken
    if base is ADAPTERS:
        scene.trains_adapters()
        scene.server.adapters["policy-3"] = "a folder"
    scene.config, scene.server.sleeps = colocated(base), True
    held = hold(scene.folder, GPU, deadline_s=0, waits=lambda: None)
    async with EngineSleeping(scene.server, 1 if base is ADAPTERS else 2):
        pass
    monkeypatch.setattr(locks, "_taken", lambda descriptor: tries.append(descriptor) or taken(descriptor))
    async with scene.watched() as found:
        await scene.until(lambda: len(tries) > 3)
        assert scene.server.asleep and scene.server.paused, "it is the learner's turn"
        held.let_go()  # as the kernel does for a process that ends
        await scene.until(lambda: not scene.server.asleep and not scene.server.paused)
        await scene.looks(3)
        assert not found.trouble
    assert scene.server.weights == ("base" if base is ADAPTERS else str(scene.folder / "3.safetensors"))
    assert not scene.hung and scene.server.core == "alive"


class EngineSleeping:
    """Puts a fake to sleep."""

    def __init__(self, server: FakeVLLM, level: int) -> None:
        self._server, self._level = server, level

    async def __aenter__(self) -> None:
        client = EngineClient(self._server.url, transport=self._server)
        params = {"level": str(self._level), "mode": "keep"}
        await client.call("POST", "/sleep", params=params, deadline_s=5)
        await client.aclose()

    async def __aexit__(self, *_: object) -> None:
        return


@pytest.mark.parametrize("fails", [False, True])
async def test_the_lock_goes_with_the_first_attempt_to_deliver(
    fails: bool, fakes: Fakes, autojump_clock: MockClock, tmp_path: Path
) -> None:
    autojump_clock.autojump_threshold = 0.02  # seconds: a thread looks at the file, and the clock waits for no thread
    ours = WeightPublisher(colocated(FILES).engine, locks=tmp_path)
    (fake,) = list(fakes.by_url.values())[:1]
    fake.sleeps = True
    async with EngineSleeping(fake, 2):
        held = hold(tmp_path, GPU, deadline_s=0, waits=lambda: None)
        fake.down = fails

        async def mended() -> None:
            """As the supervisor does: it needs the lock to start an engine on the GPU."""
            async with exclusive(tmp_path, GPU, deadline_s=20):
                assert not held.held
                fake.restart()

        async with trio.open_nursery() as nursery:
            if fails:
                nursery.start_soon(mended)
            row = await ours.deliver([fake.url], parcel(tmp_path, 2), held)
    assert (fake.version, fake.paused, fake.asleep, held.held) == ("2", False, set(), False)
    assert row["pause_s"] >= 0 and fake.weights.endswith("2.safetensors")


# --- what cannot share


def refused(engine: dict[str, Any], train: dict[str, Any] | None = None, **more: Any) -> str:
    document = {"model": "m", "env": {"id": "test/none"}, "engine": {"colocated": True, **engine}, "train": train or {}}
    with pytest.raises(ConfigError) as told:
        configuration.parse(document | more)
    return str(told.value)


def test_what_cannot_take_turns_is_refused_with_a_mend() -> None:
    on_gpu = {"device": "cuda"}
    assert "leave engine.urls out" in refused({"kind": "vllm", "urls": ["http://a"]}, on_gpu)
    assert "train.parallel.ranks = 2: give 1" in refused({"kind": "vllm"}, {**on_gpu, "parallel": {"ranks": 2}})
    assert "engine.sync" in refused({"kind": "vllm", "sync": "ipc"}, on_gpu)
    assert "give 'adamw'" in refused({"kind": "vllm"}, {**on_gpu, "optimizer": "adamw8bit"})
    assert "give engine.kind = 'vllm'" in refused({}, on_gpu)
    assert "the engine is on GPU 0, and engine.colocated shares it" in refused({"kind": "vllm"}, {"device": "cuda:1"})
    assert "the engine is on GPU 0" in refused({"kind": "vllm"}, {"device": "cpu"})
    assert "leave it out" in refused({}, rollout={"roles": {"partner": "frozen"}})
    for engine, train in (({}, {}), ({"kind": "vllm", "replicas": [[1]]}, {"device": "cuda:1"})):
        document = {"model": "m", "env": {"id": "test/none"}, "engine": {"colocated": True, **engine}, "train": train}
        assert configuration.parse(document).engine.colocated


def test_vllm_gets_its_sleep_mode_and_its_cpu_build_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 256, "num_attention_heads": 2}))
    for cpu in (False, True):
        build = launch.Build(python=Path(sys.executable), version="0.32.0", cpu=cpu)
        server = launch.VLLMServer(model=folder, port=1, plugin_folder=tmp_path / "p", build=build, sleeps=True)
        assert "--enable-sleep-mode" in server.argv()
        assert server.env()["VLLM_SERVER_DEV_MODE"] == "1"
        if cpu:
            with pytest.raises(ConfigError, match=r"vLLM's CPU build does not sleep: .*engine\.kind = 'embedded'"):
                server.prepare()


# --- whole


@pytest.mark.slow
def test_a_run_that_takes_turns_trains_and_an_engine_wakes_without_its_learner(tmp_path: Path) -> None:
    """The learner is killed while the engine sleeps: the run goes on, with every token as it was sampled."""
    settings = {"colocated": True, "kv_cache_mb": 64, "max_batch": 16}
    file = run_file(
        tmp_path, f"{ENVS}:Vowels", train={"steps": 5, "checkpoint_every": 2}, engine=settings, eval={"sets": []}
    )
    run, gate = RunDir(tmp_path / "run"), Gate(tmp_path, at=6)
    with started("train", file, "--out", run.path, *gate.arguments) as process:
        wait_until(run.store_path.exists, process)

        def killed_in_its_turn() -> bool:
            try:
                (url,) = urls(run)
                pid = child(run, "learner", process)
                if not asleep(url, pid):
                    return False
                os.kill(pid, signal.SIGSTOP)
                in_turn = asleep(url, pid)
                os.kill(pid, signal.SIGKILL if in_turn else signal.SIGCONT)
            except (
                UsageError,
                ValueError,
                KeyError,
                OSError,
                httpx.TransportError,
            ):  # it is being made, or changes
                return False
            return in_turn

        wait_until(killed_in_its_turn, process)
        gate.open()
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out + err
    run = RunDir.open(run.path)
    assert set(json.loads(run.summary.read_text())["restarts"]) == {"learner"}
    assert_lawful(run, steps=5)
    assert_nothing_remains(run)
    with RunStore.open(run.store_path) as store:
        rows = [row.values for row in store.metrics.values("step")]
    assert len(rows) >= 5
    for row in rows:
        assert row["mismatch_max"] is None or row["mismatch_max"] < 1e-3, "tokens are what was sampled"
        assert row["swap_bytes"] > 100_000 and row["asleep_s"] >= row["sleep_s"] + row["restore_s"] + row["park_s"] > 0
        assert row["canary_error"] < 1e-3


def asleep(url: str, pid: int) -> bool:
    """Asks an engine at its socket, with the key that a process of the run has in its environment."""
    known = dict(part.partition("=")[::2] for part in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    shown, socket = bearer(EngineKey(value=known[EngineKey.VALUE])), url.removeprefix("unix://")
    with httpx.Client(transport=httpx.HTTPTransport(uds=socket), headers=shown, timeout=5) as client:
        return client.get("http://engine/is_sleeping").raise_for_status().json()["is_sleeping"]


def urls(run: RunDir) -> list[str]:
    with RunStore.read(run.store_path) as store:
        return json.loads(store.meta("engine_urls") or "[]")
