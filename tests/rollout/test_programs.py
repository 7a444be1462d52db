"""An agent program that knows an HTTP API only, played by an engine: journaled are the tokens that were sampled."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from agentrl.engine.rendering.renderer import Renderer
from agentrl.env.agent_programs import ProgramEnv
from agentrl.env.agent_programs.session import Session
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import StopReason, context_ids
from agentrl.rollout.episode import play
from agentrl.store import RunStore
from tests.parts.fake_engine import FakeEngine

from .conftest import said


async def test_law_1_a_program_that_sees_text_is_trained_on_the_tokens_that_were_sampled(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer
) -> None:
    heard: list[str] = []

    async def program(session: Session) -> float:
        """Two requests of one conversation, then one that remembers nothing of it."""
        async with httpx.AsyncClient(base_url=session.base_url, timeout=300, trust_env=False) as client:

            async def ask(messages: list[Any]) -> dict[str, Any]:
                answer = await client.post("v1/chat/completions", json={"messages": messages, "model": "m"})
                heard.append(answer.json()["choices"][0]["message"]["content"])
                return answer.json()["choices"][0]["message"]

            first = [{"role": "user", "content": "go"}]
            await ask([*first, await ask(first), {"role": "user", "content": "on"}])
            await ask([{"role": "user", "content": "summary"}])
        return 0.5

    engine, claim, env = FakeEngine(version=1), claim_one(), ProgramEnv(program)
    ending = await play(claim, context(env, engine, max_observation_bytes=5_000_000))
    assert env.observation_bytes == 5_000_000, "by which it bounds the bodies of requests"
    trajectory = store.reads.trajectory(claim.episode_id)
    assert (ending.stop_reason, trajectory.outcome) == (StopReason.DONE, 0.5)
    turns = trajectory.turns
    assert heard == [turn.text for turn in turns] and len(turns) == 3
    sampled = [request.token_ids for request in engine.requests]
    assert sampled == [context_ids(turns, index) for index in range(3)]
    assert sampled[0] == renderer.start(said("go")) and sampled[2] == renderer.start(said("summary"))
    whole = sampled[0] + turns[0].token_ids
    assert sampled[1][: len(whole)] == whole, "the answer came back as text and goes on as its tokens"
    assert [turn.parent for turn in turns] == [None, 0, None]


async def test_law_3_a_program_that_sleeps_on_the_policys_word_is_scored(
    store: RunStore, claim_one: Any, context: Any, mock_clock: trio.testing.MockClock
) -> None:
    asleep = trio.Event()

    async def program(session: Session) -> float:
        async with httpx.AsyncClient(base_url=session.base_url, timeout=300, trust_env=False) as client:
            await client.post("v1/chat/completions", json={"messages": [{"role": "user", "content": "go"}]})
            asleep.set()
            await trio.sleep(75)
        return 1.0

    async def pass_time() -> None:
        await asleep.wait()
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(61)

    claim = claim_one()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pass_time)
        ending = await play(claim, context(ProgramEnv(program), step_deadline_s=60.0))
    assert (ending.stop_reason, store.reads.trajectory(claim.episode_id).outcome) == (StopReason.TIME_LIMIT, 0.0)


class Slow(FakeEngine):
    """An engine that answers its second request when `answers` is set; `asked` is set before."""

    def __init__(self) -> None:
        super().__init__(version=1)
        self.asked, self.answers = trio.Event(), trio.Event()

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if len(self.requests) == 1:
            self.asked.set()
            await self.answers.wait()
        async for chunk in super().stream(request):
            yield chunk


@pytest.mark.parametrize("asks_again", [False, True])
async def test_law_3_a_program_that_waits_after_we_were_slow_is_not_scored_for_it(
    asks_again: bool, store: RunStore, claim_one: Any, context: Any, mock_clock: trio.testing.MockClock
) -> None:
    """Its client leaves while the engine samples, and it waits for two minutes. If it has the answer by then, that time
    is the policy's."""
    engine, asleep = Slow(), trio.Event()

    async def program(session: Session) -> float:
        async with httpx.AsyncClient(base_url=session.base_url, timeout=999, trust_env=False) as client:

            async def ask(text: str) -> None:
                await client.post("v1/chat/completions", json={"messages": [{"role": "user", "content": text}]})

            await ask("first")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, "second")
                await engine.asked.wait()
                nursery.cancel_scope.cancel()
            engine.answers.set()
            if asks_again:
                await ask("second")
            asleep.set()
            await trio.sleep(120)
        return 1.0

    async def pass_time() -> None:
        await asleep.wait()
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(61)

    claim = claim_one()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pass_time)
        ending = await play(claim, context(ProgramEnv(program), engine, step_deadline_s=60.0))
    assert ending.stop_reason is (StopReason.TIME_LIMIT if asks_again else StopReason.ENV_FAILED), ending
