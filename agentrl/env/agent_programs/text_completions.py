"""OpenAI's older `/v1/completions`: a text that the policy goes on with, without a chat template around it.

The prompt is one message marked `raw`, so whatever reads a conversation reads this one too. A prompt that goes on from
an earlier one and its answer is known by its text (`agentrl.rollout.prompts`): the answer's tokens stay as they were
sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from agentrl.env.agent_programs.model_apis import (
    BOOKKEEPING,
    DONE,
    FORMS,
    NO_FORM,
    NO_LOGPROBS,
    SAMPLING,
    Api,
    Conversation,
    Fields,
    Reply,
    model_of,
    stop_texts_of,
    stream_options_of,
    usage_of,
)
from agentrl.env.agent_programs.request_checks import Refused, RequestKeys, UnservedRequest, always, not_in, shown
from agentrl.records import Json, Message

_MOST_TOKENS: Final = 16
"""The API's own limit for a request that names none."""


class TextCompletions(Api):
    """OpenAI's `/v1/completions`."""

    path = "/v1/completions"
    keys = RequestKeys(
        honoured=frozenset({"prompt", "echo", "stop", "stream", "stream_options", "model"}),
        sampling=SAMPLING | {"logit_bias"},
        bookkeeping=BOOKKEEPING,
        refused={
            "n": Refused(not_in(1), "n must be 1: an episode has one continuation"),
            "best_of": Refused(not_in(1), "answers are sampled, one at a time"),
            "use_beam_search": Refused(always, "answers are sampled, one at a time"),
            "suffix": Refused(always, "the policy goes on from a text, and knows nothing of what shall follow"),
            # A 0 asks for the log-probs of the sampled tokens, so only false asks for nothing.
            "logprobs": Refused(lambda value: value is not False, NO_LOGPROBS),
            "prompt_logprobs": Refused(lambda value: value is not False, NO_LOGPROBS),
            "return_token_ids": Refused(always, "answers are text"),
            "prompt_embeds": Refused(always, "give the prompt as a text"),
            "response_format": Refused(always, NO_FORM),
            **{key: Refused(always, NO_FORM) for key in FORMS},
        },
    )

    def _read(self, body: Fields) -> Conversation:
        prompt: Any = body.get("prompt")
        if isinstance(prompt, list) and len(cast("list[Any]", prompt)) == 1:
            (prompt,) = cast("list[Any]", prompt)
        if not isinstance(prompt, str) or not prompt:
            # Ids are refused, since the answer has none: a client would have to encode it itself to go on from it, and
            # would send back other tokens than were sampled.
            raise UnservedRequest(
                f"prompt = {shown(prompt)}: give one text; several texts and token ids are not served"
            )
        if not isinstance(body.get("echo") or False, bool):
            raise UnservedRequest(f"echo = {shown(body['echo'])}: give true or false")
        stream_options_of(body)
        return Conversation((Message(role="user", content=prompt, raw=True),), stops=stop_texts_of(body))

    def _sampling_of(self, body: Fields) -> Mapping[str, Json]:
        # In a run its file says how the policy samples, and the API's limit is no part of that.
        limit = {"max_tokens": _MOST_TOKENS} if "max_tokens" in self._sampling.honoured else {}
        return {**limit, **super()._sampling_of(body)}

    def write(self, reply: Reply, body: Fields) -> Json:
        only_choice = _choice(_echo(body) + reply.text, "length" if reply.is_cut else "stop")
        return {**_head(reply, body), "choices": [only_choice], "usage": usage_of(reply)}

    def piece(self, reply: Reply, body: Fields, text: str, *, is_first: bool) -> list[tuple[str, Json]]:
        piece_text = _echo(body) + text if is_first else text
        return [("", {**_head(reply, body), "choices": [_choice(piece_text, None)]})]

    def events(self, reply: Reply, body: Fields, *, sent: int = 0) -> list[tuple[str, Json]]:
        chunk_head = _head(reply, body)
        rest_text = reply.text[sent:] if sent else _echo(body) + reply.text
        event_chunks: list[Json] = [
            {**chunk_head, "choices": [_choice(rest_text, None)]},
            {**chunk_head, "choices": [_choice("", "length" if reply.is_cut else "stop")]},
        ]
        if stream_options_of(body).get("include_usage"):
            event_chunks.append({**chunk_head, "choices": [], "usage": usage_of(reply)})
        return [("", event_chunk) for event_chunk in event_chunks] + [("", DONE)]


def _echo(body: Fields) -> str:
    """The prompt, if the answer shall begin with it."""
    prompt: Any = body["prompt"]
    return (prompt if isinstance(prompt, str) else prompt[0]) if body.get("echo") else ""


def _choice(text: str, finish_reason: str | None) -> Json:
    return {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}


def _head(reply: Reply, body: Fields) -> dict[str, Any]:
    return {"id": f"cmpl-{reply.name}", "object": "text_completion", "created": 0, "model": model_of(body)}
