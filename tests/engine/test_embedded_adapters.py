"""Adapters on the embedded engine: several in one pass, each exact, by name and by version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from each_case import each_case

from agentrl.config.train import Train
from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.embedded.lora import Adapter, read
from agentrl.engine.weight_sync import adapters, canary
from agentrl.engine.weight_sync.adapters import AdapterClient, always
from agentrl.engine.weight_sync.canary import Canary, probe_tokens
from agentrl.errors import CanaryMismatch, EngineUnavailable, ModelError, WeightSyncError
from agentrl.learner.model import lora
from agentrl.learner.model.policy import PolicyModel
from agentrl.protocols import GenerateRequest
from agentrl.records import SamplingParams

from .conftest import VOCAB, Server, make_model
from .test_batching import Case, prompt

ROLES = ("judge", "coder")


def policies(folder: Path, seed: int = 0) -> PolicyModel:
    """A model with three adapters, which all say something."""
    model = PolicyModel(folder, adapter=Train(lora_rank=3, lora_alpha=12))
    lora.add_roles(model.module, ROLES)
    torch.manual_seed(seed)
    for name, parameter in model.module.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def expected(model: PolicyModel, tokens: list[int], role: str | None) -> tuple[float, ...]:
    lora.activate(model.module, role)
    return model.score(tokens)


@pytest.mark.medium
@each_case("family", ["qwen3", "qwen2", "llama"])
def test_each_request_of_a_pass_runs_with_its_own_adapter(tmp_path: Path, family: str) -> None:
    """Four policies share prompts, batch and cache; each token's log-prob is that of the learner's model."""
    folder = make_model(tmp_path / "model", family)
    model = policies(folder)
    saved = lora.save(model.module, tmp_path / "adapters")
    case, architecture = Case(folder), read_architecture(folder)
    of: dict[str | None, Adapter] = {
        role: read(saved / (role or ""), architecture, name=str(role), key=-at)
        for at, role in enumerate((None, *ROLES), 1)
    }
    live = {(role, at): prompt(at, 30) for role in of for at in range(2)}
    for _ in range(2):  # the second time keys and values are there
        for (role, at), tokens in live.items():
            case.submit(f"{role}-{at}", tokens).adapter = of[role]
            case.run(1)
        case.submit("plain", prompt(0, 30))
        case.run()
        case.check_logprobs("plain")
        for role, at in live:
            request = case.requests[f"{role}-{at}"]
            scores = expected(model, request.tokens, role)[request.prompt_length - 1 :]
            assert request.logprobs == pytest.approx(scores, abs=2e-4)
            live[role, at] = request.tokens + prompt(at + 7, 5)
    assert case.batcher.counters.prefix_hits > 0, "something was shared"
    tokens = prompt(5, 20)
    for role in of:
        assert case.batcher.score(tokens, of[role]) == pytest.approx(expected(model, tokens, role), abs=2e-4)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, model_dir: Path) -> None:
    other = make_model(tmp_path / "wide", intermediate_size=96)
    saved = lora.save(policies(other).module, tmp_path / "adapters")
    with pytest.raises(ModelError, match=r"is of another model: model\.layers\.0\.mlp\.gate_proj"):
        read(saved, read_architecture(model_dir), name="x", key=-1)
    with pytest.raises(ModelError, match="cannot load the adapter in"):
        read(tmp_path / "nowhere", read_architecture(model_dir), name="x", key=-1)


@pytest.mark.medium
async def test_a_version_has_the_adapters_of_all_roles(server: Server, model_dir: Path, tmp_path: Path) -> None:
    """Loaded, sampled from and retired together; a past self stays, under names of its own."""
    old, new = policies(model_dir, seed=1), policies(model_dir, seed=2)
    folders = {7: lora.save(old.module, tmp_path / "7"), 8: lora.save(new.module, tmp_path / "8")}
    client = AdapterClient(server.url, current=always(8))

    async def ask(**given: Any) -> tuple[float, ...]:
        generation = await client.generate(
            GenerateRequest(
                request_id=f"ask-{given}",
                session="",
                token_ids=(5, 6, 7),
                sampling=SamplingParams(max_tokens=8),
                deadline_s=60,
                **given,
            )
        )
        wanted = 8 if given.get("version") is None else given["version"]
        assert [(span.version, span.start) for span in generation.spans] == [(wanted, 0)]
        asked.append([5, 6, 7, *generation.token_ids])
        return generation.logprobs

    asked: list[list[int]] = []
    try:
        for version, folder in folders.items():
            await adapters.load([client], folder, version)
        await adapters.load([client], folders[7], 7, kept=True)
        assert await adapters.loaded(client) == {7, 8} and await client.served_version() == 8
        for role in (None, *ROLES):
            for model, version in ((new, None), (old, 7)):
                logprobs = await ask(policy=role, version=version)
                assert logprobs == pytest.approx(expected(model, asked[-1], role)[2:], abs=2e-4)
        probe = probe_tokens(VOCAB, 32)
        own = {role: expected(new, list(probe), role) for role in ROLES}
        proof = Canary(version=8, token_ids=probe, logprobs=expected(new, list(probe), None), by_role=own)
        assert 0 < await canary.check([client], proof) < 1e-3
        wrong = replace(proof, by_role={**own, "coder": expected(old, list(probe), "coder")})
        with pytest.raises(CanaryMismatch, match=r"its adapter 'policy-8-coder' is .* nats from the learner's"):
            await canary.check([client], wrong)
        assert await adapters.retire([client], keep=[8]) == frozenset()
        assert await adapters.loaded(client) == {8}
        await ask(policy="judge", version=7)
        below = await ask(policy="judge", version=0)
        with lora.switched_off(new.module):
            assert below == pytest.approx(new.score(asked[-1])[2:], abs=2e-4)
        with pytest.raises(EngineUnavailable, match="has no adapter 'league-9-judge'"):
            await ask(policy="judge", version=9)
        with pytest.raises(WeightSyncError, match="there is no such folder"):
            await adapters.load([client], tmp_path / "none", 9)
        await adapters.forget([client], 9)  # it has none
        await ask(policy="judge", version=7)
        await adapters.forget([client], 7)
        for role in (None, *ROLES):
            with pytest.raises(EngineUnavailable, match="has no adapter 'league-7"):
                await ask(policy=role, version=7)
        assert await adapters.loaded(client) == {8}, "the policy stays"
    finally:
        with trio.CancelScope(shield=True):
            await adapters.retire([client], keep=())
            await adapters.forget([client])
            await client.aclose()
