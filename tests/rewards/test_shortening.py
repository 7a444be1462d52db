"""A text that is too long for the server that scores it is scored in part, or as the lowest, as is one without a score:
never dropped."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from each_case import each_case

from agentrl.config.sections import RewardSource
from agentrl.errors import EngineRefusal
from agentrl.records import Message
from agentrl.rewards import Judge, RewardModel, ScoringClient
from agentrl.rewards.scorer import rewarder_of
from agentrl.rewards.transcripts import shortened
from agentrl.rewards.verdict import Verdict
from agentrl.testing.scoring import FakeScoring
from tests.rewards.conftest import episode, turn

SCRIPTED = Verdict(0.5, reason="scripted")
ASKED: Message = {"role": "user", "content": "Write a poem."}


def client_of(fake: httpx.AsyncBaseTransport) -> ScoringClient:
    return ScoringClient("http://scorer", transport=fake, deadline_s=10.0)


def contents(messages: Sequence[Message]) -> list[str]:
    return [message["content"] for message in messages]


def test_the_longest_messages_lose_their_middle_and_say_so() -> None:
    work: Message = {"role": "assistant", "content": "a" * 500 + "b" * 1_000 + "c" * 500}
    short = shortened([ASKED, work, ASKED], 1_000, "MARK ")
    kept = (1_000 - 26) // 2
    left_out = f"\nMARK {2_000 - 2 * kept} characters are left out here\n"
    assert contents(short) == ["Write a poem.", "a" * kept + left_out + "c" * kept, "Write a poem."]
    both = shortened([work, {**work, "name": "other"}], 200)
    assert contents(both) == ["a" * 50 + "\n1900 characters are left out here\n" + "c" * 50] * 2
    assert both[1] == {"role": "assistant", "content": contents(both)[1], "name": "other"}
    assert shortened([ASKED, work], 2_013) == [ASKED, work] and shortened([], 5) == []
    assert contents(shortened([work], 0)) == ["\n2000 characters are left out here\n"]


@pytest.mark.parametrize("chars", [6_000, 60_000])
async def test_a_judge_reads_the_ends_of_what_is_too_long_and_is_told_so(chars: int) -> None:
    fake = FakeScoring("no verdict", 7, longest=4_000)
    work: Message = {"role": "assistant", "content": "The sea. " + "x" * chars + " It looks at me."}
    assert (await Judge(client_of(fake), rubric="Is it good?").score([ASKED, work])).points == 7
    shown = fake.requests[-1][1]["messages"][1]["content"]
    boundary = shown[:16]
    assert len(shown) > 1_000, "half as long each time, and no shorter"
    assert "Write a poem." in shown and "The sea. xx" in shown and "xx It looks at me." in shown
    assert f"\n{boundary} {chars}"[:18] in shown and "characters are left out here\n" in shown
    assert f"begins with {boundary} and a number of characters, these are missing." in shown


@pytest.mark.parametrize(
    ("status", "answer", "why"),
    [
        (422, {"error": {"message": "not this"}}, "not this"),
        (200, {"choices": [{"message": {"content": "Hm, " * 300}}], "data": [{"probs": [math.nan]}]}, "no verdict"),
        (200, {"choices": []}, "no chat completion"),
    ],
)
async def test_what_has_no_score_however_it_is_asked_gets_the_lowest_points(
    status: int, answer: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the text: any other one has a score."""
    scored = FakeScoring(3, outputs=(3.0,))

    async def handler(request: httpx.Request) -> httpx.Response:
        if b"Hello." in request.content:
            return await scored.handle_async_request(request)
        return httpx.Response(status, content=json.dumps(answer))

    client = client_of(httpx.MockTransport(handler))
    work: list[Message] = [ASKED, {"role": "assistant", "content": "x" * 900}]
    with caplog.at_level(logging.WARNING):
        found = await Judge(client, rubric="Is it good?", scale=(-3, 5)).score(work)
    assert (found.points, found.score) == (-3, 0.0) and "another text" in found.reason
    assert "a text of 913 characters has no score, and another one has" in caplog.text and why in caplog.text
    assert await RewardModel(client).score(work) == 0.0
    assert await RewardModel(client, refused=-2.0).score(work) == -2.0


@each_case("status", [400, 413, 422])
async def test_a_server_that_refuses_whatever_it_is_asked_has_failed(status: int) -> None:
    """The policy cannot have caused that: no such model, say."""
    client = client_of(httpx.MockTransport(lambda _: httpx.Response(status, json={"error": "no such model"})))
    with pytest.raises(EngineRefusal, match="no such model"):
        await Judge(client, rubric="Is it good?").score("a text")
    with pytest.raises(EngineRefusal, match="no such model"):
        await RewardModel(client).score([ASKED])


@pytest.mark.parametrize(
    ("source", "value"), [({"kind": "prm"}, 1.5), ({"kind": "judge", "rubric": "Good?"}, SCRIPTED)]
)
async def test_an_action_too_long_for_a_source_is_scored_at_the_first_call(
    source: dict[str, Any], value: float | Verdict
) -> None:
    fake = FakeScoring(5, outputs=(1.5,), longest=3_000)
    settings = RewardSource(**{"source": "steps", "url": "http://scorer", **source})
    scored = episode((ASKED,), turn(0, "x" * 50_000))
    assert await rewarder_of(settings, transport=fake)(scored) == value
    assert 3 <= len(fake.requests) <= 7
