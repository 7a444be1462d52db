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
        except Exception as error:  # of many kinds; the user must fix each
            reason = first_line(error)
            place = folder if adapter is None else f"{folder} with the adapter {adapter}"
            raise ModelError(f"cannot load the model in {place}: {reason}") from error
        self._module.eval()
        self.rows: int = self._module.get_input_embeddings().num_embeddings

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Log-probs of `tokens[1:]`, in nats at temperature 1."""
        ids_T = torch.tensor(tokens, device=self.device)
        numbers: list[Tensor] = []
        start = 0
        for logits_CV in self._logits(ids_T):
            targets_C = ids_T[start + 1 : start + 1 + len(logits_CV)]
            logprobs_CV = logits_CV[: len(targets_C)].float().log_softmax(-1)
            numbers.append(logprobs_CV.gather(1, targets_C[:, None])[:, 0])
            start += len(logits_CV)
        return tuple(torch.cat(numbers).tolist())

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        """The logits [T - start, V] that `tokens[start:]` were drawn from."""
        rows_TV = torch.cat([logits.float().cpu() for logits in self._logits(torch.tensor(tokens, device=self.device))])
        return rows_TV[start - 1 : -1].numpy()

    def _logits(self, ids_T: Tensor) -> Iterator[Tensor]:
        """Yield the logits of all tokens as rows [C, V], a chunk of tokens at a time: with a large vocabulary, those of
        a long context are gigabytes. In one piece if they are small, or if the model's head cannot be computed apart.
        """
        module, layer = self._module, self._module.get_output_embeddings()

        def run() -> Tensor:
            return module(input_ids=ids_T[None], use_cache=False).logits[0]

        vocab, width = getattr(layer, "out_features", 0), ids_T.numel()
        rows = max(1, _CHUNK_BYTES // (4 * max(1, vocab)))
        if width <= rows or (head := head_of(module, run, width)) is None:
            yield run()
            return
        # One pass records the input of the output layer, and computes a single column in its place. The logits of each
        # chunk are then computed from its rows of that input.
        with overheard(layer, lambda hidden: hidden[..., :1]) as heard:
            run()
        for start in range(0, width, rows):
            yield head(heard[0][0, start : start + rows])

    @contextmanager
    def without_adapter(self) -> Generator[None]:
        """Inside, the weights below the adapter alone compute."""
        with self._peft.disable_adapter():
            yield

    @contextmanager
    def quantized(self, scheme: Scheme) -> Generator[None]:
        """Inside, the linear layers of all blocks have weights rounded as the plainest kind of a scheme rounds them: a
        scale for each output, or for 128 weights in 4 bits."""
        output = self._module.get_output_embeddings()
        layers: list[Any] = [
            layer
            for name, layer in self._module.named_modules()
            if isinstance(layer, nn.Linear) and layer is not output and ".lora_" not in name
        ]
        # Rounded as they compute, a layer at a time: a second model would not fit beside a large one.
        for layer in layers:
            layer.forward = partial(_rounded_product, layer, scheme)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def layers(self) -> list[str]:
        """The parts that an update of weights may miss, in the order of the model."""
        return list(dict.fromkeys(_part(name) for name, _ in self._module.named_parameters()))

    @contextmanager
    def with_parts_of(self, other: LocalModel, parts: Sequence[str]) -> Generator[None]:
        """Inside, these parts hold the weights of another model of the same shapes."""
        theirs = dict(other._module.named_parameters())
        ours = [(name, each) for name, each in self._module.named_parameters() if _part(name) in parts]
        former = [(each, each.data) for _, each in ours]
        try:
            for name, each in ours:
                each.data = theirs[name].data
            yield
        finally:
            for each, data in former:
                each.data = data

    def has_shapes_of(self, other: LocalModel) -> bool:
        """Whether parts of one fit into the other."""
        shapes = [{name: each.shape for name, each in m._module.named_parameters()} for m in (self, other)]
        return shapes[0] == shapes[1]


def text_tokens(folder: Path, text: str) -> tuple[int, ...] | None:
    """The tokens that transformers makes of a text, with those that the tokenizer puts around it; None for a folder
    without a tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        with _quiet():
            return tuple(AutoTokenizer.from_pretrained(folder, local_files_only=True)(text)["input_ids"])
    except Exception as error:  # of many kinds; the user must fix each
        reason = first_line(error)
        raise ModelError(f"cannot load the tokenizer in {str(folder)!r}: {reason}") from error


def _adapted(module: Any, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(module, str(adapter))


def _part(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` belongs to `model.layers.3`; what belongs to no layer stands by itself."""
    match = _LAYER.search(name)
    return name.removesuffix(".weight") if match is None else name[: match.end() - 1]


def _rounded_product(layer: nn.Linear, scheme: Scheme, x: Tensor) -> Tensor:
    return nn.functional.linear(x, _rounded(layer.weight, scheme), layer.bias)


def _rounded(weight_OI: Tensor, scheme: Scheme) -> Tensor:
    exact_OI = weight_OI.float()
    width = _GROUP if scheme == "int4" and exact_OI.shape[1] % _GROUP == 0 else exact_OI.shape[1]
    grouped_OGI = exact_OI.view(len(exact_OI), -1, width)
    most = {"int8": 127.0, "float8": 448.0, "int4": 7.0}[scheme]
    scale_OG1 = grouped_OGI.abs().amax(-1, keepdim=True).clamp_min(1e-12) / most
    scaled_OGI = grouped_OGI / scale_OG1
    rounded_OGI = scaled_OGI.to(torch.float8_e4m3fn).float() if scheme == "float8" else scaled_OGI.round()
    return (rounded_OGI * scale_OG1).view_as(exact_OI).to(weight_OI.dtype)


@contextmanager
def _quiet() -> Generator[None]:
    """Inside, transformers shows no bars."""
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
