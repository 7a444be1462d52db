"""A real vLLM tells the set that each token was drawn from, and the learner's log-probs over it are the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import torch
import trio

from agentrl.algos.grpo import GRPO
from agentrl.engine.client import EngineClient
from agentrl.engine.embedded.batching import distribution
from agentrl.engine.vllm.capabilities import FOR_TRAINING, Need, probe
from agentrl.errors import EngineError
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.model.policy import PolicyModel
from agentrl.protocols import GenerateRequest
from agentrl.records import Generation, Group, GroupState, SamplingParams, StopReason, Task, Trajectory, Turn
from agentrl.tokens import sampling_mask

from .conftest import Server, up
from .policy import Policy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]  # it starts a server of its own

PROMPT = tuple(range(5, 50)) * 2
SAMPLINGS = [
    {"top_p": 0.6},
    {"top_k": 7, "temperature": 1.6},
    {"min_p": 0.3, "temperature": 0.7},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.05},
    {"top_k": 5000},  # cuts nothing
]


@pytest.fixture(scope="module")
def telling(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    given = {"max-num-batched-tokens": 64, "enable-prefix-caching": False}
    yield from up(Server(policy.folder, tmp_path_factory.mktemp("telling"), kept_sets=True, arguments=given))


@pytest.fixture
async def client(telling: Server) -> EngineClient:
    return EngineClient(telling.url, version=1)


def ask(at: int = 0, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 30, **sampling})
    prompt = (*PROMPT, *range(60, 60 + at))
    return GenerateRequest(request_id=uuid4().hex, session="s", token_ids=prompt, sampling=params, kept=True)


async def test_arguments_of_the_run_file_are_in_force_at_the_server(telling: Server, client: EngineClient) -> None:
    told = (await client.call("GET", "/metrics", deadline_s=30.0)).decode()
    assert 'enable_prefix_caching="False"' in told
    assert "max_num_batched_tokens=64" in telling.log.read_text()  # every prompt of this page is longer


def logits(policy: Policy, prompt: tuple[int, ...], generation: Generation) -> torch.Tensor:
    """What transformers says before each sampled token, under the weights that the server has."""
    policy.model.load_state_dict(policy.states[1])
    with torch.no_grad():
        return policy.model(torch.tensor([[*prompt, *generation.token_ids]])).logits[0][len(prompt) - 1 : -1]


async def sampled(client: EngineClient) -> list[tuple[GenerateRequest, Generation]]:
    """One generation of each sampling, all at once."""
    found: dict[int, tuple[GenerateRequest, Generation]] = {}

    async def one(at: int) -> None:
        asked = ask(at, **SAMPLINGS[at])
        found[at] = asked, await client.generate(asked)

    async with trio.open_nursery() as nursery:
        for at in range(len(SAMPLINGS)):
            nursery.start_soon(one, at)
    return [found[at] for at in range(len(SAMPLINGS))]


async def test_requests_of_one_batch_get_the_sets_of_their_own_settings(client: EngineClient, policy: Policy) -> None:
    """Those that our own engine would draw from, save at an edge that rounding decides."""
    for asked, generation in await sampled(client):
        logits_TV = logits(policy, asked.token_ids, generation)
        ours_TV = distribution(logits_TV, [asked.sampling] * len(generation.token_ids))
        told = sampling_mask.decode(generation.columns["kept"])
        assert len(told) == len(generation.token_ids)
        ours = [logprobs_V.isfinite().nonzero()[:, 0].tolist() for logprobs_V in ours_TV]
        same = [sorted(ids) == own for ids, own in zip(told, ours, strict=True)]
        assert sum(same) >= 0.9 * len(same)


async def test_the_ratio_is_1_for_tokens_that_the_same_weights_sampled(client: EngineClient, policy: Policy) -> None:
    learner = PolicyModel(policy.folder)
    for asked, generation in await sampled(client):
        turn = Turn(
            index=0,
            parent=None,
            prompt_ids=asked.token_ids,
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            spans=generation.spans,
            finish="stop",
            text="",
            columns=generation.columns,
        )
        task = Task(index=0, env="test/none", seed=0)
        played = Trajectory(
            episode_id=1,
            group_id=1,
            member=0,
            task=task,
            start=(),
            turns=(turn,),
            stop_reason=StopReason.DONE,
            outcome=1.0,
        )
        group = Group(id=1, task=task, state=GroupState.TAKEN, size=1, trajectories=(played,))
        rows = group_rows(group, GRPO(baseline="none"), step_of=lambda _: 0, step_now=0, max_lag=0).rows
        (pack,) = packs([rows], 4096)
        with torch.no_grad():
            ours_K, _ = learner.logprobs(pack, temperature=asked.sampling.temperature)
            whole_K, _ = learner.logprobs(replace(pack, ragged={}), temperature=asked.sampling.temperature)
        torch.testing.assert_close(ours_K, pack.columns["behaviour"], atol=3e-5, rtol=0)
        off = float((whole_K - pack.columns["behaviour"]).abs().max())
        assert off > 0.01 if asked.sampling.top_k != 5000 else off < 3e-5  # the check sees sets that are lost


async def test_such_a_server_is_known_by_a_probe_and_scores_prompts(client: EngineClient) -> None:
    (await probe(client)).require(FOR_TRAINING | {Need.KEPT_SETS})
    assert len(await client.score(PROMPT, deadline_s=60)) == len(PROMPT) - 1


async def test_it_takes_no_greedy_request_but_one_for_the_likeliest_token(client: EngineClient, policy: Policy) -> None:
    with pytest.raises(EngineError):
        await client.generate(ask(temperature=0.0))
    likeliest = await client.generate(ask(top_k=1, max_tokens=5))
    assert list(likeliest.token_ids) == logits(policy, PROMPT, likeliest).argmax(-1).tolist()
    assert likeliest.logprobs == pytest.approx([0.0] * len(likeliest.token_ids))
