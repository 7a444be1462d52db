"""A stock vLLM server, started again as its refusal says, then attached, sent new weights, and sampled from."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from agentrl.config import RunConfig
from agentrl.engine.client import EngineClient
from agentrl.engine.vllm.probe import Need, probe
from agentrl.records import WeightVersion
from agentrl.runtime.courier import Courier, Parcel
from agentrl.runtime.engines import Weights, attach

from .conftest import Started
from .policy import Policy
from .test_contract import ask
from .test_weights import probe_of

pytestmark = pytest.mark.vllm

ROUGH = 0.3  # nats: what bfloat16 may make of one token's log-prob; other weights are a nat away and more


async def test_a_stock_server_is_attached_by_what_its_refusal_says(
    stock_server: Started, stock: Policy, stock_config: RunConfig
) -> None:
    (url,), key = stock_config.engine.urls, stock_config.engine.api_key()
    first = WeightVersion(version=7, step=0)
    await attach(url, Weights(model=stock.folder, base=first, current=first), stock_config)
    async with aclosing(EngineClient(url, api_key=key)) as client:
        facts = await probe(client)
        assert facts.has == frozenset(Need) - {Need.NCCL, Need.IPC, Need.LORA, Need.ROUTED_EXPERTS}
        assert (facts.dtype, facts.root) == ("bfloat16", str(stock.folder))
        before = await client.generate(ask())
        assert {span.version for span in before.spans} == {7}
        stock.states[7] = stock.states[1]
        assert stock.error(ask().token_ids, before) < ROUGH

        version, file = stock.update(scale=0.1)
        parcel = Parcel(version=version, path=file.path, sha256=file.sha256, canary=probe_of(stock, version))
        row = await Courier(stock_config).deliver([url], parcel)
        assert row["canary_error"] < ROUGH
        prompt = tuple((7 * i) % 120 + 3 for i in range(100))
        for _ in range(2):  # the second finds its prefix computed
            after = await client.generate(ask(prompt))
            assert {span.version for span in after.spans} == {version}
            assert stock.error(prompt, after) < ROUGH
