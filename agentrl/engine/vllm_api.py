"""vLLM's `/inference/v1/generate` as the client sees it: requests to JSON, events to chunks. The one place where
their shape is known; tolerant of what other versions leave out or add. Never opens a connection.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from types import UnionType
from typing import Any, cast
from uuid import uuid4

import numpy as np
from pydantic_core import from_json

from agentrl.engine import refusals
from agentrl.errors import ConfigError, EngineError
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import Finish, Json, RoutedExperts, SamplingParams, VersionSpan
from agentrl.tokens import columns, sampling_mask

_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}
_LOGPROB = itemgetter("logprob")
_NO_LOGPROB = -9999.0  # what vLLM writes for a NaN
_ROUNDING = 1e-3  # nats that a log-prob may be above 0
_ALL = 1 << 30  # as top_k: every token. A vLLM that returns kept sets takes no request without top_k
_PLAIN = frozenset({"token", "logprob", "bytes", "top_logprobs"})  # what OpenAI's answer has for each token
_VERSION = re.compile(r"[0-9]{1,18}")
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, EOFError)


def check_sampling(sampling: SamplingParams) -> None:
    """Raise ConfigError for settings that no engine can sample with."""
    if sampling.max_tokens < 1:
        raise ConfigError("sampling.max_tokens", sampling.max_tokens, "must be at least 1")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise ConfigError("sampling.temperature", sampling.temperature, "must be 0 (greedy) or above")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError("sampling.top_p", sampling.top_p, "must be above 0 and at most 1")
    if sampling.top_k < -1:
        raise ConfigError("sampling.top_k", sampling.top_k, "must be positive, or -1 for all tokens")
    if not 0 <= sampling.min_p <= 1:
        raise ConfigError("sampling.min_p", sampling.min_p, "must be from 0 to 1")
    if any(token_id < 0 for token_id in sampling.stop_token_ids):
        raise ConfigError("sampling.stop_token_ids", sampling.stop_token_ids, "token ids are not negative")
    if not all(sampling.stop):
        raise ConfigError("sampling.stop", sampling.stop, "an empty text would end every turn at once")


def request_json(request: GenerateRequest, *, stream: bool) -> dict[str, Json]:
    """The body of a generate request. Every setting is sent, so that no server's default can slip in."""
    sampling = request.sampling
    sampling_params: dict[str, Json] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else _ALL,
        "min_p": sampling.min_p,
        # 0 candidates beside the sampled token: its log-prob alone. Left out, vLLM sends none at all.
        "logprobs": 0,
    }
    if sampling.stop_token_ids:
        sampling_params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:
        sampling_params["stop"] = list(sampling.stop)
    if request.ignore_eos:
        sampling_params["ignore_eos"] = True
    if request.experts_from is not None:
        sampling_params["routed_experts_prompt_start"] = request.experts_from
    request_body: dict[str, Json] = {
        "request_id": request.request_id,
        "token_ids": list(request.token_ids),
        "sampling_params": sampling_params,
        "stream": stream,
    }
    if request.images:
        request_body["images"] = [image.url for image in request.images]
    return request_body if request.model is None else request_body | {"model": request.model}


def score_json(token_ids: Sequence[int], model: str | None) -> dict[str, Json]:
    """The body of a request for the log-probs of a prompt's tokens at temperature 1."""
    # vLLM samples at least one token for any request; `top_k` 1 suits servers that return kept sets, which refuse one
    # without it.
    sampling_params: dict[str, Json] = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "prompt_logprobs": 0}
    request_body: dict[str, Json] = {
        "request_id": f"score-{uuid4().hex}",
        "token_ids": list(token_ids),
        "sampling_params": sampling_params,
    }
    return request_body if model is None else request_body | {"model": model}


def prompt_logprobs(document: Mapping[str, Json], token_ids: Sequence[int]) -> tuple[float, ...]:
    """The log-probs of `token_ids[1:]` in the answer to a request for the log-probs of its prompt."""
    prompt_entries = document.get("prompt_logprobs")
    entries = cast("list[Any]", prompt_entries) if isinstance(prompt_entries, list) else []
    if len(entries) != len(token_ids):
        raise EngineError("the engine does not score prompts (prompt_logprobs)")
    try:
        return tuple(
            float(entry[str(token_id)]["logprob"]) for entry, token_id in zip(entries[1:], token_ids[1:], strict=True)
        )
    except MALFORMED as error:
        raise EngineError(f"the engine's prompt log-probs have an unknown shape: {error!r}") from error


def results(body: str | bytes, **fields: type | UnionType) -> list[dict[str, Any]]:
    """The answers of an engine's workers to a call, at least one, each with these `fields` of these types. Raises
    EngineError for anything else."""
    listed_results = parse_json(body).get("results")
    answers = cast("list[Any]", listed_results) if isinstance(listed_results, list) else []
    if not answers:
        raise EngineError(f"the engine's workers gave no results: {body[:80]!r}")
    for answer in answers:
        if not isinstance(answer, dict):
            raise EngineError(f"the engine's workers answered {answer!r:.80}, which is no object")
        for field_name, field_type in fields.items():
            if not isinstance(field_value := cast("dict[str, Any]", answer).get(field_name), field_type):
                raise EngineError(f"the engine's workers say that {field_name!r} is {field_value!r:.80}")
    return answers


def metric(line: str) -> tuple[str, float]:
    """The name, labels included, and the value of a line of metrics. Raises EngineError."""
    metric_name, _, number_text = line.rpartition(" ")
    try:
        return metric_name, float(number_text)
    except ValueError:
        raise EngineError(f"the engine has no number in its metrics: {line[:80]!r}") from None


def parse_version(text: object) -> int:
    """A weight version as engines write it: "default" is 0, else a decimal number that a store can hold. Raises
    EngineError."""
    if text == "default":
        return 0
    version_text = str(text) if type(text) is int else text
    if isinstance(version_text, str) and _VERSION.fullmatch(version_text):
        return int(version_text)
    raise EngineError(f"the engine names a weight version {text!r:.80}, which is none")


class ChunkParser:
    """Turns the events of the answer to `request` into chunks. `version` is the one that the engine is known to serve:
    it labels tokens until the engine itself states a version, which then replaces it. The model has `vocabulary` tokens
    (None: not known); a learner has no row for others.

    `stated` are the spans that the engine itself gave in the last event. `unsound` says what is wrong with the rest of
    an event whose tokens were good up to some place: those are its chunk, and the last."""

    def __init__(self, version: int, request: GenerateRequest, vocabulary: int | None = None) -> None:
        self.version, self._request, self._vocabulary = version, request, vocabulary
        self.stated: tuple[VersionSpan, ...] = ()
        self.unsound: str | None = None
        self.received = 0

    def parse(self, document: Mapping[str, Json]) -> Chunk | None:
        """One event, or one whole answer; None if it carries nothing. Raises EngineError if it makes no sense."""
        if "error" in document:
            raise EngineError(f"the engine failed: {_message(document)}")
        choices = document.get("choices")
        if not choices:
            return None
        try:
            return self._choice(choices[0])
        except MALFORMED as error:
            raise EngineError(f"the engine's answer has an unknown shape: {error!r}") from error

    def _choice(self, choice: Mapping[str, Json]) -> Chunk | None:
        first_position = self.received
        token_ids = tuple(cast("list[int]", choice.get("token_ids") or []))
        # Two C-level passes instead of a loop: this runs for every chunk of every turn, on the worker's one thread.
        if token_ids and not (set(map(type, token_ids)) == {int} and min(token_ids) >= 0):
            raise EngineError("the engine sent token ids that are no numbers from 0 on")
        # Padded vocabularies have rows that no tokenizer has a token for. A learner without such a row would fail at
        # the gather, steps later and in another process.
        if self._vocabulary is not None and (highest_id := max(token_ids, default=-1)) >= self._vocabulary:
            raise EngineError(f"the engine sent token {highest_id}, and the model has {self._vocabulary}")
        content: list[Json] = cast("dict[str, Json]", choice.get("logprobs") or {}).get("content") or []
        logprobs: tuple[Json, ...] = tuple(map(_LOGPROB, content))
        if len(logprobs) != len(token_ids):
            raise EngineError(f"the engine sent {len(token_ids)} tokens with {len(logprobs)} log-probs")
        finish = choice.get("finish_reason")
        if not token_ids and finish is None:
            return None
        if finish is not None and finish not in _FINISHES:
            raise EngineError(f"the engine finished with {finish!r}")
        sound_count = _sound(logprobs)
        if sound_count < len(logprobs):
            # The rest of the chunk goes, and not the chunk: the tokens before were sampled soundly, and to sample
            # them again is what law 1 forbids.
            self.unsound = (
                f"the engine sent {logprobs[sound_count]!r} as the log-prob of token {first_position + sound_count}"
            )
            token_ids, logprobs, finish = token_ids[:sound_count], logprobs[:sound_count], None
        self.received += sound_count
        if finish in ("stop", "length") and not self._request.sampled + self.received:
            raise EngineError(f"the engine finished with {finish!r} without a token")  # an action that nobody sampled
        version_spans = self._spans(choice.get("weight_versions") or [], first_position, sound_count)
        experts = None
        if self._request.experts_from is not None and finish in ("stop", "length"):
            # The last token was never computed, only drawn: no router has seen it.
            experts_end = len(self._request.token_ids) + self.received - 1
            experts = _experts(choice.get("routed_experts"), self._request.experts_from, experts_end)
        extra_columns = _columns(content[:sound_count])
        if self._request.kept and sound_count:
            kept_sets = self._kept(token_ids, choice.get("sampling_mask"), len(content))
            extra_columns = {**extra_columns, columns.KEPT: sampling_mask.encode(kept_sets)}
        return Chunk(
            token_ids=token_ids,
            logprobs=tuple(map(float, logprobs)),
            spans=version_spans,
            finish=finish,
            experts=experts,
            columns=extra_columns,
        )

    def _kept(self, token_ids: Sequence[int], sets: Sequence[Sequence[int]] | None, sent: int) -> list[Sequence[int]]:
        """The set that each of these tokens was drawn from, of those for the `sent` ones."""
        if sets is None or len(sets) != sent:
            set_count = "no" if sets is None else len(sets)
            raise EngineError(f"the engine sent {sent} tokens with {set_count} sets that they were drawn from")
        for token_id, kept_ids in zip(token_ids, sets, strict=False):
            if token_id not in kept_ids:
                raise EngineError(f"the engine drew token {token_id} from a set that does not hold it")
            if self._vocabulary is not None and (highest_id := max(kept_ids)) >= self._vocabulary:
                raise EngineError(
                    f"the engine drew from a set with token {highest_id}: the model has {self._vocabulary}"
                )
        return list(sets[: len(token_ids)])

    def _spans(self, stamps: Sequence[Json], base: int, count: int) -> tuple[VersionSpan, ...]:
        """The versions of `count` tokens from the one at `base` on, and of earlier ones that are stated again."""
        version_spans: list[VersionSpan] = []
        for stamp in stamps:
            version, stamp_start, stamp_end = parse_version(stamp["version"]), int(stamp["start"]), int(stamp["end"])
            # Spans count from the request's first sampled token, ours from the chunk's first: hence the differences
            # below, and negative starts for tokens of earlier chunks.
            if not 0 <= stamp_start <= stamp_end or (stamp_end > base + count and self.unsound is None):
                raise EngineError(
                    f"the engine stamps tokens {stamp_start} to {stamp_end} of {base + count}: some lie outside"
                )
            if (stamp_end := min(stamp_end, base + count)) > stamp_start:
                version_spans.append(VersionSpan(version, stamp_start - base, stamp_end - base))
        self.stated = tuple(version_spans)
        stamped_count = sum(span.end - max(span.start, 0) for span in version_spans if span.end > 0)
        if count and not stamped_count:
            # No stamp at all is a server that stamps at the end only. A stamp for some of the tokens is a
            # contradiction, and is refused below.
            return (*version_spans, VersionSpan(self.version, 0, count))
        if stamped_count < count:
            raise EngineError(f"the engine names no weight version of some of its tokens: {list(stamps)}")
        return self.stated


def _columns(content: Sequence[Json]) -> columns.Columns:
    """The registered columns that the server adds to the log-probs of all these tokens: numbers, or nested lists."""
    if not content or content[0].keys() <= _PLAIN:  # the usual answer: nothing is looked up for each chunk
        return columns.NONE
    column_names = [column for column in columns.known() if all(column in entry for entry in content)]
    return {column: tuple(number for entry in content for number in _flat(entry[column])) for column in column_names}


def _flat(value: Json) -> list[float]:
    return (
        [number for part in cast("list[Json]", value) for number in _flat(part)] if isinstance(value, list) else [value]
    )


def _sound(logprobs: Sequence[Json]) -> int:
    """How many log-probs come before the first that cannot be one. Looks at each only if something is wrong."""
    # One NaN makes the sum NaN: a single pass in C finds out whether the slow look is needed.
    are_numbers = set(map(type, logprobs)) == {float} and not math.isnan(sum(logprobs))
    if are_numbers and min(logprobs) > _NO_LOGPROB and max(logprobs) <= _ROUNDING:
        return len(logprobs)
    return next((position for position, logprob in enumerate(logprobs) if not _is_sound(logprob)), len(logprobs))


def _is_sound(logprob: Json) -> bool:
    """Whether this can be a sampled token's log-prob. JSON has no NaN: vLLM writes one as -9999."""
    return isinstance(logprob, int | float) and not isinstance(logprob, bool) and _NO_LOGPROB < logprob <= _ROUNDING


def _experts(encoded: str | None, start: int, end: int) -> RoutedExperts:
    """A base64 .npy array [end - start, layers, experts per token]. Raises EngineError for anything else."""
    if encoded is None:
        raise EngineError("the engine does not say which experts it chose (routed_experts)")
    # Never pickled: an .npy file of objects runs code when it is read, and it comes from a server.
    array = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    if array.ndim != 3 or len(array) != end - start or array.dtype.kind not in "iu" or array.min(initial=0) < 0:
        raise EngineError(
            f"the engine's experts are {array.dtype} {array.shape}, not those of tokens {start} to {end - 1}"
        )
    width = 1 if array.max(initial=0) < 256 else 2
    expert_bytes = array.astype(f"<u{width}").tobytes()
    return RoutedExperts(start=start, layers=array.shape[1], per_token=array.shape[2], width=width, data=expert_bytes)


def parse_json(text: str | bytes) -> dict[str, Json]:
    """A JSON object of the engine. Raises EngineError for anything else."""
    try:
        document: Any = _loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"the engine's answer is not JSON: {text[:80]!r}") from error
    if not isinstance(document, dict):
        raise EngineError(f"the engine's answer is not an object: {text[:80]!r}")
    return cast("dict[str, Json]", document)


def _loads(text: str | bytes) -> Any:
    """Parse JSON quickly, else by `json.loads`, which takes twice as long and accepts a little more: lone surrogates,
    UTF-16, and deep nesting."""
    try:
        return from_json(text)
    except ValueError:
        return json.loads(text)


def refusal(body: bytes) -> str:
    """The readable part of an error answer."""
    try:
        document = parse_json(body)
    except EngineError:
        return body[:200].decode(errors="replace").strip() or "no reason given"
    return _message(document)


def outgrew_context(status: int, body: bytes) -> bool:
    """Whether an error answer says that the conversation is too long for the model."""
    try:
        document = parse_json(body)
    except EngineError:
        document = {"message": body[:4_000].decode(errors="replace")}
    return refusals.is_context_full(status, refusals.codes_of(document), refusals.words_of(document))


def _message(document: Mapping[str, Json]) -> str:
    error = document.get("error", document.get("detail", document))
    if isinstance(error, dict):
        error = cast("dict[str, Json]", error).get("message", cast(object, error))
    return str(cast(object, error))[:500]
