"""Judges and reward models on real servers: the numbers are transformers' own, the format is held by the server.

A random model judges nothing; what is tested of it is the way of a verdict, there and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import trio
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from agentrl.engine.client import EngineClient
from agentrl.engine.scoring_client import ScoringClient
from agentrl.errors import EngineError, ScoreError
from agentrl.records import Message
from agentrl.rewards import Judge, RewardModel

from .conftest import START_S, Server
from .policy import make_reward_model

pytestmark = pytest.mark.vllm

SAID: list[Message] = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4. <b>"}]


@pytest.fixture(scope="module")
def reward_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("reward")
    model = make_reward_model(folder / "model")
    server = Server(model, folder / "server", extra=("--runner", "pooling", "--stream-interval", "1"))
    server.start()
    try:
        trio.run(_answers, server)
        yield server
    finally:
        server.close()


async def _answers(server: Server) -> None:
    client = EngineClient(server.url)
    with trio.fail_after(START_S):
        while not await client.healthy(deadline_s=60.0):
            assert not server.ended(), server.log.read_text()
            await trio.sleep(0.1)
    await client.aclose()


async def test_a_reward_is_transformers_own(reward_server: Server) -> None:
    folder = reward_server.spec.model
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rewards = RewardModel(ScoringClient(reward_server.url, deadline_s=60.0))

    def expected(ids: list[int]) -> float:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, 0].item()

    ids = list(range(40, 90))
    found = [await rewards.score_raw(ids), await rewards.score_raw("a text"), await rewards.score(SAID)]
    rendered = tokenizer.encode("2 + 2? It is 4. <\N{WORD JOINER}b> ")
    wanted = [expected(ids), expected(tokenizer.encode("a text")), expected(rendered)]
    assert found == pytest.approx(wanted, abs=1e-3)
    assert len({round(number, 2) for number in wanted}) == 3  # they can be told apart
    activated = RewardModel(ScoringClient(reward_server.url), activation=True)
    assert await activated.score_raw(ids) == pytest.approx(torch.tensor(wanted[0]).sigmoid().item(), abs=1e-3)


async def test_a_guided_judge_answers_in_its_format(server: Server) -> None:
    judge = Judge(
        ScoringClient(server.url, deadline_s=60.0),
        rubric="Is it right?",
        scale=(1, 5),
        attempts=1,
        options={"max_tokens": 800, "temperature": 1.0},
    )
    for _ in range(2):
        judgement = await judge.score(SAID)
        assert judgement.points in range(1, 6)
        assert judgement.score == (judgement.points - 1) / 4


async def test_a_judge_left_alone_gives_no_verdict(server: Server) -> None:
    client = ScoringClient(server.url, deadline_s=60.0)
    with pytest.raises(ScoreError, match="no verdict"):
        await Judge(client, rubric="Is it right?", guided=False, attempts=1, options={"max_tokens": 8}).score(SAID)


async def test_a_server_of_the_other_kind_refuses(server: Server, reward_server: Server) -> None:
    with pytest.raises(EngineError, match="answered 404"):
        await RewardModel(ScoringClient(server.url)).score_raw("x")
    with pytest.raises(EngineError, match="answered 404"):
        await Judge(ScoringClient(reward_server.url), rubric="Is it right?").score(SAID)
