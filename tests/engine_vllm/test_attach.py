"""A stock vLLM server, started again as its refusal says, then attached, sent new weights, and sampled from."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from agentrl.config import RunConfig
from agentrl.engine.client import EngineClient
from agentrl.engine.vllm.capabilities import Need, probe
from agentrl.engine.weight_sync import canary
from agentrl.engine.weight_sync.file_transport import push
from agentrl.engine.weight_sync.publisher import WeightPublisher
from agentrl.engine.weight_sync.transport import Parcel
from agentrl.errors import CanaryMismatch
from agentrl.records import WeightVersion
from agentrl.run.children.engine_process import ServedWeights, attach

from .conftest import Started
from .policy import Policy
from .test_contract import ask
from .test_weights import ADMIN_S, mend, probe_of

pytestmark = pytest.mark.vllm

ROUGH = 0.3  # nats: what bfloat16 may make of one token's log-prob; other weights are a nat away and more


async def test_a_stock_server_is_attached_by_what_its_refusal_says(
    stock_server: Started, stock: Policy, stock_config: RunConfig
) -> None:
    (url,), key = stock_config.engine.urls, stock_config.engine.key_of(stock_config.engine.urls[0])
    first = WeightVersion(version=7, step=0)
    await attach(url, ServedWeights(model=stock.folder, base=first, current=first), stock_config)
    async with aclosing(EngineClient(url, api_key=key)) as client:
        facts = await probe(client)
        assert facts.has == frozenset(Need) - {Need.NCCL, Need.IPC, Need.LORA, Need.ROUTED_EXPERTS, Need.KEPT_SETS}
        assert (facts.dtype, facts.root) == ("bfloat16", str(stock.folder))
        before = await client.generate(ask())
        assert {span.version for span in before.spans} == {7}
        stock.states[7] = stock.states[1]
        assert stock.error(ask().token_ids, before) < ROUGH

        version, file = stock.update(scale=0.1)
        parcel = Parcel(
            version=version, path=file.path, sha256=file.sha256, canary=probe_of(stock, version, marked=True)
        )
        row = await WeightPublisher(stock_config.engine, stock_config.sync).deliver([url], parcel)
        assert row["canary_error"] < ROUGH
        prompt = tuple((7 * i) % 120 + 3 for i in range(100))
        for _ in range(2):  # the second finds its prefix computed
            after = await client.generate(ask(prompt))
            assert {span.version for span in after.spans} == {version}
            assert stock.error(prompt, after) < ROUGH


async def test_a_bfloat16_layer_that_missed_one_small_step_is_seen(
    stock_server: Started, stock: Policy, stock_config: RunConfig
) -> None:
    """The numbers of the probe do not show it: what is left out is less than what bfloat16 makes of them."""
    (url,), key = stock_config.engine.urls, stock_config.engine.key_of(stock_config.engine.urls[0])
    async with aclosing(EngineClient(url, api_key=key)) as client:
        try:
            version, file = stock.update()
            await push([client], file.path, version, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True)
            assert await canary.check([client], probe_of(stock, version, marked=True)) < ROUGH
            await mend(client, False)
            version, file = stock.update()
            await push([client], file.path, version, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True)
            left_behind = stock.error(ask().token_ids, await client.generate(ask())) > ROUGH
            await mend(client, True)
            await push([client], file.path, version, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True)
            await mend(client, False)
            version, file = stock.update(scale=1e-4)
            await push([client], file.path, version, sha256=file.sha256, deadline_s=ADMIN_S, clear_cache=True)
            assert await canary.check([client], probe_of(stock, version)) < ROUGH  # all that there was
            if not left_behind:  # a CPU for which vLLM packs no bfloat16 layer
                assert await canary.check([client], probe_of(stock, version, marked=True)) < ROUGH
                return
            says = r"its layers compute with other weights; not taken: lm_head \(tied to model\.embed_tokens\.weight\)$"
            with pytest.raises(CanaryMismatch, match=says):
                await canary.check([client], probe_of(stock, version, marked=True))
        finally:
            await mend(client, True)
