"""vLLM's own `nccl` weight transfer, both ends of it, from our learner's memory into a real server: over gloo, as there
is no GPU. What only a GPU can show (NCCL itself, CUDA streams, CUDA IPC) is not here."""

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

from agentrl.engine.client import EngineClient
from agentrl.engine.vllm.probe import Need, needed, probe
from agentrl.errors import UsageError

from . import gloo
from .conftest import Server
from .policy import make_model

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def nccl_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that takes weights over `nccl`."""
    folder = tmp_path_factory.mktemp("nccl")
    model = make_model(folder / "model")
    gloo.carry(folder)
    server = Server(model, folder, weight_backend="nccl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        server.start()
    try:
        trio.run(server.ready, 1)
        yield server
    finally:
        server.close()


async def test_a_server_says_how_it_takes_weights(nccl_server: Server) -> None:
    client = EngineClient(nccl_server.url)
    facts = await probe(client)
    await client.aclose()
    assert facts.backend == "NCCLWeightTransferEngine"
    facts.require(needed("nccl"))
    with pytest.raises(UsageError, match=r'files: start it with --weight-transfer-config \'{"backend": "shm"}\'$'):
        facts.require(needed("full"))
    with pytest.raises(
        UsageError, match=r'IPC: start it with --weight-transfer-config \'{"backend": "ipc"}\' and VLLM'
    ):
        facts.require(needed("ipc"))
    assert Need.WEIGHTS in needed("delta") and Need.LORA in needed("adapter")


def test_versions_go_from_memory_to_memory_and_the_engine_samples_from_them(nccl_server: Server) -> None:
    model = nccl_server.spec.model
    done = subprocess.run(
        [
            nccl_server.spec.build.python,
            "-c",
            f"import runpy, sys; sys.path.append({sysconfig.get_path('purelib')!r}); "  # for what it lacks of ours
            "runpy.run_module('tests.engine_vllm.trainer', run_name='__main__')",
            nccl_server.url,
            model,
        ],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    size = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())
    assert [(one["served"], one["bytes"]) for one in said["told"]] == [(2, size), (3, size)]
    assert all(one["error"] < 1e-4 for one in said["told"])
    assert said["joined"] == 1  # the second version goes over the same channel
    assert said["broadcasts"] > 4  # in pieces
