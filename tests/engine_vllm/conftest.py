"""Real vLLM servers on tiny random models, one of each kind for the whole session, and the policy they serve.

Every server is a child with a lifeline: it cannot outlive the test process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from transformers import AutoModelForCausalLM

from agentrl import config as configuration
from agentrl.config import RunConfig
from agentrl.engine.client import EngineClient
from agentrl.engine.embedded_process import end_group
from agentrl.engine.vllm.launch import VLLMServer, find_build, ready
from agentrl.engine.weight_sync import weight_file
from agentrl.engine.weight_sync.weight_sources import everyday
from agentrl.errors import UsageError
from agentrl.host.janitor import OwnedFolder
from agentrl.host.ports import free_port
from agentrl.records import WeightVersion
from agentrl.run.children.engine_process import ServedWeights, attach
from tests.parts.served_vllm import listening
from tests.parts.vllm_server import FakeVLLM

from .policy import Policy, make_model

START_S = 500.0
LORA_RANK = 8
KEY = "TEST_STOCK_SERVER_KEY"


class Started:
    """One process with a lifeline, and the log of it."""

    def __init__(self, argv: list[str], env: dict[str, str], folder: Path) -> None:
        self.folder, self.log = folder, folder / "vllm.log"
        self._argv, self._env = argv, env
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                env={**os.environ, **self._env},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    async def answers(self, url: str) -> None:
        """Wait until somebody answers at `url`."""
        async with aclosing(EngineClient(url)) as client:
            with trio.fail_after(START_S):
                while not await client.healthy():
                    assert not self.ended(), self.log.read_text()[-2000:]
                    await trio.sleep(0.1)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL to the front end alone: what it started has to go by itself."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=120)
        finally:
            self._process.kill()
            self._process.wait()
            trio.run(end_group, self.pid)


class Server(Started):
    """A server of ours on a port of its own, without a key unless told; `start` after `kill` puts another one in its
    place."""

    def __init__(self, model: Path, folder: Path, **options: object) -> None:
        self.spec = VLLMServer(
            model=model,
            port=free_port(),
            plugin_folder=folder / "plugin",
            build=find_build(),
            dtype="float32",
            kv_cache_bytes=16 << 20,
            max_model_len=2048,
            max_batch=64,
            stream_tokens=4,
            weights_from=(*everyday(), f"file://{folder.parent}"),
            **{"open": True, **options},  # pyright: ignore[reportArgumentType]
        )
        self.url = self.spec.url
        self.spec.prepare()
        super().__init__([str(self.spec.build.python), *self.spec.argv()], self.spec.env(), folder)

    async def ready(self, version: int) -> None:
        await ready(self.spec, version=version, deadline_s=START_S, ended=self.ended, log=self.log)


@pytest.fixture(scope="session")
def shm() -> Iterator[Path]:
    """A folder in shared memory, gone afterwards, also where the tests are killed."""
    with contextlib.closing(OwnedFolder()) as owner:
        yield owner.path


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory, shm: Path) -> Policy:
    """A dense model with tied embeddings, and every version of its weights that a test has made."""
    return Policy(make_model(tmp_path_factory.mktemp("vllm") / "dense"), shm / "dense")


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory, shm: Path) -> Policy:
    """A mixture of experts."""
    return Policy(make_model(tmp_path_factory.mktemp("vllm") / "moe", experts=8), shm / "moe")


@pytest.fixture(scope="session")
def server(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves `policy`, with LoRA; its weights are at version 1 when it starts."""
    yield from _serve(policy, tmp_path_factory.mktemp("server"), lora_rank=LORA_RANK)


@pytest.fixture(scope="session")
def mixture_server(mixture: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves `mixture` and reports the experts it chose."""
    yield from _serve(mixture, tmp_path_factory.mktemp("server"), routed_experts=True)


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory, shm: Path) -> Policy:
    """A model of bfloat16 values in several files, whose pad row is zero: for a server that somebody else started."""
    folder = make_model(tmp_path_factory.mktemp("vllm") / "stock", seed=3)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(weight_file.parts(folder)) > 1
    return Policy(folder, shm / "stock", dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def stock_config(stock: Policy) -> RunConfig:
    """A run that attaches to a server of `stock` by the URL that users of its chat API are given."""
    engine = {"kind": "vllm", "urls": [f"http://127.0.0.1:{free_port()}/v1"], "api_key_env": KEY, "dtype": "bfloat16"}
    return configuration.parse({"model": str(stock.folder), "env": {"id": "test/none"}, "engine": engine})


@pytest.fixture(scope="session")
def stock_server(stock: Policy, stock_config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A stock server, started again as its refusal says, word for word: a command for a shell with `agentrl` and vLLM's
    python on its path. The one here starts the same server with a lifeline."""
    folder, (url,) = tmp_path_factory.mktemp("stock"), stock_config.engine.urls
    os.environ[KEY] = "s3cret"
    command = trio.run(_advice, stock, stock_config)
    python = folder / "python"
    host = f"{find_build().python} -m agentrl.engine.vllm.plugin.server"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {host} "$@"\n')
    python.chmod(0o755)
    own = f"--port {url.rpartition(':')[2]} --api-key s3cret --served-model-name policy"
    fit = "--max-model-len 2048 --kv-cache-memory-bytes 16M --enforce-eager --block-size 32"  # for this machine
    env = {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder),
        "TMPDIR": str(folder),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONDONTWRITEBYTECODE": "",  # as for our own: what Python and torch compile is kept for the next one
        "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}",
    }
    server = Started(["bash", "-c", f"{command} {own} {fit}"], env, folder)
    server.start()
    try:
        trio.run(server.answers, url)
        yield server
    finally:
        server.close()


async def _advice(stock: Policy, config: RunConfig) -> str:
    """The command that `attach` names for a server of this model that was started with nothing but its name."""
    fake = FakeVLLM(model=str(stock.folder), api_key="s3cret")
    fake.lacks = {"tokens", "admin", "processed", "transfer", "plugin", "lora"}
    first = WeightVersion(version=1, step=0)
    async with listening(fake) as url:
        engine = config.engine.model_copy(update={"urls": [url]})  # a key is shown to the run's own engines alone
        with pytest.raises(UsageError) as caught:
            await attach(
                url,
                ServedWeights(model=stock.folder, base=first, current=first),
                config.model_copy(update={"engine": engine}),
            )
    return str(caught.value).partition("with: ")[2]


def _serve(policy: Policy, folder: Path, **options: object) -> Iterator[Server]:
    yield from up(Server(policy.folder, folder, **options))


def up(server: Server) -> Iterator[Server]:
    """Start it; closed afterwards, also if it does not come up."""
    server.start()
    try:
        trio.run(server.ready, 1)
        yield server
    finally:
        server.close()


@pytest.fixture
async def client(server: Server) -> EngineClient:
    return EngineClient(server.url, version=1)


@pytest.fixture
async def mixture_client(mixture_server: Server) -> EngineClient:
    return EngineClient(mixture_server.url, version=1)
