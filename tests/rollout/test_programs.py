"""An agent program that knows an HTTP API only, played by an engine: journaled are the tokens that were sampled."""

from __future__ import annotations

from typing import Any

import httpx

from agentrl.engine.rendering.renderer import Renderer
from agentrl.env.agent_programs import ProgramEnv
from agentrl.env.agent_programs.session import Session
from agentrl.records import StopReason, context_ids
from agentrl.rollout.episode import play
from agentrl.store import RunStore
from agentrl.testing.engine import FakeEngine

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

    engine, claim = FakeEngine(version=1), claim_one()
    ending = await play(claim, context(ProgramEnv(program), engine))
    trajectory = store.trajectory(claim.episode_id)
    assert (ending.stop_reason, trajectory.outcome) == (StopReason.DONE, 0.5)
    turns = trajectory.turns
    assert heard == [turn.text for turn in turns] and len(turns) == 3
    sampled = [request.token_ids for request in engine.requests]
    assert sampled == [context_ids(turns, index) for index in range(3)]
    assert sampled[0] == renderer.start(said("go")) and sampled[2] == renderer.start(said("summary"))
    whole = sampled[0] + turns[0].token_ids
    assert sampled[1][: len(whole)] == whole, "the answer came back as text and goes on as its tokens"
    assert [turn.parent for turn in turns] == [None, 0, None]
