"""The experts that a mixture chose, token by token and over turns, against transformers' own router."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import trio

from agentrl.config import EngineSettings, EnvSource, RunConfig, Train
from agentrl.engine.client import EngineClient
from agentrl.learner.learner import Learner
from agentrl.protocols import GenerateRequest
from agentrl.records import Group, GroupState, RoutedExperts, SamplingParams, StopReason, Task, Trajectory, Turn

from .policy import Policy, text_of, with_tokenizer

pytestmark = pytest.mark.vllm

SHARED = [(5 * i) % 120 + 3 for i in range(70)]
ANSWER = (7, 40, 11)
LAYERS, PER_TOKEN = 2, 2
TASK = Task(index=0, env="test/none", seed=0)


async def test_the_experts_that_come_back_are_those_of_transformers(
    mixture_client: EngineClient, mixture: Policy
) -> None:
    """Concurrent episodes of two turns, half of whose prompts lie in the prefix cache: cached tokens bring their
    experts along, and those of the second turn begin where those of the first end."""
    version = await mixture_client.served_version()
    chains: list[tuple[tuple[int, ...], tuple[RoutedExperts, RoutedExperts]]] = []

    async def turn(prompt: tuple[int, ...], start: int) -> tuple[tuple[int, ...], RoutedExperts]:
        request = GenerateRequest(
            request_id=f"experts-{hash((prompt, start))}",
            session="experts",
            token_ids=prompt,
            sampling=SamplingParams(max_tokens=20),
            experts_from=start,
        )
        generation = await mixture_client.generate(request)
        assert generation.experts is not None
        return prompt + generation.token_ids, generation.experts

    async def episode(prompt: tuple[int, ...]) -> None:
        tokens, first = await turn(prompt, 0)
        tokens, second = await turn(tokens + ANSWER, len(tokens) - 1)
        assert (first.start, second.start) == (0, first.end)
        chains.append((tokens, (first, second)))

    await episode(tuple(SHARED))
    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(episode, (*SHARED[: 40 + 4 * number], number + 3, 9, 11))
    assert (await mixture_client.metrics())["vllm:prefix_cache_hits_total"] > 32
    mixture.model.load_state_dict(mixture.states[version])
    for tokens, told in chains:
        assert all((one.layers, one.per_token, one.width) == (LAYERS, PER_TOKEN, 1) for one in told)
        found = np.frombuffer(b"".join(one.data for one in told), np.uint8).reshape(-1, LAYERS, PER_TOKEN)
        with torch.no_grad():
            routers = mixture.model(torch.tensor([tokens]), output_router_logits=True).router_logits
        expected = torch.stack([logits.topk(PER_TOKEN, dim=-1).indices for logits in routers], dim=1)[:-1].numpy()
        assert (np.sort(found, -1) == np.sort(expected, -1)).all()


async def test_the_experts_of_a_turn_that_a_text_ended_are_complete(mixture_client: EngineClient) -> None:
    request = GenerateRequest(
        request_id="whole",
        session="experts",
        token_ids=tuple(SHARED),
        sampling=SamplingParams(max_tokens=20, temperature=0),
        experts_from=0,
    )
    whole = await mixture_client.generate(request)
    sampling = replace(request.sampling, stop=(text_of(whole.token_ids[6:8]),))
    stopped = await mixture_client.generate(replace(request, request_id="stopped", sampling=sampling))
    assert (stopped.finish, stopped.token_ids) == ("stop", whole.token_ids[: len(stopped.token_ids)])
    assert whole.experts is not None and stopped.experts is not None
    assert stopped.experts.end == len(SHARED) + len(stopped.token_ids) - 1
    assert stopped.experts.data == whole.experts.data[: len(stopped.experts.data)]


async def test_the_learner_computes_with_the_engines_experts_and_no_token_falls_back(
    mixture_client: EngineClient, mixture: Policy, tmp_path: Path
) -> None:
    """Two turns of two members; a step on their tokens refuses any whose experts are not journaled."""
    version = await mixture_client.served_version()
    mixture.model.load_state_dict(mixture.states[version])
    folder = with_tokenizer(mixture.model, tmp_path / "model")
    members: list[Trajectory] = []
    for member in range(2):
        turns: list[Turn] = []
        context: tuple[int, ...] = ()
        for index, prompt in enumerate((tuple(SHARED), ANSWER)):
            request = GenerateRequest(
                request_id=f"learnt-{member}-{index}",
                session="learnt",
                token_ids=context + prompt,
                sampling=SamplingParams(max_tokens=20),
                experts_from=max(0, len(context) - 1),
            )
            told = await mixture_client.generate(request)
            context += prompt + told.token_ids
            said = {name: getattr(told, name) for name in ("token_ids", "logprobs", "spans", "finish", "experts")}
            turns.append(Turn(index=index, parent=index - 1 if index else None, prompt_ids=prompt, text="", **said))
        made = {"episode_id": member, "group_id": 0, "member": member, "task": TASK, "start": (), "success": None}
        outcome = float(member)
        members.append(Trajectory(turns=tuple(turns), stop_reason=StopReason.DONE, outcome=outcome, **made))
    engine = EngineSettings(kind="vllm", routed_experts="required")
    train = Train()
    config = RunConfig(model=str(folder), env=EnvSource(id=TASK.env), engine=engine, train=train)
    group = Group(id=0, task=TASK, state=GroupState.TAKEN, size=2, trajectories=tuple(members))
    report = Learner(config.learner, folder).step([group], step_of=lambda _: 0)
    assert report.routing is not None and report.routing.missing == 0
    sizes = [sum(len(turn.prompt_ids + turn.token_ids) for turn in member.turns) for member in members]
    assert report.routing.replayed == sum(sizes) - len(sizes)  # a row's last token predicts nothing
    assert report.mismatch_max is not None and report.mismatch_max < 1e-4
