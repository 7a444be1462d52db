"""The memory that a learner's step needs, by purpose, computed before anything is loaded.

The learner's own models are made from the model's configuration alone, of tensors that have shapes and no numbers
(torch's FakeTensorMode), and make one pass forward and backward and one update; meanwhile every storage is counted from
its first tensor to its last. So a new optimizer, a checkpointed layer or another output layer needs no formula here.
Never knows GPUs, engines or prices. Kernels' own scratch memory, and what an allocator loses between blocks, are not
counted.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from agentrl.config.roles import LearnerSettings
from agentrl.errors import ModelError
from agentrl.learner.data.prefix_trees import Branch, Pack, packs, stem
from agentrl.learner.data.rows import Row
from agentrl.learner.flops import EXPERTS, operations, prices
from agentrl.learner.model.load import load
from agentrl.learner.model.models import ModelPasses, Models
from agentrl.learner.parallel.pass_shards import pieces, spans
from agentrl.learner.parallel.ranks import ALONE

# Two layers and four: their difference is that of two layers in the middle, free of what the first and the last one
# have to themselves.
TRACED = (2, 4)  # layers; of a deeper model the rest follows from these two


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes. `frozen` are other models that learn nothing, and those that follow the policy. `optimizer` is what an
    optimizer remembers, masters too; what of that waits in host memory is in `host` instead. `activations` are what the
    forward pass leaves for the backward pass, logits too if there is room for all of them; `lent` of these is what a
    stem keeps for its passes. `temporary` is what comes and goes within a pass or an update, such as the logits of a
    chunk. `operations` are floating-point ones, of the pass forward and backward; `again` of these would be those of
    its stem, which is computed once for several passes."""

    weights: float
    frozen: float
    gradients: float
    optimizer: float
    host: float
    activations: float
    lent: float
    temporary: float
    operations: float
    again: float
    parameters: float  # of the policy, however many bytes one takes
    experts: float  # of these, those of a mixture's experts

    @property
    def total(self) -> float:
        """The most at any time."""
        return self.static + self.activations + self.temporary

    @property
    def static(self) -> float:
        """The memory that does not depend on the size of a pass."""
        return self.weights + self.frozen + self.gradients + self.optimizer


class Tracker(TorchDispatchMode):
    """Inside, counts the bytes of every storage that a tensor is made over, as long as one lives. `now` and `peak` are
    in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        # Storages and not tensors: a view, a transpose and a slice of one tensor hold the same bytes once.
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Count these as well. Returns how many bytes are new."""
        bytes_before = self.now
        for plain_tensor in _plain(tensors):
            storage = plain_tensor.untyped_storage()
            storage_key = storage._cdata  # pyright: ignore[reportPrivateUsage]
            if storage_key not in self._known:
                self._count(storage_key, storage, storage.nbytes())
        return self.now - bytes_before

    def leave(self, tensors: Iterable[Tensor]) -> int:
        """Count these no longer, however they are used: they are on another device. Returns how many bytes they had."""
        bytes_before = self.now
        for plain_tensor in _plain(tensors):
            self.add([plain_tensor])
            storage = plain_tensor.untyped_storage()
            self.now -= storage.nbytes()
            self._known[storage._cdata] = weakref.ref(storage)  # pyright: ignore[reportPrivateUsage]
        return bytes_before - self.now

    def _count(self, key: int, storage: Any, size: int) -> None:
        def gone(_: object) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation_result = (grouped if func is torch.ops.aten._grouped_mm.default else func)(*args, **(kwargs or {}))
        self.add(result_leaf for result_leaf in tree_leaves(operation_result) if isinstance(result_leaf, Tensor))
        return operation_result


def grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: object, **__: object) -> Tensor:
    """Stand in for torch's grouped matrix products, for any dtype: without numbers torch refuses all but bfloat16."""
    group_dimensions = () if a.ndim != b.ndim else (len(b) if offs is None else len(offs),)
    return a.new_empty(*group_dimensions, a.shape[-2], b.shape[-1])


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that hold numbers: some stand for others (moments of 8 bits: codes and scales)."""
    for outer_tensor in tensors:
        if is_traceable_wrapper_subclass(outer_tensor):
            yield from _plain(getattr(outer_tensor, inner_name) for inner_name in outer_tensor.__tensor_flatten__()[0])
        else:
            yield outer_tensor


def parameters_of(folder: Path) -> int:
    """Number of parameters of the model that a config.json describes, tied ones once. Raises ModelError."""
    with hollow():
        hollow_module: nn.Module = load(folder, ALONE, "sdpa")
    return sum(parameter.numel() for parameter in hollow_module.parameters())


def held(
    settings: LearnerSettings, folder: Path, rows: Sequence[Row], *, on_gpu: bool, passes: int = 1, context: int = 1
) -> MemoryBudget:
    """Compute the budget of a step whose largest pass computes `rows`, after the first step; of a group that has
    several `passes` where it is larger than one. `folder` needs no more than a config.json. With `on_gpu`, attention is
    one kernel that holds its inputs and its output, and optimizers work on all tensors at once, as on CUDA. The
    activations are those of one of `context` ranks that share a pass by its nodes: each has its nodes', the keys and
    values on their paths, and all that a stem lends. Raises ModelError for a model that cannot be computed without
    numbers."""
    try:
        return _held(settings, folder, rows, passes, context, on_gpu=on_gpu)
    # Tensors without numbers refuse what needs one: an `.item()`, a data-dependent shape. The model may well train;
    # only the plan cannot be made.
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as trace_error:
        reason = next(iter(str(trace_error).splitlines()), type(trace_error).__name__)
        raise ModelError(f"cannot plan {str(folder)!r}: a pass without numbers failed ({reason})") from trace_error


def _held(
    settings: LearnerSettings, folder: Path, rows: Sequence[Row], passes: int, context: int, *, on_gpu: bool
) -> MemoryBudget:
    described = json.loads((folder / "config.json").read_text())
    layer_count = described.get("num_hidden_layers")
    if not isinstance(layer_count, int) or layer_count <= max(TRACED):
        return _traced(settings, folder, rows, passes, context, on_gpu=on_gpu)
    with tempfile.TemporaryDirectory() as scratch_folder:
        folders = (_shallow(described, layers, Path(scratch_folder) / str(layers)) for layers in TRACED)
        smaller_budget, larger_budget = (
            _traced(settings, shallow_folder, rows, passes, context, on_gpu=on_gpu) for shallow_folder in folders
        )
    layer_pairs = (layer_count - TRACED[0]) / (TRACED[1] - TRACED[0])
    smaller_sizes = {field_name: getattr(smaller_budget, field_name) for field_name in MemoryBudget.__slots__}
    return MemoryBudget(
        **{
            field_name: smaller_size + (getattr(larger_budget, field_name) - smaller_size) * layer_pairs
            for field_name, smaller_size in smaller_sizes.items()
        }
    )


def _shallow(described: dict[str, Any], layers: int, folder: Path) -> Path:
    """Describe a model of only `layers` layers in `folder`, otherwise as in `described`."""
    folder.mkdir()
    layer_kinds = {"layer_types": described["layer_types"][:layers]} if described.get("layer_types") else {}
    (folder / "config.json").write_text(json.dumps({**described, "num_hidden_layers": layers, **layer_kinds}))
    return folder


def _traced(
    settings: LearnerSettings, folder: Path, rows: Sequence[Row], passes: int, context: int, *, on_gpu: bool
) -> MemoryBudget:
    with hollow():
        models = Models(settings, folder, "cpu", reference_dir=folder, folder_of=lambda _: folder)

    class Counted(Kernel):
        heard: ClassVar[list[int]] = []

    if on_gpu:
        for language_model in models.language_models():
            language_model.layout = Counted
    model_passes, optimizers = ModelPasses(models), list(models.optimizers.values())
    (traced_pass,) = packs([rows], 1 << 60)
    prompt_stem = stem(rows, passes)
    if passes > 1 and len(prompt_stem) and models.prompt_once:
        traced_pass = replace(traced_pass, stem=prompt_stem)
    tracker = Tracker()
    with tracker:
        learned_tensors, other_tensors = models.held()
        weight_bytes, frozen_bytes = tracker.add(learned_tensors), tracker.add(other_tensors)
        # Gradients are there from the first step on, and the peak is one of a later step.
        for parameter in models.learned():
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        gradient_bytes = tracker.now - weight_bytes - frozen_bytes
        tracker.add(models.masters())
        # An update before the pass: an optimizer makes its moments in its first step, and the pass of the second step
        # has them beside it.
        _update(optimizers, on_gpu)
        host_bytes = tracker.leave(models.away())
        static_bytes = tracker.now
        # What loading needed is over by the time of a step.
        tracker.peak = static_bytes
        activation_bytes = lent_bytes = path_bytes = 0
        with model_passes.stem():
            # In the second pass the sums of the stem's gradients are there.
            for _ in range(1 if traced_pass.stem is None else 2):
                model_passes.others(traced_pass)
                pass_outputs = model_passes.forward(traced_pass, trained=tuple(models.optimizers))
                activation_bytes, lent_bytes = tracker.now - static_bytes, model_passes.lent_bytes
                if not settings.train.gradient_checkpointing:
                    path_bytes = path_bytes or sum(Counted.heard)  # in the first the stem's are among them
                output_parts = (pass_outputs.logprobs_K, pass_outputs.entropy_K, pass_outputs.values_K)
                differentiable = [part for part in output_parts if part is not None and part.requires_grad]
                traced_loss = torch.stack([part.sum() for part in differentiable]).sum()
                traced_loss.backward()
                del pass_outputs, traced_loss, output_parts, differentiable
        _update(optimizers, on_gpu)
    return MemoryBudget(
        weights=weight_bytes,
        frozen=frozen_bytes,
        gradients=gradient_bytes,
        optimizer=static_bytes - weight_bytes - frozen_bytes - gradient_bytes,
        host=host_bytes,
        activations=(activation_bytes - lent_bytes - path_bytes) / context
        + lent_bytes
        + path_bytes * _along(traced_pass, context),
        lent=lent_bytes,
        temporary=tracker.peak - static_bytes - activation_bytes,
        operations=operations(models.policy.module, replace(traced_pass, stem=None)),
        again=0.0 if traced_pass.stem is None else prices(models.policy.module).stem(traced_pass.stem),
        parameters=sum(parameter.numel() for parameter in models.policy.module.parameters()),
        experts=sum(
            parameter.numel()
            for parameter_name, parameter in models.policy.module.named_parameters()
            if EXPERTS in parameter_name
        ),
    )


@contextmanager
def hollow() -> Generator[None]:
    """Inside, modules are made of tensors without numbers. Torch's own way to convert a module cannot swap these."""

    def convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for submodule in module.modules() if recurse else (module,):
            for parameter_name, parameter in submodule._parameters.items():  # pyright: ignore[reportPrivateUsage]
                if parameter is not None and (converted := function(parameter.detach())).dtype != parameter.dtype:
                    setattr(submodule, parameter_name, nn.Parameter(converted, parameter.requires_grad))
        return module

    with FakeTensorMode(allow_non_fake_inputs=True), patch.object(nn.Module, "_apply", convert):
        yield


def _update(optimizers: Sequence[torch.optim.Optimizer], on_gpu: bool) -> None:
    for optimizer in optimizers:
        for parameter_group in optimizer.param_groups:
            if on_gpu and parameter_group.get("foreach", False) is None and not parameter_group.get("fused"):
                parameter_group["foreach"] = True
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its own, which takes longer than all of this
            optimizer.step()


def _along(pack: Pack, context: int) -> float:
    """The most that one of `context` ranks has of a pass's keys and values: a run of nodes has a copy of its path."""
    span_edges = sorted({0, 0 if pack.stem is None else len(pack.stem), len(pack.token_ids_N)})
    rank_lengths = [0] * context
    for node_span in pairwise(span_edges):
        branches = pieces(pack.branches, [node_span])
        for rank, rank_share in enumerate(spans(branches, context)):
            rank_lengths[rank] += sum(len(branch.path) for branch in pieces(branches, rank_share))
    total_length = sum(
        len(branch.path) for node_span in pairwise(span_edges) for branch in pieces(pack.branches, [node_span])
    )
    return max(rank_lengths) / total_length


class Kernel:
    """A layout whose attention is one kernel: it holds queries, keys and values along the paths, and its output."""

    heard: ClassVar[list[int]]
    """Bytes of keys and values along the paths, of each attention that a backward pass will see."""

    def __init__(self, branches: Sequence[Branch], device: torch.device | None = None) -> None:
        del device
        self.paths = torch.cat([branch.path for branch in branches])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        del window, scale, sinks
        keys, values = key.index_select(2, self.paths), value.index_select(2, self.paths)
        if torch.is_grad_enabled():
            self.heard.append(keys.nbytes + values.nbytes)
        return _Attention.apply(query, keys, values).transpose(1, 2)  # pyright: ignore


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, row_sums = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, row_sums)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
