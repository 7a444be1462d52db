"""The experts a mixture chose, token by token, against transformers' own router."""

from __future__ import annotations

import base64
import io
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import trio

from .conftest import Server
from .policy import Policy

pytestmark = pytest.mark.vllm

SHARED = [(5 * i) % 120 + 3 for i in range(70)]


async def test_the_experts_that_come_back_are_those_of_transformers(mixture_server: Server, mixture: Policy) -> None:
    """Concurrent requests, half of whose prompts lie in the prefix cache: cached tokens bring their experts along."""
    answers: list[tuple[list[int], dict[str, Any]]] = []
    async with httpx.AsyncClient(base_url=mixture_server.url, timeout=120) as http:
        version = int((await http.get("/weight_info")).json()["weight_version"])

        async def one(prompt: list[int]) -> None:
            params = {"max_tokens": 20, "logprobs": 0, "ignore_eos": True}
            asked = {"token_ids": prompt, "sampling_params": params}
            answers.append((prompt, (await http.post("/inference/v1/generate", json=asked)).json()))

        await one(SHARED)
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(one, [*SHARED[: 40 + 4 * number], number + 3, 9, 11])
    assert any(answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32 for _, answer in answers)
    mixture.model.load_state_dict(mixture.states[version])
    for prompt, answer in answers:
        (choice,) = answer["choices"]
        tokens = [*prompt, *choice["token_ids"]]
        found = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        with torch.no_grad():
            routers = mixture.model(torch.tensor([tokens]), output_router_logits=True).router_logits
        expected = torch.stack([logits.topk(2, dim=-1).indices for logits in routers], dim=1)[:-1].numpy()
        assert found.dtype == np.uint8 and found.shape == (len(tokens) - 1, 2, 2)
        assert (np.sort(found, -1) == np.sort(expected, -1)).all()
