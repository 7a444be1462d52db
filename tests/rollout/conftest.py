"""A byte tokenizer with a ChatML template, a store, and environments that do what a test wants of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentrl.config import Rollout
from agentrl.engine.rendering.renderer import Renderer
from agentrl.records import Message, StopReason, Task
from agentrl.rollout.context import RolloutContext
from agentrl.store import Claim, RunStore
from agentrl.store.journal_writer import JournalWriter
from tests.parts.fake_engine import FakeEngine

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of bytes, with two special tokens and a template."""
    special = ["<|im_start|>", "<|im_end|>"]
    vocabulary = {token: at for at, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(write_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.create(tmp_path / "store.sqlite", "{}") as opened:
        opened.versions.confirm_version(opened.versions.mint_version(0))
        yield opened


Answer = tuple[Sequence[Message], float, bool, bool, dict[str, Any]]


def said(text: str) -> tuple[Message, ...]:
    return (Message(role="user", content=text),)


class ScriptedEnv:
    """Answers action k with `answers[k]`; an answer that is an exception is raised, a callable awaited first."""

    replayable = True

    def __init__(self, answers: Sequence[Any], start: str = "go", end: dict[str, Any] | None = None) -> None:
        self.answers, self.start, self.end = list(answers), start, end or {}
        self.actions: list[str] = []
        self.charged: list[int] = []
        self.ended: StopReason | None = None
        self.closed = 0

    def tool_schemas(self) -> list[dict[str, Any]]:
        return []

    async def areset(self, *, seed: int | None = None, options: Any = None) -> tuple[tuple[Message, ...], dict]:
        self.actions = []
        return said(self.start), {}

    async def astep(self, action: str) -> Any:
        answer = self.answers[len(self.actions)]
        self.actions.append(action)
        if isinstance(answer, BaseException):
            raise answer
        return await answer() if callable(answer) else answer

    async def aend(self, reason: StopReason) -> dict[str, Any]:
        self.ended = reason
        return self.end

    def charge_tokens(self, count: int) -> None:
        self.charged.append(count)

    async def aclose(self) -> None:
        self.closed += 1


def going(text: str = "on", reward: float = 0.0, **info: Any) -> Answer:
    return said(text), reward, False, False, info


def done(outcome: float = 1.0, reward: float = 0.0, **info: Any) -> Answer:
    return (), reward, True, False, {"outcome": outcome, "success": outcome > 0, **info}


@pytest.fixture
def claim_one(store: RunStore) -> Callable[..., Claim]:
    """A claimed episode of a training group of two."""

    def claim(worker: str = "w", now: float = 0.0) -> Claim:
        if not store.groups.counts():
            store.groups.add_groups([Task(index=0, env="test/Env", seed=3)], size=2, purpose="train")
        return store.leases.claim(worker, 1, lease_s=10, now=now)[0]

    return claim


@pytest.fixture
def context(renderer: Renderer, store: RunStore) -> Callable[..., RolloutContext]:
    """`context(env, **settings)`: a context at a fake engine that plays the given environment."""

    def make(
        env: ScriptedEnv, engine: FakeEngine | None = None, rewarder: Any = None, **settings: Any
    ) -> RolloutContext:
        return RolloutContext(
            engine=engine or FakeEngine(version=1),
            renderer=renderer,
            store=JournalWriter(store, inline=True, disk_wait_s=60.0),
            settings=Rollout(**settings),
            make_env=lambda task: env,
            rewarder=rewarder,
        )

    return make
