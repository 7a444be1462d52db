"""An environment that answers with more than a model can read costs its own episode, and no other one's time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from agentrl.engine.rendering.renderer import Renderer
from agentrl.records import StopReason
from agentrl.rollout.episode import play
from agentrl.store import RunStore

from .conftest import ScriptedEnv, done, going, said


def size(messages: Any) -> int:
    return sum(len(message["content"].encode()) for message in messages)


async def test_an_observation_is_cut_to_what_the_run_takes_and_flagged(
    store: RunStore, claim_one: Any, context: Any
) -> None:
    huge = "é" * 1_000_000
    answers = [(said("short") + said(huge) + said(huge), 0.0, False, False, {"kept": 1}), going("small"), done()]
    claim = claim_one()
    ending = await play(claim, context(ScriptedEnv(answers), max_observation_bytes=1000, max_context=100_000))
    assert ending.stop_reason is StopReason.DONE
    first, second, _ = (turn.step for turn in store.reads.trajectory(claim.episode_id).turns)
    assert first is not None
    assert second is not None
    assert first.observation[0]["content"] == "short"
    assert all(
        "[cut: " in message["content"] and "of 2000000 bytes shown]" in message["content"]
        for message in first.observation[1:]
    )
    assert 500 < size(first.observation) < 1100
    assert first.info == {"kept": 1}
    assert first.observation_cut == pytest.approx(4_000_000 - 1000, abs=500)
    assert (size(second.observation), second.observation_cut) == (5, 0)


async def test_prompt_and_rewritten_history_are_cut_too(store: RunStore, claim_one: Any, context: Any) -> None:
    rewritten = going(history=list(said("y" * 100_000)))
    claim = claim_one()
    await play(claim, context(ScriptedEnv([rewritten, done()], start="x" * 100_000), max_observation_bytes=600))
    trajectory = store.reads.trajectory(claim.episode_id)
    assert size(trajectory.start) < 700
    assert trajectory.turns[0].step is not None
    assert trajectory.turns[0].step.history is not None
    assert size(trajectory.turns[0].step.history) < 700
    assert len(trajectory.turns[1].prompt_ids) < 800


async def test_without_a_setting_the_context_says_how_much_is_too_much(
    store: RunStore, claim_one: Any, context: Any
) -> None:
    claim = claim_one()
    ending = await play(claim, context(ScriptedEnv([going("x" * 1_000_000), done()]), max_context=500))
    assert ending.stop_reason is StopReason.CONTEXT_LIMIT
    (turn,) = store.reads.trajectory(claim.episode_id).turns
    assert turn.step is not None
    assert size(turn.step.observation) < 16 * 500 + 100


async def test_large_answers_are_tokenized_beside_the_loop(
    claim_one: Any, context: Any, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def extend(*args: Any, **tools: Any) -> tuple[int, ...]:
        threads.append(threading.current_thread() is threading.main_thread())
        return Renderer.extend(renderer, *args, **tools)

    monkeypatch.setattr(renderer, "extend", extend)
    await play(claim_one(), context(ScriptedEnv([going("x" * 50_000), going("short"), done()]), max_context=200_000))
    assert threads == [False, True]
