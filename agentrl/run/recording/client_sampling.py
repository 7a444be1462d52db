"""Samples the turns of a recorded conversation as its client asks for them: temperature, limits, stop texts.

Owns which keys of a request about sampling are honoured, and what their values may be. Never knows a conversation's
words.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from agentrl.engine.router.turn_request import Decode, finish_of
from agentrl.env.agent_programs.model_apis import Conversation, SamplingKeys
from agentrl.env.agent_programs.request_checks import UnservedRequest, shown
from agentrl.protocols import Chunk, Engine, GenerateRequest
from agentrl.records import Generation, SamplingParams

_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0 - 1e-6),
    "top_k": (-1, 1 << 30),
    **dict.fromkeys(_LIMITS, (1, 1 << 30)),
}
_WHOLE: Final = ("top_k", *_LIMITS)

KEYS: Final = SamplingKeys(frozenset(_BOUNDS), "the recorder does not pass it to the engine")


def check_sampling(conversation: Conversation) -> None:
    """Raise UnservedRequest for a value that no engine can sample with."""
    for option, value in conversation.sampling.items():
        lowest, highest = _BOUNDS[option]
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not lowest <= value <= highest or (option in _WHOLE and value != int(value)):
            kind = "a whole number" if option in _WHOLE else "a number"
            raise UnservedRequest(f"{option} = {shown(value)}: give {kind} from {lowest:g} to {highest:g}")


def sampling_of(conversation: Conversation, default: SamplingParams) -> SamplingParams:
    """The sampling that a client asks for, within the limits of `default`."""
    chosen_values: dict[str, Any] = {
        option: value for option, value in conversation.sampling.items() if option not in _LIMITS
    }
    if "top_k" in chosen_values:
        chosen_values["top_k"] = int(chosen_values["top_k"])
    token_limits = [int(conversation.sampling[option]) for option in _LIMITS if option in conversation.sampling]
    stop_texts = tuple(stop_text for stop_text in conversation.stops if stop_text)
    return replace(
        default, max_tokens=min(default.max_tokens, *token_limits, default.max_tokens), stop=stop_texts, **chosen_values
    )


@dataclass(frozen=True, slots=True)
class ClientSampling:
    """`engine`, whose turns are sampled as the client of the `waiting` conversation wants it: that gives None if the
    client has gone on. `decode` gives the text of tokens, `on_request` gets the tokens before each turn."""

    engine: Engine
    waiting: Callable[[], Awaitable[Conversation | None]]
    decode: Decode
    on_request: Callable[[int], None]

    async def generate(self, request: GenerateRequest) -> Generation:
        """The rest of the turn; raises as the engine does."""
        request, empty_rest = await self._for_client(request)
        return empty_rest or await self.engine.generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """The rest of the turn in one chunk; raises as the engine does."""
        yield Chunk.whole(await self.generate(request))

    async def aclose(self) -> None:
        """Do nothing: the engine belongs to whoever gave it."""

    async def _for_client(self, request: GenerateRequest) -> tuple[GenerateRequest, Generation | None]:
        """The request as the client asks for it; and the empty rest of a turn that is whole already, because its last
        token was journaled and the turn was not."""
        self.on_request(len(request.token_ids) - request.sampled)
        conversation = await self.waiting()
        if conversation is None:
            return request, None
        # The limits that come with the request are those of the rest, the client's are those of the turn.
        turn_limits = replace(request.sampling, max_tokens=request.sampling.max_tokens + request.sampled)
        sampling = sampling_of(conversation, turn_limits)
        sampled_ids = request.token_ids[len(request.token_ids) - request.sampled :]
        finish_reason = finish_of(sampled_ids, sampling.max_tokens, sampling, self.decode) if sampled_ids else None
        if finish_reason is not None:
            return request, Generation(token_ids=(), logprobs=(), spans=(), finish=finish_reason)
        rest_sampling = replace(sampling, max_tokens=sampling.max_tokens - request.sampled)
        return replace(request, sampling=rest_sampling), None
