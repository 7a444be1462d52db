"""What the embedded engine takes of a request with images, and what it refuses, over its real parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.engine.embedded.requests import BadRequest, parse_generate
from agentrl.engine.vllm_api import request_json
from agentrl.protocols import GenerateRequest
from agentrl.records import SamplingParams
from agentrl.tokens.vision import Vision, read_vision
from tests.parts.tiny_vision import make_tiny_vision

from .test_vision import picture

ONE = picture(24, 16)
IDS = (20, *[ONE.token] * 6, 21)


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Vision:
    found = read_vision(make_tiny_vision(tmp_path_factory.mktemp("vision") / "model"))
    assert found is not None
    return found


def body(**changes: Any) -> bytes:
    request = GenerateRequest(
        request_id="r", session="s", token_ids=IDS, sampling=SamplingParams(max_tokens=4), images=(ONE,)
    )
    return json.dumps({**request_json(request, stream=False), **changes}).encode()


def test_a_request_of_the_client_is_taken_with_its_images(vision: Vision) -> None:
    asked = parse_generate(body(), vocab=262, length=100, default_id="d", vision=vision)
    assert (tuple(asked.token_ids), asked.images) == (IDS, {ONE.token: ONE})
    text = GenerateRequest(request_id="r", session="s", token_ids=(1,), sampling=SamplingParams(max_tokens=4))
    assert "images" not in request_json(text, stream=False), "servers that know none are sent none"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"images": []}, "token_ids: every id must be an integer from 0 to 261"),
        ({"images": "x"}, "images: must be a list of at most 256"),
        ({"images": ["http://example.org/a.png"]}, "images: .*nothing is fetched"),
        ({"images": [5]}, "images: .*nothing is fetched"),
        ({"token_ids": [20, *[ONE.token] * 5, 21]}, "token_ids: the image at token 1 has 5 tokens, not 3 x 2"),
        ({"token_ids": [20, ONE.token + 1]}, "token_ids: every id must be"),
        ({"sampling_params": {"prompt_logprobs": 0}}, "a prompt with images is not scored"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(vision: Vision, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        parse_generate(body(**changes), vocab=262, length=100, default_id="d", vision=vision)


def test_a_model_that_reads_no_images_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="images: this model reads none"):
        parse_generate(body(), vocab=262, length=100, default_id="d")
