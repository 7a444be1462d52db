"""Real vLLM servers on tiny random models, one of each kind for the whole session, and the policy they serve.

Every server is a child with a lifeline: it cannot outlive the test process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

os.environ.setdefault("OMP_NUM_THREADS", "1")

from agentrl.engine.client import EngineClient
from agentrl.engine.launch import end_group
from agentrl.engine.vllm.launch import VLLMServer, find_build, ready
from agentrl.owner import OwnedFolder
from agentrl.ports import free_port

from .policy import Policy, make_model

START_S = 500.0
LORA_RANK = 8


class Server:
    """One server process on a port of its own; `restart` puts another one in its place."""

    def __init__(self, model: Path, folder: Path, **options: object) -> None:
        self.folder, self.log = folder, folder / "vllm.log"
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
            **options,  # pyright: ignore[reportArgumentType]
        )
        self.url = self.spec.url
        self.spec.prepare()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.spec.build.python), *self.spec.argv()],
                env={**os.environ, **self.spec.env()},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    async def ready(self, version: int) -> None:
        await ready(self.spec, version=version, deadline_s=START_S, ended=self.ended, log=self.log)

    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

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
