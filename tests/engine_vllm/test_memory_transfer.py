"""vLLM's own weight transfer, both ends of it, from a learner's memory into a real server, without a GPU: `nccl` over
gloo, `ipc` over a mapped file. What only a GPU can show (NCCL itself, CUDA IPC, CUDA streams) is not here."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from safetensors.torch import load_file

from agentrl.config.weight_sync import transport_of
from agentrl.engine.client import EngineClient
from agentrl.engine.vllm.capabilities import Need, needed, probe
from agentrl.errors import UsageError

from . import gloo, mapped
from .conftest import Server
from .policy import make_model

pytestmark = pytest.mark.vllm

FLAG = r"start it, by vLLM's own python .* with: .*api_server .* --weight-transfer-config '{\"backend\": \"%s\"}'"


@pytest.fixture(scope="module", params=["nccl", "ipc"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Servers that take weights from memory to memory: two that join one group, or one that shares the memory."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder / "model")
    gloo.carry(folder)
    gloo.carry(folder, Path(mapped.__file__))
    started: list[Server] = []
    try:
        for number in range(2 if request.param == "nccl" else 1):
            (own := folder / str(number)).mkdir()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", str(folder))
                started.append(Server(model, own, weight_backend=request.param))
            started[-1].start()
        for server in started:
            trio.run(server.ready, 1)
        yield started
    finally:
        for server in started:
            server.close()


async def test_a_server_says_how_it_takes_weights(servers: list[Server]) -> None:
    server = servers[0]
    client = EngineClient(server.url)
    facts = await probe(client)
    await client.aclose()
    sync = server.spec.weight_backend
    assert facts.backend == f"{sync.upper()}WeightTransferEngine"
    facts.require(needed(transport_of(sync)))
    with pytest.raises(UsageError, match="files: " + FLAG % "shm"):
        facts.require(needed(transport_of("full")))
    other = {"nccl": "ipc", "ipc": "nccl"}[sync]
    with pytest.raises(UsageError, match=FLAG % other):
        facts.require(needed(transport_of(other)))
    assert Need.WEIGHTS in needed(transport_of("delta")) and Need.LORA in needed(transport_of("adapter"))


def test_versions_go_from_memory_to_memory_and_the_engines_sample_from_them(servers: list[Server]) -> None:
    server, urls = servers[0], [server.url for server in servers]
    model = server.spec.model
    fallback = sysconfig.get_path("purelib")  # for what vLLM's environment lacks of ours
    code = (
        f"import runpy, sys; sys.path.append({fallback!r}); "
        "runpy.run_module('tests.engine_vllm.trainer', run_name='__main__')"
    )
    done = subprocess.run(
        [server.spec.build.python, "-c", code, server.spec.weight_backend, model, *urls],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    size = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())
    assert [(one["served"], one["bytes"]) for one in said["told"]] == [([2] * len(urls), size), ([3] * len(urls), size)]
    assert all(one["error"] < 1e-4 for one in said["told"])
    assert all(one["pieces"] > 3 for one in said["told"])
    assert said["joined"] == 1  # the second version goes over the same channel
