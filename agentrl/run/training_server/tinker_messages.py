"""The requests and answers of the Tinker API that carry tokens and numbers, as the `tinker` client writes and reads
them.

The descriptors of its protobuf messages are the client's own package's (extra `tinker`). What a client sends is
checked here: a ConfigError names the field, the value and the fix.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (the package is imported when it is needed, without types)

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from agentrl.config.sections import config_error
from agentrl.env.optional_imports import require
from agentrl.errors import ConfigError
from agentrl.host.installation import install_command
from agentrl.learner.adapter_learner import TargetRow
from agentrl.records import Generation
from agentrl.run.training_server.call_log import CallAnswer
from agentrl.run.training_server.target_losses import TargetLoss

MOST_RANK = 512
MOST_NUMBER = (1 << 63) - 1  # that the log of calls can hold
_MOST_NUMBERS = 1 << 26  # of one tensor
_MOST_OF_AN_ERROR = 2000  # characters


@cache
def messages() -> Any:
    """The module of the protobuf messages. Raises UsageError if the package is not installed."""
    return require("tinker.proto.tinker_public_pb2", what="agentrl serve --training", command=install_command("tinker"))


# --- JSON ---------------------------------------------------------------------------------------------------------


class TinkerRequest(BaseModel):
    """A JSON request. Fields that are not named here must not matter."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), frozen=True)


class LoraFields(TinkerRequest):
    """`lora_config` of a request for a training client."""

    rank: int = Field(ge=1, le=MOST_RANK)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class TypeFields(TinkerRequest):
    """Fields of a table that has a `type`."""

    type: str


class CreateModel(TinkerRequest):
    """`create_model`."""

    session_id: str
    model_seq_id: int = Field(ge=0, le=MOST_NUMBER)
    base_model: str
    lora_config: LoraFields | None = None
    optimizer_config: TypeFields = TypeFields(type="adamw")


class AdamFields(TinkerRequest):
    """`adam_params` of an optimizer step."""

    learning_rate: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class OptimStep(TinkerRequest):
    """`optim_step`."""

    adam_params: AdamFields | None = None
    optimizer_params: TypeFields | None = None


class SaveWeights(TinkerRequest):
    """`save_weights` and `save_weights_for_sampler`."""

    path: str | None = None
    overwrite: bool = False
    sampling_session_seq_id: int | None = Field(default=None, ge=0, le=MOST_NUMBER)


class LoadWeights(TinkerRequest):
    """`load_weights`: into a training client, or for a new one of a session."""

    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, le=MOST_NUMBER)
    base_model: str | None = None
    path: str
    optimizer: bool
    optimizer_config: TypeFields | None = None
    weights_access_token: str | None = None


class CreateSampler(TinkerRequest):
    """`create_sampling_session`."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0, le=MOST_NUMBER)
    base_model: str | None = None
    model_path: str | None = None


class ChunkFields(TinkerRequest):
    """A piece of a prompt."""

    type: str
    tokens: list[int] = Field(default_factory=list[int])


class PromptFields(TinkerRequest):
    """A prompt."""

    chunks: list[ChunkFields]


class SamplingFields(TinkerRequest):
    """`sampling_params`."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_k: int = -1
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleRequest(TinkerRequest):
    """`asample`."""

    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt: PromptFields
    sampling_params: SamplingFields
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


def parse(kind: type[Any], body: bytes) -> Any:
    """A request of this kind. Raises ConfigError naming the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise config_error(error, kind) from None


def prompt_tokens(prompt: PromptFields) -> tuple[int, ...]:
    """The tokens of a prompt. Raises ConfigError for what is no text."""
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise _no_text("prompt", chunk.type)
    return tuple(token for chunk in prompt.chunks for token in chunk.tokens)


# --- forward and backward -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForwardBackwardRequest:
    """`forward_backward`. `message` is the protobuf message."""

    model_id: str
    seq_id: int
    forward_only: bool
    message: Any

    @classmethod
    def read(cls, body: bytes) -> ForwardBackwardRequest:
        """Raises ConfigError for what is no such message."""
        message = messages().ForwardBackwardRequest()
        try:
            message.ParseFromString(body)
        except Exception as error:  # google.protobuf's DecodeError
            correction = "send the protobuf message of the tinker client"
            raise ConfigError("body", f"{len(body)} bytes", f"{correction} ({error})") from error
        return cls(message.model_id, message.seq_id, message.forward_only, message)

    @property
    def loss(self) -> tuple[str, dict[str, float | str]]:
        """The name of the loss and its settings."""
        settings = {
            setting_key: setting_value.text if setting_value.WhichOneof("value") == "text" else setting_value.number
            for setting_key, setting_value in self.message.loss_fn_config_v2.items()
        }
        return self.message.loss_fn, settings or dict(self.message.loss_fn_config)

    def rows(self, loss: TargetLoss, *, vocab: int, most_tokens: int) -> list[TargetRow]:
        """The rows with what the loss reads. Raises ConfigError for what cannot be computed."""
        target_rows = [
            _row(f"data[{datum_index}]", datum, loss, vocab, most_tokens)
            for datum_index, datum in enumerate(self.message.data)
        ]
        if not target_rows:
            raise ConfigError("data", [], "give one datum or more")
        return target_rows


def _row(name: str, datum: Any, loss: TargetLoss, vocab: int, most_tokens: int) -> TargetRow:
    token_arrays = list[NDArray[np.int32]]()
    for chunk in datum.model_input:
        if (chunk_kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise _no_text(f"{name}.model_input", chunk_kind)
        if len(chunk.encoded_text.tokens) % 4:
            raise ConfigError(f"{name}.model_input", f"{len(chunk.encoded_text.tokens)} bytes", "give int32 tokens")
        token_arrays.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    input_T = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *token_arrays]).astype(np.int64))
    if not 1 <= len(input_T) <= most_tokens:
        raise ConfigError(f"{name}.model_input", f"{len(input_T)} tokens", f"give 1 to {most_tokens}")
    _check_ids(f"{name}.model_input", input_T, vocab)
    inputs = {
        input_key: _tensor(f"{name}.loss_fn_inputs.{input_key}", message)
        for input_key, message in datum.loss_fn_inputs.items()
    }
    target_field = f"{name}.loss_fn_inputs.target_tokens"
    target_TC = inputs.pop("target_tokens", None)
    if target_TC is None:
        raise ConfigError(target_field, None, "give the token that comes after each token of model_input")
    if target_TC.is_floating_point() or target_TC.ndim not in (1, 2) or len(target_TC) != len(input_T):
        correction = f"give int64 [{len(input_T)}], or [{len(input_T)}, choices]"
        raise ConfigError(target_field, f"{target_TC.dtype} {list(target_TC.shape)}", correction)
    _check_ids(target_field, target_TC, vocab)
    if loss.default:
        inputs = {column: torch.ones(target_TC.shape) for column in loss.columns} | inputs
    # A column that the loss does not read is refused as well: it is most often a misspelt one, and the loss would train
    # on a default in its place (law 8).
    for input_key in sorted(inputs.keys() ^ set(loss.columns)):
        correction = (
            "the loss reads it: give it" if input_key in loss.columns else "the loss does not read it: leave it out"
        )
        raise ConfigError(
            f"{name}.loss_fn_inputs.{input_key}",
            list(inputs[input_key].shape) if input_key in inputs else None,
            correction,
        )
    for input_key, column in inputs.items():
        if column.shape != target_TC.shape:
            correction = f"give the shape of target_tokens, {list(target_TC.shape)}"
            raise ConfigError(f"{name}.loss_fn_inputs.{input_key}", list(column.shape), correction)
        if not bool(torch.isfinite(column).all()):
            raise ConfigError(f"{name}.loss_fn_inputs.{input_key}", "nan or inf", "give finite numbers")
    columns = {input_key: column.float() for input_key, column in inputs.items()}
    return TargetRow(input_T=input_T, target_TC=target_TC, columns=columns)


def _check_ids(name: str, ids: Tensor, vocab: int) -> None:
    unknown_ids = ids[(ids < 0) | (ids >= vocab)]
    if len(unknown_ids):
        raise ConfigError(name, int(unknown_ids[0]), f"the model has the tokens 0 to {vocab - 1}")


def _tensor(name: str, message: Any) -> Tensor:
    number_type = {messages().DTYPE_FLOAT32: np.float32, messages().DTYPE_INT64: np.int64}.get(message.dtype)
    if number_type is None:
        raise ConfigError(name, f"dtype {message.dtype}", "give float32 or int64")
    sparse_csr = message.sparse_csr if message.HasField("sparse_csr") else None
    try:
        numbers = np.frombuffer(message.dense if sparse_csr is None else sparse_csr.values, number_type).copy()
        full_shape = tuple(message.shape) or numbers.shape
        if sparse_csr is None:
            return torch.from_numpy(numbers.reshape(full_shape))
        # A sparse tensor of a few bytes may claim any shape, and is made dense below: the claim is checked before the
        # memory is taken.
        if math.prod(full_shape) > _MOST_NUMBERS:
            raise ValueError(f"{math.prod(full_shape)} numbers are too many")
        row_starts, columns = (
            np.frombuffer(indices, np.int64) for indices in (sparse_csr.crow_indices, sparse_csr.col_indices)
        )
        dense_array = np.zeros(full_shape, number_type)  # a place that is not named has token 0 and weight 0
        dense_array[np.repeat(np.arange(full_shape[0]), np.diff(row_starts)), columns] = numbers
        return torch.from_numpy(dense_array)
    except (ValueError, IndexError) as error:
        correction = "the bytes do not fit dtype and shape: use the tinker client's TensorData"
        raise ConfigError(name, list(message.shape), f"{correction} ({error})") from error


def _no_text(name: str, kind: object) -> ConfigError:
    return ConfigError(name, str(kind), "this server trains and samples text alone: give encoded_text")


def forward_backward_answer(loss: float, logprobs: Sequence[Tensor]) -> CallAnswer:
    """Loss, and log-probs [T] or [T, C] of each row. Neighbours with as many choices lie together."""
    answer_message = messages().ForwardBackwardOutput()
    answer_message.loss_fn_output_type = "ArrayRecord"
    answer_message.metrics["loss:sum"] = loss
    for choices, neighbours in groupby(logprobs, key=lambda row: row.shape[1:]):
        logprobs_arrays = [row_logprobs.numpy().astype(np.float32) for row_logprobs in neighbours]
        record_message = answer_message.loss_fn_outputs.add()
        record_message.num_datums = len(logprobs_arrays)
        logprobs_column = record_message.fields["logprobs"]
        logprobs_column.dtype = messages().DTYPE_FLOAT32
        logprobs_column.data = b"".join(logprobs_array.tobytes() for logprobs_array in logprobs_arrays)
        logprobs_column.offsets = (
            np.cumsum([0, *(logprobs_array.nbytes for logprobs_array in logprobs_arrays)]).astype(np.int64).tobytes()
        )
        logprobs_column.trailing_shape.extend(choices)
    return CallAnswer("protobuf", answer_message.SerializeToString())


# --- samples ------------------------------------------------------------------------------------------------------


def sample_answer(samples: Sequence[Generation], prompt_logprobs: Sequence[float] | None) -> CallAnswer:
    """Sampled sequences, and log-probs of the prompt's tokens but the first."""
    response = messages().SampleResponse()
    for generation in samples:
        sequence = response.sequences.add()
        sequence.stop_reason = (
            messages().STOP_REASON_STOP if generation.finish == "stop" else messages().STOP_REASON_LENGTH
        )
        sequence.tokens = np.array(generation.token_ids, np.int32).tobytes()
        sequence.logprobs = np.array(generation.logprobs, np.float32).tobytes()
    if prompt_logprobs is not None:
        response.prompt_logprobs = np.array([math.nan, *prompt_logprobs], np.float32).tobytes()
    return CallAnswer("protobuf", response.SerializeToString())


def json_answer(**fields: object) -> CallAnswer:
    """An answer in JSON."""
    return CallAnswer("json", json.dumps(fields).encode())


def failed_answer(error: str, category: Literal["user", "server"]) -> CallAnswer:
    """The failure of a call, and whose it is."""
    return CallAnswer("failed", json.dumps({"error": cut(error), "category": category}).encode())


def cut(error: str) -> str:
    """The text of an error, of which a client gets a few thousand characters at most."""
    return error if len(error) <= _MOST_OF_AN_ERROR else f"{error[:_MOST_OF_AN_ERROR]} … ({len(error)} characters)"
