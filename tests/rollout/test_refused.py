"""A conversation that the chat template refuses: its own episode fails, or is the policy's fault; the others go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.engine.rendering.renderer import Renderer
from agentrl.env.image_parts import image_part
from agentrl.records import Message, StopReason
from agentrl.rollout.episode import play
from agentrl.rollout.render_messages import plain
from agentrl.store import RunStore

from .conftest import TEMPLATE, ScriptedEnv, done, going, write_tokenizer

STRICT = (
    "{% for message in messages %}"
    "{% if message.role == 'judge' %}{{ raise_exception('no judges here') }}{% endif %}"
    "{% if 'forbidden' in message.content %}{{ raise_exception('a word that may not be') }}{% endif %}"
    "{% if message.content.count('\"name\"') > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{% if 'deep' in message.content %}{{ message.content.nothing.at_all }}{% endif %}"
    "{% if 'huge' in message.content %}{{ 1 // 0 }}{% endif %}"
    "{% endfor %}" + TEMPLATE
)


@pytest.fixture
def strict(tmp_path: Path) -> Renderer:
    folder = write_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(STRICT)
    return Renderer(folder)


def calls(*names: str) -> Message:
    made = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": made}  # type: ignore[typeddict-item]


def judge(text: str) -> Message:
    return {"role": "judge", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text}


@pytest.mark.parametrize(
    ("start", "answer", "reason", "turns"),
    [
        ("forbidden", None, StopReason.ENV_FAILED, 0),
        ("deep", None, StopReason.ENV_FAILED, 0),
        ("huge", None, StopReason.ENV_FAILED, 0),
        ("go", going("forbidden"), StopReason.POLICY_FAULT, 1),
        ("go", ((judge("any"),), 0.0, False, False, {}), StopReason.ENV_FAILED, 0),
        ("go", going("on", history=[calls("a", "b"), judge("x")]), StopReason.ENV_FAILED, 0),
        ("go", going("on", history=[calls("a", "b")]), StopReason.POLICY_FAULT, 1),
    ],
    ids=["first", "undefined", "arithmetic", "a text later", "a role later", "both later", "its own calls"],
)
async def test_a_refused_conversation_fails_alone_and_names_the_reason(
    store: RunStore,
    claim_one: Any,
    context: Any,
    strict: Renderer,
    renderer: Renderer,
    start: str,
    answer: Any,
    reason: StopReason,
    turns: int,
) -> None:
    claim = claim_one()
    env = ScriptedEnv([answer], start=start)
    shared = context(env, max_context=100_000)
    ending = await play(claim, _with(shared, strict))
    assert ending.stop_reason is reason
    assert "chat template" in ending.detail
    assert env.closed == 1
    trajectory = store.reads.trajectory(claim.episode_id)
    assert trajectory.scored is reason.by_policy
    if reason.by_policy:
        assert len(trajectory.turns) == turns
    other = claim_one()
    assert (await play(other, context(ScriptedEnv([done()]), max_context=100_000))).stop_reason is StopReason.DONE


async def test_the_failure_names_the_environment_and_the_roles(claim_one: Any, context: Any, strict: Renderer) -> None:
    ending = await play(claim_one(), _with(context(ScriptedEnv([], start="forbidden")), strict))
    assert ending.detail.startswith("test/Env: the chat template of ")
    assert ending.detail.endswith("refuses these messages: a word that may not be (roles: user)")


@pytest.mark.parametrize("at", ["start", "answer", "history"])
async def test_a_model_that_reads_no_images_ends_the_episode_and_the_policy_is_not_to_blame(
    claim_one: Any, context: Any, at: str
) -> None:
    shown = [{"role": "user", "content": [image_part(np.zeros((2, 2, 3), dtype=np.uint8))]}]
    answer = going("on", history=shown) if at == "history" else (tuple(shown), 0.0, False, False, {})
    ending = await play(
        claim_one(),
        context(ScriptedEnv([answer], start=shown[0]["content"] if at == "start" else "go"), max_context=100_000),
    )
    assert ending.stop_reason is StopReason.ENV_FAILED
    assert "reads no images that are known here (give one of" in ending.detail
    assert "and a message has one" in ending.detail


def test_plain_messages_keep_the_order_of_roles_and_nothing_that_a_policy_writes() -> None:
    given: list[Message] = [{"role": "system", "content": "s"}, calls("a", "b"), tool("x"), tool("y")]
    given.append({"role": "user", "content": [{"type": "text", "text": "z"}]})  # type: ignore[typeddict-item]
    assert plain(given) == [
        {"role": "system", "content": "."},
        {
            "role": "assistant",
            "content": ".",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "tool", "arguments": {}}}],
        },
        {"role": "tool", "content": "."},
        {"role": "user", "content": "."},
    ]


def _with(context: Any, renderer: Renderer) -> Any:
    from dataclasses import replace

    return replace(context, renderer=renderer)
