"""What a policy makes its agent program send: no request, to any API and in any dialect, takes an episode out of the
loss (law 3).

Requests are mutations of sound ones: values of another kind, numbers and texts that JSON cannot carry, keys that are
gone, said twice or not known. `AGENTRL_FUZZED_REQUESTS=2000` says how many the long test sends.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from agentrl.engine.rendering.renderer import Renderer
from agentrl.env.agent_programs import ProgramEnv
from agentrl.env.agent_programs.session import Session
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import FORMATS, get_format
from agentrl.protocols import GenerateRequest
from agentrl.rollout.episode import play
from agentrl.store import Claim, RunStore
from tests.parts.fake_engine import FakeEngine

from .conftest import write_tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": ["string", "null"], "enum": ["1"]}, "b": {"anyOf": [{"type": "integer"}]}},
    "required": ["a"],
}
FUNCTION = {"name": "f", "description": "d", "parameters": PARAMETERS}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "1"}'}}
SOUND: dict[str, Any] = {
    "v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "t"},
            {"role": "tool", "content": "y", "tool_call_id": "c", "name": "f"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "stop": ["z"],
        "stream": False,
        "stream_options": {"include_usage": True},
        "n": 1,
    },
    "v1/responses": {
        "instructions": "s",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "function_call", "name": "f", "arguments": '{"a": "1"}', "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": "y"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "text": {"format": {"type": "text"}},
        "stream": True,
    },
    "v1/messages": {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "1"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "y"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": PARAMETERS}],
        "stop_sequences": ["z"],
        "max_tokens": 9,
    },
}
RAW = {
    "@nan": "NaN",
    "@infinite": "1e999",
    "@large": "9" * 5_000,
    "@surrogate": '"\\ud800"',
    "@deep": "[" * 99 + "]" * 99,
}
VALUES: Sequence[Any] = (
    *RAW,
    *(None, True, False, 0, -1, 2**70, 0.5, "", "x", "a<b>\n\x00", "<tool_call>", "<|im_end|>", "system", "none"),
    *([], {}, [[]], [{}], [5], {"a": 5}, {"type": "image_url"}, ["x"] * 65, {"type": "function"}, {"x": [{}]}),
)
STRICT = (
    "{% for tool in tools or [] %}{{ tool.function.name + tool.function.description }}:"
    "{% for key, value in tool.function.parameters.properties.items() %} {{ key }}={{ value.type + '' }}"
    "{% endfor %}\n{% endfor %}"
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message stands first') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.items() | list }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """All containers within a JSON value, each with one of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *places(value[key]))]


def hostile(rng: random.Random) -> tuple[str, bytes]:
    """A request, by its path and body."""
    path = rng.choice(list(SOUND))
    body = copy.deepcopy(SOUND[path])
    for _ in range(rng.randint(1, 3)):
        if not (found := places(body)):
            break
        container, key = rng.choice(found)
        act = rng.randrange(5)
        if act == 0:
            del container[key]
        elif act == 1 and isinstance(container, list):
            container[key:key] = [copy.deepcopy(container[key])] * rng.choice((1, 2, 50))
        elif act == 1:
            container[
                rng.choice(("x", "functions", "tool_choice", "type", "tool_calls", "images", "$ref", "$schema"))
            ] = copy.deepcopy(rng.choice(VALUES))
        else:
            container[key] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(body)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return path, text.encode()


class Scored:
    """Plays episodes whose program sends hostile requests, and says what became of them."""

    def __init__(self, folder: Path, template: str | None) -> None:
        self._folder = folder
        write_tokenizer(folder)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        self.renderer = Renderer(folder)
        self.sent = self.served = 0

    async def play(self, seed: int, count: int, claim_of: Callable[[RunStore], Claim], context: Any) -> Any:
        rng = random.Random(seed)
        dialect = rng.choice(sorted(FORMATS))
        requests = [hostile(rng) for _ in range(count)]
        last: list[bytes] = []

        async def program(session: Session) -> float:
            async with httpx.AsyncClient(base_url=session.base_url, timeout=60, trust_env=False) as client:
                first = {"messages": [{"role": "user", "content": "go"}]}
                assert (await client.post("v1/chat/completions", json=first)).status_code == 200
                for path, body in requests:
                    last[:] = [body]
                    answer = await client.post(path, content=body)
                    self.sent += 1
                    self.served += answer.status_code == 200
                    assert answer.status_code in (200, 400), (answer.status_code, answer.text)
            return 0.0

        calls = [get_format(dialect).write(ToolCall("f", {"a": "1", "b": 2})), "hello", "<tool_call>{"]

        def script(request: GenerateRequest) -> Sequence[int]:
            tokens = self.renderer.start([{"role": "user", "content": rng.choice(calls)}])
            return (*tokens[6:-13], *request.sampling.stop_token_ids[:1])

        with RunStore.create(self._folder / f"{seed}.sqlite", "{}") as store:
            store.versions.confirm_version(store.versions.mint_version(0))
            env = ProgramEnv(program, tool_format=dialect, max_turns=1000)
            settings = {"max_context": 1_000_000, "max_tokens_per_turn": 1_000}
            ending = await play(
                claim_of(store), context(self.renderer, store, env, FakeEngine(script, version=1), settings)
            )
        assert ending.stop_reason.by_policy, (seed, dialect, ending, last)
        return ending


@pytest.fixture
def parts() -> tuple[Any, Any]:
    """How to claim an episode of a store, and the context to play it in."""
    from agentrl.config import Rollout
    from agentrl.records import Task
    from agentrl.rollout.context import RolloutContext
    from agentrl.store.journal_writer import JournalWriter

    def claim(store: RunStore) -> Claim:
        store.groups.add_groups([Task(index=0, env="test/Env", seed=3)], size=2, purpose="train")
        return store.leases.claim("w", 1, lease_s=3600, now=0.0)[0]

    def context(renderer: Renderer, store: RunStore, env: Any, engine: Any, settings: Any) -> RolloutContext:
        return RolloutContext(
            engine=engine,
            renderer=renderer,
            store=JournalWriter(store, inline=True, disk_wait_s=60.0),
            settings=Rollout(**settings),
            make_env=lambda task: env,
        )

    return claim, context


async def fuzzed(folder: Path, template: str | None, parts: tuple[Any, Any], count: int, first_seed: int) -> Scored:
    scored, seed = Scored(folder, template), first_seed
    while scored.sent < count:
        with trio.fail_after(120):
            await scored.play(seed, min(20, count - scored.sent), *parts)
        seed += 1
    return scored


@pytest.mark.medium
@pytest.mark.parametrize("template", [None, STRICT], ids=["any", "strict"])
async def test_law_3_no_hostile_request_takes_an_episode_out_of_the_loss(
    template: str | None, tmp_path: Path, parts: tuple[Any, Any]
) -> None:
    scored = await fuzzed(tmp_path, template, parts, 60, 1)
    assert scored.served >= 5, "not all of them are refused at the door"


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, STRICT], ids=["any", "strict"])
async def test_law_3_of_thousands_of_hostile_requests_none_does(
    template: str | None, tmp_path: Path, parts: tuple[Any, Any]
) -> None:
    count = int(os.environ.get("AGENTRL_FUZZED_REQUESTS", "2000")) // 2
    assert (await fuzzed(tmp_path, template, parts, count, 1_000)).sent >= count
