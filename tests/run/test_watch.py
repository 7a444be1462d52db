"""Who looks after engines that serve: one that hangs is ended, one that lacks the current weights is given them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from safetensors.numpy import save_file
from trio.testing import MockClock

from agentrl.config import EngineSettings, EnvSource, RunConfig, Train
from agentrl.engine.client import EngineClient
from agentrl.engine.weight_sync import weight_lock as module
from agentrl.engine.weight_sync.adapters import AdapterClient
from agentrl.engine.weight_sync.canary import Canary
from agentrl.engine.weight_sync.weight_lock import exclusive
from agentrl.errors import WrongWeights, matters
from agentrl.records import WeightVersion
from agentrl.run.children import engine_health, engine_process
from agentrl.run.children.engine_health import EngineWatch
from agentrl.run.children.engine_process import current_weights
from agentrl.run.start_point import StartPoint
from agentrl.store import RunStore
from agentrl.store.async_calls import Looks
from agentrl.store.run_values import PAUSED
from tests.parts.vllm_server import FakeVLLM, made_up_logprob

SETTINGS = EngineSettings(kind="vllm", liveness_deadline_s=60.0)
ENV = EnvSource(id="test/none")
FILES = RunConfig(model="unused", env=ENV, engine=SETTINGS)
ADAPTERS = RunConfig(model="unused", env=ENV, engine=SETTINGS, train=Train(lora_rank=8))


class Scene:
    """A run at version 3 of step 2, one engine that serves it, and what was said of a hang."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.hung, self.config = folder, list[str](), FILES
        self.signs_s = list[float]()
        self.server = FakeVLLM(version="3")
        self.store = RunStore.create(folder / "store.sqlite", "{}")
        self.store.versions.confirm_version(self.store.versions.mint_version(0))
        for step in (1, 2):
            path = folder / f"{step + 1}.safetensors"
            save_file({}, path)
            self.store.versions.confirm_version(self.store.versions.mint_version(step, path))
        self.model = folder / "model"
        self.model.mkdir()
        save_file({}, self.model / "model.safetensors")
        monkeypatch.setattr(engine_process, "model_dir", lambda name: self.model)
        for where, name, client in (
            (engine_health, "EngineClient", EngineClient),
            (engine_health, "AdapterClient", AdapterClient),
            (engine_process, "EngineClient", EngineClient),
            (engine_process.adapters, "AdapterClient", AdapterClient),
        ):
            monkeypatch.setattr(where, name, partial(client, transport=self.server))

    def trains_adapters(self) -> None:
        """Version 3 is an adapter."""
        self.config = ADAPTERS
        (self.folder / "3.safetensors").unlink()
        (self.folder / "3.safetensors").mkdir()

    @asynccontextmanager
    async def watched(self, *, learns: bool = True) -> AsyncIterator[EngineWatch]:
        start = StartPoint(model=self.model, checkpoint=None, version=WeightVersion(version=1, step=0))
        looks = Looks(self.store)
        found = EngineWatch(
            url=self.server.url,
            config=self.config,
            looks=looks,
            weights=partial(looks, lambda store: current_weights(self.config, store, start)) if learns else None,
            locks=self.folder,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(found.run, self.hung.append, lambda: self.signs_s.append(trio.current_time()))
            yield found
            nursery.cancel_scope.cancel()

    async def until(self, done: Callable[[], bool]) -> None:
        """Weight files are read on a thread, for which virtual time would not wait."""
        with trio.fail_after(60):
            while not done():  # noqa: ASYNC110 - the fake tells nobody
                await trio.sleep(0.005)

    async def looks(self, count: int) -> None:
        """Until so many looks more are over."""
        asked = len(self.server.calls) + count * len(("/is_paused", "/version", "/weight_info")) + 1
        await self.until(lambda: len(self.server.calls) >= asked)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_health, "_LOOK_S", 0.005)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def stop(server: FakeVLLM) -> None:
    """As SIGSTOP of the process does."""
    server.silent |= {"/health", "/version", "/weight_info", "/is_paused", "/v1/models"}


def stop_core(server: FakeVLLM) -> None:
    """As SIGSTOP of the engine core behind the front end does: /health answers."""
    server.core = "hung"


@pytest.mark.parametrize("config", [FILES, ADAPTERS])
@pytest.mark.parametrize("hang", [stop, stop_core])
async def test_an_engine_that_hangs_is_said_to_within_its_deadline_and_a_busy_one_is_not(
    hang: Any, config: RunConfig, scene: Scene, autojump_clock: MockClock
) -> None:
    scene.config = config
    scene.server.adapters["policy-3"] = "a folder"
    async with scene.watched():
        await trio.sleep(500)
        assert not scene.hung
        hang(scene.server)
        await trio.sleep(58)
        assert not scene.hung
        await trio.sleep(3)
    assert scene.hung == ["did not answer for 60 s (engine.liveness_deadline_s)"]


async def test_law_4_only_answers_are_an_engines_signs_of_life(scene: Scene, autojump_clock: MockClock) -> None:
    """A restart budget counts the time between them, and not the silence until a hang is noticed."""
    stop_core(scene.server)
    async with scene.watched():
        await trio.sleep(50)
        assert scene.signs_s == []
        scene.server.mend()
        await trio.sleep(10)
        stop_core(scene.server)
        await trio.sleep(50)
    assert 8 <= scene.signs_s[-1] - scene.signs_s[0] <= 11


async def test_an_engine_that_was_silent_for_less_than_its_deadline_lives(
    scene: Scene, autojump_clock: MockClock
) -> None:
    async with scene.watched():
        await trio.sleep(6)
        for _ in range(5):
            stop_core(scene.server)
            await trio.sleep(50)
            scene.server.mend()
            await trio.sleep(11)
    assert not scene.hung


def given(scene: Scene) -> bool:
    return scene.server.version == "3" and not scene.server.paused


@pytest.mark.usefixtures("often")
async def test_an_engine_that_missed_a_delivery_is_given_the_current_weights(scene: Scene) -> None:
    scene.server.version = "2"
    async with scene.watched():
        await scene.until(lambda: given(scene))
    assert scene.server.weights == str(scene.folder / "3.safetensors")


@pytest.mark.usefixtures("often")
async def test_an_attached_engine_that_somebody_restarted_is_fitted_again_with_a_file(scene: Scene) -> None:
    async with scene.watched():
        await scene.looks(5)
        assert not {call for call in scene.server.calls if call.startswith("POST")}, "nothing was to be done"
        scene.server.restart()
        await scene.until(lambda: given(scene))
    assert scene.server.weights == str(scene.folder / "3.safetensors")


@pytest.mark.usefixtures("often")
async def test_an_attached_engine_that_somebody_restarted_is_fitted_again_with_base_and_adapter(scene: Scene) -> None:
    scene.trains_adapters()
    scene.server.restart()
    async with scene.watched():
        await scene.until(lambda: "policy-3" in scene.server.adapters)
    assert scene.server.adapters == {"policy-3": str(scene.folder / "3.safetensors")}
    assert scene.server.weights == str(scene.model / "model.safetensors")


@pytest.mark.usefixtures("often")
async def test_an_engine_that_lacks_only_the_newest_adapter_keeps_the_others(scene: Scene) -> None:
    scene.trains_adapters()
    scene.server.version = "0"
    scene.server.adapters["policy-2"] = "a folder"
    async with scene.watched():
        await scene.until(lambda: "policy-3" in scene.server.adapters)
    assert "policy-2" in scene.server.adapters and scene.server.weights == "base"


@pytest.mark.usefixtures("often")
async def test_an_engine_ahead_of_the_run_is_left_to_the_learner_that_sends(scene: Scene) -> None:
    scene.store.versions.mint_version(3)
    scene.server.version = "4"
    async with scene.watched():
        await scene.looks(5)
    assert scene.server.version == "4"


@pytest.mark.usefixtures("often")
async def test_nothing_is_sent_while_the_learner_sends_nor_after_it_did(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    taken = module._taken
    scene.server.version = "2"
    async with exclusive(scene.folder, scene.server.url, deadline_s=1):
        monkeypatch.setattr(module, "_taken", lambda descriptor: tries.append(descriptor) or taken(descriptor))
        async with scene.watched():
            await scene.until(lambda: len(tries) > 3)
            assert scene.server.version == "2"
            scene.server.version, scene.server.weights = "3", "the learner's"
    async with scene.watched():
        await scene.looks(5)
    assert scene.server.weights == "the learner's"


async def test_a_model_that_does_not_learn_is_given_nothing(scene: Scene, autojump_clock: MockClock) -> None:
    scene.server.version = "0"
    async with scene.watched(learns=False):
        await trio.sleep(20)
        stop(scene.server)
        await trio.sleep(100)
    assert scene.server.version == "0" and scene.hung


@pytest.mark.usefixtures("often")
async def test_an_engine_that_cannot_be_fitted_is_tried_again_and_says_why(scene: Scene) -> None:
    scene.server.version = "default"
    scene.server.lacks.add("processed")
    async with scene.watched() as found:
        await scene.until(lambda: "--logprobs-mode processed_logprobs" in found.trouble)
        scene.server.lacks.clear()
        await scene.until(lambda: given(scene) and not found.trouble)


@pytest.mark.usefixtures("often")
async def test_an_engine_that_says_it_took_the_weights_and_did_not_ends_the_run(scene: Scene) -> None:
    path = scene.folder / "3.safetensors"
    proof = Canary(version=3, token_ids=(5, 6), logprobs=(-3.0,))
    proof.write(engine_process.canary.beside(path))
    scene.server.version = "2"
    with pytest.raises(ExceptionGroup) as raised:
        async with scene.watched():
            await trio.sleep(60)
    assert matters(raised.value).args[0].startswith("http://engine was started again: canary: ")
    assert isinstance(matters(raised.value), WrongWeights)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("half_loaded", [False, True])
async def test_an_engine_whose_pusher_vanished_after_the_pause_is_given_whole_weights_and_goes_on(
    scene: Scene, half_loaded: bool
) -> None:
    """It says that it serves the current version all the same. What was half loaded is never sampled from."""
    async with aclosing(EngineClient(scene.server.url, transport=scene.server)) as pusher:
        await pusher.call("POST", "/pause", params={"mode": "keep"}, deadline_s=1)
        if half_loaded:
            await pusher.call("POST", "/start_weight_update", deadline_s=1)
    assert scene.server.paused
    async with scene.watched():
        await scene.until(lambda: given(scene))
    assert scene.server.weights == str(scene.folder / "3.safetensors")


@pytest.mark.usefixtures("often")
async def test_an_engine_that_is_paused_by_a_pusher_that_lives_is_left_to_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    taken = module._taken
    scene.server.version, scene.server.paused = "3", True
    async with exclusive(scene.folder, scene.server.url, deadline_s=1):
        monkeypatch.setattr(module, "_taken", lambda descriptor: tries.append(descriptor) or taken(descriptor))
        async with scene.watched():
            await scene.until(lambda: len(tries) > 3)
            assert scene.server.paused and scene.server.weights == "base"


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("asleep", [False, True])
async def test_an_engine_that_somebody_else_paused_or_put_to_sleep_goes_on_and_a_line_says_so(
    scene: Scene, asleep: bool
) -> None:
    """With adapters nothing is sent anew, and without a pusher nothing else would resume it."""
    scene.trains_adapters()
    scene.server.adapters["policy-3"] = "a folder"
    scene.server.sleeps = asleep
    async with aclosing(EngineClient(scene.server.url, transport=scene.server)) as foreign:
        path, params = ("/sleep", {"level": "1", "mode": "keep"}) if asleep else ("/pause", {"mode": "keep"})
        await foreign.call("POST", path, params=params, deadline_s=1)
    assert scene.server.paused
    said: list[str] = []
    async with scene.watched() as found:
        found.say = said.append
        await scene.until(lambda: not scene.server.paused and not scene.server.asleep)
    assert said[0] == (
        "agentrl: http://engine was left paused, by somebody else, or by a push of this run that broke off: "
        "it is made to go on"
    )


@pytest.mark.usefixtures("often")
async def test_a_pause_is_left_alone_where_it_may_be_the_learners(scene: Scene) -> None:
    engine = scene.config.engine.model_copy(update={"sync": "nccl"})
    scene.config = scene.config.model_copy(update={"engine": engine})
    scene.server.version, scene.server.paused = "3", True
    said: list[str] = []
    async with scene.watched() as found:
        found.say = said.append
        asked = scene.server.calls.count
        await scene.until(lambda: asked("GET /weight_info") + asked("GET /health") > 9)
    assert scene.server.paused and not said and not [call for call in scene.server.calls if call.startswith("POST")]


@pytest.mark.usefixtures("often")
async def test_an_engine_that_was_put_to_sleep_is_given_its_weights_and_wakes(scene: Scene) -> None:
    """Full weights: its sleep may have dropped them."""
    scene.server.sleeps = True
    async with aclosing(EngineClient(scene.server.url, transport=scene.server)) as foreign:
        await foreign.call("POST", "/sleep", params={"level": "2", "mode": "keep"}, deadline_s=1)
    async with scene.watched():
        await scene.until(lambda: given(scene) and not scene.server.asleep)


def proved(scene: Scene) -> Canary:
    """The engine computes with version 3, and the learner's canary says the same numbers."""
    path, tokens = scene.folder / "3.safetensors", (5, 6, 7)
    scene.server.version, scene.server.weights = "3", str(path)
    logprobs = tuple(made_up_logprob(str(path), place, token) for place, token in enumerate(tokens) if place)
    proof = Canary(version=3, token_ids=tokens, logprobs=logprobs)
    proof.write(engine_process.canary.beside(path))
    return proof


@pytest.mark.usefixtures("often")
async def test_weights_that_somebody_sends_between_two_syncs_end_the_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the version that the engine has: no version tells, and no sync comes."""
    proved(scene)
    monkeypatch.setattr(engine_health, "CANARY_EVERY_S", 0.01)
    with pytest.raises(ExceptionGroup) as raised:
        async with scene.watched():
            await scene.until(lambda: scene.server.calls.count("POST /inference/v1/generate") >= 3)  # nothing is found
            scene.server.weights = "somebody else's"
            await trio.sleep(60)
    error = matters(raised.value)
    assert isinstance(error, WrongWeights)
    assert error.args[0].startswith("http://engine was sent weights by somebody else: canary: ")


async def test_an_engine_of_a_paused_run_is_checked_seldom_and_a_hang_is_noticed_as_soon(
    scene: Scene, autojump_clock: MockClock
) -> None:
    async with scene.watched():
        await trio.sleep(100)
        checks = len(scene.signs_s)
        PAUSED.set(scene.store, {"since_s": 1.0, "now": False})
        await trio.sleep(100)
        assert 90 < checks < 105 and 18 < len(scene.signs_s) - checks < 24
        stop(scene.server)
        await trio.sleep(55)
        assert not scene.hung
        await trio.sleep(6)
    assert scene.hung == ["did not answer for 60 s (engine.liveness_deadline_s)"]


def test_moments_of_the_canary_are_not_foretold(scene: Scene) -> None:
    found = EngineWatch(url="u", config=scene.config, looks=None, weights=None, locks=scene.folder)  # pyright: ignore[reportArgumentType]
    mean = engine_health.CANARY_EVERY_S
    pauses = [found._pause_s() for _ in range(200)]
    assert mean / 2 <= min(pauses) < 0.7 * mean and 1.3 * mean < max(pauses) <= 1.5 * mean
