"""Engines that somebody else started: taken by their URL as it is written, with their key, or refused with the command.

Against a fake server; a real vLLM is attached in tests/engine_vllm/test_attach.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from safetensors.numpy import save_file

from agentrl import config as configuration
from agentrl.config import Rollout
from agentrl.engine.client import EngineClient
from agentrl.errors import ConfigError, UsageError
from agentrl.records import WeightVersion
from agentrl.run.children import attached_engines
from agentrl.run.children.engine_process import ServedWeights, attach
from agentrl.run.run_folder import RunDir
from tests.parts.served_vllm import in_thread, listening
from tests.parts.vllm_server import FakeVLLM

FIRST = WeightVersion(version=3, step=0)


@pytest.fixture
async def server() -> AsyncIterator[FakeVLLM]:
    fake = FakeVLLM()
    async with listening(fake):
        yield fake


@pytest.fixture
def weights(tmp_path: Path) -> ServedWeights:
    """A folder whose weights are in two files, as those of every model beyond a few billion parameters."""
    parts = {f"model-0000{n}-of-00002.safetensors": f"layer.{n}.weight" for n in (1, 2)}
    for file, name in parts.items():
        save_file({name: np.zeros(3, dtype=np.float32)}, tmp_path / file)
    index = {"weight_map": {name: file for file, name in parts.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return ServedWeights(model=tmp_path, base=FIRST, current=FIRST)


def run_config(url: str, train: dict[str, Any] | None = None, **engine: Any) -> configuration.RunConfig:
    settings = {"kind": "vllm", "urls": [url], **engine}
    return configuration.parse({"model": "m", "env": {"id": "e"}, "engine": settings, "train": train or {}})


async def attach_as(config: configuration.RunConfig, weights: ServedWeights) -> None:
    (url,) = config.engine.urls
    await attach(url, weights, config)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_a_url_is_taken_as_it_is_written(end: str, server: FakeVLLM, weights: ServedWeights) -> None:
    config = run_config(server.url + end)
    assert config.engine.urls == [server.url]
    await attach_as(config, weights)
    assert server.version == "3"


async def test_weights_in_several_files_are_sent_as_one_update(server: FakeVLLM, weights: ServedWeights) -> None:
    await attach_as(run_config(server.url), weights)
    steps = [call for call in server.calls if "weight" in call and "init" not in call]
    updates = ["POST /update_weights"] * 2
    assert steps == ["POST /start_weight_update", *updates, "POST /finish_weight_update", "GET /weight_info"]
    assert server.weights.endswith("model-00002-of-00002.safetensors")


async def test_a_server_that_asks_for_a_key_is_shown_the_one_of_the_environment(
    server: FakeVLLM, weights: ServedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.api_key = "s3cret"
    with pytest.raises(UsageError, match=r"asks for an API key: .*name the variable in engine\.api_key_env"):
        await attach_as(run_config(server.url), weights)
    config = run_config(server.url, api_key_env="THE_KEY")
    monkeypatch.delenv("THE_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"engine\.api_key_env = 'THE_KEY': this environment variable is not set"):
        await attach_as(config, weights)
    monkeypatch.setenv("THE_KEY", "s3cret")
    await attach_as(config, weights)
    assert server.version == "3"
    assert "s3cret" not in configuration.to_json(config)  # what a run writes down


async def test_a_server_of_another_version_needs_the_setting(server: FakeVLLM, weights: ServedWeights) -> None:
    server.vllm = "0.33.1"
    with pytest.raises(UsageError, match=r"has vLLM 0\.33\.1; .* engine\.untested_vllm = true"):
        await attach_as(run_config(server.url), weights)
    with pytest.warns(UserWarning, match=r"has vLLM 0\.33\.1"):
        await attach_as(run_config(server.url, untested_vllm=True), weights)
    assert server.version == "3"


@pytest.mark.parametrize("sync", ["full", "nccl", "ipc"])
async def test_without_our_plugin_nothing_is_sent(sync: str, server: FakeVLLM, weights: ServedWeights) -> None:
    server.lacks = {"plugin"}
    server.backend = {"nccl": "NCCLWeightTransferEngine", "ipc": "IPCWeightTransferEngine"}.get(sync, server.backend)
    config = run_config(server.url, sync=sync, train={"device": "cuda:1"})
    with pytest.raises(UsageError, match=r"agentrl's plugin.* PYTHONPATH=\$\(agentrl vllm-plugin\) "):
        await attach_as(config, weights)
    assert server.version == "default" and not server.paused


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}])
async def test_without_the_sets_that_tokens_are_drawn_from_a_cut_is_refused(
    cut: dict[str, float], server: FakeVLLM, weights: ServedWeights
) -> None:
    server.lacks = {"kept"}
    config = run_config(server.url)
    cutting = config.model_copy(update={"rollout": Rollout(**cut)})  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match=r"lacks the set that each token is drawn from .* --return-sampling-mask$"):
        await attach_as(cutting, weights)
    assert server.version == "default" and not server.paused
    await attach_as(config, weights)  # nothing is cut
    server.lacks = set()
    await attach_as(cutting, weights)
    assert server.version == "3"


async def test_a_stock_server_is_refused_with_the_whole_command(server: FakeVLLM, weights: ServedWeights) -> None:
    server.lacks, server.model = {"tokens", "admin", "processed", "transfer", "plugin", "lora"}, "/models/a b"
    with pytest.raises(UsageError) as caught:
        await attach_as(run_config(server.url, train={"lora_rank": 4}), weights)
    _, _, command = str(caught.value).partition("with: ")
    assert command == (
        "VLLM_SERVER_DEV_MODE=1 PYTHONSAFEPATH=1 PYTHONPATH=$(agentrl vllm-plugin) VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 "
        "python -m vllm.entrypoints.openai.api_server --model "
        "'/models/a b' --enable-scale-out --logprobs-mode processed_logprobs "
        '--weight-transfer-config \'{"backend": "shm"}\' '
        "--worker-extension-cls agentrl.engine.vllm.plugin.worker_extension.WorkerExtension "
        "--enable-lora --max-lora-rank 8 --dtype float32"
    )


def attached_run(tmp_path: Path, url: str) -> RunDir:
    """A run at step 0 that is attached to an engine, with a small model."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    save_file({"w": np.zeros(3, dtype=np.float32)}, model / "model.safetensors")
    document = {"model": str(model), "env": {"id": "e"}, "engine": {"kind": "vllm", "urls": [url]}}
    return RunDir.create(tmp_path / "run", configuration.parse(document))


async def left_paused(url: str) -> None:
    """A pusher died in the middle: the engine is paused, and its weights are half loaded."""
    async with aclosing(EngineClient(url)) as client:
        await client.call("POST", "/pause", params={"mode": "keep"}, deadline_s=5)
        await client.call("POST", "/start_weight_update", deadline_s=5)


async def test_an_engine_that_a_dead_run_left_paused_gets_whole_weights_and_goes_on(
    server: FakeVLLM, tmp_path: Path
) -> None:
    run = attached_run(tmp_path, server.url)
    assert await attached_engines.free(run) == [], "it is not paused: nothing is sent to it"
    assert server.weights == "base"
    await left_paused(server.url)
    assert await attached_engines.free(run) == [
        f"{server.url} was left paused: it has the weights of step 0 now and goes on"
    ]
    assert not server.paused
    assert server.weights == str(tmp_path / "model" / "model.safetensors")


async def test_an_engine_that_cannot_be_freed_is_named_with_what_to_type(server: FakeVLLM, tmp_path: Path) -> None:
    run = attached_run(tmp_path, server.url)
    await left_paused(server.url)
    (tmp_path / "model" / "model.safetensors").unlink()
    (line,) = await attached_engines.free(run)
    assert line.startswith(f"{server.url} may still be paused (")
    assert line.endswith(f"go on with agentrl train --resume {run.path}, or restart it")


SUPERVISOR = """
import sys, time
from pathlib import Path
from agentrl.run.run_folder import RunDir
from agentrl.run.scratch_space import ScratchSpace
run = RunDir(Path(sys.argv[1]))
with run.lock() as lock, ScratchSpace(run).owned(lock):
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.mark.medium
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_law_4_a_pause_does_not_outlive_a_run_that_is_killed_whole(tmp_path: Path, how: signal.Signals) -> None:
    fake = FakeVLLM()
    with in_thread(fake) as served:
        run = attached_run(tmp_path, served.url)
        with subprocess.Popen([sys.executable, "-c", SUPERVISOR, run.path], stdout=subprocess.PIPE) as supervisor:
            assert supervisor.stdout is not None and supervisor.stdout.readline()
            trio.run(left_paused, served.url)
            assert fake.paused
            supervisor.send_signal(how)
        with run.lock():  # the janitor gives it back when it has done its work
            assert not fake.paused
    assert "was left paused: it has the weights of step 0" in (run.logs / "attached.log").read_text()
