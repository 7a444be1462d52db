"""One base model that many adapters are trained over, each by somebody else: a training service's learner.

Owns the base model, the adapters with their gradients and their Adam, and files of an adapter's state. Never knows
whose an adapter is, nor in which order calls came. A call computes in the calling thread, one at a time; the same calls
in the same order give the same bits.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agentrl.errors import ModelError, UsageError
from agentrl.learner.model import lora
from agentrl.learner.model.policy import PolicyModel

ALPHA = 32
"""The scale of an adapter of rank r is ALPHA / r."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # of torch's AdamW
_WEIGHT = "weight"
_ATTENTION = re.compile(r"\battn\b|attn|attention", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """A row to compute: the log-probs of `target_TC` ([T], or [T, C]: C choices) after each of its tokens `input_T`.
    `columns` are what a loss reads beside them, float32 of the targets' shape."""

    input_T: Tensor
    target_TC: Tensor
    columns: Mapping[str, Tensor]


RowLoss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""The loss of a row, a scalar, from the log-probs of its targets and its columns; those of all rows add up."""


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Which layers an adapter changes, and its rank."""

    rank: int
    attention: bool = True
    mlp: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """The settings of one optimizer step; those of torch.optim.AdamW. `grad_clip` is the largest norm of the gradient,
    0 for any."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    # Smaller than torch's 1e-8, as training services have it: an adapter's gradients are small, and 1e-8 would
    # dominate the second moment of some of them and slow exactly those down.
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip: float = 0.0


@dataclass(slots=True)
class _Adapter:
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW

    @property
    def gradients(self) -> list[Tensor]:
        """Current gradients: those of all parameters, or an empty list if no backward pass has run."""
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]


class AdapterLearner:
    """Trains adapters called by a name of letters and digits. Between calls an adapter's gradients are those of its
    `forward_backward`s since its last `step`."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        threads: int = 1,
        tokens_per_pass: int = 1024,
        logits_mb: int = 256,
    ) -> None:
        """Load the model of `folder`. A pass has at most `tokens_per_pass`, or one row; more logits than `logits_mb`
        are computed in parts. Raises ModelError, also for a mixture of experts."""
        torch.set_num_threads(threads)
        self._model = PolicyModel(folder, device=device, dtype=dtype, frozen=True, logits_mb=logits_mb)
        self._parts = lora.choose(self._model.module, ())
        if any(part.parameter for part in self._parts):
            raise ModelError(f"{str(folder)!r} is a mixture of experts, which this learner has no adapters for")
        self._tokens_per_pass = tokens_per_pass
        self._adapters: dict[str, _Adapter] = {}

    @property
    def vocab(self) -> int:
        """Token ids that the model knows: 0 to `vocab` - 1."""
        return self._model.vocab

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def create(self, name: str, shape: AdapterShape, *, seed: int) -> None:
        """Make an adapter, which changes nothing at first. Raises UsageError if the model has none of its layers."""
        parts = [part for part in self._parts if (shape.attention if _ATTENTION.search(part.name) else shape.mlp)]
        if not parts:
            raise UsageError("the model has no layer that this adapter would change")
        module = self._model.module
        # The seed is the caller's, and this process serves many: without the fork the initial weights of one adapter
        # would move the random state of all others.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            lora.add(module, name, parts, rank=shape.rank, alpha=ALPHA)
        for parameter in lora.parameters(module, name):
            # PEFT makes matrices as narrow as the layer below. An update of a millionth does not change a bfloat16,
            # so they are trained in float32.
            parameter.data = parameter.data.float()
        mark = f".{name}."
        parameters = {
            full_name.replace(mark, "."): parameter
            for full_name, parameter in module.named_parameters()
            if ".lora_" in full_name and mark in full_name
        }
        self._adapters[name] = _Adapter(parameters, torch.optim.AdamW(parameters.values()))

    def forget(self, name: str) -> None:
        """Take an adapter out of memory."""
        if self._adapters.pop(name, None) is not None:
            lora.remove(self._model.module, name)

    def forward(self, name: str, rows: Sequence[TargetRow], loss: RowLoss) -> tuple[float, list[Tensor]]:
        """The loss of all rows, and the log-probs of each row's targets, of their shape."""
        lora.activate(self._model.module, name)
        total, logprobs = 0.0, list[Tensor]()
        with torch.no_grad():
            for part in self._passes(rows):
                of_targets = self._model.choices([(row.input_T, row.target_TC) for row in part])
                total += float(_sum(part, of_targets, loss))
                logprobs += [tensor.cpu() for tensor in of_targets]
        return total, logprobs

    def forward_backward(self, name: str, rows: Sequence[TargetRow], loss: RowLoss) -> tuple[float, list[Tensor]]:
        """Compute what `forward` computes, and add the gradients to the adapter's: all of them, or none if it
        raises."""
        lora.activate(self._model.module, name)
        adapter = self._adapters[name]
        parameters = list(adapter.parameters.values())
        total, logprobs = 0.0, list[Tensor]()
        # Summed apart from `parameter.grad`, and added to it at the end: a row that raises in the third pass leaves
        # the adapter as it was before the call.
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        for part in self._passes(rows):
            of_targets = self._model.choices([(row.input_T, row.target_TC) for row in part])
            lost = _sum(part, of_targets, loss)
            part_gradients = torch.autograd.grad(lost, parameters, allow_unused=True)
            for sum_, new in zip(gradients, cast("tuple[Tensor | None, ...]", part_gradients), strict=True):
                if new is not None:
                    sum_ += new
            total += float(lost.detach())
            logprobs += [tensor.detach().cpu() for tensor in of_targets]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return total, logprobs

    def step(self, name: str, adam: AdamStep) -> dict[str, float]:
        """An AdamW step from the gradients at hand, which are gone afterwards. Returns the norm of the gradient before
        it was clipped. Raises UsageError, and no weight changes, without gradients or for one that is not finite."""
        adapter = self._adapters[name]
        parameters = list(adapter.parameters.values())
        gradients = adapter.gradients
        if not gradients:
            raise UsageError("optim_step has no gradients: call forward_backward before")
        norm = float(nn.utils.get_total_norm(gradients))
        try:
            # One NaN in a step would make every later one NaN, through Adam's moments. The gradient is dropped with
            # the step: whoever sent it may go on.
            if norm != norm or norm == float("inf"):
                raise UsageError(f"the gradient is not finite (norm {norm}): no weight changed, and it is gone")
            if adam.grad_clip > 0:
                nn.utils.clip_grad_norm_(parameters, adam.grad_clip)
            for group in adapter.optimizer.param_groups:
                betas = adam.beta1, adam.beta2
                group.update(lr=adam.lr, betas=betas, eps=adam.eps, weight_decay=adam.weight_decay)
            adapter.optimizer.step()
        finally:
            adapter.optimizer.zero_grad()
        return {"grad_norm": norm}

    def save(self, name: str, file: Path) -> None:
        """Write weights and optimizer, without gradients, to `file`: whole or not at all, also if the power fails."""
        adapter = self._adapters[name]
        tensors = {f"{_WEIGHT}/{key}": parameter.detach() for key, parameter in adapter.parameters.items()}
        for key, parameter in adapter.parameters.items():
            tensors |= {
                f"{moment}/{key}": tensor for moment, tensor in adapter.optimizer.state.get(parameter, {}).items()
            }
        draft = file.with_name(f".{file.name}.draft")
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, draft)
        # The file first, then the folder with its new name: after a power loss a name without its bytes would be
        # worse than the old file.
        for path in (draft, file.parent):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                if path is draft:
                    draft.rename(file)
            finally:
                os.close(descriptor)

    def load(self, name: str, file: Path, *, optimizer: bool = True) -> None:
        """Go on from what `save` wrote, of an adapter of the same shape; without `optimizer` a new Adam begins.
        Gradients are gone. Raises ModelError, and nothing has changed, if the file does not fit."""
        adapter = self._adapters[name]
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read the state in {str(file)!r}: {error}") from error
        weights = dict(_below(tensors, _WEIGHT))
        if {key: tensor.shape for key, tensor in weights.items()} != {
            key: tensor.shape for key, tensor in adapter.parameters.items()
        }:
            raise ModelError("the checkpoint is of an adapter of another rank, or on other layers")
        # A new optimizer that takes the old one's place at the end. `load_state_dict` into the old one would leave it
        # half changed if a moment were missing.
        fresh = torch.optim.AdamW(adapter.parameters.values())
        with torch.no_grad():
            for key, parameter in adapter.parameters.items():
                parameter.copy_(weights[key])
        moments = {moment: dict(_below(tensors, moment)) for moment in _MOMENTS} if optimizer else {}
        for key, parameter in adapter.parameters.items():
            if moments and key in moments["step"]:
                fresh.state[parameter] = {
                    moment: of[key] if moment == "step" else of[key].to(parameter.device)
                    for moment, of in moments.items()
                }
        fresh.zero_grad()
        adapter.optimizer = fresh

    def export(self, name: str, folder: Path) -> None:
        """Write the adapter as PEFT and engines read it."""
        lora.export(self._model.module, name, folder)

    def _passes(self, rows: Sequence[TargetRow]) -> Iterator[list[TargetRow]]:
        """The rows in order, as many at once as have room in a pass."""
        part, tokens = list[TargetRow](), 0
        for row in rows:
            if part and tokens + len(row.input_T) > self._tokens_per_pass:
                yield part
                part, tokens = [], 0
            part.append(row)
            tokens += len(row.input_T)
        if part:
            yield part


def _sum(rows: Sequence[TargetRow], of_targets: Sequence[Tensor], loss: RowLoss) -> Tensor:
    return torch.stack(
        [
            loss(logprobs_TC, {key: column.to(logprobs_TC.device) for key, column in row.columns.items()})
            for row, logprobs_TC in zip(rows, of_targets, strict=True)
        ]
    ).sum()


def _below(tensors: Mapping[str, Tensor], name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors whose names begin with `name` and a slash, by the rest."""
    return ((key.removeprefix(f"{name}/"), tensor) for key, tensor in tensors.items() if key.startswith(f"{name}/"))
