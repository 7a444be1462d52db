"""SGLang's `/generate` as the client sees it: requests to JSON, events to chunks. Opens no connection of its own.

An event that streams names one version, the newest that the server's front end has heard of. The last event of a
request names the version of each token (`weight_versions`, counted where tokens are sampled): it holds, whatever came
before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, cast
from uuid import uuid4

from agentrl.engine.vllm_api import MALFORMED, ChunkParser
from agentrl.errors import ConfigError, EngineError, EngineRefusal
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import Json

_ALL = 1 << 30  # as top_k: every token
_MOST_KEPT = 4096  # tokens of a set, unless the server was started with another --sampling-mask-max-tokens
_UNKNOWN_ADAPTER = "LoRA adapters are not loaded"
RID_END = "$"
"""Ends each request's id: an abort ends all requests whose ids begin with the one that it names."""


def request_json(request: GenerateRequest) -> dict[str, Json]:
    """The body of a generate request. Every setting is sent, so that no server's default can slip in. Raises
    ConfigError for kept sets without a `top_k`, for experts and images."""
    sampling = request.sampling
    sampling_params: dict[str, Json] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else _ALL,
        "min_p": sampling.min_p,
        "skip_special_tokens": False,
    }
    if sampling.stop_token_ids:
        sampling_params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:
        sampling_params["stop"] = list(sampling.stop)
    if request.ignore_eos:
        sampling_params["ignore_eos"] = True
    request_body: dict[str, Json] = {
        # An abort of `turn-1` would end `turn-12` as well: SGLang compares beginnings.
        "rid": request.request_id + RID_END,
        "input_ids": list(request.token_ids),
        "sampling_params": sampling_params,
        "return_logprob": True,
        # -1 leaves the prompt out; scoring it would compute logits for every token of the context.
        "logprob_start_len": -1,
        "stream": True,
    }
    if request.images:
        raise ConfigError("engine.kind", "sglang", "images are sent to the embedded engine only: take 'embedded'")
    if request.experts_from is not None:
        raise ConfigError("engine.routed_experts", True, "SGLang's answer does not say their shape: leave it out")
    if request.kept:
        # A longer set does not come whole, and the learner would divide by too little mass.
        if not 0 < sampling.top_k <= _MOST_KEPT:
            hint = f"SGLang returns the set that a token is drawn from for 1 to {_MOST_KEPT}: give rollout.top_k"
            raise ConfigError("rollout.top_k", sampling.top_k, hint)
        request_body["return_sampling_mask"] = True
    return request_body if request.model is None else request_body | {"lora_path": request.model}


def score_json(tokens: Sequence[int], model: str | None) -> dict[str, Json]:
    """The body of a request for the log-probs of a prompt's tokens at temperature 1; nothing is sampled."""
    request_body: dict[str, Json] = {
        "rid": f"score-{uuid4().hex}{RID_END}",
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "stream": False,
    }
    return request_body if model is None else request_body | {"lora_path": model}


def prompt_logprobs(document: Mapping[str, Json], tokens: Sequence[int]) -> tuple[float, ...]:
    """The log-probs of `tokens[1:]` in the answer to `score_json`. Raises EngineError."""
    try:
        entries = cast("list[Any]", document["meta_info"]["input_token_logprobs"])
        if [entry[1] for entry in entries] != list(tokens):
            raise EngineError("the engine scored other tokens than the request has (input_token_logprobs)")
        return tuple(float(entry[0]) for entry in entries[1:])
    except MALFORMED as error:
        raise EngineError(f"the engine's prompt log-probs have an unknown shape: {error!r}") from error


class SGLangParser(ChunkParser):
    """A `ChunkParser` for the events of SGLang, whether each repeats all tokens or has the new ones alone."""

    _stamp: str | None = None  # the version of the tokens received last, and how often the request was put back by then
    _retractions: int | None = None

    def parse(self, document: Mapping[str, Json]) -> Chunk | None:
        if isinstance(error := document.get("error"), dict):
            error_fields = cast("dict[str, Json]", error)
            raise _failure(str(error_fields.get("message")), error_fields.get("code"))
        try:
            choice = self._as_choice(document)
        except MALFORMED as error:
            raise EngineError(f"the engine's answer has an unknown shape: {error!r}") from error
        return super().parse({"choices": [choice]})

    def _as_choice(self, document: Mapping[str, Json]) -> dict[str, Json]:
        """An event in the shape that vLLM gives it."""
        meta: dict[str, Any] = document["meta_info"]
        finish_reason: dict[str, Any] = meta["finish_reason"] or {}
        if finish_reason.get("type") == "abort" and finish_reason.get("status_code") is not None:
            raise _failure(str(finish_reason.get("message")), finish_reason["status_code"])
        # By the server's count, and not by the length of the list: whether an event repeats all tokens or has the new
        # ones alone is a flag of the server, and both kinds of lists are read by `_new`.
        new_count = meta["completion_tokens"] - self.received
        token_ids = self._new(document["output_ids"], new_count)
        entries = self._new(meta.get("output_token_logprobs") or [], new_count)
        if [entry[1] for entry in entries] != token_ids:
            raise EngineError("the engine sent log-probs of other tokens than it sampled (output_token_logprobs)")
        logprobs = [entry[0] for entry in entries]
        choice: dict[str, Json] = {"token_ids": token_ids, "finish_reason": finish_reason.get("type")}
        if (kept_sets := meta.get("output_token_sampling_mask")) is not None:
            choice["sampling_mask"] = self._new(kept_sets, new_count)
            logprobs = self._new(meta["output_token_sampling_logprobs"], new_count)  # under what was left after the cut
        # From here on all is vLLM's shape, so that every check of a token, a log-prob and a version is written once,
        # in `ChunkParser`.
        choice["logprobs"] = {"content": [{"logprob": logprob} for logprob in logprobs]}
        choice["weight_versions"] = meta.get("weight_versions") or self._provisional(meta, new_count)
        return choice

    def _new(self, values: list[Any], new: int) -> list[Any]:
        """The entries of the `new` tokens in a list of one entry a token: that of all tokens, or of the new ones."""
        if len(values) >= self.received + new:
            return values[self.received : self.received + new]
        if not 0 <= new <= len(values):
            raise EngineError(f"the engine sent {len(values)} entries for {new} new tokens")
        return values[:new]  # an abort may repeat the last token behind them

    def _provisional(self, meta: Mapping[str, Any], new: int) -> list[Json]:
        """The version that an event before the last names. It was read when the event left the server: if it changed
        without the pause of an update, which puts requests back, then these tokens were sampled before that."""
        version_stamp, retractions = meta["weight_version"], meta.get("num_retractions")
        if self._stamp is not None and retractions is not None and retractions == self._retractions:
            version_stamp = self._stamp
        if new:
            self._stamp, self._retractions = version_stamp, retractions
        return [{"version": version_stamp, "start": self.received, "end": self.received + new}] if new else []


def _failure(message: str, code: object) -> EngineError:
    if _UNKNOWN_ADAPTER in message:
        return EngineRefusal(f"the adapter does not exist: {message}", status=HTTPStatus.NOT_FOUND, reason=message)
    return EngineRefusal(message) if code == 400 else EngineError(f"the engine failed: {message}")
