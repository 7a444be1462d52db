"""Samples a conversation's turns at a server that gives no tokens: any OpenAI-compatible endpoint.

Such a turn is recorded as its text. It has no tokens, since a tokenizer's answer for a text need not be what was
sampled (law 1). Never knows a renderer: the client's messages go on as they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from agentrl.engine.scoring_client import ScoringClient
from agentrl.env.agent_programs.model_apis import Conversation
from agentrl.env.tools.parsers import DEFAULT
from agentrl.env.tools.tools import clean_text
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import Generation, Json
from agentrl.run.evaluation.served_model import ServedModel, was_cut_by
from agentrl.run.recording.recorded_env import RecordedConversation

_RENAMED: Final = {"max_output_tokens": "max_tokens"}  # keys of the other APIs, as chat completions call them


class TextUpstream:
    """Engine and renderer of one conversation, `env`, at the server of `client`."""

    stop_token_ids: tuple[int, ...] = ()
    tool_format: str | None = DEFAULT

    def __init__(self, client: ScoringClient, env: RecordedConversation, *, deadline_s: float) -> None:
        self._client, self._env, self._deadline_s = client, env, deadline_s
        self._options, self._text = dict[str, Json](), ""
        env.template_format = DEFAULT  # the calls that the server gives are written so, and read so again
        self._model = ServedModel(client, env, deadline_s=deadline_s, options=self._options)

    def start(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> tuple[int, ...]:
        """No tokens: nobody knows them."""
        return ()

    def extend(self, sampled: Sequence[int], messages: Sequence[Any], tools: Sequence[Any] = ()) -> tuple[int, ...]:
        """No tokens: nobody knows them."""
        return ()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the last answer."""
        return self._text

    async def generate(self, request: GenerateRequest) -> Generation:
        """The server's answer to the request that waits; empty if its client has gone on. Raises EngineError."""
        self._text, finish_reason = "", "stop"
        conversation = await self._env.waiting()
        if conversation is not None:
            self._options.clear()
            self._options.update(_options(conversation))
            if conversation.is_raw:
                return await self._continued(conversation)
            model_answer = await self._model.answer(list(conversation.messages), [], conversation.tools)
            self._text, finish_reason = model_answer.text, "length" if model_answer.was_cut else "stop"
        return Generation(token_ids=(), logprobs=(), spans=(), finish=finish_reason)

    async def _continued(self, conversation: Conversation) -> Generation:
        prompt = "".join(message["content"] for message in conversation.messages)
        text, finish_reason = await self._client.continuation(prompt, deadline_s=self._deadline_s, **self._options)
        self._text = clean_text(text)
        was_cut = was_cut_by(finish_reason, self._client.url)
        return Generation(token_ids=(), logprobs=(), spans=(), finish="length" if was_cut else "stop")

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """The answer as one chunk without tokens; raises as `generate`."""
        yield Chunk.whole(await self.generate(request))

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""


def _options(conversation: Conversation) -> dict[str, Json]:
    server_options = {
        _RENAMED.get(option_name, option_name): option_value
        for option_name, option_value in conversation.sampling.items()
    }
    return {**server_options, **({"stop": list(conversation.stops)} if conversation.stops else {})}
