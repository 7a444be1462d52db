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
        if any(adapted_part.parameter for adapted_part in self._parts):
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
        adapted_parts = [
            model_part
            for model_part in self._parts
            if (shape.attention if _ATTENTION.search(model_part.name) else shape.mlp)
        ]
        if not adapted_parts:
            raise UsageError("the model has no layer that this adapter would change")
        model_module = self._model.module
        # The seed is the caller's, and this process serves many: without the fork the initial weights of one adapter
        # would move the random state of all others.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            lora.add(model_module, name, adapted_parts, rank=shape.rank, alpha=ALPHA)
        for parameter in lora.parameters(model_module, name):
            # PEFT makes matrices as narrow as the layer below. An update of a millionth does not change a bfloat16,
            # so they are trained in float32.
            parameter.data = parameter.data.float()
        name_marker = f".{name}."
        parameters = {
            full_name.replace(name_marker, "."): parameter
            for full_name, parameter in model_module.named_parameters()
            if ".lora_" in full_name and name_marker in full_name
        }
        self._adapters[name] = _Adapter(parameters, torch.optim.AdamW(parameters.values()))

    def forget(self, name: str) -> None:
        """Take an adapter out of memory."""
        if self._adapters.pop(name, None) is not None:
            lora.remove(self._model.module, name)

    def forward(self, name: str, rows: Sequence[TargetRow], loss: RowLoss) -> tuple[float, list[Tensor]]:
        """The loss of all rows, and the log-probs of each row's targets, of their shape."""
        lora.activate(self._model.module, name)
        total_loss, logprobs = 0.0, list[Tensor]()
        with torch.no_grad():
            for pass_rows in self._passes(rows):
                pass_logprobs = self._model.choices(
                    [(target_row.input_T, target_row.target_TC) for target_row in pass_rows]
                )
                total_loss += float(_sum(pass_rows, pass_logprobs, loss))
                logprobs += [target_logprobs.cpu() for target_logprobs in pass_logprobs]
        return total_loss, logprobs

    def forward_backward(self, name: str, rows: Sequence[TargetRow], loss: RowLoss) -> tuple[float, list[Tensor]]:
        """Compute what `forward` computes, and add the gradients to the adapter's: all of them, or none if it
        raises."""
        lora.activate(self._model.module, name)
        adapter = self._adapters[name]
        parameters = list(adapter.parameters.values())
        total_loss, logprobs = 0.0, list[Tensor]()
        # Summed apart from `parameter.grad`, and added to it at the end: a row that raises in the third pass leaves
        # the adapter as it was before the call.
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        for pass_rows in self._passes(rows):
            pass_logprobs = self._model.choices(
                [(target_row.input_T, target_row.target_TC) for target_row in pass_rows]
            )
            pass_loss = _sum(pass_rows, pass_logprobs, loss)
            pass_gradients = torch.autograd.grad(pass_loss, parameters, allow_unused=True)
            for gradient_sum, pass_gradient in zip(
                gradients, cast("tuple[Tensor | None, ...]", pass_gradients), strict=True
            ):
                if pass_gradient is not None:
                    gradient_sum += pass_gradient
            total_loss += float(pass_loss.detach())
            logprobs += [target_logprobs.detach().cpu() for target_logprobs in pass_logprobs]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return total_loss, logprobs

    def step(self, name: str, adam: AdamStep) -> dict[str, float]:
        """An AdamW step from the gradients at hand, which are gone afterwards. Returns the norm of the gradient before
        it was clipped. Raises UsageError, and no weight changes, without gradients or for one that is not finite."""
        adapter = self._adapters[name]
        parameters = list(adapter.parameters.values())
        gradients = adapter.gradients
        if not gradients:
            raise UsageError("optim_step has no gradients: call forward_backward before")
        gradient_norm = float(nn.utils.get_total_norm(gradients))
        try:
            # One NaN in a step would make every later one NaN, through Adam's moments. The gradient is dropped with
            # the step: whoever sent it may go on.
            if gradient_norm != gradient_norm or gradient_norm == float("inf"):
                raise UsageError(
                    f"the gradient is not finite (norm {gradient_norm}): no weight changed, and it is gone"
                )
            if adam.grad_clip > 0:
                nn.utils.clip_grad_norm_(parameters, adam.grad_clip)
            for parameter_group in adapter.optimizer.param_groups:
                betas = adam.beta1, adam.beta2
                parameter_group.update(lr=adam.lr, betas=betas, eps=adam.eps, weight_decay=adam.weight_decay)
            adapter.optimizer.step()
        finally:
            adapter.optimizer.zero_grad()
        return {"grad_norm": gradient_norm}

    def save(self, name: str, file: Path) -> None:
        """Write weights and optimizer, without gradients, to `file`: whole or not at all, also if the power fails."""
        adapter = self._adapters[name]
        saved_tensors = {
            f"{_WEIGHT}/{parameter_name}": parameter.detach()
            for parameter_name, parameter in adapter.parameters.items()
        }
        for parameter_name, parameter in adapter.parameters.items():
            saved_tensors |= {
                f"{moment_name}/{parameter_name}": saved_tensor
                for moment_name, saved_tensor in adapter.optimizer.state.get(parameter, {}).items()
            }
        draft_file = file.with_name(f".{file.name}.draft")
        save_file(
            {parameter_name: saved_tensor.cpu().contiguous() for parameter_name, saved_tensor in saved_tensors.items()},
            draft_file,
        )
        # The file first, then the folder with its new name: after a power loss a name without its bytes would be
        # worse than the old file.
        for synced_path in (draft_file, file.parent):
            descriptor = os.open(synced_path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                if synced_path is draft_file:
                    draft_file.rename(file)
            finally:
                os.close(descriptor)

    def load(self, name: str, file: Path, *, optimizer: bool = True) -> None:
        """Go on from what `save` wrote, of an adapter of the same shape; without `optimizer` a new Adam begins.
        Gradients are gone. Raises ModelError, and nothing has changed, if the file does not fit."""
        adapter = self._adapters[name]
        try:
            saved_tensors = load_file(file)
        except (OSError, SafetensorError) as read_error:
            raise ModelError(f"cannot read the state in {str(file)!r}: {read_error}") from read_error
        saved_weights = dict(_below(saved_tensors, _WEIGHT))
        if {parameter_name: parameter_tensor.shape for parameter_name, parameter_tensor in saved_weights.items()} != {
            parameter_name: parameter_tensor.shape for parameter_name, parameter_tensor in adapter.parameters.items()
        }:
            raise ModelError("the checkpoint is of an adapter of another rank, or on other layers")
        # A new optimizer that takes the old one's place at the end. `load_state_dict` into the old one would leave it
        # half changed if a moment were missing.
        new_optimizer = torch.optim.AdamW(adapter.parameters.values())
        with torch.no_grad():
            for parameter_name, parameter in adapter.parameters.items():
                parameter.copy_(saved_weights[parameter_name])
        moments_by_name = (
            {moment_name: dict(_below(saved_tensors, moment_name)) for moment_name in _MOMENTS} if optimizer else {}
        )
        for parameter_name, parameter in adapter.parameters.items():
            if moments_by_name and parameter_name in moments_by_name["step"]:
                new_optimizer.state[parameter] = {
                    moment_name: saved_moments[parameter_name]
                    if moment_name == "step"
                    else saved_moments[parameter_name].to(parameter.device)
                    for moment_name, saved_moments in moments_by_name.items()
                }
        new_optimizer.zero_grad()
        adapter.optimizer = new_optimizer

    def export(self, name: str, folder: Path) -> None:
        """Write the adapter as PEFT and engines read it."""
        lora.export(self._model.module, name, folder)

    def _passes(self, rows: Sequence[TargetRow]) -> Iterator[list[TargetRow]]:
        """The rows in order, as many at once as have room in a pass."""
        pass_rows, pass_tokens = list[TargetRow](), 0
        for target_row in rows:
            if pass_rows and pass_tokens + len(target_row.input_T) > self._tokens_per_pass:
                yield pass_rows
                pass_rows, pass_tokens = [], 0
            pass_rows.append(target_row)
            pass_tokens += len(target_row.input_T)
        if pass_rows:
            yield pass_rows


def _sum(rows: Sequence[TargetRow], of_targets: Sequence[Tensor], loss: RowLoss) -> Tensor:
    return torch.stack(
        [
            loss(
                logprobs_TC,
                {
                    column_name: column_TC.to(logprobs_TC.device)
                    for column_name, column_TC in target_row.columns.items()
                },
            )
            for target_row, logprobs_TC in zip(rows, of_targets, strict=True)
        ]
    ).sum()


def _below(tensors: Mapping[str, Tensor], name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors whose names begin with `name` and a slash, by the rest."""
    return (
        (full_name.removeprefix(f"{name}/"), saved_tensor)
        for full_name, saved_tensor in tensors.items()
        if full_name.startswith(f"{name}/")
    )
