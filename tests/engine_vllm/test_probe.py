"""Probing real servers: what each has is found, what it lacks is refused with what mends it."""

from __future__ import annotations

import pytest

from agentrl.engine.client import EngineClient
from agentrl.engine.vllm.capabilities import FOR_TRAINING, Need, probe
from agentrl.errors import EngineUnavailable, UsageError
from agentrl.host.ports import free_port

from .conftest import Server

pytestmark = pytest.mark.vllm


async def test_a_server_of_ours_has_what_it_was_started_with(server: Server, client: EngineClient) -> None:
    facts = await probe(client)
    assert facts.has == frozenset(Need) - {Need.ROUTED_EXPERTS, Need.KEPT_SETS, Need.NCCL, Need.IPC}
    assert (facts.model, facts.max_model_len, facts.version) == ("policy", 2048, server.spec.build.version)
    assert (facts.root, facts.dtype) == (str(server.spec.model), "float32")
    assert facts.backend == "FileTransferEngine"
    facts.require(FOR_TRAINING | {Need.LORA})
    with pytest.raises(UsageError, match=r"lacks the experts chosen per token: .* --enable-return-routed"):
        facts.require({Need.ROUTED_EXPERTS})


async def test_a_server_without_lora_says_so(mixture_client: EngineClient) -> None:
    facts = await probe(mixture_client)
    assert facts.has == frozenset(Need) - {Need.LORA, Need.KEPT_SETS, Need.NCCL, Need.IPC}
    with pytest.raises(UsageError, match="--enable-lora"):
        facts.require({Need.LORA})


async def test_nobody_there() -> None:
    client = EngineClient(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(EngineUnavailable):
        await probe(client)
    await client.aclose()
