"""The embedded engine on a pretrained model: a known answer, and the log-probs of a plain forward pass."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from uuid import uuid4

import pytest
import trio

from agentrl.engine.client import EngineClient
from agentrl.engine.rendering.renderer import Renderer
from agentrl.models import smollm2
from agentrl.models.resolve import model_dir
from agentrl.protocols import GenerateRequest
from agentrl.records import SamplingParams

from .conftest import Server
from .oracle import reference_logprobs

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]


async def test_it_answers_and_its_logprobs_are_those_of_the_model(tmp_path: Path) -> None:
    folder = model_dir(smollm2.ID)
    renderer = Renderer(folder)
    prompt = renderer.start([{"role": "user", "content": "What is the capital of France?"}])
    server = Server(folder, tmp_path, "--kv-cache-mb", "128")
    try:
        async with aclosing(EngineClient(server.url)) as client:
            for temperature in (0.01, 1.0):
                sampling = SamplingParams(max_tokens=16, temperature=temperature)
                request = GenerateRequest(
                    request_id=uuid4().hex, session="s", token_ids=prompt, sampling=sampling, deadline_s=300.0
                )
                answer = await client.generate(request)
                tokens = [*prompt, *answer.token_ids]
                expected = reference_logprobs(folder, tokens, len(prompt), temperature)
                assert list(answer.logprobs) == pytest.approx(expected, abs=1e-3 / temperature)
                if temperature < 1:
                    assert "Paris" in renderer.decode(answer.token_ids)
    finally:
        await trio.to_thread.run_sync(server.close)
