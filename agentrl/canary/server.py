"""Requests to a server: log-probs of prompts and of sampled tokens, and the tokens that it makes of texts.

Three paths lead there: `/v1/completions` (vLLM's `prompt_logprobs`, else OpenAI's `echo`), vLLM's
`/inference/v1/generate`, which the embedded engine has too, and SGLang's `/generate`; `EngineClient` speaks the last
two. Every request has a deadline. Never knows what the answers should be; no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, cast
from uuid import uuid4

from agentrl.engine.client import EngineClient
from agentrl.engine.vllm_api import MALFORMED, parse_json, prompt_logprobs
from agentrl.engine.weight_sync.canary import refuses_nan
from agentrl.errors import EngineBroke, EngineError, EngineTimeout, EngineUnavailable, UsageError
from agentrl.protocols import GenerateRequest
from agentrl.records import Json, Message, SamplingParams

Way = Literal["completions", "echo", "generate", "sglang"]
_NO_PATH = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
_NO_KEY = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_TOKEN_ID = re.compile(r"token_id:(\d+)")
_SWITCH_ON = (
    "vLLM and SGLang return them as they are (vLLM: leave out --max-logprobs 0, and speculative decoding); of another"
    " server, switch on echo with logprobs for prompts of token ids at /v1/completions, or serve the model with vLLM"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens that a server sampled after a prompt, with the log-probs that it reports."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """The tokens that a server makes of a text or conversation: their ids, or (None) only how many they are."""

    count: int
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ServedNames:
    """The model to compare and the one below it, and all adapters, by their names at the server."""

    name: str | None
    base: str | None
    adapters: tuple[str, ...]


class Server:
    """A server that `connect` has looked at. `name` is the model to compare, `base` the one below it if that is an
    adapter (both None: the server needs no name), `fits` the longest context, None if it does not say."""

    def __init__(self, client: EngineClient, way: Way, names: ServedNames, fits: int | None, deadline_s: float) -> None:
        self.client, self.fits = client, fits
        self.way: Way = way
        self.name, self.base, self._adapters = names.name, names.base, names.adapters
        self._deadline_s = deadline_s

    @property
    def url(self) -> str:
        return self.client.url

    async def score(self, tokens: Sequence[int], name: str | None) -> tuple[float, ...]:
        """The log-probs of `tokens[1:]`, all NaN if the server computed one. Raises UsageError, in one line, for a
        server that has none."""
        try:
            if self.way == "completions":
                completion_choice = await self._complete(tokens, name, {"prompt_logprobs": 0, "max_tokens": 1})
                return prompt_logprobs(completion_choice, tokens)
            if self.way == "echo":
                completion_choice = await self._complete(tokens, name, {"echo": True, "logprobs": 1, "max_tokens": 1})
                return _echoed(completion_choice, len(tokens))
            return await self.client.score(tokens, deadline_s=self._deadline_s, model=self._model(name))
        except EngineError as score_error:
            if refuses_nan(score_error):
                return (math.nan,) * (len(tokens) - 1)
            raise

    async def sample(
        self, prompt: Sequence[int], name: str | None, *, count: int, temperature: float = 1.0
    ) -> Sample | None:
        """Sample `count` tokens, or fewer up to the end that the model chooses, without any cut or penalty. None if the
        server does not say which tokens it sampled, or how probable they were."""
        prompt = tuple(prompt)
        if self.way in ("sglang", "generate"):
            sample_request = GenerateRequest(
                request_id=f"canary-{uuid4().hex}",
                session="canary",
                token_ids=prompt,
                sampling=SamplingParams(max_tokens=count, temperature=temperature),
                deadline_s=self._deadline_s,
                model=self._model(name),
                ignore_eos=True,
            )
            generation = await self.client.generate(sample_request)
            return Sample(prompt, generation.token_ids, generation.logprobs)
        plain_options: dict[str, Json] = {"max_tokens": count, "temperature": temperature, "top_p": 1.0, "logprobs": 1}
        plain_options |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        # Everything that a server may have a default for is named: a folder's generation settings would slip in.
        extended_options = {
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        extended_options["return_tokens_as_token_ids"] = True
        try:
            completion_choice = await self._complete(prompt, name, plain_options | extended_options)
        except (EngineUnavailable, EngineTimeout):
            raise
        except EngineError:  # it knows OpenAI's names alone
            completion_choice = await self._complete(prompt, name, plain_options)
        return _sampled(prompt, completion_choice)

    async def chat_tokens(self, messages: Sequence[Message], name: str | None) -> ServedTokens | None:
        """The prompt that the server makes of a conversation; None if it has no chats. Raises EngineError if it refuses
        the conversation."""
        request_body: dict[str, Json] = {"messages": list(messages), "max_tokens": 1, **_named(name)}
        try:
            chat_answer = await self._post("/v1/chat/completions", request_body | {"return_token_ids": True})
        except EngineError as refusal:
            if refusal.status in _NO_PATH:
                return None
            raise
        if (prompt_ids := _ids(chat_answer.get("prompt_token_ids"))) is not None:
            return ServedTokens(len(prompt_ids), prompt_ids)
        tokenized = await self._tokenize({"messages": list(messages), "add_generation_prompt": True}, name)
        return tokenized or _counted(chat_answer)

    async def text_tokens(self, text: str, name: str | None) -> ServedTokens | None:
        """The tokens of a text, with those that the tokenizer puts around it; None if the server does not say."""
        return await self._tokenize({"prompt": text, "add_special_tokens": True}, name)

    def _model(self, name: str | None) -> str | None:
        """The model in a request for tokens: SGLang knows adapters alone by a name."""
        return None if self.way == "sglang" and name not in self._adapters else name

    async def _tokenize(self, body: Mapping[str, Json], name: str | None) -> ServedTokens | None:
        try:
            token_ids = _ids((await self._post("/tokenize", {**body, **_named(name)})).get("tokens"))
        except (EngineUnavailable, EngineTimeout):
            raise
        except EngineError:  # it has no such path, or another form of it
            return None
        return None if token_ids is None else ServedTokens(len(token_ids), token_ids)

    async def _complete(self, prompt: Sequence[int], name: str | None, options: Mapping[str, Json]) -> dict[str, Json]:
        """The only choice of a completion."""
        request_body: dict[str, Json] = {"prompt": list(prompt), "temperature": 1.0, **_named(name), **options}
        completion = await self._post("/v1/completions", request_body)
        try:
            first_choice = completion["choices"][0]
            return dict(first_choice)
        except MALFORMED as shape_error:
            raise EngineBroke(f"{self.url} gave no completion: {str(completion)[:200]}", url=self.url) from shape_error

    async def _post(self, path: str, body: Mapping[str, Json]) -> dict[str, Json]:
        return parse_json(await self.client.call("POST", path, json=body, deadline_s=self._deadline_s))


async def connect(
    url: str, *, key: str | None, name: str | None, adapted: bool, deadline_s: float, probe: Sequence[int]
) -> Server:
    """Find out what a server is, by the log-probs of a short `probe`. `name` is that of the model there; None: its only
    one, with `adapted` its only adapter. Raises UsageError, in one line, for a server that has no log-probs of prompts,
    no such model, or several; EngineUnavailable or EngineTimeout if it is not there."""
    engine_client = EngineClient(url, api_key=key)
    try:
        listed_models = await _models(engine_client, deadline_s)
        served_names = _choose(listed_models, name, adapted, url)
        context_limit = min(
            (
                int(listed_model["max_model_len"])
                for listed_model in listed_models
                if isinstance(listed_model.get("max_model_len"), int)
            ),
            default=None,
        )
        failure_words = ""
        for candidate_way in await _ways(engine_client, deadline_s):
            if candidate_way == "sglang":
                await engine_client.aclose()
                engine_client = EngineClient(url, api_key=key, kind="sglang")
            server = Server(engine_client, candidate_way, served_names, context_limit, deadline_s)
            try:
                await server.score(probe, server.name)
            except (EngineUnavailable, EngineTimeout):
                raise
            except EngineError as probe_error:
                _refuse_key(probe_error, url)
                failure_words = failure_words if probe_error.status in _NO_PATH else f" ({probe_error.reason[:160]})"
            else:
                return server
        raise UsageError(f"{url} returns no log-probs of a prompt's tokens{failure_words}: {_SWITCH_ON}")
    except BaseException:
        await engine_client.aclose()
        raise


async def _models(client: EngineClient, deadline_s: float) -> list[dict[str, Any]]:
    """The models that the server lists, adapters among them; none if it has no list."""
    try:
        listed_models = parse_json(await client.call("GET", "/v1/models", deadline_s=deadline_s)).get("data")
    except (EngineUnavailable, EngineTimeout):
        raise
    except EngineError as list_error:
        _refuse_key(list_error, client.url)
        return []
    model_entries = cast("list[Any]", listed_models) if isinstance(listed_models, list) else []
    return [
        cast("dict[str, Any]", model_entry)
        for model_entry in model_entries
        if isinstance(model_entry, dict) and "id" in model_entry
    ]


def _refuse_key(error: EngineError, url: str) -> None:
    if error.status in _NO_KEY:
        suggestion = "export its key, and name the variable in --key-variable"
        raise UsageError(f"{url} asks for an API key: {suggestion}") from error


def _choose(models: list[dict[str, Any]], name: str | None, adapted: bool, url: str) -> ServedNames:
    """The names to compare. Raises UsageError."""
    adapter_names = tuple(str(listed_model["id"]) for listed_model in models if listed_model.get("parent"))
    base_names = tuple(str(listed_model["id"]) for listed_model in models if not listed_model.get("parent"))
    if name is None:
        # A server that merged the adapter, or hides it behind the model's own name, lists no adapter.
        candidate_names = adapter_names if adapted and adapter_names else base_names
        if len(candidate_names) > 1:
            raise UsageError(f"{url} serves {', '.join(candidate_names)}: say with --name which of them to compare")
        name = candidate_names[0] if candidate_names else None
    elif models and name not in adapter_names + base_names:
        raise UsageError(f"--name {name}: {url} serves {', '.join(base_names + adapter_names)}")
    base_name = base_names[0] if adapted and base_names and name != base_names[0] else None
    return ServedNames(name, base_name, adapter_names)


async def _ways(client: EngineClient, deadline_s: float) -> list[Way]:
    """How log-probs may be had from this server, the likeliest way first."""
    for info_path in ("/model_info", "/get_model_info"):  # SGLang's alone, the second one of older versions
        try:
            await client.call("GET", info_path, deadline_s=deadline_s)
        except (EngineUnavailable, EngineTimeout):
            raise
        except EngineError:
            continue
        return ["sglang"]
    return ["completions", "echo", "generate"]


def _named(name: str | None) -> dict[str, Json]:
    return {} if name is None else {"model": name}


def _ids(value: object) -> tuple[int, ...] | None:
    """Token ids in an answer; None for anything else."""
    token_ids = cast("list[Any]", value) if isinstance(value, list) else []
    return (
        tuple(token_ids)
        if token_ids and all(type(token_id) is int and token_id >= 0 for token_id in token_ids)
        else None
    )


def _counted(answer: Mapping[str, Json]) -> ServedTokens | None:
    token_usage = answer.get("usage")
    prompt_length = cast("dict[str, Json]", token_usage).get("prompt_tokens") if isinstance(token_usage, dict) else None
    return ServedTokens(prompt_length) if type(prompt_length) is int else None


def _echoed(choice: Mapping[str, Json], length: int) -> tuple[float, ...]:
    """The log-probs of the prompt at the head of a completion's. Raises EngineError."""
    try:
        echoed_logprobs = cast("list[Any]", choice["logprobs"]["token_logprobs"])
        # A server that ignores `echo` has those of the sampled token alone; the first of a prompt has none.
        if len(echoed_logprobs) < length or echoed_logprobs[0] is not None:
            raise EngineError("it does not echo the prompt's log-probs")
        return tuple(float(logprob) for logprob in echoed_logprobs[1:length])
    except MALFORMED as shape_error:
        raise EngineError(f"its log-probs have an unknown shape: {shape_error!r}") from shape_error


def _sampled(prompt: tuple[int, ...], choice: Mapping[str, Json]) -> Sample | None:
    try:
        logprobs = choice["logprobs"]
        sampled_logprobs = tuple(float(logprob) for logprob in logprobs["token_logprobs"])
        token_ids = _ids(choice.get("token_ids"))
        if token_ids is None:
            id_matches = [_TOKEN_ID.fullmatch(str(token_text)) for token_text in logprobs["tokens"]]
            token_ids = tuple(int(id_match[1]) for id_match in id_matches if id_match is not None)
    except MALFORMED:
        return None
    return (
        Sample(prompt, token_ids, sampled_logprobs) if token_ids and len(token_ids) == len(sampled_logprobs) else None
    )
