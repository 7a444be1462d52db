"""The shape of a generate request and its answer, as vLLM's `/inference/v1/generate` has them.

Owns the checking of a client's request. Never knows how tokens are made.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast

from agentrl.engine.embedded.batching import Emission
from agentrl.records import SamplingParams
from agentrl.tokens import images
from agentrl.tokens.images import Image
from agentrl.tokens.vision import Vision

_ALL = 1 << 30  # as top_k: nothing is cut
_IMAGES = 256  # that a request may show
_STOPS = 64  # stop token ids, or stop texts, that a request may name


class BadRequest(Exception):
    """The client's request cannot be served; the text goes back with `status`."""

    status: int = HTTPStatus.BAD_REQUEST


class UnknownModel(BadRequest):
    """The request names a model, or an adapter, that this engine does not have; vLLM answers 404 too."""

    status = HTTPStatus.NOT_FOUND

    def __init__(self, name: str) -> None:
        super().__init__(f"The model `{name}` does not exist.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """A checked generate request."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    stream: bool
    score: bool  # the prompt's log-probs are requested too
    model: str | None = None  # the name of an adapter, or the engine's own
    images: dict[int, Image] = field(default_factory=dict[int, Image])  # by their token


def parse_generate(
    body: bytes, *, vocab: int, length: int, default_id: str, vision: Vision | None = None
) -> SamplingRequest:
    """Check a request's body. `length` is the most tokens that prompt and generation may have together; `vision` is how
    the model reads images, if it does.

    Raises BadRequest naming the field."""
    document = parse_object(body)
    token_ids = document.get("token_ids")
    if not isinstance(token_ids, list) or not token_ids:
        raise BadRequest("token_ids: a non-empty list of token ids is required")
    prompt_ids = cast("list[Any]", token_ids)
    if len(prompt_ids) >= length:
        raise BadRequest(f"token_ids: {len(prompt_ids)} tokens leave no room to generate; the context holds {length}")
    shown = _images(document.get("images", []), vision)
    # `type`, and not `isinstance`: JSON's `true` is an int to Python, and would be token 1.
    if not all(type(token_id) is int and (0 <= token_id < vocab or token_id in shown) for token_id in prompt_ids):
        raise BadRequest(f"token_ids: every id must be an integer from 0 to {vocab - 1}")
    sampling_params = document.get("sampling_params", {})
    if not isinstance(sampling_params, dict):
        raise BadRequest("sampling_params: must be an object")
    request_id = document.get("request_id", default_id)
    if not isinstance(request_id, str) or not 0 < len(request_id) <= 256:
        raise BadRequest("request_id: must be a string of 1 to 256 characters")
    parameters = cast("dict[str, Any]", sampling_params)
    is_streamed, scores_prompt = document.get("stream", False) is True, parameters.get("prompt_logprobs") is not None
    if scores_prompt and (is_streamed or parameters["prompt_logprobs"] != 0):
        raise BadRequest("sampling_params.prompt_logprobs: must be 0, in a request that is not streamed")
    if scores_prompt and shown:
        raise BadRequest("sampling_params.prompt_logprobs: a prompt with images is not scored")
    try:
        if vision is not None and shown:
            vision.positions(prompt_ids, shown)
    except ValueError as error:
        raise BadRequest(f"token_ids: {error}") from None
    sampling = _sampling(parameters, vocab)
    model = document.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("model: must be a name")
    return SamplingRequest(
        request_id=request_id,
        token_ids=prompt_ids,
        sampling=sampling,
        stream=is_streamed,
        score=scores_prompt,
        model=model,
        images=shown,
    )


def _images(urls: Any, vision: Vision | None) -> dict[int, Image]:
    if not urls:
        return {}
    if vision is None:
        raise BadRequest("images: this model reads none")
    if not isinstance(urls, list) or len(cast("list[Any]", urls)) > _IMAGES:
        raise BadRequest(f"images: must be a list of at most {_IMAGES} data: URLs")
    try:
        return {image.token: image for image in map(images.from_url, map(str, cast("list[Any]", urls)))}
    except ValueError as error:
        raise BadRequest(f"images: {error}") from None


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object, `{}` for an empty body. Raises BadRequest for anything else."""
    try:
        document = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise BadRequest("the body is not valid JSON") from None
    if not isinstance(document, dict):
        raise BadRequest("the body must be a JSON object")
    return cast("dict[str, Any]", document)


def _sampling(params: dict[str, Any], vocab: int) -> SamplingParams:
    max_tokens = _number(params, "max_tokens", 16, 1, 1 << 30)
    top_k = _number(params, "top_k", 0, -1, _ALL)
    if max_tokens != int(max_tokens) or top_k != int(top_k):
        raise BadRequest("sampling_params.max_tokens and top_k: must be whole numbers")
    temperature = _number(params, "temperature", 1.0, 0.0, 100.0)
    # Logits divided by less overflow float32, and the draw would be the argmax under a log-prob of 0: greedy sampling
    # that does not call itself so. vLLM takes a larger temperature instead, which is then not the one that was sent.
    if 0 < temperature < 1e-3:
        raise BadRequest("sampling_params.temperature: must be 0 (greedy) or at least 0.001")
    min_p = _number(params, "min_p", 0.0, 0.0, 1.0)
    top_p = _number(params, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise BadRequest("sampling_params.top_p: must be above 0")
    stop_token_ids = cast("list[Any]", params.get("stop_token_ids") or [])
    if not isinstance(stop_token_ids, list) or len(stop_token_ids) > _STOPS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadRequest(f"sampling_params.stop_token_ids: must be a list of at most {_STOPS} token ids")
    if not all(type(token_id) is int and 0 <= token_id < vocab for token_id in stop_token_ids):
        raise BadRequest(f"sampling_params.stop_token_ids: every id must be an integer from 0 to {vocab - 1}")
    texts = cast("list[Any]", params.get("stop") or [])
    if not isinstance(texts, list) or len(texts) > _STOPS or not all(isinstance(text, str) and text for text in texts):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadRequest(f"sampling_params.stop: must be a list of at most {_STOPS} texts, none of them empty")
    # Left out in silence they would change the distribution that the client believes to sample from (law 8).
    for setting_name in ("min_tokens", "presence_penalty", "frequency_penalty", "logit_bias", "seed"):
        if params.get(setting_name):
            raise BadRequest(f"sampling_params.{setting_name}: the embedded engine does not have it")
    if params.get("n", 1) != 1:
        raise BadRequest("sampling_params.n: must be 1")
    return SamplingParams(
        max_tokens=int(max_tokens),
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=int(top_k) if top_k < _ALL else -1,
        min_p=float(min_p),
        stop_token_ids=tuple(stop_token_ids),
        stop=tuple(texts),
    )


def _number(params: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    number = params.get(name)
    if number is None:
        return default
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise BadRequest(f"sampling_params.{name}: must be a number")
    if not low <= number <= high:
        raise BadRequest(f"sampling_params.{name} = {number}: must be from {low:g} to {high:g}")
    return number


def choice_json(emission: Emission) -> str:
    """One choice of a generate answer, with vLLM's names. Version spans count from the first sampled token."""
    # Built as text: a dictionary for each token would be made only to be written. `repr` of a float reads back as the
    # same float, so no log-prob is rounded on its way (law 1).
    content_json = ",".join(
        f'{{"token":"token_id:{token_id}","logprob":{logprob!r},"top_logprobs":[]}}'
        for token_id, logprob in zip(emission.token_ids, emission.logprobs, strict=True)
    )
    spans = ",".join(f'{{"version":"{span.version}","start":{span.start},"end":{span.end}}}' for span in emission.spans)
    finish_json = f'"{emission.finish}"' if emission.finish else "null"
    kept_json = f',"sampling_mask":{json.dumps(emission.kept, separators=(",", ":"))}' if emission.kept else ""
    return (
        f'{{"index":0,"token_ids":{json.dumps(emission.token_ids, separators=(",", ":"))},'
        f'"logprobs":{{"content":[{content_json}]}},"finish_reason":{finish_json},"weight_versions":[{spans}]{kept_json}}}'
    )


def answer_json(
    request_id: str,
    emission: Emission,
    prompt_tokens: int,
    cached_tokens: int,
    prompt_logprobs: list[dict[str, dict[str, float]] | None] | None = None,
) -> str:
    """A whole generate answer, or one event of a stream."""
    usage_json = (
        f'{{"prompt_tokens":{prompt_tokens},"prompt_tokens_details":{{"cached_tokens":{cached_tokens}}}}}'
        if emission.finish
        else "null"
    )
    scored = f',"prompt_logprobs":{json.dumps(prompt_logprobs)}' if prompt_logprobs else ""
    return f'{{"request_id":{json.dumps(request_id)},"choices":[{choice_json(emission)}],"usage":{usage_json}{scored}}}'
