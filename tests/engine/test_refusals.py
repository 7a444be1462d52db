"""Which refusals mean that a conversation is too long for the model: bodies as public servers write them."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.engine.refusals import codes_of, is_context_full, words_of

TOO_LONG: list[tuple[int, dict[str, Any]]] = [
    (400, {"error": {"message": "no", "type": "invalid_request_error", "code": "context_length_exceeded"}}),  # OpenAI
    (400, {"object": "error", "message": "This model's maximum context length is 64 tokens. However", "code": 400}),
    (400, {"error": {"message": "The decoder prompt (length 98) is longer than the maximum model length of 96."}}),
    (400, {"error": {"message": "The input (45 tokens) is longer than the model's context length (40 tokens)."}}),
    (400, {"error": {"code": 400, "message": "no", "type": "exceed_context_size_error", "n_ctx": 9}}),  # llama.cpp
    (
        500,
        {"error": {"code": 500, "message": "the request exceeds the available context size", "type": "server_error"}},
    ),
    (422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 40", "error_type": "x"}),
    (422, {"error": "Input validation error: `inputs` must have less than 95 tokens. Given: 100"}),  # TGI
    (400, {"type": "error", "error": {"type": "x", "message": "prompt is too long: 205 tokens > 200 maximum"}}),
    (400, {"error": {"message": "The input token count (12) exceeds the maximum number of tokens allowed (10)."}}),
    (400, {"message": "Prompt contains 40 tokens, too large for model with 32 maximum context length"}),  # Mistral
    (400, {"message": "too many tokens: total number of tokens in the prompt cannot exceed 4081"}),  # Cohere
    (400, {"message": "Input is too long for requested model."}),  # Bedrock
    (400, {"error": {"message": "litellm.ContextWindowExceededError: no", "type": None, "code": "400"}}),
    (400, {"error": {"message": "Provider returned error", "metadata": {"raw": "maximum context length is 9"}}}),
    (400, {"error": {"message": "token_ids: 70 tokens leave no room to generate; the context holds 64"}}),  # ours
    (413, {"error": "Payload too large"}),
]

OTHER: list[tuple[int, dict[str, Any]]] = [
    (400, {"error": {"message": "role tool is not supported by this model"}}),
    (400, {"error": {"message": "max_tokens: 9000 > 8192, which is the maximum allowed number of output tokens"}}),
    (400, {"error": {"message": "max_tokens is too large: 9000. This model supports at most 4096 completion tokens"}}),
    (400, {"error": {"message": "'messages[3].id': string too long. Expected a string with maximum length 40"}}),
    (400, {"error": {"message": "Conversation roles must alternate user/assistant/user/assistant/..."}}),
    (400, {"error": {"message": "The prompt was filtered", "code": "content_filter"}}),
    (400, {"error": {"message": "unknown parameter context_length"}}),
    (400, {"error": {"message": "image exceeds the maximum size of 5 MB"}}),
    (422, {"detail": [{"msg": "Field required", "input": {"messages": "the maximum context length is 9"}}]}),  # an echo
]


@pytest.mark.parametrize(("bodies", "is_full"), [(TOO_LONG, True), (OTHER, False)])
def test_a_refusal_for_length_is_told_from_every_other(bodies: list[tuple[int, dict[str, Any]]], is_full: bool) -> None:
    for status, body in bodies:
        assert is_context_full(status, codes_of(body), words_of(body)) is is_full, body
