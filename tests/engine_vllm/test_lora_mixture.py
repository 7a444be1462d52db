"""An adapter that the learner trained on a mixture's attention, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config import Train
from agentrl.engine.client import EngineClient
from agentrl.engine.weight_sync import adapters
from agentrl.engine.weight_sync.adapters import AdapterClient, always
from agentrl.engine.weight_sync.file_transport import push
from agentrl.learner.learner import Learner
from agentrl.learner.model import lora
from tests.learner.making import random_group, run_config

from .conftest import LORA_RANK, Server, up
from .policy import VOCAB, Policy
from .test_contract import ask
from .test_weights import ADMIN_S, EXACT

pytestmark = pytest.mark.vllm

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module")
def server(mixture: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    yield from up(Server(mixture.folder, folder, lora_rank=LORA_RANK, lora_targets=tuple(ATTENTION)))


def trained(mixture: Policy) -> tuple[int, Path]:
    """A new version of the policy: an adapter that the learner moved away from nothing, and its folder."""
    settings = Train(lr=1e-1, warmup_steps=0, lora_rank=LORA_RANK, lora_targets=ATTENTION)
    learner = Learner(run_config(train=settings).learner, mixture.folder)
    for step in range(2):
        learner.step([random_group(step, seed=step, vocab=VOCAB)], step_of=lambda _: 0)
    version = mixture.version + 1
    mixture.states[version] = lora.merged(learner.model.module)
    return version, learner.export_adapter(mixture.scratch / f"adapter-{version}")


@pytest.mark.long
async def test_an_adapter_of_a_mixtures_attention_is_served_exactly(server: Server, mixture: Policy) -> None:
    plain = EngineClient(server.url, version=1)
    before = await plain.generate(ask())
    assert mixture.error(ask().token_ids, before) <= EXACT
    version, folder = trained(mixture)
    client = AdapterClient(server.url, current=always(version))
    await adapters.load([client], folder, version, deadline_s=ADMIN_S)
    after = await client.generate(ask())
    assert {span.version for span in after.spans} == {version}
    assert mixture.error(ask().token_ids, after) <= EXACT
    below = mixture.logprobs(ask().token_ids, after.token_ids, 1)
    assert max(abs(a - b) for a, b in zip(below, after.logprobs, strict=True)) > 0.1  # the adapter matters
    await adapters.retire([client], keep=(), deadline_s=ADMIN_S)
    newer, file = mixture.update()
    await push([plain], file.path, newer, deadline_s=ADMIN_S)
    assert mixture.error(ask().token_ids, await plain.generate(ask())) <= EXACT  # the experts below are loaded anew
    await client.aclose()
    await plain.aclose()
