"""A model folder's own log-probs, by transformers' forward pass, as nobody's engine computes them.

Owns the model in memory, its dtype, its adapter, and the changes that a hypothesis makes to its weights. The one module
of this room that imports torch. Never knows servers.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch, transformers and peft leave parts of their signatures untyped)

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.errors import ModelError, first_line
from agentrl.learner.model.logprobs import head_of, overheard

ADAPTER = "adapter_config.json"
Scheme = Literal["int8", "float8", "int4"]
SCHEMES: Final[tuple[Scheme, ...]] = ("int8", "float8", "int4")
_CHUNK_BYTES: Final = 256 << 20  # of the logits that are held at once
_GROUP: Final = 128  # weights that share a scale in 4 bits
_LAYER = re.compile(r"\.(\d+)\.")


class LocalModel:
    """The model of a folder, in `dtype`, with an adapter over it if there is one. Raises ModelError, in one line, for a
    folder that transformers or peft cannot load."""

    def __init__(self, folder: Path, dtype: Literal["float32", "bfloat16"], adapter: Path | None = None) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # float32 is float32: the numbers that this module gives are the measure.
        torch.set_float32_matmul_precision("highest")
        self._peft: Any = None
        try:
            with _quiet():
                self._module: Any = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
                )
                self._module.to(self.device)
                if adapter is not None:
                    self._peft = _adapted(self._module, adapter)
        except Exception as load_error:  # of many kinds; the user must fix each
            failure_reason = first_line(load_error)
            model_place = folder if adapter is None else f"{folder} with the adapter {adapter}"
            raise ModelError(f"cannot load the model in {model_place}: {failure_reason}") from load_error
        self._module.eval()
        self.rows: int = self._module.get_input_embeddings().num_embeddings

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Log-probs of `tokens[1:]`, in nats at temperature 1."""
        ids_T = torch.tensor(tokens, device=self.device)
        chunk_logprobs: list[Tensor] = []
        chunk_start = 0
        for logits_CV in self._logits(ids_T):
            targets_C = ids_T[chunk_start + 1 : chunk_start + 1 + len(logits_CV)]
            logprobs_CV = logits_CV[: len(targets_C)].float().log_softmax(-1)
            chunk_logprobs.append(logprobs_CV.gather(1, targets_C[:, None])[:, 0])
            chunk_start += len(logits_CV)
        return tuple(torch.cat(chunk_logprobs).tolist())

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        """The logits [T - start, V] that `tokens[start:]` were drawn from."""
        rows_TV = torch.cat(
            [chunk_logits.float().cpu() for chunk_logits in self._logits(torch.tensor(tokens, device=self.device))]
        )
        return rows_TV[start - 1 : -1].numpy()

    def _logits(self, ids_T: Tensor) -> Iterator[Tensor]:
        """Yield the logits of all tokens as rows [C, V], a chunk of tokens at a time: with a large vocabulary, those of
        a long context are gigabytes. In one piece if they are small, or if the model's head cannot be computed apart.
        """
        model_module, output_layer = self._module, self._module.get_output_embeddings()

        def run() -> Tensor:
            return model_module(input_ids=ids_T[None], use_cache=False).logits[0]

        vocabulary_size, token_count = getattr(output_layer, "out_features", 0), ids_T.numel()
        chunk_rows = max(1, _CHUNK_BYTES // (4 * max(1, vocabulary_size)))
        if token_count <= chunk_rows or (compute_logits := head_of(model_module, run, token_count)) is None:
            yield run()
            return
        # One pass records the input of the output layer, and computes a single column in its place. The logits of each
        # chunk are then computed from its rows of that input.
        with overheard(output_layer, lambda hidden: hidden[..., :1]) as hidden_states:
            run()
        for chunk_start in range(0, token_count, chunk_rows):
            yield compute_logits(hidden_states[0][0, chunk_start : chunk_start + chunk_rows])

    @contextmanager
    def without_adapter(self) -> Generator[None]:
        """Inside, the weights below the adapter alone compute."""
        with self._peft.disable_adapter():
            yield

    @contextmanager
    def quantized(self, scheme: Scheme) -> Generator[None]:
        """Inside, the linear layers of all blocks have weights rounded as the plainest kind of a scheme rounds them: a
        scale for each output, or for 128 weights in 4 bits."""
        output_layer = self._module.get_output_embeddings()
        linear_layers: list[Any] = [
            linear_layer
            for module_name, linear_layer in self._module.named_modules()
            if isinstance(linear_layer, nn.Linear) and linear_layer is not output_layer and ".lora_" not in module_name
        ]
        # Rounded as they compute, a layer at a time: a second model would not fit beside a large one.
        for linear_layer in linear_layers:
            linear_layer.forward = partial(_rounded_product, linear_layer, scheme)
        try:
            yield
        finally:
            for linear_layer in linear_layers:
                del linear_layer.forward

    def layers(self) -> list[str]:
        """The parts that an update of weights may miss, in the order of the model."""
        return list(dict.fromkeys(_part(parameter_name) for parameter_name, _ in self._module.named_parameters()))

    @contextmanager
    def with_parts_of(self, other: LocalModel, parts: Sequence[str]) -> Generator[None]:
        """Inside, these parts hold the weights of another model of the same shapes."""
        other_parameters = dict(other._module.named_parameters())
        own_parameters = [
            (parameter_name, parameter)
            for parameter_name, parameter in self._module.named_parameters()
            if _part(parameter_name) in parts
        ]
        former_weights = [(parameter, parameter.data) for _, parameter in own_parameters]
        try:
            for parameter_name, parameter in own_parameters:
                parameter.data = other_parameters[parameter_name].data
            yield
        finally:
            for parameter, former_data in former_weights:
                parameter.data = former_data

    def has_shapes_of(self, other: LocalModel) -> bool:
        """Whether parts of one fit into the other."""
        parameter_shapes = [
            {parameter_name: parameter.shape for parameter_name, parameter in model._module.named_parameters()}
            for model in (self, other)
        ]
        return parameter_shapes[0] == parameter_shapes[1]


def text_tokens(folder: Path, text: str) -> tuple[int, ...] | None:
    """The tokens that transformers makes of a text, with those that the tokenizer puts around it; None for a folder
    without a tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        with _quiet():
            return tuple(AutoTokenizer.from_pretrained(folder, local_files_only=True)(text)["input_ids"])
    except Exception as load_error:  # of many kinds; the user must fix each
        failure_reason = first_line(load_error)
        raise ModelError(f"cannot load the tokenizer in {str(folder)!r}: {failure_reason}") from load_error


def _adapted(module: Any, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(module, str(adapter))


def _part(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` belongs to `model.layers.3`; what belongs to no layer stands by itself."""
    layer_match = _LAYER.search(name)
    return name.removesuffix(".weight") if layer_match is None else name[: layer_match.end() - 1]


def _rounded_product(layer: nn.Linear, scheme: Scheme, x: Tensor) -> Tensor:
    return nn.functional.linear(x, _rounded(layer.weight, scheme), layer.bias)


def _rounded(weight_OI: Tensor, scheme: Scheme) -> Tensor:
    exact_OI = weight_OI.float()
    group_width = _GROUP if scheme == "int4" and exact_OI.shape[1] % _GROUP == 0 else exact_OI.shape[1]
    grouped_OGI = exact_OI.view(len(exact_OI), -1, group_width)
    largest_level = {"int8": 127.0, "float8": 448.0, "int4": 7.0}[scheme]
    scale_OG1 = grouped_OGI.abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest_level
    scaled_OGI = grouped_OGI / scale_OG1
    rounded_OGI = scaled_OGI.to(torch.float8_e4m3fn).float() if scheme == "float8" else scaled_OGI.round()
    return (rounded_OGI * scale_OG1).view_as(exact_OI).to(weight_OI.dtype)


@contextmanager
def _quiet() -> Generator[None]:
    """Inside, transformers shows no bars."""
    shows_bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows_bars:
            transformers.utils.logging.enable_progress_bar()
